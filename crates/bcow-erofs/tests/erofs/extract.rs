//! A tree that is extracted to a directory, by the library's own interface.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::support::*;
use bcow::BlockDevice;
use bcow_erofs::damage::{UnreadableRange, damaged_files};
use bcow_erofs::extract::{
    Existing, ExtractError, ExtractOptions, ExtractReport, Progress, Unreadable, extract,
};
use bcow_erofs::reader::{ExtentSource, FileType, Filesystem, Inode};
use bcow_erofs::tree::*;
use bcow_testkit::{changed, lacks};

fn find(fs: &Filesystem, path: &str) -> Inode {
    let nid = fs.resolve(path.as_bytes()).unwrap().unwrap();
    fs.inode(nid).unwrap()
}

fn extract_all(
    fs: &Filesystem,
    to: &Path,
    options: &ExtractOptions,
) -> Result<ExtractReport, ExtractError> {
    extract(fs, &find(fs, "/"), b"/", to, options, &())
}

/// What every user can set on every file system.
fn plain() -> ExtractOptions {
    ExtractOptions {
        owners: false,
        xattrs: false,
        ..ExtractOptions::default()
    }
}

/// A tree of a directory, two files, a link and a further name.
fn small() -> Filesystem {
    let mut space = Space::new(0);
    let mut layer = LayerTree::new();
    put(&mut layer, "etc", directory());
    let file = regular(space.file(b"Welcome.\n"));
    let motd = put(&mut layer, "etc/motd", file);
    link(&mut layer, "same", motd);
    let file = regular(space.file(&[7; 10_000]));
    put(&mut layer, "large", file);
    put(&mut layer, "link", symlink(b"etc/motd"));
    open(&space.image(&layer.into_tree().unwrap()))
}

#[test]
fn every_inode_of_a_tree_gets_its_type_attributes_and_content() {
    if lacks("root", rustix::process::geteuid().is_root()) {
        return;
    }
    let (tree, space) = everything();
    let fs = open(&space.image(&tree));
    let to = tempfile::tempdir().unwrap();
    let options = changed(ExtractOptions::default(), |new| new.xattrs = false);
    let report = extract_all(&fs, &to.path().join("new"), &options).unwrap();
    let mut walk = bcow_erofs::reader::Walk::new(&fs);
    let mut entries = 0;
    let mut first_names = BTreeMap::new();
    while let Some(inode) = walk.next().unwrap() {
        entries += 1;
        let path = to.path().join("new");
        let path = path.join(std::ffi::OsStr::from_bytes(walk.path()));
        let metadata = path.symlink_metadata().unwrap();
        let kind = metadata.file_type();
        let is_same_kind = match inode.kind {
            FileType::Regular => kind.is_file(),
            FileType::Directory => kind.is_dir(),
            FileType::CharDevice => kind.is_char_device(),
            FileType::BlockDevice => kind.is_block_device(),
            FileType::Fifo => kind.is_fifo(),
            FileType::Socket => kind.is_socket(),
            FileType::Symlink => kind.is_symlink(),
        };
        assert!(is_same_kind, "{path:?} is {kind:?}, not {:?}", inode.kind);
        let owner = (metadata.uid(), metadata.gid());
        assert_eq!(owner, (inode.uid, inode.gid), "{path:?}");
        let time = (metadata.mtime(), metadata.mtime_nsec());
        let expected = (inode.mtime.seconds, inode.mtime.nanoseconds.into());
        assert_eq!(time, expected, "{path:?}");
        if !kind.is_symlink() {
            assert_eq!(metadata.mode(), inode.mode(), "{path:?}");
        }
        if let Some(number) = inode.rdev {
            let expected = rustix::fs::makedev(number.major, number.minor);
            assert_eq!(metadata.rdev(), expected, "{path:?}");
        }
        if kind.is_symlink() {
            let link = std::fs::read_link(&path).unwrap();
            assert_eq!(link.as_os_str().as_bytes(), fs.read_link(&inode).unwrap());
        }
        if kind.is_file() {
            let mut content = vec![0; inode.size as usize];
            fs.read(&inode, 0, &mut content).unwrap();
            assert!(std::fs::read(&path).unwrap() == content, "{path:?}");
            let first = *first_names.entry(inode.nid).or_insert(metadata.ino());
            assert_eq!(first, metadata.ino(), "{path:?}");
        }
    }
    assert_eq!((report.entries, report.unreadable), (entries, 0));
}

#[test]
fn an_existing_link_is_not_followed_and_an_existing_file_not_overwritten() {
    let fs = small();
    let directory = tempfile::tempdir().unwrap();
    let (outside, to) = (
        directory.path().join("outside"),
        directory.path().join("to"),
    );
    std::fs::create_dir(&outside).unwrap();
    std::fs::create_dir(&to).unwrap();
    std::os::unix::fs::symlink(&outside, to.join("etc")).unwrap();
    let error = extract_all(&fs, &to, &plain()).unwrap_err();
    assert!(
        matches!(&error, ExtractError::Exists { path } if *path == to.join("etc")),
        "{error}"
    );
    let replace = changed(plain(), |new| new.existing = Existing::Replace);
    extract_all(&fs, &to, &replace).unwrap();
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
    assert_eq!(std::fs::read(to.join("same")).unwrap(), b"Welcome.\n");

    let error = extract_all(&fs, &to, &plain()).unwrap_err();
    assert!(matches!(error, ExtractError::Exists { .. }), "{error}");
}

#[test]
fn a_single_file_is_extracted_under_its_own_name() {
    let fs = small();
    let directory = tempfile::tempdir().unwrap();
    let to = directory.path().join("new");
    let one =
        |path: &str, source: &[u8]| extract(&fs, &find(&fs, path), source, &to, &plain(), &());
    let error = one("etc/motd", b"/etc/motd/..").unwrap_err();
    assert!(matches!(error, ExtractError::NoName { .. }), "{error}");
    assert!(!to.exists());
    assert_eq!(one("etc/motd", b"/etc/motd").unwrap().entries, 1);
    assert_eq!(std::fs::read(to.join("motd")).unwrap(), b"Welcome.\n");
    assert_eq!(to.metadata().unwrap().mode() & 0o7777, 0o755);
}

#[test]
fn an_extraction_ends_when_it_is_cancelled() {
    let fs = small();
    let directory = tempfile::tempdir().unwrap();
    let to = directory.path().join("new");
    let options = ExtractOptions {
        cancel: Some(Arc::new(AtomicBool::new(true))),
        ..plain()
    };
    let error = extract_all(&fs, &to, &options).unwrap_err();
    assert!(matches!(error, ExtractError::Cancelled), "{error}");
    assert!(!to.exists(), "an empty new destination is removed");
}

/// A device whose bytes from `bad` on cannot be read.
struct Damaged {
    bytes: Vec<u8>,
    bad: std::ops::Range<u64>,
}

impl BlockDevice for Damaged {
    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), bcow::Error> {
        let end = offset + buf.len() as u64;
        if offset < self.bad.end && self.bad.start < end {
            Err(unreadable())
        } else {
            self.bytes.read_at(offset, buf)
        }
    }
}

fn unreadable() -> bcow::Error {
    let empty: &dyn BlockDevice = &Vec::new();
    empty.read_at(1 << 40, &mut [0; 1]).unwrap_err()
}

/// Records what an extraction reports.
#[derive(Default)]
struct Record {
    bytes: Cell<u64>,
    unreadable: RefCell<Vec<String>>,
}

impl Progress for Record {
    fn advance(&self, bytes: u64) {
        self.bytes.set(self.bytes.get() + bytes);
    }

    fn unreadable(&self, error: &ExtractError) {
        self.unreadable.borrow_mut().push(error.to_string());
    }
}

#[test]
fn a_damaged_file_ends_the_extraction_or_is_left_out() {
    let mut space = Space::new(0);
    let mut layer = LayerTree::new();
    for (name, byte) in [("a", 1), ("b", 2), ("c", 3)] {
        let content = space.file(&[byte; 10_000]);
        put(&mut layer, name, regular(content));
    }
    let bytes = space.image(&layer.into_tree().unwrap());
    let start = bytes.windows(100).position(|run| run == [2; 100]).unwrap() as u64;
    let bad = start + 4096..start + 8192;
    let device = Damaged {
        bytes,
        bad: bad.clone(),
    };
    let fs = Filesystem::open(Arc::new(device)).unwrap();

    let to = tempfile::tempdir().unwrap();
    let error = extract_all(&fs, to.path(), &plain()).unwrap_err();
    assert!(error.is_in_image(), "{error}");
    assert_eq!(error.to_string(), "cannot read /b");
    assert!(!to.path().join("b").exists());

    let options = ExtractOptions {
        existing: Existing::Replace,
        unreadable: Unreadable::LeaveOut,
        ..plain()
    };
    let record = Record::default();
    let root = find(&fs, "/");
    let report = extract(&fs, &root, b"/", to.path(), &options, &record).unwrap();
    assert_eq!((report.entries, report.unreadable), (3, 1));
    assert_eq!(*record.unreadable.borrow(), ["cannot read /b"]);
    assert_eq!(record.bytes.get(), report.content_bytes);
    assert_eq!(std::fs::read(to.path().join("c")).unwrap(), [3; 10_000]);

    let ranges = [UnreadableRange {
        bytes: bad,
        error: unreadable(),
    }];
    let damaged = damaged_files(&fs, &ranges, 10).files;
    let named: Vec<_> = damaged
        .iter()
        .map(|file| (&file.path[..], file.offset))
        .collect();
    assert_eq!(named, [(&b"/b"[..], 4096)]);
    let extent = fs.extents(&find(&fs, "b"), 0).next().unwrap().unwrap();
    assert_eq!(extent.source, ExtentSource::Device { offset: start });
    let none = damaged_files(&fs, &ranges, 0);
    assert_eq!((none.files.len(), none.omitted), (0, damaged.len() as u64));
}

#[test]
fn an_owner_that_no_user_has_is_refused_and_nothing_is_left() {
    for owner in [(u32::MAX, 0), (0, u32::MAX)] {
        let space = Space::new(0);
        let mut layer = LayerTree::new();
        let attributes = attributes(0o644, owner.0, owner.1, 0);
        let kind = NodeKind::Fifo;
        put(&mut layer, "strange", Node { attributes, kind });
        let fs = open(&space.image(&layer.into_tree().unwrap()));
        let directory = tempfile::tempdir().unwrap();
        let to = directory.path().join("to");
        let options = changed(plain(), |new| new.owners = true);
        let file = find(&fs, "strange");
        match extract(&fs, &file, b"strange", &to, &options, &()).unwrap_err() {
            ExtractError::Owner { path, uid, gid } => {
                assert_eq!((&path[..], (uid, gid)), (&b"strange"[..], owner));
            }
            other => panic!("{other}"),
        }
        assert!(!to.exists());
        extract_all(&fs, &to, &plain()).unwrap();
        assert!(to.join("strange").symlink_metadata().is_ok());
    }
}

//! Images to mount, mounts that go away with the test, and trees to compare.
#![allow(dead_code, reason = "each test program uses a part")]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirEntryExt, FileExt, FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bcow::BlockDevice;
use bcow_erofs::reader::Filesystem;
use bcow_erofs::tree::{Attributes, Blocks, ChunkRun, Content, LayerTree, Node, NodeKind, Tree};
use bcow_erofs::writer::{Plan, WriteOptions};
use bcow_fuse::session::Content as Mountable;
use bcow_fuse::{ImageFs, MountError, MountOptions, Session, Unmounter};
use bcow_testkit::{changed, lacks, lacks_mkfs, make_erofs, noise};
use bcow_union::fs::{LowerImage, UnionFs};
use bcow_union::{UnionOptions, UpperError};
use rustix::fs::{FileType, Mode, Timespec, Timestamps, XattrFlags};
use rustix::mount::{MountFlags, UnmountFlags};
use tempfile::TempDir;

/// An EROFS file system as bcow's own writer makes it: a sparse file of three chunks, of which the
/// middle one is stored, a name of 255 bytes, and metadata behind the data, so that nids start at
/// 0.
pub fn written_image() -> Vec<u8> {
    const BLOCK: usize = 4096;
    let data = noise(3, BLOCK);
    let file = |blocks, size| Node {
        attributes: changed(Attributes::default(), |new| new.permissions = 0o644),
        kind: NodeKind::Regular(Content {
            size,
            blocks,
            tail: None,
        }),
    };
    let mut layer = LayerTree::new();
    let sparse = layer.add(file(
        Blocks::Chunked {
            chunk_shift: 0,
            runs: Box::new([ChunkRun {
                first: 1,
                count: 1,
                start: 1,
            }]),
        },
        3 * BLOCK as u64,
    ));
    layer.insert(LayerTree::ROOT, b"sparse", sparse);
    let whole = layer.add(file(Blocks::Flat { start: 1 }, BLOCK as u64));
    layer.insert(LayerTree::ROOT, &[b'n'; 255], whole);
    written(&layer.into_tree().unwrap(), &data)
}

/// An image of this tree, with this content behind the first block.
pub fn written(tree: &Tree, data: &[u8]) -> Vec<u8> {
    const BLOCK: usize = 4096;
    let mut image = vec![0; BLOCK];
    image.extend_from_slice(data);
    let plan = Plan::new(
        tree,
        &WriteOptions {
            metadata_start: image.len() as u64,
            inline_max: 0,
        },
    )
    .unwrap();
    plan.write(&Vec::new(), &mut |bytes| {
        image.extend_from_slice(bytes);
        Ok::<(), std::convert::Infallible>(())
    })
    .unwrap();
    let blocks = (image.len() / BLOCK) as u64;
    image[1024..BLOCK].copy_from_slice(&plan.superblock(blocks));
    image
}

/// Whether real mounts cannot be tested here.
pub fn lacks_mounts() -> bool {
    lacks("/dev/fuse", Path::new("/dev/fuse").exists()) || lacks_mkfs()
}

pub fn device(image: &Path) -> Arc<dyn BlockDevice> {
    Arc::new(fs::read(image).unwrap())
}

pub fn open(device: Arc<dyn BlockDevice>) -> Arc<Filesystem> {
    Arc::new(Filesystem::open(device).unwrap())
}

/// A mount that this process serves, and that goes away with it.
pub struct Mounted {
    directory: TempDir,
    unmounter: Unmounter,
    server: Option<JoinHandle<Result<(), MountError>>>,
}

impl Mounted {
    pub fn new(fs: Arc<Filesystem>) -> Self {
        Mounted::with_options(fs, "").unwrap()
    }

    pub fn with_options(fs: Arc<Filesystem>, list: &str) -> Result<Self, MountError> {
        Mounted::serve(ImageFs::new(fs), list)
    }

    /// An image under `upper`.
    pub fn writable(fs: Arc<Filesystem>, upper: &Path, list: &str) -> Self {
        let options = UnionOptions::default();
        let open = || {
            let lower = LowerImage {
                fs: Arc::clone(&fs),
                identity: [7; 32],
                name: "sample".into(),
            };
            UnionFs::open(lower, upper, "a test", &options)
        };
        // A process that another test is just starting has the lock of the mount before until it
        // executes its program.
        let start = Instant::now();
        let union = loop {
            match open() {
                Err(UpperError::InUse { .. }) if start.elapsed() < Duration::from_secs(60) => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                opened => break opened.unwrap(),
            }
        };
        Mounted::serve(union, list).unwrap()
    }

    fn serve(content: impl Into<Mountable>, list: &str) -> Result<Self, MountError> {
        let directory = TempDir::new().unwrap();
        let mut options = MountOptions::default();
        options.apply(OsStr::new(list))?;
        let session = Session::mount(content, Arc::default(), directory.path(), &options, 4)?;
        Ok(Mounted {
            directory,
            unmounter: session.unmounter(),
            server: Some(std::thread::spawn(|| session.serve())),
        })
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Waits until the server has ended because of an unmount.
    pub fn ended(mut self) -> Result<(), MountError> {
        self.server.take().unwrap().join().unwrap()
    }
}

/// The image of a tree with one of everything; `None` where mounts cannot be tested.
pub fn sample() -> Option<Sample> {
    (!lacks_mounts()).then(|| Sample::new(&[]))
}

/// The same image, mounted with these options.
pub fn mounted(list: &str) -> Option<Mounted> {
    Some(Mounted::with_options(sample()?.open(), list).unwrap())
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.unmounter.unmount();
        if let Some(server) = self.server.take() {
            let _ = server.join();
        }
    }
}

/// The kernel's own mount of an image: the judge.
pub struct KernelMount(TempDir);

impl KernelMount {
    /// `None` where the kernel cannot mount a file without a loop device (before Linux 6.12).
    pub fn new(image: &Path) -> Option<Self> {
        let directory = TempDir::new().unwrap();
        let mounted =
            rustix::mount::mount(image, directory.path(), "erofs", MountFlags::RDONLY, None);
        match mounted {
            Ok(()) => Some(KernelMount(directory)),
            Err(_) => None,
        }
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for KernelMount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.path(), UnmountFlags::DETACH);
    }
}

/// All that can be seen of one name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    pub inode: u64,
    pub mode: u32,
    pub owner: (u32, u32),
    pub links: u64,
    pub size: u64,
    pub modified: (i64, i64),
    pub device: u64,
    pub listed_as: String,
    pub target: Option<PathBuf>,
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub content: Option<Vec<u8>>,
}

/// Everything below `root`, by relative path. Inodes are numbered anew in the order of their first
/// paths, so that hardlink groups compare and the numbers themselves do not.
pub fn walk(root: &Path) -> BTreeMap<PathBuf, Facts> {
    let mut all = BTreeMap::new();
    visit(root, Path::new(""), "directory".into(), &mut all);
    let mut groups = BTreeMap::new();
    for facts in all.values_mut() {
        let next = groups.len() as u64;
        facts.inode = *groups.entry(facts.inode).or_insert(next);
    }
    all
}

fn visit(root: &Path, relative: &Path, listed_as: String, all: &mut BTreeMap<PathBuf, Facts>) {
    let path = root.join(relative);
    let metadata = fs::symlink_metadata(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
    let kind = metadata.file_type();
    let facts = Facts {
        inode: metadata.ino(),
        mode: metadata.mode(),
        owner: (metadata.uid(), metadata.gid()),
        links: metadata.nlink(),
        size: metadata.size(),
        modified: (metadata.mtime(), metadata.mtime_nsec()),
        device: metadata.rdev(),
        listed_as,
        target: kind.is_symlink().then(|| fs::read_link(&path).unwrap()),
        xattrs: xattrs(&path),
        content: kind.is_file().then(|| fs::read(&path).unwrap()),
    };
    all.insert(relative.to_owned(), facts);
    if kind.is_dir() {
        for entry in fs::read_dir(&path).unwrap() {
            let entry = entry.unwrap();
            let listed_as = match entry.file_type().unwrap() {
                t if t.is_dir() => "directory",
                t if t.is_file() => "file",
                t if t.is_symlink() => "symlink",
                t if t.is_char_device() => "char",
                t if t.is_block_device() => "block",
                t if t.is_fifo() => "fifo",
                t if t.is_socket() => "socket",
                _ => "unknown",
            };
            let inner = relative.join(entry.file_name());
            assert_eq!(
                entry.ino(),
                fs::symlink_metadata(root.join(&inner)).unwrap().ino(),
                "{inner:?} is listed with another inode number than it has"
            );
            visit(root, &inner, listed_as.into(), all);
        }
    }
}

pub fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0; 1 << 16];
    let length = rustix::fs::llistxattr(path, &mut names).unwrap();
    names[..length]
        .split(|&byte| byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| {
            let mut value = vec![0; 1 << 16];
            let length = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value).unwrap();
            (name.to_vec(), value[..length].to_vec())
        })
        .collect()
}

/// A tree with one of everything. Needs root, for owners and devices.
pub fn fill_tree(root: &Path) {
    let at = |name: &str| root.join(name);
    fs::create_dir(at("sizes")).unwrap();
    for size in [0, 1, 31, 4095, 4096, 4097, 65_536, 131_072, 1_000_003] {
        fs::write(at(&format!("sizes/{size}")), noise(size as u64, size)).unwrap();
    }
    fs::create_dir_all(at("a/b/c/d/e")).unwrap();
    fs::write(at("a/b/c/d/e/deep"), "deep").unwrap();
    fs::create_dir(at("many")).unwrap();
    for index in 0..1500 {
        fs::write(at(&format!("many/file-{index:05}")), index.to_string()).unwrap();
    }
    fs::create_dir(at("names")).unwrap();
    for name in [
        &b"with space"[..],
        b"new\nline",
        b"\xff\xfe not text",
        b"-dash",
        b"back\\slash",
        // mkfs.erofs 1.5 fails for 255.
        &[b'x'; 200],
    ] {
        fs::write(at("names").join(OsStr::from_bytes(name)), name).unwrap();
    }
    fs::write(at("original"), "linked").unwrap();
    fs::hard_link(at("original"), at("second name")).unwrap();
    fs::hard_link(at("original"), at("a/third name")).unwrap();
    symlink("a/b/c", at("link")).unwrap();
    symlink("nowhere", at("dangling")).unwrap();
    symlink("x".repeat(4000), at("long link")).unwrap();
    for (name, kind, device) in [
        ("null", FileType::CharacterDevice, (1, 3)),
        ("disk", FileType::BlockDevice, (259, 70_000)),
        ("pipe", FileType::Fifo, (0, 0)),
        ("socket", FileType::Socket, (0, 0)),
    ] {
        rustix::fs::mknodat(
            rustix::fs::CWD,
            at(name),
            kind,
            Mode::from_raw_mode(0o640),
            rustix::fs::makedev(device.0, device.1),
        )
        .unwrap();
    }
    fs::write(at("owned"), "owned").unwrap();
    std::os::unix::fs::chown(at("owned"), Some(70_000), Some(80_000)).unwrap();
    fs::set_permissions(at("owned"), fs::Permissions::from_mode(0o4711)).unwrap();
    fs::write(at("secret"), "secret").unwrap();
    fs::set_permissions(at("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(at("attributed"), "attributed").unwrap();
    set_xattr(&at("attributed"), "user.text", b"value");
    set_xattr(&at("attributed"), "user.empty", b"");
    set_xattr(&at("attributed"), "user.binary", &noise(7, 600));
    set_xattr(&at("attributed"), "trusted.secret", b"for the privileged");
    // cap_net_raw=ep, as setcap writes it.
    let capability = [
        1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ];
    set_xattr(&at("attributed"), "security.capability", &capability);
    let sparse = File::create(at("sparse")).unwrap();
    sparse.set_len(10 << 20).unwrap();
    sparse.write_all_at(&noise(9, 8192), 4 << 20).unwrap();
    for (name, seconds, nanoseconds) in [
        ("owned", 1, 999_999_999),
        ("original", 1_600_000_000, 123_456_789),
        ("secret", 4_000_000_000, 0),
    ] {
        let time = Timespec {
            tv_sec: seconds,
            tv_nsec: nanoseconds,
        };
        let times = Timestamps {
            last_access: time,
            last_modification: time,
        };
        rustix::fs::utimensat(
            rustix::fs::CWD,
            at(name),
            &times,
            rustix::fs::AtFlags::SYMLINK_NOFOLLOW,
        )
        .unwrap();
    }
}

pub fn set_xattr(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty()).unwrap();
}

/// A tree with one of everything, and its image.
pub struct Sample {
    directory: TempDir,
}

impl Sample {
    pub fn new(arguments: &[&str]) -> Self {
        Sample::with(arguments, fill_tree)
    }

    pub fn with(arguments: &[&str], fill: impl FnOnce(&Path)) -> Self {
        let directory = TempDir::new().unwrap();
        let sample = Sample { directory };
        fs::create_dir(sample.tree()).unwrap();
        // All users may enter the root, with any umask of this process.
        fs::set_permissions(sample.tree(), fs::Permissions::from_mode(0o755)).unwrap();
        fill(&sample.tree());
        make_erofs(&sample.tree(), &sample.image(), arguments);
        sample
    }

    pub fn tree(&self) -> PathBuf {
        self.directory.path().join("tree")
    }

    pub fn image(&self) -> PathBuf {
        self.directory.path().join("image.erofs")
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub fn open(&self) -> Arc<Filesystem> {
        open(device(&self.image()))
    }
}

/// The user ID of ordinary users in the tests.
pub const ORDINARY_USER: u32 = 65_534;

pub fn as_ordinary_user(program: &str, arguments: &[&Path]) -> std::process::Output {
    use std::os::unix::process::CommandExt;
    Command::new(program)
        .args(arguments)
        .uid(ORDINARY_USER)
        .gid(ORDINARY_USER)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Temporary directories are for their owner only; others shall get as far as the mount itself.
pub fn open_the_way_to(mountpoint: &Path) {
    let parent = mountpoint.parent().unwrap();
    let mode = fs::metadata(parent).unwrap().permissions().mode();
    assert!(mode & 0o001 != 0, "others cannot reach {parent:?}");
}

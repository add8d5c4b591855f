//! The union without a mount: what each request does to the upper, and that all is as it was when it is opened again.
//! Needs root (trusted attributes) and mkfs.erofs.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, OnceLock};

use bcow_erofs::reader::Filesystem;
use bcow_testkit::{has_program, lacks};
use bcow_union::NodeId;
use bcow_union::fs::{
    Allocate, Attributes, Caller, Changes, LowerImage, Privileges, RenameHow, SyncWhat, UnionFs,
};
use bcow_union::options::{SketchChoice, SyncPolicy, UnionOptions};
use bcow_union::upper::{SetHow, SketchMark};
use rustix::io::Errno;
use tempfile::TempDir;

/// Whether to skip.
fn lacks_tools() -> bool {
    lacks("root", rustix::process::geteuid().is_root())
        || lacks("mkfs.erofs", has_program("mkfs.erofs"))
}

struct Fixture {
    directory: TempDir,
    options: UnionOptions,
    image: Vec<u8>,
    union: Option<Arc<UnionFs>>,
}

fn noise(seed: u32, length: usize) -> Vec<u8> {
    let mut state = seed | 1;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            state as u8
        })
        .collect()
}

const ACCESS_ACL: &str = "system.posix_acl_access";

/// An ACL that lets everybody read, and user 1000 do `may`.
fn acl(may: u16) -> Vec<u8> {
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in [
        (0x01_u16, 7_u16, u32::MAX),
        (0x02, may, 1000),
        (0x04, 5, u32::MAX),
        (0x10, 7, u32::MAX),
        (0x20, 5, u32::MAX),
    ] {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

fn make_image() -> Vec<u8> {
    let directory = tempfile::tempdir().unwrap();
    let tree = directory.path().join("tree");
    fs::create_dir_all(tree.join("dir/sub")).unwrap();
    fs::write(tree.join("small"), b"small file\n").unwrap();
    fs::write(tree.join("big"), noise(1, 300_000)).unwrap();
    fs::write(tree.join("dir/x"), b"x").unwrap();
    fs::write(tree.join("dir/sub/y"), b"y").unwrap();
    fs::write(tree.join("h1"), b"two names").unwrap();
    fs::hard_link(tree.join("h1"), tree.join("h2")).unwrap();
    symlink("small", tree.join("link")).unwrap();
    fs::create_dir(tree.join("empty")).unwrap();
    fs::set_permissions(&tree, fs::Permissions::from_mode(0o755)).unwrap();
    rustix::fs::setxattr(&tree, ACCESS_ACL, &acl(7), rustix::fs::XattrFlags::empty()).unwrap();
    let image = directory.path().join("image");
    let status = Command::new("mkfs.erofs")
        .args([
            "--quiet",
            "-x1",
            "-U",
            "6a0f7b5e-0000-4000-8000-00000000bc0f",
        ])
        .arg(&image)
        .arg(&tree)
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    fs::read(image).unwrap()
}

impl Fixture {
    fn new(options: UnionOptions) -> Option<Fixture> {
        if lacks_tools() {
            return None;
        }
        // Made once: a child that was just forked would hold another test's lock for a moment.
        static IMAGE: OnceLock<Vec<u8>> = OnceLock::new();
        let mut fixture = Fixture {
            image: IMAGE.get_or_init(make_image).clone(),
            directory: tempfile::tempdir().unwrap(),
            options,
            union: None,
        };
        fixture.open();
        Some(fixture)
    }

    fn upper(&self) -> PathBuf {
        self.directory.path().join("upper")
    }

    fn open(&mut self) {
        let fs = Filesystem::open(Arc::new(self.image.clone())).unwrap();
        let lower = LowerImage {
            fs: Arc::new(fs),
            identity: [7; 32],
            name: "image".into(),
        };
        self.union = Some(UnionFs::open(lower, &self.upper(), "a test", &self.options).unwrap());
    }

    /// Closes and opens again, as an unmount and a mount do.
    fn reopen(&mut self) {
        self.union.take().unwrap().close().unwrap();
        self.open();
    }

    fn fs(&self) -> &UnionFs {
        self.union.as_deref().unwrap()
    }

    fn get(&self, path: &str) -> Option<Attributes> {
        let mut found = self.fs().attributes(NodeId::ROOT).unwrap();
        for name in path.split('/').filter(|name| !name.is_empty()) {
            found = self.fs().lookup(found.node, name.as_bytes()).unwrap()?;
        }
        Some(found)
    }

    fn id(&self, path: &str) -> NodeId {
        self.get(path)
            .unwrap_or_else(|| panic!("{path} is there"))
            .node
    }

    fn content(&self, path: &str) -> Vec<u8> {
        self.read(self.id(path))
    }

    fn read(&self, id: NodeId) -> Vec<u8> {
        let mut all = Vec::new();
        let mut scratch = Vec::new();
        loop {
            let read = self
                .fs()
                .read(id, all.len() as u64, 65536, &mut scratch, <[u8]>::to_vec)
                .unwrap();
            if read.is_empty() {
                return all;
            }
            all.extend(read);
        }
    }

    fn write(&self, path: &str, offset: u64, data: &[u8]) {
        let id = self.id(path);
        let written = self.fs().write(id, offset, data, Privileges::Drop).unwrap();
        assert_eq!(written as usize, data.len());
    }

    fn names(&self, path: &str) -> Vec<String> {
        let handle = self.fs().open_directory(self.id(path)).unwrap();
        let mut names = Vec::new();
        self.fs()
            .read_directory(handle, 0, &mut |entry| {
                names.push(String::from_utf8(entry.name.to_vec()).unwrap());
                ControlFlow::Continue(())
            })
            .unwrap();
        self.fs().close_directory(handle);
        names.retain(|name| name != "." && name != "..");
        names.sort();
        names
    }

    /// Every path with its type, mode, link count, inode number and content.
    fn tree(&self) -> BTreeMap<String, String> {
        let mut tree = BTreeMap::new();
        let mut todo = vec![String::new()];
        while let Some(path) = todo.pop() {
            let found = self.get(&path).unwrap();
            let content = match found.kind {
                bcow_erofs::reader::FileType::Directory => {
                    todo.extend(
                        self.names(&path)
                            .iter()
                            .map(|name| format!("{path}/{name}")),
                    );
                    Vec::new()
                }
                bcow_erofs::reader::FileType::Regular => self.read(found.node),
                bcow_erofs::reader::FileType::Symlink => self.fs().read_link(found.node).unwrap(),
                _ => Vec::new(),
            };
            let mode = found.kind.mode_bits() | u32::from(found.permissions);
            let sum = content.iter().fold(0_u64, |sum, &byte| {
                sum.wrapping_mul(31).wrapping_add(byte.into())
            });
            let line = format!(
                "{mode:o} links {} inode {} size {} sum {sum:x}",
                found.nlink,
                found.node.0,
                content.len()
            );
            tree.insert(path, line);
        }
        tree
    }

    /// Asserts that nothing changes by closing and opening.
    fn assert_kept(&mut self) {
        let before = self.tree();
        self.reopen();
        assert_eq!(self.tree(), before);
    }
}

fn is_whiteout(path: &Path) -> bool {
    let found = fs::symlink_metadata(path).unwrap();
    found.file_type().is_char_device() && found.rdev() == 0
}

/// Runs as an ordinary user: of Linux's, each thread has its own owner.
fn as_ordinary_user(run: impl FnOnce() + Send) {
    let (uid, gid) = (
        rustix::fs::Uid::from_raw(USER.uid),
        rustix::fs::Gid::from_raw(USER.gid),
    );
    let thread = || {
        rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
        rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
        run();
    };
    std::thread::scope(|scope| scope.spawn(thread).join().unwrap());
}

const USER: Caller = Caller {
    uid: 65534,
    gid: 65534,
    pid: 1,
    umask: 0,
};

const ROOT: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
    umask: 0o022,
};

#[test]
fn fresh_union_shows_the_image_and_its_upper_stays_empty() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    assert_eq!(
        fixture.names(""),
        ["big", "dir", "empty", "h1", "h2", "link", "small"]
    );
    assert_eq!(fixture.content("small"), b"small file\n");
    assert_eq!(fixture.content("big"), noise(1, 300_000));
    assert_eq!(fixture.get("h1").unwrap().nlink, 2);
    fixture.assert_kept();
    let left: Vec<_> = fs::read_dir(fixture.upper())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, [".bcow"]);
}

#[test]
fn changing_attributes_of_a_big_file_copies_no_byte() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    let before = fixture.get("big").unwrap();
    let changes = Changes {
        permissions: Some(0o600),
        uid: Some(7),
        ..Changes::default()
    };
    let after = fixture.fs().set_attributes(before.node, &changes).unwrap();
    assert_eq!((after.permissions, after.uid), (0o600, 7));
    assert_eq!((after.node, after.size), (before.node, before.size));
    let host = fs::metadata(fixture.upper().join("big")).unwrap();
    // At most the host's block for attributes.
    assert_eq!(host.len(), 300_000);
    assert!(host.blocks() <= 8, "{}", host.blocks());
    assert_eq!(host.permissions().mode() & 0o7777, 0o600);
    assert_eq!(fixture.content("big"), noise(1, 300_000));
    fixture.assert_kept();
}

#[test]
fn small_file_is_copied_by_its_first_write() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    let node = fixture.id("small");
    fixture.write("small", 6, b"FILE");
    assert_eq!(fixture.content("small"), b"small FILE\n");
    assert_eq!(
        fs::read(fixture.upper().join("small")).unwrap(),
        b"small FILE\n"
    );
    fixture.fs().sync(node, SyncWhat::All).unwrap();
    assert_eq!(fixture.id("small"), node);
    fixture.assert_kept();
}

#[test]
fn removed_names_are_whiteouts_and_new_ones_take_their_place() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    fixture.fs().unlink(NodeId::ROOT, b"small").unwrap();
    assert!(fixture.get("small").is_none());
    assert!(is_whiteout(&fixture.upper().join("small")));
    let dir = fixture.id("dir");
    assert_eq!(
        fixture.fs().remove_directory(NodeId::ROOT, b"dir"),
        Err(Errno::NOTEMPTY)
    );
    let sub = fixture.id("dir/sub");
    fixture.fs().unlink(sub, b"y").unwrap();
    fixture.fs().remove_directory(dir, b"sub").unwrap();
    fixture.fs().unlink(dir, b"x").unwrap();
    fixture.fs().remove_directory(NodeId::ROOT, b"dir").unwrap();
    assert!(is_whiteout(&fixture.upper().join("dir")));
    fixture.assert_kept();
    fixture
        .fs()
        .make_directory(&ROOT, NodeId::ROOT, b"dir", 0o777)
        .unwrap();
    assert!(fixture.names("dir").is_empty());
    assert_eq!(fixture.get("dir").unwrap().permissions, 0o755);
    fixture
        .fs()
        .create(&ROOT, NodeId::ROOT, b"small", 0o666)
        .unwrap();
    assert_eq!(fixture.content("small"), b"");
    assert_eq!(
        fixture.fs().create(&ROOT, NodeId::ROOT, b"big", 0o666),
        Err(Errno::EXIST)
    );
    fixture.assert_kept();
}

#[test]
fn lower_directory_is_renamed_with_all_that_is_in_it() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    let dir = fixture.id("dir");
    let y = fixture.id("dir/sub/y");
    fixture
        .fs()
        .rename(
            NodeId::ROOT,
            b"dir",
            NodeId::ROOT,
            b"moved",
            RenameHow::NoReplace,
        )
        .unwrap();
    assert!(fixture.get("dir").is_none());
    assert!(is_whiteout(&fixture.upper().join("dir")));
    assert_eq!((fixture.id("moved"), fixture.id("moved/sub/y")), (dir, y));
    fixture.write("moved/sub/y", 1, b"es");
    assert_eq!(
        fixture
            .fs()
            .rename(NodeId::ROOT, b"moved", dir, b"in", RenameHow::Replace),
        Err(Errno::INVAL)
    );
    // Over an empty lower directory, and another in its old place.
    fixture
        .fs()
        .rename(
            NodeId::ROOT,
            b"moved",
            NodeId::ROOT,
            b"empty",
            RenameHow::Replace,
        )
        .unwrap();
    fixture
        .fs()
        .make_directory(&ROOT, NodeId::ROOT, b"dir", 0o700)
        .unwrap();
    assert!(fixture.names("dir").is_empty());
    assert_eq!(fixture.names("empty"), ["sub", "x"]);
    assert_eq!(fixture.content("empty/sub/y"), b"yes");
    fixture.assert_kept();
    fixture
        .fs()
        .rename(
            NodeId::ROOT,
            b"dir",
            NodeId::ROOT,
            b"empty",
            RenameHow::Exchange,
        )
        .unwrap();
    assert_eq!(fixture.names("dir"), ["sub", "x"]);
    assert!(fixture.names("empty").is_empty());
    fixture.assert_kept();
}

/// The kernel forgets an entry that it is shown without attributes: once for each.
#[test]
fn damaged_entries_of_a_listing_take_no_reference_from_an_open_file() {
    let Some(fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    const NAME: &str = "trusted.overlay.metacopy";
    let none = rustix::fs::XattrFlags::empty();
    fixture.write("small", 0, b"S");
    let new = fixture
        .fs()
        .create(&ROOT, NodeId::ROOT, b"new", 0o644)
        .unwrap();
    for name in ["small", "new"] {
        rustix::fs::setxattr(fixture.upper().join(name), NAME, b"bad", none).unwrap();
    }
    for taken in 0..12 {
        let handle = fixture.fs().open_directory(NodeId::ROOT).unwrap();
        let mut shown = Vec::new();
        let mut left = taken;
        fixture
            .fs()
            .read_directory_plus(handle, 0, &mut |entry| {
                if left == 0 {
                    return ControlFlow::Break(());
                }
                left -= 1;
                let is_dot = matches!(entry.name, b"." | b"..");
                shown.push((entry.attributes.map(|found| found.node), is_dot));
                ControlFlow::Continue(())
            })
            .unwrap();
        fixture.fs().close_directory(handle);
        for (node, is_dot) in shown {
            match node {
                _ if is_dot => {}
                Ok(node) | Err(node) => fixture.fs().forget(node, 1),
            }
        }
    }
    rustix::fs::removexattr(fixture.upper().join("new"), NAME).unwrap();
    assert_eq!(
        fixture.fs().attributes(new.node).map(|found| found.node),
        Ok(new.node)
    );
    // The one that its creation counted is the last.
    fixture.fs().forget(new.node, 1);
    assert_eq!(fixture.fs().attributes(new.node), Err(Errno::STALE));
}

#[test]
fn hardlinks_of_the_image_stay_one_file() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    let node = fixture.id("h1");
    assert_eq!(fixture.id("h2"), node);
    fixture.write("h1", 0, b"TWO");
    assert_eq!(fixture.content("h2"), b"TWO names");
    fixture.reopen();
    assert_eq!(fixture.content("h2"), b"TWO names");
    assert_eq!(fixture.get("h2").unwrap().nlink, 2);
    let dir = fixture.id("dir");
    fixture.fs().link(fixture.id("h2"), dir, b"h3").unwrap();
    assert_eq!(fixture.get("h1").unwrap().nlink, 3);
    fixture.assert_kept();
    fixture
        .fs()
        .rename(NodeId::ROOT, b"h2", NodeId::ROOT, b"h4", RenameHow::Replace)
        .unwrap();
    assert_eq!(fixture.get("h4").unwrap().nlink, 3);
    fixture.assert_kept();
    for (directory, name) in [(NodeId::ROOT, "h1"), (fixture.id("dir"), "h3")] {
        fixture.fs().unlink(directory, name.as_bytes()).unwrap();
        fixture.assert_kept();
    }
    assert_eq!(fixture.get("h4").unwrap().nlink, 1);
    assert_eq!(fixture.content("h4"), b"TWO names");
    let open = fixture.id("h4");
    fixture.fs().unlink(NodeId::ROOT, b"h4").unwrap();
    assert_eq!(fixture.read(open), b"TWO names");
    assert_eq!(fixture.fs().attributes(open).unwrap().nlink, 0);
    assert_eq!(
        fs::read_dir(fixture.upper().join(".bcow/index"))
            .unwrap()
            .count(),
        0
    );
    fixture.assert_kept();
}

#[test]
fn one_of_two_lower_names_removed_leaves_one() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    fixture.fs().unlink(NodeId::ROOT, b"h2").unwrap();
    assert_eq!(fixture.get("h1").unwrap().nlink, 1);
    assert_eq!(fixture.content("h1"), b"two names");
    fixture.assert_kept();
    fixture.fs().unlink(NodeId::ROOT, b"h1").unwrap();
    assert!(fixture.get("h1").is_none());
    fixture.assert_kept();
}

#[test]
fn unlinked_file_lives_until_it_is_forgotten() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    let small = fixture.id("small");
    fixture.fs().unlink(NodeId::ROOT, b"small").unwrap();
    assert_eq!(fixture.read(small), b"small file\n");
    fixture
        .fs()
        .write(small, 0, b"S", Privileges::Drop)
        .unwrap();
    assert_eq!(fixture.read(small), b"Small file\n");
    assert_eq!(fixture.fs().attributes(small).unwrap().nlink, 0);
    fixture.fs().forget(small, 1);
    assert_eq!(fixture.fs().attributes(small), Err(Errno::STALE));
    fixture.assert_kept();
}

/// Who may enter the container's root has no business in the directory on the host.
#[test]
fn acl_of_the_root_does_not_reach_the_host() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    let upper = fixture.upper();
    let on_host = || {
        let mut value = [0; 256];
        let read = rustix::fs::getxattr(&upper, ACCESS_ACL, &mut value);
        let mode = fs::metadata(&upper).unwrap().mode() & 0o7777;
        (mode, read.map(|length| value[..length].to_vec()))
    };
    let seen = |fixture: &Fixture| {
        let names = fixture.fs().xattr_names(NodeId::ROOT).unwrap();
        let times = names
            .split(|&byte| byte == 0)
            .filter(|name| *name == ACCESS_ACL.as_bytes())
            .count();
        let acl = fixture.fs().xattr(NodeId::ROOT, ACCESS_ACL.as_bytes());
        let mode = fixture.fs().attributes(NodeId::ROOT).unwrap().permissions;
        (mode, times, acl)
    };
    let private = (0o700, Err(Errno::NODATA));
    assert_eq!(on_host(), private);
    assert_eq!(seen(&fixture), (0o775, 1, Ok(acl(7))));
    fixture
        .fs()
        .set_xattr(
            NodeId::ROOT,
            ACCESS_ACL.as_bytes(),
            &acl(3),
            SetHow::Replace,
        )
        .unwrap();
    fixture.reopen();
    assert_eq!(on_host(), private);
    assert_eq!(seen(&fixture), (0o775, 1, Ok(acl(3))));
    // The host's own is the host's.
    rustix::fs::setxattr(&upper, ACCESS_ACL, &acl(0), rustix::fs::XattrFlags::empty()).unwrap();
    assert_eq!(seen(&fixture), (0o775, 1, Ok(acl(3))));
    fixture
        .fs()
        .remove_xattr(NodeId::ROOT, ACCESS_ACL.as_bytes())
        .unwrap();
    assert_eq!(seen(&fixture), (0o775, 0, Err(Errno::NODATA)));
    assert_eq!(on_host(), (0o775, Ok(acl(0))));
}

#[test]
fn meta_directory_is_not_part_of_the_tree() {
    let Some(fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    assert!(fixture.get(".bcow").is_none());
    let refused = Err(Errno::PERM);
    assert_eq!(
        fixture.fs().create(&ROOT, NodeId::ROOT, b".bcow", 0o600),
        refused
    );
    assert_eq!(
        fixture.fs().rename(
            NodeId::ROOT,
            b"small",
            NodeId::ROOT,
            b".bcow",
            RenameHow::Replace
        ),
        Err(Errno::PERM)
    );
    let dir = fixture.id("dir");
    fixture.fs().create(&ROOT, dir, b".bcow", 0o600).unwrap();
}

#[test]
fn opaque_marks_of_the_container_do_not_reach_the_host() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    let dir = fixture.id("dir");
    let how = bcow_union::fs::SetHow::Any;
    fixture
        .fs()
        .set_xattr(dir, b"trusted.overlay.opaque", b"y", how)
        .unwrap();
    fixture.fs().set_xattr(dir, b"user.x", b"1", how).unwrap();
    assert_eq!(
        fixture.fs().xattr(dir, b"trusted.overlay.opaque").unwrap(),
        b"y"
    );
    fixture.assert_kept();
    assert_eq!(fixture.names("dir"), ["sub", "x"]);
    let dir = fixture.id("dir");
    let names = fixture.fs().xattr_names(dir).unwrap();
    let mut names: Vec<&[u8]> = names
        .split(|&byte| byte == 0)
        .filter(|n| !n.is_empty())
        .collect();
    names.sort();
    assert_eq!(names, [&b"trusted.overlay.opaque"[..], b"user.x"]);
}

#[test]
fn first_write_to_a_big_file_stores_what_it_touches() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    let node = fixture.id("big");
    let mut expected = noise(1, 300_000);
    fixture.write("big", 100_000, b"hello");
    expected[100_000..100_005].copy_from_slice(b"hello");
    assert_eq!(fixture.content("big"), expected);
    let host = fs::metadata(fixture.upper().join("big")).unwrap();
    assert_eq!(host.len(), 300_000);
    assert!(host.blocks() <= 16 + 8, "{}", host.blocks());
    fixture.fs().sync(node, SyncWhat::Data).unwrap();
    fixture.assert_kept();
    assert_eq!(fixture.content("big"), expected);
    // Cut and grown again: what was cut off does not come back.
    let size = |size| Changes {
        size: Some(size),
        ..Changes::default()
    };
    fixture.fs().set_attributes(node, &size(150_001)).unwrap();
    fixture.fs().set_attributes(node, &size(200_000)).unwrap();
    expected.truncate(150_001);
    expected.resize(200_000, 0);
    assert_eq!(fixture.content("big"), expected);
    fixture.assert_kept();
    assert_eq!(fixture.content("big"), expected);
    // Written whole, it needs the image no more.
    let all = noise(9, 200_000);
    fixture.write("big", 0, &all);
    fixture.assert_kept();
    assert_eq!(fixture.content("big"), all);
}

/// The host takes them away with each write, and whoever opens a sketch may have to write to it.
#[test]
fn capabilities_of_a_sketch_stay_until_its_next_write() {
    const NAME: &[u8] = b"security.capability";
    const CAPABILITY: [u8; 20] = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for kind in [SketchChoice::Sparse, SketchChoice::Packed] {
        let options = UnionOptions {
            sketch: kind,
            ..UnionOptions::default()
        };
        let Some(mut fixture) = Fixture::new(options) else {
            return;
        };
        let node = fixture.id("big");
        fixture.write("big", 100_000, b"hello");
        fixture.fs().sync(node, SyncWhat::All).unwrap();
        fixture.write("big", 200_000, b"more");
        let set = fixture.fs().set_xattr(node, NAME, &CAPABILITY, SetHow::Any);
        set.unwrap();
        for _ in 0..2 {
            fixture.fs().sync(fixture.id("big"), SyncWhat::All).unwrap();
            fixture.reopen();
            assert_eq!(&fixture.content("big")[200_000..200_004], b"more");
            let found = fixture.fs().xattr(fixture.id("big"), NAME);
            assert_eq!(found.as_deref(), Ok(&CAPABILITY[..]), "{kind:?}");
        }
        fixture.write("big", 0, b"x");
        let found = fixture.fs().xattr(fixture.id("big"), NAME);
        assert_eq!(found, Err(Errno::NODATA), "{kind:?}");
        // Also of one that the kernel forgot before everything was with the host.
        fixture.fs().forget(fixture.id("big"), 1000);
        let node = fixture.id("big");
        fixture
            .fs()
            .set_xattr(node, NAME, &CAPABILITY, SetHow::Any)
            .unwrap();
        fixture.fs().sync_all().unwrap();
        let found = fixture.fs().xattr(node, NAME);
        assert_eq!(found.as_deref(), Ok(&CAPABILITY[..]), "{kind:?}");
        // What the kernel writes back takes none away, when it comes nor when it is completed.
        let written = fixture
            .fs()
            .write(node, 150_000, b"late", Privileges::KeepAll);
        assert_eq!(written, Ok(4));
        fixture.fs().sync_all().unwrap();
        let found = fixture.fs().xattr(node, NAME);
        assert_eq!(found.as_deref(), Ok(&CAPABILITY[..]), "{kind:?}");
        fixture.fs().remove_xattr(node, NAME).unwrap();
        let written = fixture
            .fs()
            .write(node, 160_000, b"late", Privileges::KeepAll);
        assert_eq!(written, Ok(4));
        assert_eq!(fixture.fs().xattr(node, NAME), Err(Errno::NODATA));
    }
}

/// The value of an attribute of a file of the host.
fn host_xattr(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = [0; 256];
    match rustix::fs::lgetxattr(path, name, &mut value[..]) {
        Ok(length) => Some(value[..length].to_vec()),
        Err(Errno::NODATA) => None,
        Err(errno) => panic!("{name}: {errno}"),
    }
}

#[test]
fn a_first_write_without_room_leaves_the_images_file() {
    let options = UnionOptions {
        sketch: SketchChoice::Packed,
        size_limit: Some(4096),
        ..UnionOptions::default()
    };
    let Some(mut fixture) = Fixture::new(options) else {
        return;
    };
    let node = fixture.id("big");
    let changes = Changes {
        permissions: Some(0o600),
        ..Changes::default()
    };
    fixture.fs().set_attributes(node, &changes).unwrap();
    fixture
        .fs()
        .rename(
            NodeId::ROOT,
            b"big",
            NodeId::ROOT,
            b"BIG",
            RenameHow::Replace,
        )
        .unwrap();
    let host = fixture.upper().join("BIG");
    let before = fixture.get("BIG");
    for _ in 0..3 {
        let node = fixture.id("BIG");
        for _ in 0..2 {
            let full = fixture.fs().write(node, 5, b"x", Privileges::Drop);
            assert_eq!(full, Err(Errno::NOSPC));
            assert_eq!(fixture.content("BIG"), noise(1, 300_000));
        }
        assert_eq!(fs::metadata(&host).unwrap().len(), 300_000);
        let xattr = |name| host_xattr(&host, name);
        assert_eq!(xattr("trusted.bcow.sketch"), None);
        assert_eq!(xattr("trusted.overlay.metacopy"), Some(vec![]));
        assert_eq!(xattr("trusted.overlay.redirect"), Some(b"/big".to_vec()));
        fixture.assert_kept();
    }
    let modified = |found: Option<Attributes>| found.unwrap().mtime;
    assert_eq!(modified(fixture.get("BIG")), modified(before));
    // With room it can be written to.
    fixture.options.size_limit = None;
    fixture.reopen();
    fixture.write("BIG", 5, b"x");
    fixture.assert_kept();
    let mut expected = noise(1, 300_000);
    expected[5] = b'x';
    assert_eq!(fixture.content("BIG"), expected);
}

/// Not even if a host that failed left the mark of a sketch that it could not become.
#[test]
fn a_file_that_was_emptied_shows_nothing_of_the_images_again() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    let host = fixture.upper().join("big");
    fixture.write("big", 5, b"x");
    fixture.fs().sync(fixture.id("big"), SyncWhat::All).unwrap();
    let mut mark =
        SketchMark::decode(host_xattr(&host, "trusted.bcow.sketch").unwrap().as_slice()).unwrap();
    mark.map_exists = false;
    fixture.fs().unlink(NodeId::ROOT, b"big").unwrap();
    fixture.reopen();
    let node = fixture.id("h1");
    let changes = |permissions, size| Changes {
        permissions,
        size,
        ..Changes::default()
    };
    fixture
        .fs()
        .set_attributes(node, &changes(Some(0o600), None))
        .unwrap();
    let host = fixture.upper().join("h1");
    mark.lower_limit = 9;
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(&host, "trusted.bcow.sketch", &mark.encode(), flags).unwrap();
    fixture
        .fs()
        .set_attributes(node, &changes(None, Some(0)))
        .unwrap();
    fixture.write("h1", 0, b"new");
    fixture.fs().sync(node, SyncWhat::All).unwrap();
    assert_eq!(host_xattr(&host, "trusted.bcow.sketch"), None);
    fixture.assert_kept();
    assert_eq!(fixture.content("h1"), b"new");
}

#[test]
fn space_that_was_allocated_is_free_when_the_file_is_gone() {
    let options = UnionOptions {
        size_limit: Some(100 * 4096),
        ..UnionOptions::default()
    };
    let Some(fixture) = Fixture::new(options) else {
        return;
    };
    let union = fixture.fs();
    let used = || union.report().counted_bytes / 4096;
    let new = union.create(&ROOT, NodeId::ROOT, b"new", 0o644).unwrap();
    union
        .allocate(new.node, 0, 90 * 4096, Allocate::Extend)
        .unwrap();
    fixture.write("new", 4096, b"some bytes");
    assert_eq!(used(), 90);
    union.forget(new.node, 1000);
    assert_eq!(used(), 1);
    fixture.write("new", 0, b"more");
    assert_eq!(used(), 2);
    let node = fixture.id("new");
    union.unlink(NodeId::ROOT, b"new").unwrap();
    union.forget(node, 1000);
    assert_eq!(used(), 0);
}

#[test]
fn a_sketch_of_a_file_without_a_name_leaves_nothing_behind() {
    for sketch in [SketchChoice::Sparse, SketchChoice::Packed] {
        let options = UnionOptions {
            size_limit: Some(1 << 20),
            sketch,
            ..UnionOptions::default()
        };
        let Some(mut fixture) = Fixture::new(options) else {
            return;
        };
        let node = fixture.id("big");
        fixture.fs().unlink(NodeId::ROOT, b"big").unwrap();
        let before = fixture.fs().report().counted_bytes;
        let mut expected = noise(1, 300_000);
        for at in [5000, 100_000] {
            fixture
                .fs()
                .write(node, at, b"hello", Privileges::Drop)
                .unwrap();
            expected[at as usize..][..5].copy_from_slice(b"hello");
            fixture.fs().sync(node, SyncWhat::All).unwrap();
        }
        assert!(fixture.fs().report().counted_bytes > before);
        assert_eq!(fixture.read(node), expected);
        let maps = fixture.upper().join(".bcow/maps");
        assert_eq!(fs::read_dir(&maps).unwrap().count(), 0);
        fixture.fs().forget(node, 1000);
        assert_eq!(fixture.fs().report().counted_bytes, before, "{sketch:?}");
        fixture.assert_kept();
        assert!(fixture.get("big").is_none());
    }
}

/// A process that was told to end twice ends when the first close is done, not when the second was asked for.
#[test]
fn whoever_closes_while_another_does_waits_for_the_outcome() {
    let options = UnionOptions {
        sync: SyncPolicy::Volatile,
        ..UnionOptions::default()
    };
    let Some(mut fixture) = Fixture::new(options) else {
        return;
    };
    let note = fixture.upper().join(".bcow/volatile");
    for round in 0..5 {
        for block in 0..70 {
            fixture.write("big", block * 4096 + round, b"x");
        }
        assert!(note.exists());
        let union = fixture.union.take().unwrap();
        let together = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    together.wait();
                    union.close().unwrap();
                    // The last thing that a close does is to remove it.
                    assert!(!note.exists());
                });
            }
        });
        drop(union);
        fixture.open();
    }
}

#[test]
fn renamed_and_removed_sketches_leave_nothing_behind() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    let maps = fixture.upper().join(".bcow/maps");
    let node = fixture.id("big");
    fixture.write("big", 5000, b"hello");
    fixture.fs().sync(node, SyncWhat::All).unwrap();
    assert_eq!(fs::read_dir(&maps).unwrap().count(), 1);
    let dir = fixture.id("dir");
    fixture
        .fs()
        .rename(NodeId::ROOT, b"big", dir, b"BIG", RenameHow::Replace)
        .unwrap();
    fixture.assert_kept();
    let mut expected = noise(1, 300_000);
    expected[5000..5005].copy_from_slice(b"hello");
    assert_eq!(fixture.content("dir/BIG"), expected);
    let node = fixture.id("dir/BIG");
    fixture.fs().unlink(fixture.id("dir"), b"BIG").unwrap();
    assert_eq!(fs::read_dir(&maps).unwrap().count(), 0);
    fixture
        .fs()
        .write(node, 0, b"still", Privileges::Drop)
        .unwrap();
    expected[..5].copy_from_slice(b"still");
    assert_eq!(fixture.read(node), expected);
    fixture.assert_kept();
    assert!(fixture.get("dir/BIG").is_none());
}

#[test]
fn limit_counts_what_is_stored_and_deleting_makes_room() {
    let options = UnionOptions {
        size_limit: Some(10 * 4096),
        ..UnionOptions::default()
    };
    let Some(mut fixture) = Fixture::new(options) else {
        return;
    };
    let node = fixture.id("big");
    for block in 0..10 {
        fixture.write("big", block * 8192, b"x");
    }
    let full = fixture.fs().write(node, 100_001, b"x", Privileges::Drop);
    assert_eq!(full, Err(Errno::NOSPC));
    // What is stored already can be written again.
    fixture.write("big", 0, b"y");
    fixture.reopen();
    let node = fixture.id("big");
    let full = fixture.fs().write(node, 100_001, b"x", Privileges::Drop);
    assert_eq!(full, Err(Errno::NOSPC));
    fixture.fs().unlink(NodeId::ROOT, b"big").unwrap();
    fixture.fs().forget(node, 1000);
    let new = fixture
        .fs()
        .create(&ROOT, NodeId::ROOT, b"new", 0o644)
        .unwrap();
    let data = noise(3, 11 * 4096);
    let written = fixture
        .fs()
        .write(new.node, 0, &data, Privileges::Drop)
        .unwrap();
    assert_eq!(written, 10 * 4096);
    let full = fixture
        .fs()
        .write(new.node, 10 * 4096, b"x", Privileges::Drop);
    assert_eq!(full, Err(Errno::NOSPC));
    // Also of one that nobody looked into since it was mounted.
    fixture.reopen();
    let node = fixture.id("new");
    fixture.fs().unlink(NodeId::ROOT, b"new").unwrap();
    fixture.fs().forget(node, 1000);
    let new = fixture.fs().create(&ROOT, NodeId::ROOT, b"newer", 0o644);
    let written = fixture
        .fs()
        .write(new.unwrap().node, 0, &data, Privileges::Drop);
    assert_eq!(written, Ok(10 * 4096));
}

/// Where owners are kept in an attribute, its owner must be able to set it, whatever the mode is.
#[test]
fn an_ordinary_user_makes_what_its_mode_keeps_him_out_of() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    fixture.union.take().unwrap().close().unwrap();
    fs::remove_dir_all(fixture.upper()).unwrap();
    fs::create_dir(fixture.upper()).unwrap();
    let everyone = fs::Permissions::from_mode(0o755);
    fs::set_permissions(fixture.directory.path(), everyone).unwrap();
    std::os::unix::fs::chown(fixture.upper(), Some(USER.uid), Some(USER.gid)).unwrap();
    as_ordinary_user(|| {
        fixture.open();
        let file = fixture.fs().create(&USER, NodeId::ROOT, b"object", 0o444);
        let file = file.unwrap();
        assert_eq!((file.uid, file.permissions), (USER.uid, 0o444));
        fixture
            .fs()
            .write(file.node, 0, b"object", Privileges::Drop)
            .unwrap();
        fixture
            .fs()
            .create(&USER, NodeId::ROOT, b"none", 0)
            .unwrap();
        for (name, mode) in [(&b"closed"[..], 0o555), (b"shut", 0)] {
            let made = fixture.fs().make_directory(&USER, NodeId::ROOT, name, mode);
            assert_eq!(made.unwrap().permissions, mode);
        }
        fixture.assert_kept();
        assert_eq!(fixture.content("object"), b"object");
        fixture.union.take().unwrap().close().unwrap();
    });
}

fn make_whiteout(path: &Path) {
    let whiteout = rustix::fs::FileType::CharacterDevice;
    let mode = rustix::fs::Mode::empty();
    rustix::fs::mknodat(rustix::fs::CWD, path, whiteout, mode, 0).unwrap();
}

fn set_attribute(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::setxattr(path, name, value, rustix::fs::XattrFlags::empty()).unwrap();
}

/// Overlayfs names the old name only of what was renamed in its directory.
#[test]
fn what_overlayfs_renamed_can_be_moved_again() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    fixture.union.take().unwrap().close().unwrap();
    let upper = fixture.upper();
    fs::remove_dir_all(&upper).unwrap();
    fs::create_dir_all(upper.join("moved")).unwrap();
    set_attribute(&upper.join("moved"), "trusted.overlay.redirect", b"dir");
    make_whiteout(&upper.join("dir"));
    let copy = fs::File::create(upper.join("copy")).unwrap();
    copy.set_len(300_000).unwrap();
    set_attribute(&upper.join("copy"), "trusted.overlay.redirect", b"big");
    set_attribute(&upper.join("copy"), "trusted.overlay.metacopy", b"");
    make_whiteout(&upper.join("big"));
    fixture.open();
    assert_eq!(fixture.names("moved"), ["sub", "x"]);
    for (name, new) in [("moved", "DIR"), ("copy", "COPY")] {
        let empty = fixture.id("empty");
        let (name, new) = (name.as_bytes(), new.as_bytes());
        let moved = fixture
            .fs()
            .rename(NodeId::ROOT, name, empty, new, RenameHow::Replace);
        moved.unwrap();
    }
    fixture.assert_kept();
    assert_eq!(fixture.names("empty/DIR"), ["sub", "x"]);
    assert_eq!(fixture.content("empty/COPY"), noise(1, 300_000));
}

#[test]
fn a_directory_that_cannot_be_replaced_stays_as_it_was() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    let root = NodeId::ROOT;
    let made = fixture.fs().make_directory(&ROOT, root, b"from", 0o755);
    let from = made.unwrap().node;
    let target = fixture.fs().make_directory(&ROOT, root, b"target", 0o755);
    let target = target.unwrap().node;
    let changes = Changes {
        permissions: Some(0o711),
        uid: Some(5),
        ..Changes::default()
    };
    fixture.fs().set_attributes(target, &changes).unwrap();
    let set = fixture.fs().set_xattr(target, b"user.x", b"y", SetHow::Any);
    set.unwrap();
    let before = fixture.fs().attributes(target).unwrap();
    // The host refuses to move what is immutable.
    let host = fs::File::open(fixture.upper().join("from")).unwrap();
    let immutable = rustix::fs::IFlags::IMMUTABLE;
    if rustix::fs::ioctl_setflags(&host, immutable).is_err() {
        return;
    }
    let moved = fixture
        .fs()
        .rename(root, b"from", root, b"target", RenameHow::Replace);
    rustix::fs::ioctl_setflags(&host, rustix::fs::IFlags::empty()).unwrap();
    assert_eq!(moved, Err(Errno::PERM));
    for _ in 0..2 {
        let after = fixture.get("target").unwrap();
        assert_eq!((after.node, after.uid), (before.node, 5));
        assert_eq!((after.permissions, after.mtime), (0o711, before.mtime));
        assert_eq!(fixture.fs().xattr(after.node, b"user.x").unwrap(), b"y");
        fixture.reopen();
    }
    assert_eq!(fixture.id("from"), from);
    let moved = fixture
        .fs()
        .rename(root, b"from", root, b"target", RenameHow::Replace);
    moved.unwrap();
    assert_eq!(fixture.id("target"), from);
    fixture.assert_kept();
}

#[test]
fn a_root_that_was_not_completed_is_so_by_the_next_mount() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    let before = fixture.get("").unwrap().mtime;
    fixture.union.take().unwrap().close().unwrap();
    let upper = fixture.upper();
    for has_record in [true, false] {
        // Killed after its record was written, or before.
        rustix::fs::removexattr(&upper, "trusted.overlay.origin").unwrap();
        if !has_record {
            fs::remove_file(upper.join(".bcow/instance.json")).unwrap();
        }
        let root = fs::File::open(&upper).unwrap();
        let now = std::time::SystemTime::now();
        root.set_modified(now).unwrap();
        fixture.open();
        assert_eq!(fixture.get("").unwrap().mtime, before);
        fixture.union.take().unwrap().close().unwrap();
    }
    fixture.open();
    // Once it has names, its time is its own.
    fixture
        .fs()
        .create(&ROOT, NodeId::ROOT, b"new", 0o644)
        .unwrap();
    let after = fixture.get("").unwrap().mtime;
    assert_ne!(after, before);
    fixture.reopen();
    assert_eq!(fixture.get("").unwrap().mtime, after);
}

#[test]
fn the_root_of_an_adopted_upper_stays_what_it_was_made() {
    let Some(mut fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    fixture.union.take().unwrap().close().unwrap();
    fs::remove_dir_all(fixture.upper()).unwrap();
    fs::create_dir(fixture.upper()).unwrap();
    fs::write(fixture.upper().join("theirs"), b"x").unwrap();
    fixture.open();
    let changes = Changes {
        permissions: Some(0o711),
        ..Changes::default()
    };
    let union = fixture.fs();
    union.set_attributes(NodeId::ROOT, &changes).unwrap();
    union.unlink(NodeId::ROOT, b"theirs").unwrap();
    let before = fixture.get("").unwrap();
    for _ in 0..2 {
        fixture.reopen();
        let after = fixture.get("").unwrap();
        assert_eq!((after.mtime, after.permissions), (before.mtime, 0o711));
    }
}

/// What is not the mount's own from the start gets its place when it is complete: a crash leaves nothing with another owner.
#[test]
fn what_is_made_has_its_owner_when_it_has_its_name() {
    use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};
    let Some(fixture) = Fixture::new(UnionOptions::default()) else {
        return;
    };
    let watch = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).unwrap();
    let what = WatchFlags::CREATE | WatchFlags::MOVED_TO;
    inotify::add_watch(&watch, fixture.upper(), what).unwrap();
    let (union, root) = (fixture.fs(), NodeId::ROOT);
    union.create(&USER, root, b"file", 0o644).unwrap();
    union
        .make_directory(&USER, root, b"directory", 0o755)
        .unwrap();
    union.create(&ROOT, root, b"own", 0o644).unwrap();
    let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(&watch, &mut buffer);
    let mut seen = Vec::new();
    while let Ok(event) = reader.next() {
        let name = event.file_name().unwrap().to_str().unwrap().to_owned();
        seen.push((name, event.events().contains(ReadFlags::MOVED_TO)));
    }
    let want = [("file", true), ("directory", true), ("own", false)];
    assert_eq!(seen, want.map(|(name, moved)| (name.to_owned(), moved)));
    for name in ["file", "directory"] {
        let host = fs::metadata(fixture.upper().join(name)).unwrap();
        assert_eq!((host.uid(), host.gid()), (USER.uid, USER.gid));
    }
}

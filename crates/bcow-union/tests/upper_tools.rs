//! What is said of an upper without a mount is what the union showed: random changes, with both kinds of sketches. Needs root
//! (trusted attributes) and mkfs.erofs.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};

use bcow::BlockDevice;
use bcow_erofs::merge::merge;
use bcow_erofs::overlay::{ReadOptions, read_layer};
use bcow_erofs::reader::{FileType, Filesystem, Walk};
use bcow_testkit::{Random, has_program, lacks};
use bcow_union::NodeId;
use bcow_union::fs::{
    Allocate, Caller, Changes as SetAttributes, LowerImage, Privileges, RenameHow, SetTime, UnionFs,
};
use bcow_union::options::{SketchChoice, UnionOptions};
use bcow_union::upper::check::{self, CheckedImage, Report, Severity};
use bcow_union::upper::{
    Attribute, Changes, Instance, LOWER_FROM, Mark, Marks, Namespace, Scope, SetHow, SketchMark,
    UpperError, UpperReader, lower_offset,
};
use rustix::fs::{CWD, FileType as HostType, Mode};
use tempfile::TempDir;

/// Whether to skip.
fn lacks_tools() -> bool {
    lacks("root", rustix::process::geteuid().is_root())
        || lacks("mkfs.erofs", has_program("mkfs.erofs"))
}

fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    (0..length).map(|_| random.next_u64() as u8).collect()
}

fn make_image() -> Vec<u8> {
    let directory = TempDir::new().unwrap();
    let tree = directory.path().join("tree");
    for name in ["a/b/c", "a/d", "e/f", "g"] {
        fs::create_dir_all(tree.join(name)).unwrap();
    }
    // Of all sizes around a block, so that ends lie beside inodes and in blocks.
    let sizes = [0, 1, 100, 4095, 4096, 4097, 70_000, 131_072, 300_001];
    for (index, size) in sizes.into_iter().enumerate() {
        let parent = ["a", "a/b", "a/b/c", "e", "g"][index % 5];
        let path = tree.join(parent).join(format!("file{index}"));
        fs::write(path, noise(index as u64, size)).unwrap();
    }
    fs::write(tree.join("large"), noise(77, 2_000_000)).unwrap();
    fs::write(tree.join("h1"), noise(78, 100_000)).unwrap();
    for link in ["a/h2", "a/b/h3", "g/h4"] {
        fs::hard_link(tree.join("h1"), tree.join(link)).unwrap();
    }
    symlink("a/file0", tree.join("link")).unwrap();
    let image = directory.path().join("image");
    let status = Command::new("mkfs.erofs")
        .args(["--quiet", "-U", "6a0f7b5e-0000-4000-8000-00000000bc0f"])
        .arg(&image)
        .arg(&tree)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .unwrap();
    assert!(status.success());
    let mut bytes = fs::read(image).unwrap();
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    bytes
}

fn image() -> (Arc<Filesystem>, Arc<dyn BlockDevice>) {
    static IMAGE: OnceLock<Arc<Vec<u8>>> = OnceLock::new();
    let bytes = IMAGE.get_or_init(|| Arc::new(make_image())).clone();
    let device: Arc<dyn BlockDevice> = Arc::new(bytes);
    (Arc::new(Filesystem::open(device.clone()).unwrap()), device)
}

/// What there is to see of a path.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    kind: FileType,
    permissions: u16,
    owner: (u32, u32),
    mtime: (i64, u32),
    /// Of files, the number of their names, and the first of them.
    names: Option<(u32, Vec<u8>)>,
    content: Vec<u8>,
}

type Tree = BTreeMap<Vec<u8>, Seen>;

struct Union {
    fs: Arc<UnionFs>,
}

impl Union {
    fn open(upper: &Path, sketch: SketchChoice) -> Union {
        let options = UnionOptions {
            sketch,
            ..UnionOptions::default()
        };
        let lower = LowerImage {
            fs: image().0,
            identity: [7; 32],
            name: "image".into(),
        };
        let fs = UnionFs::open(lower, upper, "a test", &options).unwrap();
        Union { fs }
    }

    fn names(&self, id: NodeId) -> Vec<Vec<u8>> {
        let handle = self.fs.open_directory(id).unwrap();
        let mut names = Vec::new();
        self.fs
            .read_directory(handle, 0, &mut |entry| {
                names.push(entry.name.to_vec());
                ControlFlow::Continue(())
            })
            .unwrap();
        self.fs.close_directory(handle);
        names.retain(|name| !matches!(&name[..], b"." | b".."));
        names.sort();
        names
    }

    fn content(&self, id: NodeId) -> Vec<u8> {
        let (mut all, mut scratch) = (Vec::new(), Vec::new());
        loop {
            let at = all.len() as u64;
            let read = self.fs.read(id, at, 1 << 20, &mut scratch, <[u8]>::to_vec);
            let read = read.unwrap();
            if read.is_empty() {
                return all;
            }
            all.extend(read);
        }
    }

    fn tree(&self) -> Tree {
        let mut tree = Tree::new();
        let mut firsts: HashMap<NodeId, Vec<u8>> = HashMap::new();
        let mut todo = vec![(Vec::new(), self.fs.attributes(NodeId::ROOT).unwrap())];
        while let Some((path, found)) = todo.pop() {
            let mut names = None;
            let content = match found.kind {
                FileType::Directory => {
                    // The last is taken first, so that paths come in order.
                    for name in self.names(found.node).into_iter().rev() {
                        let child = self.fs.lookup(found.node, &name).unwrap().unwrap();
                        todo.push((join(&path, &name), child));
                    }
                    Vec::new()
                }
                FileType::Regular => self.content(found.node),
                FileType::Symlink => self.fs.read_link(found.node).unwrap(),
                _ => Vec::new(),
            };
            if found.kind != FileType::Directory {
                let first = firsts.entry(found.node).or_insert_with(|| path.clone());
                names = Some((found.nlink, first.clone()));
            }
            let seen = Seen {
                kind: found.kind,
                permissions: found.permissions,
                owner: (found.uid, found.gid),
                mtime: (found.mtime.seconds, found.mtime.nanoseconds),
                names,
                content,
            };
            tree.insert(path, seen);
        }
        tree
    }
}

fn join(path: &[u8], name: &[u8]) -> Vec<u8> {
    match path {
        [] => name.to_vec(),
        path => [path, b"/", name].concat(),
    }
}

fn tree_of(fs: &Filesystem) -> Tree {
    let mut tree = Tree::new();
    let mut firsts: HashMap<u64, Vec<u8>> = HashMap::new();
    let mut walk = Walk::new(fs);
    while let Some(inode) = walk.next().unwrap() {
        let path = walk.path().to_vec();
        let content = match inode.kind {
            FileType::Regular => {
                let mut content = vec![0; inode.size as usize];
                assert_eq!(fs.read(&inode, 0, &mut content).unwrap(), content.len());
                content
            }
            FileType::Symlink => fs.read_link(&inode).unwrap(),
            _ => Vec::new(),
        };
        let names = (inode.kind != FileType::Directory).then(|| {
            let first = firsts.entry(inode.nid.0).or_insert_with(|| path.clone());
            (inode.nlink, first.clone())
        });
        let seen = Seen {
            kind: inode.kind,
            permissions: inode.permissions,
            owner: (inode.uid, inode.gid),
            mtime: (inode.mtime.seconds, inode.mtime.nanoseconds),
            names,
            content,
        };
        tree.insert(path, seen);
    }
    tree
}

const ROOT: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
    umask: 0o022,
};

/// One random change. That some are refused is as it should be.
fn change(union: &Union, random: &mut Random) {
    let fs = &union.fs;
    let mut directories = Vec::new();
    let mut files = Vec::new();
    let mut todo = vec![NodeId::ROOT];
    while let Some(id) = todo.pop() {
        directories.push(id);
        for name in union.names(id) {
            let child = fs.lookup(id, &name).unwrap().unwrap();
            match child.kind {
                FileType::Directory => {
                    todo.push(child.node);
                    files.push((id, name, child));
                }
                _ => files.push((id, name, child)),
            }
        }
    }
    let new = format!("new{}", random.below(30)).into_bytes();
    let into = *random.pick(&directories);
    if files.is_empty() {
        let _ = fs.create(&ROOT, into, &new, 0o644);
        return;
    }
    let (parent, name, found) = random.pick(&files).clone();
    let size = found.size;
    match random.below(14) {
        0 => {
            if let Ok(made) = fs.create(&ROOT, into, &new, 0o640) {
                let data = noise(random.next_u64(), random.below(20_000) as usize);
                fs.write(made.node, random.below(3) * 5000, &data, Privileges::Drop)
                    .unwrap();
            }
        }
        1 => drop(fs.make_directory(&ROOT, into, &new, 0o750)),
        2 => drop(fs.unlink(parent, &name)),
        3 => drop(fs.remove_directory(parent, &name)),
        4 | 5 => {
            let how = *random.pick(&[
                RenameHow::Replace,
                RenameHow::NoReplace,
                RenameHow::Exchange,
            ]);
            let (to, to_name) = match random.one_in(2) {
                true => (into, new),
                false => {
                    let (to, name, _) = random.pick(&files).clone();
                    (to, name)
                }
            };
            let _ = fs.rename(parent, &name, to, &to_name, how);
        }
        6 => drop(fs.link(found.node, into, &new)),
        7 => {
            let set = SetAttributes {
                permissions: Some(random.below(0o1000) as u16),
                uid: Some(random.below(3) as u32),
                mtime: Some(SetTime::At(bcow_erofs::tree::Timestamp {
                    seconds: random.below(1 << 31) as i64,
                    nanoseconds: random.below(1_000_000_000) as u32,
                })),
                ..SetAttributes::default()
            };
            let _ = fs.set_attributes(found.node, &set);
        }
        8 if found.kind == FileType::Regular => {
            let set = SetAttributes {
                size: Some(random.below(size * 2 + 5000)),
                ..SetAttributes::default()
            };
            fs.set_attributes(found.node, &set).unwrap();
        }
        9 if found.kind == FileType::Regular => {
            let how = *random.pick(&[Allocate::PunchHole, Allocate::ZeroExtend, Allocate::Extend]);
            let _ = fs.allocate(
                found.node,
                random.below(size + 1),
                1 + random.below(9000),
                how,
            );
        }
        10 => drop(fs.make_symlink(&ROOT, into, &new, b"some/where")),
        _ if found.kind == FileType::Regular => {
            for _ in 0..=random.below(4) {
                let data = noise(random.next_u64(), 1 + random.below(9000) as usize);
                let at = random.below(size + 9000);
                fs.write(found.node, at, &data, Privileges::Drop).unwrap();
            }
        }
        _ => {}
    }
}

fn changes(upper: &Path, scope: Scope) -> Changes {
    let (fs, device) = image();
    let reader = UpperReader::open(upper).unwrap();
    Changes::read(&reader, fs, device, scope, 1 << 20).unwrap()
}

/// What the upper and the image are together.
fn put_together(upper: &Path) -> Tree {
    let changes = changes(upper, Scope::Layer);
    let options = ReadOptions {
        place: &|offset, _| u32::try_from((LOWER_FROM + offset) / 4096).ok(),
        tails: LOWER_FROM,
        max_inodes: 1 << 20,
    };
    let lower = read_layer(&image().0, &options).unwrap();
    let merged = merge(vec![lower, changes.layer]).unwrap();
    tree_of(&changes.store.filesystem(&merged).unwrap().filesystem)
}

/// What the comparison looks at must have all that differs, and nothing that is only in one.
fn assert_touched(upper: &Path, before: &Tree, after: &Tree) {
    let changes = changes(upper, Scope::Touched);
    let a = merge(vec![changes.touched.clone()]).unwrap();
    let b = merge(vec![changes.touched, changes.layer]).unwrap();
    let [a, b] = [a, b].map(|tree| tree_of(&changes.store.filesystem(&tree).unwrap().filesystem));
    for (seen, whole) in [(&a, before), (&b, after)] {
        for (path, seen) in seen {
            assert_eq!(
                whole.get(path),
                Some(seen),
                "{:?}",
                String::from_utf8_lossy(path)
            );
        }
    }
    for path in before.keys().chain(after.keys()) {
        if before.get(path) != after.get(path) {
            let shown = String::from_utf8_lossy(path);
            assert!(
                a.contains_key(path) || b.contains_key(path),
                "{shown:?} is left out"
            );
        }
    }
}

fn assert_sound(upper: &Path) {
    let (filesystem, device) = image();
    let image = CheckedImage { filesystem, device };
    let reader = UpperReader::open(upper).unwrap();
    let report = check::check(&reader, Some(&image)).unwrap();
    assert!(report.is_sound(), "{:#?}", report.findings);
    assert!(report.findings.is_empty(), "{:#?}", report.findings);
}

fn assert_same(shown: &Tree, told: &Tree, seed: u64) {
    for path in shown.keys().chain(told.keys()) {
        let (a, b) = (shown.get(path), told.get(path));
        let brief = |seen: Option<&Seen>| {
            seen.map(|seen| {
                let mut seen = seen.clone();
                seen.content.truncate(8);
                (seen, seen_length(shown, path), seen_length(told, path))
            })
        };
        assert!(
            a == b,
            "seed {seed}: {:?}: the union has {:?}, the upper says {:?}",
            String::from_utf8_lossy(path),
            brief(a),
            brief(b)
        );
    }
}

fn seen_length(tree: &Tree, path: &[u8]) -> Option<usize> {
    tree.get(path).map(|seen| seen.content.len())
}

/// `BCOW_ROUNDS` asks for more.
fn rounds(sketch: SketchChoice, first: u64) {
    if lacks_tools() {
        return;
    }
    let before = tree_of(&image().0);
    let count = std::env::var("BCOW_ROUNDS").map_or(12, |count| count.parse().unwrap());
    for seed in first..first + count {
        let mut random = Random::new(seed);
        let directory = TempDir::new().unwrap();
        let upper = directory.path().join("upper");
        for _ in 0..3 {
            let union = Union::open(&upper, sketch);
            for _ in 0..1 + random.below(40) {
                change(&union, &mut random);
            }
            let shown = union.tree();
            union.fs.close().unwrap();
            drop(union);
            let told = put_together(&upper);
            assert_same(&shown, &told, seed);
            assert_sound(&upper);
            assert_touched(&upper, &before, &told);
        }
    }
}

#[test]
fn an_upper_with_sparse_sketches_is_what_the_union_showed() {
    rounds(SketchChoice::Sparse, 0);
}

#[test]
fn an_upper_with_packed_sketches_is_what_the_union_showed() {
    rounds(SketchChoice::Packed, 1 << 32);
}

#[test]
fn what_comes_from_the_image_is_not_stored_again() {
    if lacks_tools() {
        return;
    }
    let directory = TempDir::new().unwrap();
    let upper = directory.path().join("upper");
    let union = Union::open(&upper, SketchChoice::Sparse);
    let large = union.fs.lookup(NodeId::ROOT, b"large").unwrap().unwrap();
    union
        .fs
        .write(large.node, 1_000_000, b"x", Privileges::Drop)
        .unwrap();
    union.fs.close().unwrap();
    drop(union);
    let changes = changes(&upper, Scope::Layer);
    let tree = merge(vec![changes.layer]).unwrap();
    let spliced = changes.store.filesystem(&tree).unwrap();
    let fs = &spliced.filesystem;
    let inode = fs.inode(fs.resolve(b"large").unwrap().unwrap()).unwrap();
    let mut own = 0;
    for extent in fs.extents(&inode, 0) {
        let extent = extent.unwrap();
        match extent.source {
            bcow_erofs::reader::ExtentSource::Device { offset }
                if lower_offset(offset).is_none() =>
            {
                own += extent.length;
            }
            _ => {}
        }
    }
    // The block, and the end of the file, which lies beside its inode in the image.
    assert!(own <= 2 * 4096, "{own}");
}

#[test]
fn the_acl_of_the_root_is_the_mounts_and_not_the_directorys() {
    const NAME: &str = "system.posix_acl_access";
    if lacks_tools() {
        return;
    }
    let acl = |entries: &[(u8, u8)]| {
        let mut bytes = vec![2, 0, 0, 0];
        for &(tag, permissions) in entries {
            bytes.extend([tag, 0, permissions, 0, 255, 255, 255, 255]);
        }
        bytes
    };
    let of_mount = acl(&[(0x01, 7), (0x04, 5), (0x10, 5), (0x20, 1)]);
    let of_host = acl(&[(0x01, 7), (0x04, 0), (0x10, 7), (0x20, 0)]);
    let directory = TempDir::new().unwrap();
    let upper = directory.path().join("upper");
    let union = Union::open(&upper, SketchChoice::Sparse);
    let how = bcow_union::upper::SetHow::Any;
    let set = union
        .fs
        .set_xattr(NodeId::ROOT, NAME.as_bytes(), &of_mount, how);
    set.unwrap();
    union.fs.close().unwrap();
    drop(union);
    rustix::fs::setxattr(&upper, NAME, &of_host, rustix::fs::XattrFlags::empty()).unwrap();
    let changes = changes(&upper, Scope::Layer);
    let tree = merge(vec![changes.layer]).unwrap();
    let spliced = changes.store.filesystem(&tree).unwrap();
    let root = spliced.filesystem.inode(spliced.filesystem.root()).unwrap();
    let acls: Vec<_> = spliced
        .filesystem
        .xattrs(&root)
        .unwrap()
        .into_iter()
        .collect();
    assert_eq!(acls, [(NAME.as_bytes().to_vec(), of_mount)]);
    assert_eq!(root.permissions, 0o751);
}

#[test]
fn a_wrong_number_of_names_is_corrected() {
    if lacks_tools() {
        return;
    }
    let directory = TempDir::new().unwrap();
    let upper = directory.path().join("upper");
    let union = Union::open(&upper, SketchChoice::Sparse);
    let file = union.fs.lookup(NodeId::ROOT, b"h1").unwrap().unwrap();
    union
        .fs
        .write(file.node, 5, b"x", Privileges::Drop)
        .unwrap();
    union.fs.close().unwrap();
    drop(union);
    let entry = fs::read_dir(upper.join(".bcow/index"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap();
    rustix::fs::setxattr(
        entry.path(),
        "trusted.overlay.nlink",
        b"U+9",
        rustix::fs::XattrFlags::empty(),
    )
    .unwrap();
    let (filesystem, device) = image();
    let image = CheckedImage { filesystem, device };
    let report = check::check(&UpperReader::open(&upper).unwrap(), Some(&image)).unwrap();
    assert_eq!(report.findings.len(), 1, "{:#?}", report.findings);
    assert_eq!(report.findings[0].code, "upper-nlink");
    let instance = Instance::open_existing(&upper, "a test").unwrap();
    assert_eq!(check::repair(&instance, &report).unwrap().len(), 1);
    drop(instance);
    assert_sound(&upper);
}

/// An upper with one sketch, the start of `large`.
fn sketched(upper: &Path) {
    let union = Union::open(upper, SketchChoice::Sparse);
    let large = union.fs.lookup(NodeId::ROOT, b"large").unwrap().unwrap();
    let written = union
        .fs
        .write(large.node, 0, &noise(5, 8192), Privileges::Drop);
    assert_eq!(written.unwrap(), 8192);
    union.fs.close().unwrap();
}

fn checked(upper: &Path) -> Report {
    let (filesystem, device) = image();
    let image = CheckedImage { filesystem, device };
    check::check(&UpperReader::open(upper).unwrap(), Some(&image)).unwrap()
}

fn codes(report: &Report) -> Vec<&'static str> {
    report.findings.iter().map(|found| found.code).collect()
}

#[test]
fn nobody_writes_to_an_upper_whose_content_is_still_to_be_read() {
    if lacks_tools() {
        return;
    }
    let directory = TempDir::new().unwrap();
    let upper = directory.path().join("upper");
    sketched(&upper);
    let Changes { layer, store, .. } = changes(&upper, Scope::Layer);
    let spliced = store.filesystem(&merge(vec![layer]).unwrap()).unwrap();
    drop(store);
    let writer = || Instance::open_existing(&upper, "a test");
    assert!(matches!(writer(), Err(UpperError::InUse { .. })));
    UpperReader::open(&upper).unwrap();
    assert!(matches!(writer(), Err(UpperError::InUse { .. })));
    drop(spliced);
    writer().unwrap();
}

#[test]
fn a_promotion_that_was_cut_short_is_no_damage() {
    if lacks_tools() {
        return;
    }
    let directory = TempDir::new().unwrap();
    let upper = directory.path().join("upper");
    sketched(&upper);
    let file = fs::File::open(upper.join("large")).unwrap();
    let at = Attribute::Open(file.as_fd());
    let set = |mark: SketchMark| {
        let set = Mark::Sketch.set(at, Namespace::Trusted, &mark.encode());
        set.unwrap();
    };
    let mark = Marks::read(at, Namespace::Trusted).unwrap().sketch.unwrap();
    assert!(mark.lower_limit > 8192);
    assert!(Mark::Metacopy.clear(at, Namespace::Trusted).unwrap());
    assert_eq!(codes(&checked(&upper)), ["upper-mark-misplaced"]);
    // Of which nothing is missing: the two blocks are all that may be the image's.
    let lower_limit = 8192;
    set(SketchMark {
        lower_limit,
        ..mark
    });
    assert_sound(&upper);
    set(SketchMark {
        lower_limit: 8193,
        ..mark
    });
    assert_eq!(codes(&checked(&upper)), ["upper-mark-misplaced"]);
    // Nor does overlayfs know what is in a packed one.
    set(SketchMark {
        kind: bcow_union::upper::SketchKind::Packed,
        lower_limit: 0,
        map_exists: false,
        size: 8192,
        ..mark
    });
    assert_eq!(codes(&checked(&upper)), ["upper-mark-misplaced"]);
}

#[test]
fn no_number_of_warnings_is_an_error_or_hides_one() {
    if lacks_tools() {
        return;
    }
    let directory = TempDir::new().unwrap();
    let upper = directory.path().join("upper");
    Union::open(&upper, SketchChoice::Sparse)
        .fs
        .close()
        .unwrap();
    for index in 0..1003 {
        let name = upper.join(format!("white{index}"));
        rustix::fs::mknodat(CWD, name, HostType::CharacterDevice, Mode::empty(), 0).unwrap();
    }
    let report = checked(&upper);
    assert!(report.is_sound());
    assert_eq!(report.findings.len(), 1000);
    let file = fs::File::create(upper.join("zzz")).unwrap();
    let at = Attribute::Open(file.as_fd());
    at.set(b"trusted.overlay.metacopy", b"?", SetHow::Any)
        .unwrap();
    let report = checked(&upper);
    assert!(!report.is_sound());
    let is_error = |code: &str| {
        let mut found = report.findings.iter();
        found.any(|found| found.severity == Severity::Error && found.code == code)
    };
    assert!(is_error("upper-mark"), "{:#?}", report.findings.last());
}

#[test]
fn what_should_be_a_directory_beside_the_tree_and_is_none_is_named() {
    if lacks_tools() {
        return;
    }
    for name in ["index", "maps", "work"] {
        let directory = TempDir::new().unwrap();
        let upper = directory.path().join("upper");
        let union = Union::open(&upper, SketchChoice::Sparse);
        union.fs.close().unwrap();
        drop(union);
        let path = upper.join(".bcow").join(name);
        fs::remove_dir_all(&path).unwrap();
        fs::write(&path, "x").unwrap();
        let report = checked(&upper);
        assert_eq!(codes(&report), ["upper-host"], "{name}");
        assert_eq!(report.findings[0].path, format!(".bcow/{name}").as_bytes());
        if name == "index" {
            let (fs, device) = image();
            let reader = UpperReader::open(&upper).unwrap();
            let read = Changes::read(&reader, fs, device, Scope::Layer, 1 << 20);
            let error = read.err().unwrap().to_string();
            assert_eq!(error, "cannot read \".bcow/index\"");
        }
    }
}

#[test]
fn the_root_continues_the_images_root_whatever_it_is_marked_as() {
    if lacks_tools() {
        return;
    }
    let directory = TempDir::new().unwrap();
    let upper = directory.path().join("upper");
    sketched(&upper);
    let before = put_together(&upper);
    let root = fs::File::open(&upper).unwrap();
    let at = Attribute::Open(root.as_fd());
    Mark::Opaque.set(at, Namespace::Trusted, b"y").unwrap();
    let union = Union::open(&upper, SketchChoice::Sparse);
    let shown = union.tree();
    union.fs.close().unwrap();
    drop(union);
    assert_same(&shown, &put_together(&upper), 0);
    assert_same(&shown, &before, 0);
    assert_touched(&upper, &tree_of(&image().0), &shown);
    // What the image has is known to those who check it.
    rustix::fs::mknodat(&root, "white", HostType::CharacterDevice, Mode::empty(), 0).unwrap();
    assert_eq!(codes(&checked(&upper)), ["upper-whiteout"]);
}

/// An upper in which the image's file of four names was written to, and closed again.
fn written_links(directory: &TempDir, length: usize) -> std::path::PathBuf {
    let upper = directory.path().join("upper");
    let union = Union::open(&upper, SketchChoice::Sparse);
    let file = union.fs.lookup(NodeId::ROOT, b"h1").unwrap().unwrap();
    let data = vec![b'x'; length];
    union
        .fs
        .write(file.node, 0, &data, Privileges::Drop)
        .unwrap();
    union.fs.close().unwrap();
    upper
}

fn entry_of_index(upper: &Path) -> Option<std::path::PathBuf> {
    let mut entries = fs::read_dir(upper.join(".bcow/index")).unwrap();
    entries.next().map(|entry| entry.unwrap().path())
}

fn names_mark(entry: &Path) -> String {
    let mut value = [0; 16];
    let length = rustix::fs::getxattr(entry, "trusted.overlay.nlink", &mut value[..]).unwrap();
    String::from_utf8(value[..length].to_vec()).unwrap()
}

fn set_names_mark(entry: &Path, value: &str) {
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(entry, "trusted.overlay.nlink", value.as_bytes(), flags).unwrap();
}

/// Repairs as `bcow fsck --repair` does.
fn repair(upper: &Path) {
    let (filesystem, device) = image();
    let image = CheckedImage { filesystem, device };
    let instance = Instance::open_existing(upper, "a test").unwrap();
    let reader = UpperReader::of(&instance).unwrap();
    let report = check::check(&reader, Some(&image)).unwrap();
    check::repair(&instance, &report).unwrap();
}

fn at(union: &Union, path: &str) -> Option<bcow_union::fs::Attributes> {
    let mut found = union.fs.attributes(NodeId::ROOT).unwrap();
    for name in path.split('/') {
        found = union.fs.lookup(found.node, name.as_bytes()).unwrap()?;
    }
    Some(found)
}

const LINKS: [&str; 4] = ["h1", "a/h2", "a/b/h3", "g/h4"];

#[test]
fn a_copy_up_of_one_of_several_names_that_fails_leaves_nothing() {
    if lacks_tools() {
        return;
    }
    let directory = TempDir::new().unwrap();
    let upper = directory.path().join("upper");
    let union = Union::open(&upper, SketchChoice::Sparse);
    let file = at(&union, "h1").unwrap();
    // Somebody made a file behind the mount's back, where the copy would go.
    fs::write(upper.join("h1"), b"in the way").unwrap();
    for _ in 0..3 {
        let failed = union.fs.write(file.node, 0, b"x", Privileges::Drop);
        assert_eq!(failed, Err(rustix::io::Errno::EXIST));
        assert_eq!(entry_of_index(&upper), None);
    }
    fs::remove_file(upper.join("h1")).unwrap();
    union
        .fs
        .write(file.node, 0, b"x", Privileges::Drop)
        .unwrap();
    assert_eq!(at(&union, "g/h4").unwrap().nlink, 4);
    union.fs.close().unwrap();
    drop(union);
    assert_sound(&upper);
}

#[test]
fn a_further_name_that_cannot_be_copied_up_still_counts() {
    if lacks_tools() {
        return;
    }
    let directory = TempDir::new().unwrap();
    let upper = directory.path().join("upper");
    let union = Union::open(&upper, SketchChoice::Sparse);
    let file = at(&union, "h1").unwrap();
    union
        .fs
        .write(file.node, 0, b"x", Privileges::Drop)
        .unwrap();
    let parent = at(&union, "a/b").unwrap().node;
    let mode = SetAttributes {
        permissions: Some(0o700),
        ..SetAttributes::default()
    };
    union.fs.set_attributes(parent, &mode).unwrap();
    // No name can be made in a directory that is gone.
    fs::remove_dir(upper.join("a/b")).unwrap();
    for _ in 0..3 {
        let root = NodeId::ROOT;
        let moved = union
            .fs
            .rename(parent, b"h3", root, b"new", RenameHow::Replace);
        assert_eq!(moved, Err(rustix::io::Errno::NOENT));
        assert_eq!(
            union.fs.unlink(parent, b"h3"),
            Err(rustix::io::Errno::NOENT)
        );
        assert_eq!(union.fs.attributes(file.node).unwrap().nlink, 4);
        assert_eq!(names_mark(&entry_of_index(&upper).unwrap()), "U+2");
    }
}

/// What a crash leaves between the steps of a copy-up, of a further name's, and of the removal of one: the mark is relative to
/// the image's count, and all names are what was written.
#[test]
fn the_number_of_names_survives_a_crash_while_links_change() {
    if lacks_tools() {
        return;
    }
    // Whether the copy has its place; what the mark says; whether a name was removed; how many names there are said to be.
    for (is_placed, mark, is_removed, said) in [
        (false, "L+0", false, 4),
        (true, "L+0", false, 4),
        (true, "L+0", true, 4),
        (true, "L-1", true, 3),
    ] {
        let directory = TempDir::new().unwrap();
        let upper = written_links(&directory, 3);
        let entry = entry_of_index(&upper).unwrap();
        assert_eq!(names_mark(&entry), "U+2");
        set_names_mark(&entry, mark);
        if !is_placed {
            fs::remove_file(upper.join("h1")).unwrap();
        }
        if is_removed {
            let whiteout = rustix::fs::FileType::CharacterDevice;
            fs::create_dir(upper.join("g")).unwrap();
            let mode = rustix::fs::Mode::empty();
            rustix::fs::mknodat(rustix::fs::CWD, upper.join("g/h4"), whiteout, mode, 0).unwrap();
        }
        assert_sound(&upper);
        let union = Union::open(&upper, SketchChoice::Sparse);
        assert_eq!(at(&union, "a/h2").unwrap().nlink, said);
        assert_eq!(&names_mark(&entry)[..1], "U");
        let mut left = said;
        for name in LINKS {
            let Some(found) = at(&union, name) else {
                continue;
            };
            assert_eq!(found.nlink, left, "{mark} {name}");
            assert_eq!(&union.content(found.node)[..3], b"xxx", "{mark} {name}");
            let (parent, last) = match name.rsplit_once('/') {
                Some((parent, last)) => (at(&union, parent).unwrap().node, last),
                None => (NodeId::ROOT, name),
            };
            union.fs.unlink(parent, last.as_bytes()).unwrap();
            left -= 1;
        }
        assert_eq!(entry_of_index(&upper).is_some(), left > 0, "{mark}");
        union.fs.close().unwrap();
        drop(union);
        if left > 0 {
            assert_eq!(codes(&checked(&upper)), ["upper-index-leak"]);
            repair(&upper);
        }
        assert_sound(&upper);
    }
}

#[test]
fn an_entry_of_the_index_without_a_name_is_removed_with_its_map() {
    if lacks_tools() {
        return;
    }
    let directory = TempDir::new().unwrap();
    let upper = written_links(&directory, 5000);
    assert_sound(&upper);
    assert_eq!(fs::read_dir(upper.join(".bcow/maps")).unwrap().count(), 1);
    fs::remove_file(upper.join("h1")).unwrap();
    for name in ["a", "a/b", "g"] {
        fs::create_dir(upper.join(name)).unwrap();
    }
    for name in LINKS {
        let whiteout = rustix::fs::FileType::CharacterDevice;
        let mode = rustix::fs::Mode::empty();
        rustix::fs::mknodat(rustix::fs::CWD, upper.join(name), whiteout, mode, 0).unwrap();
    }
    // It says that there are four names.
    assert_eq!(names_mark(&entry_of_index(&upper).unwrap()), "U+2");
    assert_eq!(codes(&checked(&upper)), ["upper-index-leak"]);
    repair(&upper);
    assert_eq!(entry_of_index(&upper), None);
    assert_eq!(fs::read_dir(upper.join(".bcow/maps")).unwrap().count(), 0);
    assert_sound(&upper);
}

#[test]
fn wrong_numbers_of_names_are_told_from_those_that_a_crash_leaves() {
    if lacks_tools() {
        return;
    }
    let directory = TempDir::new().unwrap();
    let upper = written_links(&directory, 3);
    let entry = entry_of_index(&upper).unwrap();
    for (mark, wrong) in [("L+0", 0), ("L+1", 0), ("L+2", 1), ("L-1", 1), ("U+3", 1)] {
        set_names_mark(&entry, mark);
        let found = codes(&checked(&upper));
        assert_eq!(found, vec!["upper-nlink"; wrong], "{mark}");
        if wrong > 0 {
            repair(&upper);
            assert_eq!(names_mark(&entry), "U+2");
            assert_sound(&upper);
        }
    }
    // A temporary is no name, neither when names are counted nor after it is gone.
    set_names_mark(&entry, "U+2");
    fs::hard_link(&entry, upper.join(".bcow/work/0")).unwrap();
    assert_eq!(codes(&checked(&upper)), ["upper-work-leak"]);
    set_names_mark(&entry, "U+7");
    repair(&upper);
    assert_eq!(names_mark(&entry), "U+2");
    assert_sound(&upper);
}

/// Without the image nobody can count, and a count that is too low must not cost the file.
#[test]
fn an_entry_of_the_index_that_has_names_is_never_removed() {
    if lacks_tools() {
        return;
    }
    let directory = TempDir::new().unwrap();
    let upper = written_links(&directory, 3);
    let entry = entry_of_index(&upper).unwrap();
    set_names_mark(&entry, "U-2");
    assert_eq!(codes(&checked(&upper)), ["upper-nlink"]);
    repair(&upper);
    assert_eq!(names_mark(&entry), "U+2");
}

//! A union with few file descriptors and small stacks. The test needs a process of its own, because
//! it lowers the limits of the process permanently. Needs root (trusted attributes) and mkfs.erofs.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use bcow_erofs::reader::Filesystem;
use bcow_testkit::{lacks_mkfs, make_erofs};
use bcow_union::fs::{Caller, LowerImage, New, UnionFs};
use bcow_union::{NodeId, UnionOptions};
use rustix::process::{Resource, Rlimit};

const ROOT: Caller = Caller {
    uid: 0,
    gid: 0,
    pid: 1,
    umask: 0o022,
};

/// Depth of nested directories.
const DEPTH: usize = 3000;
/// Depth of nested directories in the image.
const LOW_DEPTH: usize = 1500;
/// Number of directories in one directory.
const BREADTH: usize = 600;
/// Limit of open descriptors.
const DESCRIPTORS: u64 = 400;

fn make_image(directory: &Path) -> Vec<u8> {
    let (tree, image) = (directory.join("tree"), directory.join("image"));
    fs::create_dir(&tree).unwrap();
    // The path is short enough for mkfs.erofs to open it as a whole.
    fs::create_dir_all(tree.join("low").join("d/".repeat(LOW_DEPTH))).unwrap();
    make_erofs(&tree, &image, &[]);
    fs::read(image).unwrap()
}

fn open(image: &[u8], upper: &Path) -> Arc<UnionFs> {
    let lower = LowerImage {
        fs: Arc::new(Filesystem::open(Arc::new(image.to_vec())).unwrap()),
        identity: [7; 32],
        name: "image".into(),
    };
    // With a limit, opening the union counts the stored bytes first.
    let options = UnionOptions {
        size_limit: Some(1 << 30),
        ..UnionOptions::default()
    };
    UnionFs::open(lower, upper, "a test", &options).unwrap()
}

fn goes_deep(union: &UnionFs) {
    let mut parent = NodeId::ROOT;
    for _ in 0..DEPTH {
        let made = union.make(&ROOT, parent, b"d", 0o755, &New::Directory);
        parent = made.unwrap().node;
    }
    union
        .make(&ROOT, parent, b"file", 0o644, &New::File)
        .unwrap();
    // This copies up all parent directories at once.
    let mut low = union.lookup(NodeId::ROOT, b"low").unwrap().unwrap().node;
    for _ in 0..LOW_DEPTH {
        low = union.lookup(low, b"d").unwrap().unwrap().node;
    }
    union.make(&ROOT, low, b"file", 0o644, &New::File).unwrap();
    // Enough other directories that the cache of descriptors evicts those above.
    let many = union.lookup(NodeId::ROOT, b"many").unwrap().unwrap().node;
    for index in 0..BREADTH {
        let name = format!("{index}").into_bytes();
        union.lookup(many, &name).unwrap().unwrap();
    }
    assert!(union.lookup(parent, b"file").unwrap().is_some());
    // Only the last directory keeps its parents alive.
    let mut here = NodeId::ROOT;
    let mut all = Vec::new();
    for _ in 0..DEPTH {
        here = union.lookup(here, b"d").unwrap().unwrap().node;
        all.push(here);
    }
    for id in all {
        union.forget(id, 1000);
    }
}

#[test]
fn neither_depth_nor_breadth_needs_descriptors_or_stack() {
    if lacks_mkfs() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = make_image(directory.path());
    let upper = directory.path().join("upper");
    fs::create_dir_all(upper.join("many")).unwrap();
    for index in 0..BREADTH {
        fs::create_dir(upper.join(format!("many/{index}"))).unwrap();
    }
    let few = Rlimit {
        current: Some(DESCRIPTORS),
        maximum: Some(DESCRIPTORS),
    };
    rustix::process::setrlimit(Resource::Nofile, few).unwrap();
    let union = open(&image, &upper);
    let small = std::thread::Builder::new().stack_size(256 << 10);
    std::thread::scope(|scope| {
        let deep = small.spawn_scoped(scope, || goes_deep(&union));
        deep.unwrap().join().unwrap();
    });
    union.close().unwrap();
    drop(union);
    // The standard library needs a descriptor for each level that it removes.
    let removed = Command::new("rm").arg("-r").arg(&upper).status();
    assert!(removed.unwrap().success());
}

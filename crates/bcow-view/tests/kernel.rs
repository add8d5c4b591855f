//! The kernel shows an EROFS and the view of it as the same tree, and `e2fsck` accepts the view.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use bcow_erofs::reader::{Filesystem, Walk};
use bcow_ext4::Sink;
use bcow_testkit::{Random, has_program, lacks, run, umount};
use bcow_view::{BLOCK_BYTES, Options, View, lay_out};
use rustix::fs::{Dev, FileType, Mode, mknodat, setxattr, utimensat};
use tempfile::TempDir;

struct Host<'f>(&'f File);

impl Sink for Host<'_> {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }
}

fn without_tools() -> bool {
    lacks("root", rustix::process::geteuid().is_root())
        || lacks("mkfs.erofs", has_program("mkfs.erofs"))
        || lacks("e2fsck", has_program("e2fsck"))
}

const OPTIONS: Options = Options {
    bytes: 2 << 30,
    journal_blocks: None,
    seed: *b"identity of an image, as a hash.",
};

/// Lays out the view of an image, with the content at its places.
fn raw_view(image: &Path, scratch: &Path) -> (View, PathBuf) {
    let bytes = fs::read(image).expect("an image");
    let fs = Filesystem::open(Arc::new(bytes.clone())).expect("an EROFS");
    let path = scratch.join("view");
    let file = File::create_new(&path).expect("a new file");
    file.set_len(OPTIONS.bytes).expect("a size");
    let view = lay_out(&fs, &OPTIONS, &mut Host(&file)).expect("a view");
    for window in &view.windows {
        let from = (window.device_start * BLOCK_BYTES) as usize;
        let shown = &bytes[from..][..(window.blocks * BLOCK_BYTES) as usize];
        let at = window.start * BLOCK_BYTES;
        file.write_all_at(shown, at).expect("written");
    }
    for fragment in &view.fragments {
        let from = fragment.device_offset as usize;
        let shown = &bytes[from..][..fragment.bytes as usize];
        let at = fragment.block * BLOCK_BYTES;
        file.write_all_at(shown, at).expect("written");
    }
    (view, path)
}

/// A mount that ends with its scope.
struct Mount(TempDir);

impl Mount {
    fn new(kind: &str, options: &str, image: &Path) -> Mount {
        let directory = tempfile::tempdir().expect("a directory");
        run(Command::new("mount")
            .args(["-t", kind, "-o", options])
            .arg(image)
            .arg(directory.path()));
        Mount(directory)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        umount(self.0.path());
    }
}

fn check(view: &Path) {
    run(Command::new("e2fsck").args(["-f", "-n"]).arg(view));
}

/// Requires that two mounts show the same tree.
fn assert_same(erofs: &Mount, ext4: &Mount) {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    run(Command::new("/usr/bin/python3")
        .arg(top.join("tests/oracle/tree.py"))
        .arg("diff")
        .args([erofs.0.path(), ext4.0.path()]));
}

/// Makes an EROFS of a tree, and requires that the kernel shows its view as the same tree.
fn compare(tree: &Path, options: &[&str]) -> View {
    let scratch = tempfile::tempdir().expect("a directory");
    let image = scratch.path().join("image");
    run(Command::new("mkfs.erofs")
        .args(options)
        .arg(&image)
        .arg(tree));
    let (view, raw) = raw_view(&image, scratch.path());
    check(&raw);
    {
        let erofs = Mount::new("erofs", "loop,ro", &image);
        let ext4 = Mount::new("ext4", "loop,rw,noatime", &raw);
        assert_same(&erofs, &ext4);
        // Behind the end of a file there are zeros, also where the file grows.
        let file = ext4.0.path().join("files/1001");
        let longer = File::options().write(true).open(&file).expect("a file");
        longer.set_len(9000).expect("longer");
        let content = fs::read(&file).expect("a file");
        assert!(content[1001..].iter().all(|&byte| byte == 0));
    }
    check(&raw);
    view
}

/// A tree with all types, and files whose content is equal to that of others.
fn tree() -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let path = |name: &str| directory.path().join(name);
    for name in ["files", "same", "special", "many"] {
        fs::create_dir(path(name)).expect("a directory");
    }
    for bytes in [0, 1, 100, 1001, 4095, 4096, 4097, 8192, 100_000, 1_000_000] {
        let content: Vec<u8> = (0..bytes)
            .map(|n: u32| (n.wrapping_mul(n) / 7 % 251 + 1) as u8)
            .collect();
        fs::write(path(&format!("files/{bytes}")), &content).expect("a file");
        fs::write(path(&format!("same/{bytes}")), &content).expect("a file");
    }
    fs::hard_link(path("files/100"), path("same/link")).expect("a link");
    let sparse = File::create_new(path("files/sparse")).expect("a file");
    sparse
        .write_all_at(b"in the middle", 3_000_000)
        .expect("written");
    sparse.set_len(9_000_001).expect("longer");
    symlink("short", path("special/short")).expect("a link");
    symlink("l".repeat(1000), path("special/long")).expect("a link");
    let node = |name: &str, kind, device: Dev| {
        mknodat(rustix::fs::CWD, path(name), kind, Mode::from(0o640), device).expect("a node");
    };
    node("special/pipe", FileType::Fifo, 0);
    node("special/socket", FileType::Socket, 0);
    node(
        "special/null",
        FileType::CharacterDevice,
        rustix::fs::makedev(1, 3),
    );
    node(
        "special/disk",
        FileType::BlockDevice,
        rustix::fs::makedev(259, 70_000),
    );
    for n in 0..2000 {
        fs::write(
            path(&format!("many/a file with a longer name {n}")),
            [b'x'; 70],
        )
        .expect("a file");
    }
    let flags = rustix::fs::XattrFlags::empty();
    setxattr(path("files/1"), "user.note", b"of one byte", flags).expect("an attribute");
    setxattr(path("files"), "trusted.large", &[7; 2000], flags).expect("an attribute");
    fs::set_permissions(path("files/100"), fs::Permissions::from_mode(0o4711)).expect("a mode");
    std::os::unix::fs::chown(path("same/1001"), Some(70_000), Some(12)).expect("an owner");
    let old = rustix::fs::Timestamps {
        last_access: rustix::fs::Timespec {
            tv_sec: -5,
            tv_nsec: 1,
        },
        last_modification: rustix::fs::Timespec {
            tv_sec: -5,
            tv_nsec: 999_999_999,
        },
    };
    let name = CString::new(path("same/0").to_str().expect("text")).expect("a name");
    utimensat(rustix::fs::CWD, &name, &old, rustix::fs::AtFlags::empty()).expect("times");
    directory
}

#[test]
fn the_view_is_the_tree_with_ends_of_files_inside_inodes() {
    if without_tools() {
        return;
    }
    let tree = tree();
    let view = compare(tree.path(), &[]);
    // Each end of a file is a fragment, and no other block.
    let ends = fs::read_dir(tree.path().join("many"))
        .expect("a directory")
        .count();
    assert!(view.fragments.len() >= ends, "{}", view.fragments.len());
}

#[test]
fn the_view_is_the_tree_where_files_share_blocks() {
    if without_tools() {
        return;
    }
    let tree = tree();
    let view = compare(tree.path(), &["--chunksize=4096"]);
    let whole = view
        .fragments
        .iter()
        .filter(|fragment| fragment.bytes == 4096)
        .count();
    assert!(whole >= 244, "{whole} shared blocks");
    let blocks: BTreeSet<u64> = view
        .fragments
        .iter()
        .map(|fragment| fragment.block)
        .collect();
    assert_eq!(blocks.len(), view.fragments.len());
}

/// An image may contradict itself. The image is then refused, or its view is sound.
#[test]
fn the_view_of_a_damaged_image_is_sound_or_refused() {
    if without_tools() {
        return;
    }
    let tree = tree();
    let scratch = tempfile::tempdir().expect("a directory");
    let path = scratch.path().join("image");
    run(Command::new("mkfs.erofs")
        .arg("--chunksize=4096")
        .arg(&path)
        .arg(tree.path()));
    let good = fs::read(&path).expect("an image");
    let opened = Filesystem::open(Arc::new(good.clone())).expect("an EROFS");
    let places = inode_places(&opened);
    let mut random = Random::new(12);
    let mut made = 0;
    for round in 0..150 {
        let mut bytes = good.clone();
        for _ in 0..=random.below(3) {
            // An inode has 32 or 64 bytes, and its attributes and chunks behind them.
            let place = places[random.below(places.len() as u64) as usize];
            let at = place + random.below(96);
            if let Some(byte) = bytes.get_mut(at as usize) {
                *byte ^= 1 << random.below(8);
            }
        }
        let Ok(fs) = Filesystem::open(Arc::new(bytes)) else {
            continue;
        };
        let raw = tempfile::NamedTempFile::new_in(scratch.path()).expect("a file");
        let options = Options {
            bytes: 1 << 30,
            ..OPTIONS
        };
        raw.as_file().set_len(options.bytes).expect("a size");
        if lay_out(&fs, &options, &mut Host(raw.as_file())).is_ok() {
            made += 1;
            let output = Command::new("e2fsck")
                .args(["-f", "-n"])
                .arg(raw.path())
                .output();
            let output = output.expect("e2fsck runs");
            assert!(output.status.success(), "round {round}: {output:?}");
        }
    }
    assert!(made > 15, "only {made} views were made");
}

/// Where the inodes of an EROFS are, in bytes.
fn inode_places(fs: &Filesystem) -> Vec<u64> {
    let mut walk = Walk::new(fs);
    let mut places = Vec::new();
    while let Some(inode) = walk.next().expect("an inode") {
        places.push(fs.superblock().metadata_offset + 32 * inode.nid.0);
    }
    places
}

/// The same for any image: `BCOW_VIEW_EROFS` names a file with an EROFS.
#[test]
fn the_view_of_a_given_image_is_its_tree() {
    let Some(image) = std::env::var_os("BCOW_VIEW_EROFS").map(PathBuf::from) else {
        return;
    };
    let scratch = tempfile::tempdir().expect("a directory");
    let (view, raw) = raw_view(&image, scratch.path());
    check(&raw);
    let stored = raw.metadata().expect("metadata").blocks() * 512;
    let fragments = view.fragments.iter();
    let ends: u64 = fragments.map(|fragment| u64::from(fragment.bytes)).sum();
    eprintln!(
        "{} windows, {} fragments of {ends} bytes; with content {stored} bytes",
        view.windows.len(),
        view.fragments.len()
    );
    let erofs = Mount::new("erofs", "loop,ro", &image);
    let ext4 = Mount::new("ext4", "loop,ro", &raw);
    assert_same(&erofs, &ext4);
}

//! What the kernel shows, and what it does with the file system. Needs root and a loop device.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use bcow_testkit::{has_program, lacks, run, umount};
use proptest::prelude::*;

use super::programs::random_tree;
use super::tree::{BLOCK, Image, Kind, Tree, block_content, check, directory, file, image};
use super::tree::{large_directory, of_all_kinds};

/// A mounted image.
struct Mount {
    directory: tempfile::TempDir,
}

impl Mount {
    fn new(image: &Image, options: &str) -> Mount {
        let directory = tempfile::tempdir().expect("a directory");
        run(Command::new("mount")
            .args(["-t", "ext4", "-o", &format!("loop,{options}")])
            .arg(image.file.path())
            .arg(directory.path()));
        Mount { directory }
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        umount(self.path());
    }
}

pub fn without_root() -> bool {
    lacks("root", rustix::process::geteuid().is_root())
        || lacks("/dev/loop-control", Path::new("/dev/loop-control").exists())
}

/// Compares what a directory shows with a tree.
fn compare(tree: &Tree, mounted: &Path) {
    let mut numbers = BTreeMap::new();
    let mut names = BTreeMap::new();
    for inode in &tree.0 {
        if let Kind::Directory(entries) = &inode.kind {
            for &child in entries.values() {
                *names.entry(child).or_insert(0u64) += 1;
            }
        }
    }
    let mut pending = vec![(0, mounted.to_owned())];
    while let Some((number, path)) = pending.pop() {
        let found = fs::symlink_metadata(&path).expect("an inode");
        let inode = &tree.0[number];
        let what = path.display();
        assert_eq!(
            found.mode() & 0o7777,
            u32::from(inode.permissions),
            "{what}"
        );
        assert_eq!((found.uid(), found.gid()), (inode.uid, inode.gid), "{what}");
        let modified = (found.mtime(), found.mtime_nsec() as u32);
        assert_eq!(modified, inode.modified, "{what}");
        let ino = *numbers.entry(number).or_insert(found.ino());
        assert_eq!(ino, found.ino(), "{what}");
        assert_eq!(xattrs(&path), expected_xattrs(&inode.xattrs), "{what}");
        if !matches!(inode.kind, Kind::Directory(_)) {
            assert_eq!(found.nlink(), names[&number], "{what}");
        }
        let device = (
            rustix::fs::major(found.rdev()),
            rustix::fs::minor(found.rdev()),
        );
        let format = found.mode() & 0o170_000;
        match &inode.kind {
            Kind::File(bytes, runs) => {
                assert_eq!(format, 0o100_000, "{what}");
                assert_eq!(found.len(), *bytes, "{what}");
                compare_content(number, &path, *bytes, runs);
            }
            Kind::Directory(entries) => {
                assert_eq!(format, 0o040_000, "{what}");
                let mut listed: Vec<Vec<u8>> = fs::read_dir(&path)
                    .expect("a directory")
                    .map(|entry| entry.expect("an entry").file_name().as_bytes().to_vec())
                    .filter(|name| !(number == 0 && name == b"lost+found"))
                    .collect();
                listed.sort();
                assert_eq!(
                    listed,
                    entries.keys().cloned().collect::<Vec<_>>(),
                    "{what}"
                );
                for (name, &child) in entries {
                    pending.push((child, path.join(OsStr::from_bytes(name))));
                }
            }
            Kind::Symlink(target) => {
                let found = fs::read_link(&path).expect("a link");
                assert_eq!(found.as_os_str().as_bytes(), target, "{what}");
            }
            &Kind::CharDevice(major, minor) => {
                assert_eq!((format, device), (0o020_000, (major, minor)), "{what}");
            }
            &Kind::BlockDevice(major, minor) => {
                assert_eq!((format, device), (0o060_000, (major, minor)), "{what}");
            }
            Kind::Fifo => assert_eq!(format, 0o010_000, "{what}"),
            Kind::Socket => assert_eq!(format, 0o140_000, "{what}"),
        }
    }
}

fn compare_content(number: usize, path: &Path, bytes: u64, runs: &[(u32, u32)]) {
    let file = fs::File::open(path).expect("a file");
    for &(logical, blocks) in runs {
        for block in logical..logical + blocks {
            let offset = u64::from(block) * BLOCK;
            let mut found = vec![0; (bytes - offset).min(BLOCK) as usize];
            file.read_exact_at(&mut found, offset).expect("content");
            let expected = &block_content(number, block)[..found.len()];
            assert!(found == expected, "{} block {block}", path.display());
        }
    }
    // Between the runs there are holes.
    if bytes < 64 << 20 {
        let stored: u64 = runs.iter().map(|&(_, blocks)| u64::from(blocks)).sum();
        let mut all = Vec::new();
        let mut whole = fs::File::open(path).expect("a file");
        whole.read_to_end(&mut all).expect("content");
        let is_zero = |block: &&[u8]| block.iter().all(|&byte| byte == 0);
        let zeros = all.chunks(BLOCK as usize).filter(is_zero).count() as u64;
        assert_eq!(zeros + stored, bytes.div_ceil(BLOCK), "{}", path.display());
    }
}

fn expected_xattrs(xattrs: &[(Vec<u8>, Vec<u8>)]) -> BTreeMap<Vec<u8>, Vec<u8>> {
    xattrs.iter().cloned().collect()
}

fn xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0; 1 << 16];
    let bytes = rustix::fs::llistxattr(path, &mut names[..]).expect("names");
    let mut found = BTreeMap::new();
    for name in names[..bytes].split(|&byte| byte == 0) {
        if name.is_empty() {
            continue;
        }
        let mut value = vec![0; 1 << 16];
        let bytes = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..]);
        value.truncate(bytes.expect("a value"));
        found.insert(name.to_vec(), value);
    }
    found
}

#[test]
fn the_kernel_shows_the_tree() {
    if without_root() {
        return;
    }
    let tree = of_all_kinds();
    for bytes in [64 << 20, 20 << 30] {
        let image = image(&tree, bytes);
        compare(&tree, Mount::new(&image, "ro").path());
        compare(&tree, Mount::new(&image, "rw,noatime").path());
        check(&image);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 8,
        max_shrink_iters: 100,
        ..ProptestConfig::default()
    })]
    #[test]
    fn the_kernel_shows_random_trees(tree in random_tree()) {
        if !without_root() {
            let image = image(&tree, 64 << 20);
            compare(&tree, Mount::new(&image, "ro").path());
        }
    }
}

#[test]
fn the_kernel_mounts_sixteen_tebibytes() {
    if without_root() {
        return;
    }
    let mut tree = Tree::new();
    tree.add(0, "file", file(100_000));
    // The host's file system has a limit for one file.
    let image = image(&tree, (16 << 40) - (1 << 30));
    let mount = Mount::new(&image, "rw,noatime");
    compare(&tree, mount.path());
    fs::write(mount.path().join("new"), vec![1; 1 << 20]).expect("written");
    let stored = image.file.as_file().metadata().expect("metadata").blocks() * 512;
    assert!(stored < 400 << 20, "{stored} bytes");
}

/// Names in a hash tree of two levels are found, and the kernel inserts between them.
#[test]
fn the_kernel_finds_and_inserts_names_in_a_hash_tree() {
    if without_root() {
        return;
    }
    let image = image(&large_directory(), 256 << 20);
    let mount = Mount::new(&image, "rw,noatime");
    let path = |n: u32| mount.path().join(format!("large/entry number {n}"));
    let first = fs::metadata(path(0)).expect("an entry").ino();
    for n in (0..120_000).step_by(2) {
        assert_eq!(fs::metadata(path(n)).expect("an entry").ino(), first, "{n}");
    }
    for n in 0..20_000 {
        fs::write(mount.path().join(format!("large/new {n}")), "").expect("a new file");
        fs::remove_file(path(n)).expect("removed");
    }
    let listed = fs::read_dir(mount.path().join("large"))
        .expect("a directory")
        .count();
    assert_eq!(listed, 120_000);
    drop(mount);
    check(&image);
}

#[test]
fn the_kernel_writes_removes_and_fills() {
    if without_root() {
        return;
    }
    let mut tree = of_all_kinds();
    let many = tree.add(0, "many", directory());
    for n in 0..300 {
        tree.add(many, format!("file {n}"), file(1000 * n));
    }
    let image = image(&tree, 400 << 20);
    let mount = Mount::new(&image, "rw,noatime");
    let path = |name: &str| mount.path().join(name);
    let mut expected = BTreeMap::new();
    for n in 0..300u64 {
        let name = format!("many/file {n}");
        let at = path(&name);
        if n % 3 == 0 {
            fs::remove_file(&at).expect("removed");
            continue;
        }
        let file = fs::OpenOptions::new()
            .write(true)
            .open(&at)
            .expect("a file");
        file.write_all_at(&[n as u8; 3000], 500 * n)
            .expect("written");
        let mut bytes = fs::read(&at).expect("a file");
        if n % 3 == 1 {
            bytes.extend([7; 9000]);
            fs::write(&at, &bytes).expect("written anew");
        }
        expected.insert(name, bytes);
    }
    fs::remove_dir_all(path("attributes")).expect("removed");
    // Until nothing more fits.
    let mut filler = fs::File::create(path("filler")).expect("a file");
    let error = loop {
        if let Err(error) = filler.write_all(&[0xff; 1 << 20]) {
            break error;
        }
    };
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    drop(filler);
    let compare = |mount: &Mount| {
        for (at, bytes) in &expected {
            let at = mount.path().join(at);
            assert!(fs::read(&at).expect("a file") == *bytes, "{}", at.display());
        }
    };
    compare(&mount);
    drop(mount);
    check(&image);
    let mount = Mount::new(&image, "rw,noatime");
    compare(&mount);
    fs::remove_file(mount.path().join("filler")).expect("removed");
    fs::remove_dir_all(mount.path().join("all")).expect("removed");
    run(Command::new("fstrim").arg(mount.path()));
    compare(&mount);
    drop(mount);
    check(&image);
}

/// In User-Mode Linux: a container may lack `CAP_SYS_RESOURCE`, which the kernel asks for.
#[test]
fn the_kernel_grows_a_mounted_file_system() {
    if lacks("linux.uml", has_program("linux.uml")) || lacks("gcc", has_program("gcc")) {
        return;
    }
    let tree = of_all_kinds();
    // Within a block of descriptors, beyond it, and by many of them.
    let sizes = [
        (300 << 20, 2 << 30),
        (8 << 30, 9 << 30),
        (9 << 30, 30 << 30),
        (20 << 30, 500 << 30),
    ];
    let images: Vec<Image> = sizes
        .iter()
        .map(|&(before, _)| image(&tree, before))
        .collect();
    for (image, (_, after)) in images.iter().zip(sizes) {
        image.file.as_file().set_len(after).expect("longer");
    }
    let output = in_guest(&images, GROW);
    for (n, (_, after)) in sizes.into_iter().enumerate() {
        let blocks = after / BLOCK;
        let line = format!("is now {blocks} (4k) blocks long");
        assert!(output.contains(&line), "disk {n}: {output}");
        check(&images[n]);
    }
}

/// Commands of the guest: each disk grows while it is mounted, and files are made on it.
const GROW: &str = r#"
for disk in /dev/ubd?; do
    mount -t ext4 "$disk" /tmp/mounted && resize2fs "$disk" 2>&1 || exit
    for n in $(seq 60); do
        mkdir "/tmp/mounted/new $n" && head -c 10000 /dev/zero > "/tmp/mounted/new $n/file" || exit
    done
    umount /tmp/mounted
done
"#;

/// Boots User-Mode Linux with the images as disks, runs commands in it, and returns their output.
fn in_guest(images: &[Image], commands: &str) -> String {
    let scratch = tempfile::tempdir().expect("a directory");
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    // The guest's kernel does not know the registers of newer processors.
    let preload = scratch.path().join("xstate.so");
    run(Command::new("gcc")
        .args(["-O2", "-shared", "-fPIC", "-o"])
        .arg(&preload)
        .arg(top.join("tests/e2e/guest/xstate.c")));
    let init = scratch.path().join("init");
    let script = format!(
        "#!/bin/sh\nmount -t tmpfs none /tmp\nmkdir /tmp/mounted\nmount -t proc none /proc\n\
         mount -t sysfs none /sys\n({commands})\nsync\necho o > /proc/sysrq-trigger\nsleep 60\n"
    );
    fs::write(&init, script).expect("a script");
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).expect("a mode");
    let mut guest = Command::new("timeout");
    guest.args([
        "300",
        "linux.uml",
        "mem=256M",
        "root=none",
        "rootfstype=hostfs",
    ]);
    guest.args([
        "rootflags=/",
        "ro",
        "quiet",
        "con=null",
        "con0=null,fd:1",
        "ssl=null",
    ]);
    for (n, image) in images.iter().enumerate() {
        guest.arg(format!("ubd{n}={}", image.file.path().display()));
    }
    guest.arg(format!("init={}", init.display()));
    guest
        .env("LD_PRELOAD", &preload)
        .env("HOME", scratch.path());
    let output = guest.output().expect("a guest");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

//! The kernel's EROFS shows the same tree, through a loop device and from the file itself.

use std::collections::{BTreeMap, HashMap};
use std::ffi::CString;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::*;
use bcow_erofs::debug::{DumpOptions, dump_to_string};
use bcow_erofs::tree::*;
use bcow_testkit::{lacks, run};

/// A mounted image; unmounts when dropped.
struct Mount {
    dir: tempfile::TempDir,
}

impl Mount {
    fn point(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    fn dir(image: &[u8]) -> (tempfile::TempDir, PathBuf, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("image");
        let point = dir.path().join("mnt");
        fs::write(&file, image).unwrap();
        fs::create_dir(&point).unwrap();
        (dir, file, point)
    }

    fn through_loop(image: &[u8]) -> Mount {
        let (dir, file, point) = Self::dir(image);
        run(Command::new("mount")
            .args(["-t", "erofs", "-o", "loop,ro"])
            .args([&file, &point]));
        Mount { dir }
    }

    /// `None` where the kernel is older than 6.12, or is built without it.
    fn from_file(image: &[u8]) -> Option<Mount> {
        Self::from_files(image, &[])
    }

    /// The same, with further devices.
    fn from_files(image: &[u8], devices: &[Vec<u8>]) -> Option<Mount> {
        let (dir, file, point) = Self::dir(image);
        let flags = rustix::mount::MountFlags::RDONLY;
        let mut options = Vec::new();
        for (i, device) in devices.iter().enumerate() {
            let path = dir.path().join(format!("device{i}"));
            fs::write(&path, device).unwrap();
            options.push(format!("device={}", path.display()));
        }
        let options = CString::new(options.join(",")).unwrap();
        match rustix::mount::mount(&file, &point, "erofs", flags, Some(&*options)) {
            Ok(()) => Some(Mount { dir }),
            Err(rustix::io::Errno::NOTBLK) => None,
            Err(e) => panic!("mount(2) of the file: {e}"),
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.point(), rustix::mount::UnmountFlags::DETACH);
    }
}

/// The dump of a tree that the kernel mounted, in the format of bcow_erofs::debug.
fn kernel_dump(root: &Path) -> String {
    let mut text = String::new();
    let mut first: HashMap<u64, PathBuf> = HashMap::new();
    let mut pending = vec![PathBuf::new()];
    while let Some(path) = pending.pop() {
        let full = root.join(&path);
        let stat = fs::symlink_metadata(&full).unwrap();
        let kind = stat.file_type();
        let letter = match () {
            () if kind.is_dir() => 'd',
            () if kind.is_file() => '-',
            () if kind.is_symlink() => 'l',
            () if kind.is_char_device() => 'c',
            () if kind.is_block_device() => 'b',
            () if kind.is_fifo() => 'p',
            () => 's',
        };
        let shown = |path: &Path| {
            if path.as_os_str().is_empty() {
                "/".to_owned()
            } else {
                format!("/{}", escape(path.as_os_str().as_bytes()))
            }
        };
        let (perm, nlink, uid, gid) = (stat.mode() & 0o7777, stat.nlink(), stat.uid(), stat.gid());
        write!(
            text,
            "{} {letter}{perm:04o} {nlink} {uid}:{gid}",
            shown(&path)
        )
        .unwrap();
        if !kind.is_dir() {
            write!(text, " {}", stat.size()).unwrap();
        }
        write!(text, " {}.{:09}", stat.mtime(), stat.mtime_nsec()).unwrap();
        if let Some(known) = first.get(&stat.ino()) {
            writeln!(text, " = {}", shown(known)).unwrap();
            continue;
        }
        first.insert(stat.ino(), path.clone());
        if kind.is_symlink() {
            let target = fs::read_link(&full).unwrap();
            write!(text, " -> {}", escape(target.as_os_str().as_bytes())).unwrap();
        }
        if kind.is_file() {
            let algorithm = crc_fast::CrcAlgorithm::Crc64Nvme;
            let crc = crc_fast::checksum(algorithm, &fs::read(&full).unwrap());
            write!(text, " crc64 {crc:016x}").unwrap();
        }
        if kind.is_char_device() || kind.is_block_device() {
            let (major, minor) = (
                rustix::fs::major(stat.rdev()),
                rustix::fs::minor(stat.rdev()),
            );
            write!(text, " dev {major}:{minor}").unwrap();
        }
        if kind.is_dir() {
            let entries = fs::read_dir(&full)
                .unwrap()
                .map(|entry| entry.unwrap().file_name());
            let mut names: Vec<_> = entries.collect();
            names.sort();
            pending.extend(names.iter().rev().map(|name| path.join(name)));
        }
        for (name, value) in kernel_xattrs(&full) {
            write!(text, " @{}={}", escape(&name), escape(&value)).unwrap();
        }
        text.push('\n');
    }
    text
}

fn kernel_xattrs(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0u8; 65_536];
    let n = rustix::fs::llistxattr(path, &mut names[..]).unwrap();
    let names = names[..n]
        .split(|&b| b == 0)
        .filter(|name| !name.is_empty());
    names
        .map(|name| {
            let mut value = vec![0u8; 65_536];
            let c_name = CString::new(name).unwrap();
            let n = rustix::fs::lgetxattr(path, &*c_name, &mut value[..]).unwrap();
            value.truncate(n);
            (name.to_vec(), value)
        })
        .collect()
}

fn compare(image: &[u8], root: &Path) {
    let ours = dump_to_string(&open(image), &DumpOptions::default());
    let theirs = kernel_dump(root);
    for (ours, theirs) in ours.lines().zip(theirs.lines()) {
        assert_eq!(ours, theirs);
    }
    assert_eq!(ours.lines().count(), theirs.lines().count());
}

fn no_mounts_of_files() {
    lacks("EROFS of the kernel that mounts files", false);
}

fn image() -> Vec<u8> {
    let (tree, space) = everything();
    space.image(&tree)
}

#[test]
fn the_kernel_sees_every_type_attribute_and_byte_through_a_loop_device() {
    if !can_mount() || !have("losetup") {
        return;
    }
    let image = image();
    compare(&image, &Mount::through_loop(&image).point());
}

#[test]
fn the_kernel_sees_every_type_attribute_and_byte_in_the_file_itself() {
    if !can_mount() {
        return;
    }
    let image = image();
    match Mount::from_file(&image) {
        Some(mount) => compare(&image, &mount.point()),
        None => no_mounts_of_files(),
    }
}

#[test]
fn the_kernel_mounts_a_stack_with_a_device_per_layer_or_as_one() {
    if !can_mount() || !have("losetup") {
        return;
    }
    let stack = stack();
    let flat = stack.flat();
    compare(&flat, &Mount::through_loop(&flat).point());
    match Mount::from_files(&stack.primary, &stack.layers) {
        Some(mount) => compare(&flat, &mount.point()),
        None => no_mounts_of_files(),
    }
}

#[test]
fn the_kernel_lists_and_finds_100_000_names() {
    if !can_mount() {
        return;
    }
    let mut layer = LayerTree::new();
    let dir = put(&mut layer, "d", directory());
    for i in 0..100_000u32 {
        let id = layer.add(node(NodeKind::Fifo));
        layer.insert(
            dir,
            format!("{:x}-{i}", i.wrapping_mul(0x9e37_79b1)).as_bytes(),
            id,
        );
    }
    let space = Space::new(0);
    let image = space.image(&layer.into_tree().unwrap());
    let Some(mount) = Mount::from_file(&image) else {
        return no_mounts_of_files();
    };
    let dir = mount.point().join("d");
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 100_000);
    for i in (0..100_000u32).step_by(997) {
        let name = format!("{:x}-{i}", i.wrapping_mul(0x9e37_79b1));
        assert!(fs::symlink_metadata(dir.join(&name)).is_ok(), "{name}");
        assert!(fs::symlink_metadata(dir.join(name + "!")).is_err());
    }
}

#[test]
fn inode_numbers_are_the_kernel_s() {
    if !can_mount() {
        return;
    }
    let image = image();
    let Some(mount) = Mount::from_file(&image) else {
        return no_mounts_of_files();
    };
    let fs = open(&image);
    for path in ["", "dir", "dir/two", "three", "acl/f7"] {
        let nid = fs.resolve(path.as_bytes()).unwrap().unwrap();
        let stat = std::fs::symlink_metadata(mount.point().join(path)).unwrap();
        assert_eq!(stat.ino(), fs.inode(nid).unwrap().ino);
    }
}

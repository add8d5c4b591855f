//! An image of mkfs.erofs shows the directory that it was made from.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::*;
use bcow_erofs::check::{CheckOptions, check};
use bcow_erofs::reader::{ErofsError, FileType, Filesystem};
use bcow_testkit::run;

/// A directory with files of many sizes, links, a large directory, xattrs.
fn source(root: &Path) {
    for dir in ["a", "a/b", "many", "empty"] {
        fs::create_dir(root.join(dir)).unwrap();
    }
    for size in [
        0, 1, 100, 2000, 4000, 4095, 4096, 4097, 12_288, 70_000, 300_000,
    ] {
        let content: Vec<u8> = (0..size).map(|i| (i * 31 % 253) as u8).collect();
        fs::write(root.join(format!("a/file{size}")), content).unwrap();
    }
    let mut repeated = vec![7; 65_536];
    repeated.extend([8; 65_536]);
    repeated.extend([7; 65_536]);
    fs::write(root.join("a/repeated"), repeated).unwrap();
    symlink("../a/file1", root.join("a/b/link")).unwrap();
    fs::hard_link(root.join("a/file4097"), root.join("a/b/hard")).unwrap();
    fs::set_permissions(root.join("a/file1"), fs::Permissions::from_mode(0o4711)).unwrap();
    for i in 0..3000 {
        fs::write(root.join(format!("many/-{i}")), "").unwrap();
    }
    for (name, value) in [
        ("user.one", "1"),
        ("user.two", "two"),
        ("trusted.three", ""),
    ] {
        for file in ["a/file1", "a/file100", "a/file2000", "a/b"] {
            let value = value.as_bytes();
            let flags = rustix::fs::XattrFlags::empty();
            // The file system of the temporary directory may not support xattrs.
            let _ = rustix::fs::setxattr(root.join(file), name, value, flags);
        }
    }
}

fn mkfs(options: &[&str], root: &Path) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    run(Command::new("mkfs.erofs")
        .args(options)
        .args([&*image, root]));
    fs::read(image).unwrap()
}

fn compare(fs: &Filesystem, root: &Path) {
    let mut pending = vec![PathBuf::new()];
    let mut entries = 0;
    while let Some(path) = pending.pop() {
        entries += 1;
        let full = root.join(&path);
        let stat = fs::symlink_metadata(&full).unwrap();
        let nid = fs
            .resolve(path.as_os_str().as_bytes())
            .unwrap()
            .expect("in the image");
        let inode = fs.inode(nid).unwrap();
        assert_eq!(inode.mode(), stat.mode(), "{path:?}");
        assert_eq!(u64::from(inode.nlink), stat.nlink(), "{path:?}");
        assert_eq!((inode.uid, inode.gid), (stat.uid(), stat.gid()));
        assert_eq!(inode.mtime.seconds, stat.mtime());
        let mut names = vec![0; 4096];
        let n = rustix::fs::llistxattr(&full, &mut names[..]).unwrap_or(0);
        let mut there: Vec<_> = names[..n]
            .split(|&b| b == 0)
            .filter(|n| !n.is_empty())
            .collect();
        there.sort();
        let mut here = fs.xattrs(&inode).unwrap();
        here.sort();
        assert_eq!(
            here.iter().map(|(name, _)| &name[..]).collect::<Vec<_>>(),
            there
        );
        for (name, value) in here {
            assert_eq!(fs.xattr(&inode, &name).unwrap(), Some(value));
        }
        match inode.kind {
            FileType::Regular => {
                let mut content = vec![0; inode.size as usize];
                assert_eq!(fs.read(&inode, 0, &mut content).unwrap(), content.len());
                assert!(content == fs::read(&full).unwrap(), "{path:?}");
            }
            FileType::Symlink => {
                let target = fs::read_link(&full).unwrap();
                assert_eq!(fs.read_link(&inode).unwrap(), target.as_os_str().as_bytes());
            }
            FileType::Directory => {
                for entry in fs::read_dir(&full).unwrap() {
                    pending.push(path.join(entry.unwrap().file_name()));
                }
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(entries > 3000);
    assert_eq!(check(fs, &CheckOptions { read_data: true }), []);
}

#[test]
fn images_of_mkfs_erofs_are_read() {
    if !have("mkfs.erofs") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    source(root.path());
    let variants: [&[&str]; 7] = [
        &[],
        &["-x1"],
        &["-Eforce-inode-compact", "-Eforce-inode-extended"],
        &["-Enoinline_data"],
        &["--chunksize=4096"],
        &["--chunksize=65536", "-Eforce-inode-blockmap"],
        &["--chunksize=65536", "-Eforce-chunk-indexes"],
    ];
    for options in variants {
        let image = mkfs(options, root.path());
        eprintln!("{options:?}");
        compare(&open(&image), root.path());
    }
}

#[test]
fn a_compressed_file_is_listed_and_refused_by_name() {
    if !have("mkfs.erofs") {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("zeros"), vec![0; 1 << 20]).unwrap();
    let image = mkfs(&["-zlz4"], root.path());
    let fs = open(&image);
    let inode = fs.inode(fs.resolve(b"zeros").unwrap().unwrap()).unwrap();
    assert_eq!(inode.size, 1 << 20);
    let e = fs.read(&inode, 0, &mut [0; 10]).unwrap_err();
    assert!(matches!(e, ErofsError::UnsupportedInode { .. }));
    assert!(
        e.to_string().contains("EROFS compression is not supported"),
        "{e}"
    );
    let codes: Vec<_> = check(&fs, &CheckOptions::default())
        .iter()
        .map(|finding| (finding.code, finding.place.to_string()))
        .collect();
    assert_eq!(codes, [("erofs-unsupported", "/zeros".to_owned())]);
}

//! Direct access to the files of an upper on the host, without the union.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, XattrFlags};
use rustix::io::Errno;

pub fn is_whiteout(path: &Path) -> bool {
    let found = fs::symlink_metadata(path).unwrap();
    found.file_type().is_char_device() && found.rdev() == 0
}

pub fn make_whiteout(path: &Path) {
    let whiteout = FileType::CharacterDevice;
    rustix::fs::mknodat(CWD, path, whiteout, Mode::empty(), 0).unwrap();
}

/// The value of an attribute of a file of the host.
pub fn attribute(path: &Path, name: &str) -> Option<Vec<u8>> {
    let mut value = [0; 256];
    match rustix::fs::lgetxattr(path, name, &mut value[..]) {
        Ok(length) => Some(value[..length].to_vec()),
        Err(Errno::NODATA) => None,
        Err(errno) => panic!("{name}: {errno}"),
    }
}

pub fn set_attribute(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::setxattr(path, name, value, XattrFlags::empty()).unwrap();
}

/// Usage of a directory on the host.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// Bytes as `du` counts them.
    pub bytes: u64,
    /// Inodes without whiteouts.
    pub inodes: u64,
    /// Number of partial files.
    pub sparse: u64,
}

/// Usage of a directory with its content. Each inode counts once.
pub fn stored_in(path: &Path) -> Stored {
    let mut stored = Stored::default();
    let mut seen = HashSet::new();
    let mut todo = vec![path.to_owned()];
    while let Some(path) = todo.pop() {
        let found = fs::symlink_metadata(&path).unwrap();
        if !is_whiteout(&path) && seen.insert(found.ino()) {
            stored.inodes += 1;
            stored.bytes += found.blocks() * 512;
            let mark = attribute(&path, "trusted.bcow.sketch");
            stored.sparse += u64::from(mark.is_some_and(|mark| mark[1] == 1));
        }
        if found.is_dir() {
            todo.extend(
                fs::read_dir(&path)
                    .unwrap()
                    .map(|entry| entry.unwrap().path()),
            );
        }
    }
    stored
}

/// The number of names in a directory.
pub fn count(path: &Path) -> usize {
    fs::read_dir(path).unwrap().count()
}

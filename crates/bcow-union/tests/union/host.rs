//! What lies in an upper on the host, behind the union's back.

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

/// The number of names in a directory.
pub fn count(path: &Path) -> usize {
    fs::read_dir(path).unwrap().count()
}

//! Refuses an upper with packed partial files: files of development versions that stored the blocks
//! of a partial file in a BCoW file.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, FileType};
use rustix::io::Errno;

use super::beneath::open_directory_beneath;
use super::marks::PartialMark;
use super::work::list;
use super::{Attribute, META, Mark, MarkError, Namespace, UpperError};

/// Fails if the tree or the index of the upper at `path` has a packed partial file.
pub(super) fn refuse_packed(
    path: &Path,
    root: BorrowedFd<'_>,
    namespace: Namespace,
) -> Result<(), UpperError> {
    let found = find(root, Mark::Partial.name(namespace))
        .map_err(|errno| UpperError::io(path, "look for packed partial files in it", errno))?;
    match found {
        Some(file) => {
            let file = path.join(OsStr::from_bytes(&file));
            Err(UpperError::PackedPartial(file))
        }
        None => Ok(()),
    }
}

/// The path below the root of the first packed partial file.
fn find(root: BorrowedFd<'_>, mark: &[u8]) -> Result<Option<Vec<u8>>, Errno> {
    // By path: there may be more directories than descriptors.
    let mut pending = vec![Vec::new(), [META.as_bytes(), b"/index"].concat()];
    while let Some(directory) = pending.pop() {
        let opened = open_directory_beneath(root, &directory)?;
        for name in list(opened.as_fd())? {
            if directory.is_empty() && name == META.as_bytes() {
                continue;
            }
            let path = if directory.is_empty() {
                name.clone()
            } else {
                [&directory, &b"/"[..], &name].concat()
            };
            let stat = rustix::fs::statat(&opened, &name[..], AtFlags::SYMLINK_NOFOLLOW)?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => pending.push(path),
                FileType::RegularFile => {
                    let value = Attribute::Named(opened.as_fd(), &name).get(mark)?;
                    let decoded = value.map(|value| PartialMark::decode(&value));
                    if let Some(Err(MarkError::PackedPartial)) = decoded {
                        return Ok(Some(path));
                    }
                }
                _ => {}
            }
        }
    }
    Ok(None)
}

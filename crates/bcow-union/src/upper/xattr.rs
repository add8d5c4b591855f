//! Extended attributes of one file of the host, given by descriptor, `O_PATH` descriptor, or name.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::XattrFlags;
use rustix::io::Errno;

/// The longest value and the longest list of names on Linux, in bytes.
const MAX_BYTES: usize = 64 << 10;
/// The first buffer size, in bytes. Most values and lists fit.
const FEW_BYTES: usize = 256;

/// A reference to a file for access to its attributes. Symbolic links are not followed.
#[derive(Debug, Clone, Copy)]
pub enum Attribute<'a> {
    /// An open file or directory.
    Open(BorrowedFd<'a>),
    /// The file that an `O_PATH` descriptor refers to.
    Path(BorrowedFd<'a>),
    /// The object with this name (one component) in an open directory.
    Named(BorrowedFd<'a>, &'a [u8]),
}

/// The behaviour if the attribute does or does not exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum XattrMode {
    /// Create or replace the attribute.
    Any,
    /// Fail with `EEXIST` if it exists.
    Create,
    /// Fail with `ENODATA` if it does not exist.
    Replace,
}

impl Attribute<'_> {
    /// The value of `name`; `None` if there is no such attribute, or if the file system does not
    /// support attributes.
    pub fn get(&self, name: &[u8]) -> Result<Option<Vec<u8>>, Errno> {
        let path = self.path()?;
        let read = |buf: &mut Vec<u8>| {
            let space = rustix::buffer::spare_capacity(buf);
            match self {
                Attribute::Open(fd) => rustix::fs::fgetxattr(fd, name, space),
                Attribute::Path(_) => rustix::fs::getxattr(&path[..], name, space),
                Attribute::Named(..) => rustix::fs::lgetxattr(&path[..], name, space),
            }
        };
        match growing(read) {
            Ok(value) => Ok(Some(value)),
            Err(Errno::NODATA | Errno::NOTSUP) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    /// All names, each followed by a NUL. Empty if the file system does not support attributes.
    pub fn list(&self) -> Result<Vec<u8>, Errno> {
        let path = self.path()?;
        let read = |buf: &mut Vec<u8>| {
            let space = rustix::buffer::spare_capacity(buf);
            match self {
                Attribute::Open(fd) => rustix::fs::flistxattr(fd, space),
                Attribute::Path(_) => rustix::fs::listxattr(&path[..], space),
                Attribute::Named(..) => rustix::fs::llistxattr(&path[..], space),
            }
        };
        match growing(read) {
            Err(Errno::NOTSUP) => Ok(Vec::new()),
            other => other,
        }
    }

    pub fn set(&self, name: &[u8], value: &[u8], how: XattrMode) -> Result<(), Errno> {
        let path = self.path()?;
        let flags = match how {
            XattrMode::Any => XattrFlags::empty(),
            XattrMode::Create => XattrFlags::CREATE,
            XattrMode::Replace => XattrFlags::REPLACE,
        };
        match self {
            Attribute::Open(fd) => rustix::fs::fsetxattr(fd, name, value, flags),
            Attribute::Path(_) => rustix::fs::setxattr(&path[..], name, value, flags),
            Attribute::Named(..) => rustix::fs::lsetxattr(&path[..], name, value, flags),
        }
    }

    /// Removes `name`. Fails with `ENODATA` if it does not exist.
    pub fn remove(&self, name: &[u8]) -> Result<(), Errno> {
        let path = self.path()?;
        match self {
            Attribute::Open(fd) => rustix::fs::fremovexattr(fd, name),
            Attribute::Path(_) => rustix::fs::removexattr(&path[..], name),
            Attribute::Named(..) => rustix::fs::lremovexattr(&path[..], name),
        }
    }

    /// Removes `name` if it exists. Returns whether it existed.
    pub fn clear(&self, name: &[u8]) -> Result<bool, Errno> {
        match self.remove(name) {
            Ok(()) => Ok(true),
            Err(Errno::NODATA | Errno::NOTSUP) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    /// The path of exactly this file. The path of a descriptor is a link in procfs, which leads to
    /// the open file itself, even if that is a symbolic link. So this link must be followed.
    fn path(&self) -> Result<Vec<u8>, Errno> {
        Ok(match self {
            Attribute::Open(_) => Vec::new(),
            Attribute::Path(fd) => format!("/proc/self/fd/{}", fd.as_raw_fd()).into_bytes(),
            Attribute::Named(dir, name) => {
                if name.is_empty() || matches!(*name, b"." | b"..") || name.contains(&b'/') {
                    return Err(Errno::INVAL);
                }
                let mut path = format!("/proc/self/fd/{}/", dir.as_raw_fd()).into_bytes();
                path.extend_from_slice(name);
                path
            }
        })
    }
}

/// The names in a list of [`Attribute::list`].
pub(crate) fn each_name(list: &[u8]) -> impl Iterator<Item = &[u8]> {
    list.split(|&byte| byte == 0)
        .filter(|name| !name.is_empty())
}

/// Reads into a buffer, and retries with a larger one if the buffer was too small.
fn growing(read: impl Fn(&mut Vec<u8>) -> Result<usize, Errno>) -> Result<Vec<u8>, Errno> {
    let mut buf = Vec::with_capacity(FEW_BYTES);
    loop {
        match read(&mut buf) {
            Ok(_) => return Ok(buf),
            Err(Errno::RANGE) if buf.capacity() < MAX_BYTES => {
                buf = Vec::with_capacity(MAX_BYTES);
            }
            Err(errno) => return Err(errno),
        }
    }
}

//! Extended attributes of one file of the host, however it is at hand.

use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::fs::XattrFlags;
use rustix::io::Errno;

/// Longest value and longest list of names that Linux has, in bytes.
const MOST_BYTES: usize = 64 << 10;
/// What most values and lists fit into.
const FEW_BYTES: usize = 256;

/// A file whose attributes are wanted. Symbolic links are not followed.
#[derive(Debug, Clone, Copy)]
pub enum Attribute<'a> {
    /// An open file or directory.
    Open(BorrowedFd<'a>),
    /// Whatever a descriptor made with `O_PATH` refers to.
    Path(BorrowedFd<'a>),
    /// What has this name, one component, in an open directory.
    Named(BorrowedFd<'a>, &'a [u8]),
}

/// What to do when an attribute is there already, or is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetHow {
    /// Set it.
    Any,
    /// Refuse to replace one (`EEXIST`).
    Create,
    /// Refuse to make one (`ENODATA`).
    Replace,
}

impl Attribute<'_> {
    /// The value of `name`; `None` if there is no such attribute, or the file system has none at all.
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

    /// All names, each with a NUL behind it; nothing if the file system has no attributes.
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

    /// Sets `name`.
    pub fn set(&self, name: &[u8], value: &[u8], how: SetHow) -> Result<(), Errno> {
        let path = self.path()?;
        let flags = match how {
            SetHow::Any => XattrFlags::empty(),
            SetHow::Create => XattrFlags::CREATE,
            SetHow::Replace => XattrFlags::REPLACE,
        };
        match self {
            Attribute::Open(fd) => rustix::fs::fsetxattr(fd, name, value, flags),
            Attribute::Path(_) => rustix::fs::setxattr(&path[..], name, value, flags),
            Attribute::Named(..) => rustix::fs::lsetxattr(&path[..], name, value, flags),
        }
    }

    /// Removes `name`; `ENODATA` if there is none.
    pub fn remove(&self, name: &[u8]) -> Result<(), Errno> {
        let path = self.path()?;
        match self {
            Attribute::Open(fd) => rustix::fs::fremovexattr(fd, name),
            Attribute::Path(_) => rustix::fs::removexattr(&path[..], name),
            Attribute::Named(..) => rustix::fs::lremovexattr(&path[..], name),
        }
    }

    /// Removes `name` if it is there; whether it was.
    pub fn clear(&self, name: &[u8]) -> Result<bool, Errno> {
        match self.remove(name) {
            Ok(()) => Ok(true),
            Err(Errno::NODATA | Errno::NOTSUP) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    /// The path that leads to the file and to no other. That of a descriptor is a link of procfs which leads to the open
    /// file itself, also when this is a symbolic link, so it is the one that has to be followed.
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

/// Reads into a buffer that is made larger when it was too small.
fn growing(read: impl Fn(&mut Vec<u8>) -> Result<usize, Errno>) -> Result<Vec<u8>, Errno> {
    let mut buf = Vec::with_capacity(FEW_BYTES);
    loop {
        match read(&mut buf) {
            Ok(_) => return Ok(buf),
            Err(Errno::RANGE) if buf.capacity() < MOST_BYTES => {
                buf = Vec::with_capacity(MOST_BYTES);
            }
            Err(errno) => return Err(errno),
        }
    }
}

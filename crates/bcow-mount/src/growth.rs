//! Growth of a hidden file, and of the file system above it while that is mounted.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::io::Errno;
use rustix::thread::CapabilitySet;

use crate::Error;
use crate::filesystem::Kind;
use crate::ioctl;
use crate::name::HiddenName;

/// Asks the process that serves the file `name` on the hidden mount at `mount` to give the file
/// this size. Does not open the file: its server allows one opening only.
pub fn set_size(mount: &Path, name: &HiddenName, bytes: u64) -> io::Result<()> {
    ioctl::truncate(&mount.join(name.to_string()), bytes)
}

/// Fails unless this process may grow a mounted file system of this kind.
pub fn may_grow(kind: Kind) -> Result<(), Error> {
    let needed = match kind {
        Kind::Ext4 => CapabilitySet::SYS_RESOURCE,
        Kind::Xfs | Kind::Btrfs => CapabilitySet::SYS_ADMIN,
        Kind::Erofs => return Err(failed(kind)(Errno::OPNOTSUPP)),
    };
    match rustix::thread::capabilities(None) {
        Ok(sets) if !sets.effective.contains(needed) => Err(failed(kind)(Errno::PERM)),
        _ => Ok(()),
    }
}

/// Grows the mounted file system that has `directory` to the `bytes` bytes of its device. A file
/// system that has this size already stays as it is. The kernel shrinks none.
pub fn grow(directory: &File, kind: Kind, bytes: u64) -> Result<(), Error> {
    may_grow(kind)?;
    let grown = match kind {
        Kind::Ext4 => grow_ext4(directory, bytes),
        Kind::Xfs => grow_xfs(directory, bytes),
        Kind::Btrfs => ioctl::grow_btrfs(directory),
        Kind::Erofs => Err(Errno::OPNOTSUPP),
    };
    grown.map_err(failed(kind))
}

fn grow_ext4(directory: &File, bytes: u64) -> rustix::io::Result<()> {
    let block_bytes = rustix::fs::fstatfs(directory)?.f_bsize;
    let block_bytes = u64::try_from(block_bytes).map_err(|_| Errno::INVAL)?;
    let blocks = bytes.checked_div(block_bytes).ok_or(Errno::INVAL)?;
    ioctl::grow_ext4(directory, blocks)
}

fn grow_xfs(directory: &File, bytes: u64) -> rustix::io::Result<()> {
    let geometry = ioctl::xfs_geometry(directory.as_fd())?;
    let blocks = bytes.checked_div(geometry.block_bytes.into());
    let blocks = blocks.ok_or(Errno::INVAL)?;
    // The kernel refuses to shrink, and a size that it has already.
    if blocks > geometry.blocks {
        ioctl::grow_xfs(directory, blocks, geometry.most_inodes_percent)
    } else {
        Ok(())
    }
}

fn failed(kind: Kind) -> impl Fn(Errno) -> Error {
    move |errno| Error::Grow {
        kind: kind.name(),
        source: io::Error::from(errno),
    }
}

//! Reads an EROFS file system from a block device.
//!
//! [`Filesystem::open`] validates the superblock, and [`Filesystem::inode`] validates an inode;
//! their results are safe to use. The reader checks every offset, length and count from the device
//! before it uses the value. The size of the device bounds every walk, and no allocation depends on
//! an unchecked number. The reader has no locks and no caches; the device has a cache.
//!
//! The reader supports the plain, inline and chunk-based layouts with blocks of 512 to 4096 bytes.
//! An extra device must be mapped into the address space of the first one. Compressed files can be
//! listed but not read.

mod children;
mod data;
mod dir;
mod error;
mod inode;
mod kind;
mod names;
mod path;
mod superblock;
mod walk;
mod xattr;

use std::sync::Arc;

use bcow::BlockDevice;

use crate::format::SLOT_BYTES;

pub use crate::tree::{DeviceNumber, Timestamp};
pub use children::{Child, Children};
pub use data::{ExtentSource, FileExtent};
pub use dir::DirEntry;
pub use error::{DirectoryProblem, ErofsError, InodeProblem, XattrProblem};
pub use inode::Inode;
pub use kind::{FileType, Nid};
pub use names::PathIndex;
pub use path::Symlinks;
pub use superblock::Superblock;
pub(crate) use walk::MAX_DEPTH;
pub use walk::Walk;
pub use xattr::XattrList;

/// An EROFS file system on a block device.
pub struct Filesystem {
    device: Arc<dyn BlockDevice>,
    device_bytes: u64,
    superblock: Superblock,
}

impl Filesystem {
    /// Opens the file system: validates the superblock and the root's inode.
    ///
    /// Returns [`ErofsError::NotErofs`] if there is no superblock, and
    /// [`ErofsError::UnsupportedFeature`] for features that the reader does not support.
    pub fn open(device: Arc<dyn BlockDevice>) -> Result<Filesystem, ErofsError> {
        let device_bytes = device.size();
        let superblock = Superblock::read(&*device)?;
        let fs = Filesystem {
            device,
            device_bytes,
            superblock,
        };
        let root = fs.inode(fs.root())?;
        root.require(FileType::Directory, "directory")?;
        Ok(fs)
    }

    /// The superblock.
    pub fn superblock(&self) -> &Superblock {
        &self.superblock
    }

    /// The root directory.
    pub fn root(&self) -> Nid {
        self.superblock.root
    }

    /// Size of the device in bytes.
    pub fn device_bytes(&self) -> u64 {
        self.device_bytes
    }

    fn block_bytes(&self) -> u64 {
        u64::from(self.superblock.block_bytes)
    }

    /// Whether `length` bytes at `offset` lie on the device.
    fn on_device(&self, offset: u64, length: u64) -> bool {
        offset
            .checked_add(length)
            .is_some_and(|end| end <= self.device_bytes)
    }

    /// The offset of an inode on the device, in bytes; `None` if the calculation overflows.
    pub(crate) fn nid_offset(&self, nid: Nid) -> Option<u64> {
        nid.0
            .checked_mul(SLOT_BYTES as u64)?
            .checked_add(self.superblock.metadata_offset)
    }

    /// Reads bytes of the device and discards them, so that the device verifies their checksums.
    pub(crate) fn verify_range(&self, offset: u64, length: u64) -> Result<(), ErofsError> {
        Ok(self.device.read_with(offset, length, &mut |_| {})?)
    }

    /// Fills `buf` with the bytes at `offset` of the device. The caller has checked that they lie
    /// on the device.
    pub(crate) fn device_read(&self, offset: u64, buf: &mut [u8]) -> Result<(), ErofsError> {
        Ok(self.device.read_at(offset, buf)?)
    }
}

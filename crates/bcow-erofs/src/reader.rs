//! Reads an EROFS file system from a block device.

use std::ops::ControlFlow;
use std::sync::Arc;

use bcow::BlockDevice;

pub use crate::tree::{DeviceNumber, Timestamp};

/// An inode's number: its place in the metadata area in units of 32 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nid(pub u64);

/// What an inode is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileType {
    /// A regular file.
    Regular,
    /// A directory.
    Directory,
    /// A character device.
    CharDevice,
    /// A block device.
    BlockDevice,
    /// A named pipe.
    Fifo,
    /// A Unix socket.
    Socket,
    /// A symbolic link.
    Symlink,
}

/// The valid superblock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Block size in bytes, 512..=4096.
    pub block_bytes: u32,
    /// The root directory.
    pub root: Nid,
    /// Number of inodes, as the superblock claims.
    pub inodes: u64,
    /// Number of blocks, as the superblock claims.
    pub blocks: u64,
    /// Time of compact inodes.
    pub build_time: Timestamp,
    /// Volume id.
    pub uuid: [u8; 16],
    /// Volume name without trailing NULs.
    pub volume_name: Vec<u8>,
    /// Compatible feature bits.
    pub features_compatible: u32,
    /// Incompatible feature bits.
    pub features_incompatible: u32,
}

impl Superblock {
    /// All feature bits by name.
    pub fn features(&self) -> Vec<String> {
        todo!()
    }
}

/// An inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Inode {
    /// Its place.
    pub nid: Nid,
    /// Its type.
    pub kind: FileType,
    /// Permission bits with set-id and sticky bits (`0o7777`).
    pub permissions: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Number of names.
    pub nlink: u32,
    /// Modification time.
    pub mtime: Timestamp,
    /// Device number of devices.
    pub rdev: Option<DeviceNumber>,
    /// Inode number for stat, as the kernel's EROFS gives it: unique and never 0 in images made by bcow.
    pub ino: u64,
}

/// A name in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirEntry<'a> {
    /// What it names.
    pub nid: Nid,
    /// The name, 1..=255 bytes.
    pub name: &'a [u8],
    /// Its type.
    pub kind: FileType,
    /// Where [`Filesystem::read_dir`] goes on behind it.
    pub next_cookie: u64,
}

/// A run of a file's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileExtent {
    /// First byte in the file.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Where they are.
    pub source: ExtentSource,
}

/// Where a run of a file's bytes is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentSource {
    /// At this byte of the device.
    Device {
        /// Byte offset.
        offset: u64,
    },
    /// Nowhere: zeros.
    Hole,
}

/// Why a file system cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErofsError {
    /// The device below failed.
    #[error(transparent)]
    Device(#[from] bcow::Error),
}

/// Whether [`Filesystem::resolve_with`] follows symbolic links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Symlinks {
    /// Links are not followed, neither on the way nor at the end.
    Keep,
    /// Links are followed inside the file system, at most 40.
    Follow,
}

/// An EROFS file system on a block device.
pub struct Filesystem {
    _device: Arc<dyn BlockDevice>,
}

#[expect(unused_variables)]
impl Filesystem {
    /// Validates the superblock.
    pub fn open(device: Arc<dyn BlockDevice>) -> Result<Filesystem, ErofsError> {
        todo!()
    }
    /// The superblock.
    pub fn superblock(&self) -> &Superblock {
        todo!()
    }
    /// The root directory.
    pub fn root(&self) -> Nid {
        todo!()
    }
    /// Reads an inode.
    pub fn inode(&self, nid: Nid) -> Result<Inode, ErofsError> {
        todo!()
    }
    /// Finds a name in a directory.
    pub fn lookup<'n>(
        &self,
        dir: &Inode,
        name: &'n [u8],
    ) -> Result<Option<DirEntry<'n>>, ErofsError> {
        todo!()
    }
    /// Lists a directory from `cookie` on (0: the start), with `.` and `..`.
    pub fn read_dir(
        &self,
        dir: &Inode,
        cookie: u64,
        each: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<(), ErofsError> {
        todo!()
    }
    /// A symbolic link's target.
    pub fn read_link(&self, inode: &Inode) -> Result<Vec<u8>, ErofsError> {
        todo!()
    }
    /// All extended attributes, by full name.
    pub fn xattrs(&self, inode: &Inode) -> Result<Vec<(Vec<u8>, Vec<u8>)>, ErofsError> {
        todo!()
    }
    /// One extended attribute by full name.
    pub fn xattr(&self, inode: &Inode, name: &[u8]) -> Result<Option<Vec<u8>>, ErofsError> {
        todo!()
    }
    /// A file's extents from `offset` on.
    pub fn extents(
        &self,
        inode: &Inode,
        offset: u64,
    ) -> impl Iterator<Item = Result<FileExtent, ErofsError>> {
        std::iter::empty()
    }
    /// Reads file content; short only at the end of the file.
    pub fn read(&self, inode: &Inode, offset: u64, buf: &mut [u8]) -> Result<usize, ErofsError> {
        todo!()
    }
    /// Lends file content to `sink`, in order; less than `length` only at the end of the file.
    pub fn read_with(
        &self,
        inode: &Inode,
        offset: u64,
        length: u64,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), ErofsError> {
        todo!()
    }
    /// Finds a path from the root. Links are not followed; `..` is resolved by text.
    pub fn resolve(&self, path: &[u8]) -> Result<Option<Nid>, ErofsError> {
        self.resolve_with(path, Symlinks::Keep)
    }
    /// Finds a path from the root.
    pub fn resolve_with(&self, path: &[u8], links: Symlinks) -> Result<Option<Nid>, ErofsError> {
        todo!()
    }
}

//! What a caller says of the tree.

use std::fmt;

use crate::format::{entry_type, inode_number};

/// A range of blocks of 4096 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockRange {
    /// The first block.
    pub start: u64,
    /// Number of blocks.
    pub count: u64,
}

impl BlockRange {
    /// The block behind the last one.
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.count)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct InodeNumber(pub(crate) u32);

impl InodeNumber {
    /// The root directory.
    pub const ROOT: InodeNumber = InodeNumber(inode_number::ROOT);

    pub fn new(number: u32) -> InodeNumber {
        InodeNumber(number)
    }

    /// The number, as `stat` has it.
    pub fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for InodeNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A time. Times out of ext4's range, December 1901 to May 2446, become the nearest in it, as in
/// the kernel. `e2fsck` takes times from April 2310 on for an error of old kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Timestamp {
    /// Seconds since 1970.
    pub seconds: i64,
    /// Nanoseconds, below 1,000,000,000.
    pub nanoseconds: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceNumber {
    /// Major number, below 2^12.
    pub major: u32,
    /// Minor number, below 2^20.
    pub minor: u32,
}

/// An inode, as the caller describes it.
#[derive(Debug, Clone, Copy)]
pub struct Node<'a> {
    /// Permission bits with set-id and sticky bits (`0o7777`).
    pub permissions: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Last access.
    pub accessed: Timestamp,
    /// Last modification of the content.
    pub modified: Timestamp,
    /// Last change of the inode.
    pub changed: Timestamp,
    /// Creation.
    pub created: Timestamp,
    /// Number of names. Without meaning for a directory, whose links are counted.
    pub links: u32,
    /// Extended attributes, in any order.
    pub xattrs: &'a [Xattr<'a>],
    /// The type, and what belongs to it.
    pub content: Content<'a>,
}

/// An extended attribute.
#[derive(Debug, Clone, Copy)]
pub struct Xattr<'a> {
    /// The name as in `listxattr`, with its prefix.
    pub name: &'a [u8],
    /// The value as in `getxattr`. The POSIX ACLs become ext4's own form.
    pub value: &'a [u8],
}

/// The type of an inode, and what belongs to it.
#[derive(Debug, Clone, Copy)]
pub enum Content<'a> {
    /// A regular file.
    File {
        /// Length in bytes.
        bytes: u64,
        /// The places of its blocks, in ascending order; the rest are holes.
        extents: &'a [Extent],
    },
    Directory {
        /// Its parent; the root's is the root.
        parent: InodeNumber,
        /// Its names in any order, without `.` and `..`.
        entries: &'a [DirEntry<'a>],
    },
    /// A symbolic link and its target.
    Symlink(&'a [u8]),
    /// A character device.
    CharDevice(DeviceNumber),
    BlockDevice(DeviceNumber),
    /// A named pipe.
    Fifo,
    Socket,
}

impl Content<'_> {
    /// The type.
    pub fn kind(&self) -> FileKind {
        match self {
            Content::File { .. } => FileKind::Regular,
            Content::Directory { .. } => FileKind::Directory,
            Content::Symlink(_) => FileKind::Symlink,
            Content::CharDevice(_) => FileKind::CharDevice,
            Content::BlockDevice(_) => FileKind::BlockDevice,
            Content::Fifo => FileKind::Fifo,
            Content::Socket => FileKind::Socket,
        }
    }
}

/// A run of blocks of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First block in the file.
    pub logical: u32,
    /// First block in the file system's address space.
    pub physical: u64,
    /// Number of blocks.
    pub blocks: u32,
}

/// A name in a directory.
#[derive(Debug, Clone, Copy)]
pub struct DirEntry<'a> {
    /// The name: 1 to 255 bytes, without slash and NUL.
    pub name: &'a [u8],
    /// The inode that it names.
    pub inode: InodeNumber,
    /// The type of that inode.
    pub kind: FileKind,
}

/// The type of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    /// A regular file.
    Regular,
    Directory,
    /// A symbolic link.
    Symlink,
    /// A character device.
    CharDevice,
    BlockDevice,
    /// A named pipe.
    Fifo,
    Socket,
}

impl FileKind {
    /// The type in `st_mode`.
    pub(crate) fn mode_bits(self) -> u16 {
        match self {
            FileKind::Fifo => 0o010_000,
            FileKind::CharDevice => 0o020_000,
            FileKind::Directory => 0o040_000,
            FileKind::BlockDevice => 0o060_000,
            FileKind::Regular => 0o100_000,
            FileKind::Symlink => 0o120_000,
            FileKind::Socket => 0o140_000,
        }
    }

    /// The type of an inode with this mode.
    pub(crate) fn of_mode(mode: u16) -> Option<FileKind> {
        const ALL: [FileKind; 7] = [
            FileKind::Regular,
            FileKind::Directory,
            FileKind::Symlink,
            FileKind::CharDevice,
            FileKind::BlockDevice,
            FileKind::Fifo,
            FileKind::Socket,
        ];
        ALL.into_iter()
            .find(|kind| kind.mode_bits() == mode & 0o170_000)
    }

    /// The type in a directory entry.
    pub(crate) fn entry_type(self) -> u8 {
        match self {
            FileKind::Regular => entry_type::REGULAR,
            FileKind::Directory => entry_type::DIRECTORY,
            FileKind::CharDevice => entry_type::CHAR_DEVICE,
            FileKind::BlockDevice => entry_type::BLOCK_DEVICE,
            FileKind::Fifo => entry_type::FIFO,
            FileKind::Socket => entry_type::SOCKET,
            FileKind::Symlink => entry_type::SYMLINK,
        }
    }
}

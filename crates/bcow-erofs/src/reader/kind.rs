//! Numbers and types of inodes.

use std::fmt;

/// An inode's number: its place in the metadata area in units of 32 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nid(pub u64);

impl fmt::Display for Nid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The type of an inode. The numbers are those in directory entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FileType {
    /// A regular file.
    Regular = 1,
    /// A directory.
    Directory = 2,
    /// A character device.
    CharDevice = 3,
    /// A block device.
    BlockDevice = 4,
    /// A named pipe.
    Fifo = 5,
    /// A Unix socket.
    Socket = 6,
    /// A symbolic link.
    Symlink = 7,
}

const ALL: [FileType; 7] = [
    FileType::Regular,
    FileType::Directory,
    FileType::CharDevice,
    FileType::BlockDevice,
    FileType::Fifo,
    FileType::Socket,
    FileType::Symlink,
];

impl FileType {
    /// The type bits of `st_mode`.
    pub fn mode_bits(self) -> u32 {
        match self {
            FileType::Fifo => 0o010_000,
            FileType::CharDevice => 0o020_000,
            FileType::Directory => 0o040_000,
            FileType::BlockDevice => 0o060_000,
            FileType::Regular => 0o100_000,
            FileType::Symlink => 0o120_000,
            FileType::Socket => 0o140_000,
        }
    }

    /// The type in `st_mode`; `None` for bits that are no type.
    pub fn from_mode(mode: u16) -> Option<Self> {
        let bits = u32::from(mode & 0o170_000);
        ALL.into_iter().find(|kind| kind.mode_bits() == bits)
    }

    pub(super) fn from_dirent(file_type: u8) -> Option<Self> {
        ALL.into_iter().find(|kind| *kind as u8 == file_type)
    }
}

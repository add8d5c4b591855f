//! Errors of the reader, one variant for each reaction of a caller.

use super::kind::{FileType, Nid};
use crate::format::incompatible;

/// A file system, or a part of it, cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErofsError {
    /// The device failed.
    #[error(transparent)]
    Device(#[from] bcow::Error),
    /// There is no EROFS superblock at byte 1024.
    #[error("not an EROFS file system (magic number {found:#010x} instead of 0xe0f5e1e2)")]
    NotErofs {
        /// The value at the place of the magic number.
        found: u32,
    },
    /// The device is too small to hold a superblock.
    #[error("not an EROFS file system (its size in bytes, {device_bytes}, is too small)")]
    TooSmall {
        /// Size of the device in bytes.
        device_bytes: u64,
    },
    /// The superblock's checksum is wrong.
    #[error("the EROFS superblock is damaged (checksum {found:#010x}, it says {expected:#010x})")]
    SuperblockChecksum {
        /// The checksum in the superblock.
        expected: u32,
        /// The checksum of its bytes.
        found: u32,
    },
    /// A field of the superblock has an invalid value.
    #[error("the EROFS superblock is damaged ({field} = {value})")]
    Superblock {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// The file system uses incompatible features that the reader does not support.
    #[error("EROFS feature not supported: {}", feature_names(*.bits))]
    UnsupportedFeature {
        /// The unsupported bits of the incompatible features.
        bits: u32,
    },
    /// A value of the superblock is valid but not supported.
    #[error("EROFS {field} of {value} is not supported")]
    UnsupportedValue {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// An inode is valid but needs a feature that the reader does not support.
    #[error("inode {nid}: {feature} is not supported")]
    UnsupportedInode {
        /// The inode.
        nid: Nid,
        /// The feature.
        feature: &'static str,
    },
    /// An inode is damaged.
    #[error("inode {nid} is damaged: {problem}")]
    Inode {
        /// The inode.
        nid: Nid,
        /// What is wrong with it.
        problem: InodeProblem,
    },
    /// A directory's content is damaged.
    #[error("directory {nid} is damaged in block {block}: {problem}")]
    Directory {
        /// The directory.
        nid: Nid,
        /// Block of the directory, from 0.
        block: u64,
        /// What is wrong with it.
        problem: DirectoryProblem,
    },
    /// An inode's extended attributes are damaged.
    #[error("the extended attributes of inode {nid} are damaged: {problem}")]
    Xattr {
        /// The inode.
        nid: Nid,
        /// What is wrong with them.
        problem: XattrProblem,
    },
    /// The operation does not fit the type of the file: a bug of the caller, not damage.
    #[error("inode {nid} is a {found:?}, not a {expected}")]
    WrongKind {
        /// The inode.
        nid: Nid,
        /// The type that the operation needs.
        expected: &'static str,
        /// The type of the inode.
        found: FileType,
    },
    /// A directory has more than one name; in a valid file system each directory has one parent.
    #[error("directory {nid} is in the tree more than once")]
    DirectoryTwice {
        /// The directory.
        nid: Nid,
    },
    /// The names of a directory are not in byte order, which EROFS requires.
    #[error("directory {nid} is damaged: its names are not sorted")]
    Unsorted {
        /// The directory.
        nid: Nid,
    },
    /// Directories are nested deeper than any real tree.
    #[error("directories are nested more than {limit} deep")]
    TooDeep {
        /// The limit.
        limit: usize,
    },
    /// A path passes more than 40 symbolic links.
    #[error("too many symbolic links on the way")]
    TooManyLinks,
}

impl ErofsError {
    /// The inode that the error is about.
    pub fn nid(&self) -> Option<Nid> {
        match self {
            ErofsError::UnsupportedInode { nid, .. }
            | ErofsError::Inode { nid, .. }
            | ErofsError::Directory { nid, .. }
            | ErofsError::Xattr { nid, .. }
            | ErofsError::WrongKind { nid, .. }
            | ErofsError::DirectoryTwice { nid }
            | ErofsError::Unsorted { nid } => Some(*nid),
            _ => None,
        }
    }
}

/// What is wrong with an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InodeProblem {
    /// The inode lies beyond the end of the device.
    #[error("it lies beyond the end of the device")]
    OutOfRange,
    /// The inode's xattrs or chunk table lie beyond the end of the device.
    #[error("its {0} lies beyond the end of the device")]
    PartOutOfRange(&'static str),
    /// The mode has no known file type.
    #[error("its mode {0:#o} has no file type")]
    Mode(u16),
    /// The data layout is unknown.
    #[error("its data layout {0} does not exist")]
    Layout(u16),
    /// The size is negative.
    #[error("its size {0} is beyond 2^63 - 1")]
    Size(u64),
    /// The inline tail crosses a block.
    #[error("its inline tail crosses a block")]
    TailCrossesBlock,
    /// File content lies beyond the end of the device.
    #[error(
        "its content at {offset}..{} lies beyond the end of the device \
         (from device byte {device_offset})",
        .offset + .length
    )]
    Content {
        /// First byte in the file.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// Device byte of the content.
        device_offset: u64,
    },
    /// A chunk lies on a device that does not exist.
    #[error("it has a chunk on device {0}, which does not exist")]
    ChunkDevice(u16),
    /// The target of a symbolic link is empty or longer than a path can be.
    #[error("the length in bytes of its link target is {0}")]
    LinkTarget(u64),
    /// The nanoseconds are a second or more.
    #[error("its time has {0} nanoseconds")]
    Nanoseconds(u32),
}

/// What is wrong with a directory block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryProblem {
    /// The offset of the first name is not the end of a whole number of entries.
    #[error("the first name's offset is {0}")]
    FirstNameOffset(u16),
    /// The block is shorter than one entry.
    #[error("its length in bytes is {0}")]
    Short(usize),
    /// A name does not follow the name before it, or passes the end of the block.
    #[error("the name of entry {entry} spans {start}..{end}")]
    NameRange {
        /// Entry in the block, from 0.
        entry: usize,
        /// First byte of the name.
        start: usize,
        /// End of the name.
        end: usize,
    },
    /// A name is empty, too long, or contains a slash or NUL.
    #[error("the name of entry {entry} is not valid")]
    Name {
        /// Entry in the block, from 0.
        entry: usize,
    },
    /// The type byte of an entry is unknown.
    #[error("entry {entry} has type {file_type}")]
    FileType {
        /// Entry in the block, from 0.
        entry: usize,
        /// The type byte.
        file_type: u8,
    },
}

/// What is wrong with extended attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum XattrProblem {
    /// There are more shared ids than fit.
    #[error("its number of shared attributes, {0}, exceeds its length")]
    SharedCount(u8),
    /// A shared attribute lies beyond the end of the device.
    #[error("shared attribute {0} lies beyond the end of the device")]
    SharedRange(u32),
    /// An entry passes the end of the attributes.
    #[error("the entry at byte {0} passes the end")]
    EntryRange(usize),
}

/// Names of incompatible feature bits; bits without a name as numbers.
fn feature_names(bits: u32) -> String {
    names(bits, incompatible::NAMES).join(", ")
}

/// Names of feature bits; bits without a name as numbers.
pub(super) fn names(bits: u32, known: &[(u32, &str)]) -> Vec<String> {
    (0..32)
        .map(|shift| 1u32 << shift)
        .filter(|bit| bits & bit != 0)
        .map(|bit| match known.iter().find(|(named, _)| *named == bit) {
            Some((_, name)) => (*name).to_owned(),
            None => format!("bit {bit:#x}"),
        })
        .collect()
}

//! What can be wrong with a file system, kept apart by what a caller would do about it.

use super::kind::{FileType, Nid};
use crate::format::incompatible;

/// Why a file system, or something in it, cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ErofsError {
    /// The device below failed.
    #[error(transparent)]
    Device(#[from] bcow::Error),
    /// There is no EROFS superblock at byte 1024.
    #[error("this is no EROFS file system (magic number {found:#010x} instead of 0xe0f5e1e2)")]
    NotErofs {
        /// What is there instead of the magic number.
        found: u32,
    },
    /// The device is too small to hold a superblock.
    #[error("this is no EROFS file system ({device_bytes} bytes are too few for a superblock)")]
    TooSmall {
        /// Size of the device in bytes.
        device_bytes: u64,
    },
    /// The superblock's checksum is wrong.
    #[error("the EROFS superblock is damaged (checksum {found:#010x}, it says {expected:#010x})")]
    SuperblockChecksum {
        /// What the superblock says.
        expected: u32,
        /// What its bytes give.
        found: u32,
    },
    /// A field of the superblock makes no sense.
    #[error("the EROFS superblock is damaged ({field} = {value})")]
    Superblock {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// Incompatible features that this reader does not have.
    #[error("EROFS feature not supported: {}", feature_names(*.bits))]
    UnsupportedFeature {
        /// The feature bits, all incompatible ones.
        bits: u32,
    },
    /// A value of the superblock that is legal but not supported.
    #[error("EROFS {what} of {value} is not supported")]
    UnsupportedValue {
        /// What it is.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// An inode is legal but needs something that this reader does not have.
    #[error("inode {nid}: {what} is not supported")]
    UnsupportedInode {
        /// The inode.
        nid: Nid,
        /// What it needs.
        what: &'static str,
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
    /// The wrong operation for this type of file: the caller's mistake, not the file system's.
    #[error("inode {nid} is a {found:?}, not a {expected}")]
    WrongKind {
        /// The inode.
        nid: Nid,
        /// What the operation needs.
        expected: &'static str,
        /// What it is.
        found: FileType,
    },
    /// A directory is in the tree more than once; in a sound file system each has one parent.
    #[error("directory {nid} is in the tree more than once")]
    DirectoryTwice {
        /// The directory.
        nid: Nid,
    },
    /// A directory's names are not in the order that EROFS has them in.
    #[error("directory {nid} is damaged: its names are not sorted")]
    Unsorted {
        /// The directory.
        nid: Nid,
    },
    /// Directories within directories, more than anything real has.
    #[error("directories are nested more than {limit} deep")]
    TooDeep {
        /// What is allowed.
        limit: usize,
    },
    /// A path passes more than 40 symbolic links.
    #[error("too many symbolic links on the way")]
    TooManyLinks,
}

/// What is wrong with an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InodeProblem {
    /// It lies beyond the end of the device.
    #[error("it lies beyond the end of the device")]
    OutOfRange,
    /// Its xattrs or its chunk table lie beyond the end of the device.
    #[error("its {0} lies beyond the end of the device")]
    PartOutOfRange(&'static str),
    /// The mode has no known file type.
    #[error("its mode {0:#o} has no file type")]
    Mode(u16),
    /// The layout bits have no meaning.
    #[error("its data layout {0} does not exist")]
    Layout(u16),
    /// The size is negative.
    #[error("its size {0} is beyond 2^63 - 1")]
    Size(u64),
    /// The inline tail crosses a block.
    #[error("its inline tail crosses a block")]
    TailCrossesBlock,
    /// File content lies beyond the end of the device.
    #[error("its content at {offset}..{} lies beyond the end of the device (from device byte {device_offset})", .offset + .length)]
    Content {
        /// First byte in the file.
        offset: u64,
        /// Length in bytes.
        length: u64,
        /// Where it would be.
        device_offset: u64,
    },
    /// A chunk lies on a device that does not exist.
    #[error("it has a chunk on device {0}, which does not exist")]
    ChunkDevice(u16),
    /// A symbolic link's target is longer than a path can be, or empty.
    #[error("a link target of {0} bytes")]
    LinkTarget(u64),
    /// Nanoseconds of a second or more.
    #[error("its time has {0} nanoseconds")]
    Nanoseconds(u32),
}

/// What is wrong with a directory block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DirectoryProblem {
    /// The first name starts where no number of entries ends.
    #[error("the first name's offset is {0}")]
    FirstNameOffset(u16),
    /// The block is shorter than one entry.
    #[error("it has {0} bytes")]
    Short(usize),
    /// A name does not lie behind the one before it and inside the block.
    #[error("the name of entry {entry} spans {start}..{end}")]
    NameRange {
        /// Entry in the block, from 0.
        entry: usize,
        /// First byte of the name.
        start: usize,
        /// End of the name.
        end: usize,
    },
    /// A name is empty, too long, or has a slash or NUL in it.
    #[error("the name of entry {entry} is not valid")]
    Name {
        /// Entry in the block, from 0.
        entry: usize,
    },
    /// An entry's type byte has no meaning.
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
    /// More shared ids than there is room for.
    #[error("{0} shared attributes do not fit")]
    SharedCount(u8),
    /// A shared attribute lies beyond the end of the device.
    #[error("shared attribute {0} lies beyond the end of the device")]
    SharedRange(u32),
    /// An entry passes the end of the attributes.
    #[error("the entry at byte {0} passes the end")]
    EntryRange(usize),
}

/// Names of incompatible feature bits, numbers for those without.
fn feature_names(bits: u32) -> String {
    names(bits, incompatible::NAMES).join(", ")
}

/// Names of feature bits, numbers for those without.
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

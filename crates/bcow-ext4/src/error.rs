//! Errors.

use std::io;

use crate::{BlockRange, InodeNumber};

/// A tree that ext4 cannot hold, a description that contradicts itself, or a sink that fails.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Ext4Error {
    /// The sink failed.
    #[error("cannot write ext4 metadata")]
    Io(#[from] io::Error),
    /// The size of the file system is out of range.
    #[error("an ext4 of {bytes} bytes {problem}")]
    Size {
        /// The size that was asked for.
        bytes: u64,
        /// Why ext4 cannot have it.
        problem: &'static str,
    },
    /// Metadata or content does not fit.
    #[error("the file system has no room for {blocks} more blocks of 4096 bytes")]
    NoSpace {
        /// Blocks that were asked for.
        blocks: u64,
    },
    /// More inodes than the geometry has.
    #[error("the file system has no inode left after {inodes}")]
    NoInodes {
        /// All inodes of the file system.
        inodes: u32,
    },
    /// A content area that is not inside the file system, or that contains its tables.
    #[error(
        "content cannot lie at blocks {} to {}: {problem}",
        .range.start,
        .range.end()
    )]
    ContentArea {
        /// The area.
        range: BlockRange,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// An inode that ext4 cannot hold, or that contradicts the rest of the tree.
    #[error("inode {inode}: {problem}")]
    Inode {
        inode: InodeNumber,
        /// What is wrong with it.
        problem: InodeProblem,
    },
}

impl InodeNumber {
    /// The error of a description of this inode.
    pub(crate) fn refused(self, problem: InodeProblem) -> Ext4Error {
        Ext4Error::Inode {
            inode: self,
            problem,
        }
    }
}

/// What is wrong with an inode.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InodeProblem {
    /// The file is longer than ext4 allows.
    #[error("a file of {0} bytes is longer than ext4 allows")]
    FileBytes(u64),
    #[error("extent {0} is out of order, empty, or behind the end of the file")]
    ExtentOrder(usize),
    #[error("extent {0} lies outside the areas of content")]
    ExtentRange(usize),
    #[error("extent {0} has blocks that are in use already")]
    ExtentShared(usize),
    /// The number of names is 0, or more than ext4 allows.
    #[error("{0} links; ext4 allows 1 to 65000")]
    Links(u32),
    /// Fewer or more names in directories than the inode has links.
    #[error("{links} links, but {names} names")]
    Names {
        /// Links that the inode was described with.
        links: u32,
        /// Names in directories.
        names: u32,
    },
    /// A name refers to an inode that was not described.
    #[error("a directory has a name for it, but it was not described")]
    Missing,
    #[error("the directory's parent {0} is not described before it")]
    Parent(InodeNumber),
    #[error("the name in directory {0} says another type, or the directory another parent")]
    Contradiction(InodeNumber),
    /// A name that ext4 does not allow.
    #[error(
        "the name \"{}\" is empty, too long, reserved, or has a slash or NUL",
        .0.escape_ascii()
    )]
    Name(Vec<u8>),
    #[error("the name \"{}\" occurs twice", .0.escape_ascii())]
    NameTwice(Vec<u8>),
    #[error("{0} names are more than an ext4 directory can index")]
    DirectoryEntries(usize),
    /// A link target that ext4 does not allow.
    #[error("a link target of {0} bytes; ext4 allows 1 to 4095")]
    LinkTarget(usize),
    /// A device number that ext4 cannot hold.
    #[error("device {major}:{minor} is out of ext4's range")]
    Device {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// An extended attribute with a name that ext4 does not allow.
    #[error("the attribute name \"{}\" has no prefix of ext4's, or is too long", .0.escape_ascii())]
    XattrName(Vec<u8>),
    #[error("the attribute \"{}\" occurs twice", .0.escape_ascii())]
    XattrTwice(Vec<u8>),
    /// More extended attributes than an inode and one block can hold.
    #[error("extended attributes do not fit into the inode and one block of 4096 bytes")]
    XattrSpace,
    /// An access control list that the kernel would refuse.
    #[error("the attribute \"{}\" is not a POSIX ACL", .0.escape_ascii())]
    Acl(Vec<u8>),
}

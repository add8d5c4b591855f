//! Errors.

use std::fmt;
use std::io;

use crate::InodeNumber;

/// A file system cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The source failed.
    #[error("cannot read the ext4")]
    Io(#[from] io::Error),
    /// There is no ext4.
    #[error("there is no ext4 file system")]
    NoExt4,
    /// The file system has incompatible features that this version does not support.
    #[error("the ext4 has features that cannot be read yet: {0}")]
    Features(Features),
    /// The file system has another layout than those of this crate.
    #[error("the ext4 was made anew, in another layout than bcow gives it")]
    Layout,
    /// An inode has content in a form that this version does not read.
    #[error("inode {inode} of the ext4: {what} cannot be read yet")]
    Unsupported {
        inode: InodeNumber,
        /// The form.
        what: &'static str,
    },
    /// The journal has a form that this version does not replay.
    #[error("the ext4 was not unmounted, and its journal has {0}, which cannot be read yet")]
    Journal(&'static str),
    /// A structure is damaged.
    #[error("the ext4 is damaged: {place}: {problem}")]
    Damaged {
        place: Structure,
        /// What is wrong with it.
        problem: &'static str,
    },
}

/// Bits of incompatible features. They are shown with the names that e2fsprogs gives them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features(pub u32);

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let set = (0..u32::BITS).filter(|bit| self.0 & (1 << bit) != 0);
        for (index, bit) in set.enumerate() {
            if index > 0 {
                write!(f, ", ")?;
            }
            match 1 << bit {
                0x1 => write!(f, "compression")?,
                0x8 => write!(f, "journal_dev")?,
                0x1000 => write!(f, "dirdata")?,
                0x8000 => write!(f, "inline_data")?,
                0x1_0000 => write!(f, "encrypt")?,
                0x2_0000 => write!(f, "casefold")?,
                unknown => write!(f, "{unknown:#x}")?,
            }
        }
        Ok(())
    }
}

/// A structure of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Structure {
    Superblock,
    /// A group, by its index.
    Group(u32),
    /// An inode, or what belongs to it.
    Inode(InodeNumber),
    Block(u64),
    /// A block of the journal, counted from its start.
    Journal(u64),
}

impl Structure {
    /// The error of a damaged structure.
    pub(crate) fn damaged(self, problem: &'static str) -> ReadError {
        ReadError::Damaged {
            place: self,
            problem,
        }
    }
}

impl fmt::Display for Structure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Structure::Superblock => write!(f, "the superblock"),
            Structure::Group(group) => write!(f, "group {group}"),
            Structure::Inode(inode) => write!(f, "inode {inode}"),
            Structure::Block(block) => write!(f, "block {block}"),
            Structure::Journal(block) => write!(f, "block {block} of the journal"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unsupported_features_have_names() {
        let error = ReadError::Features(Features(0x1_8000 | 0x8000_0000));
        assert_eq!(
            error.to_string(),
            "the ext4 has features that cannot be read yet: inline_data, encrypt, 0x80000000"
        );
    }
}

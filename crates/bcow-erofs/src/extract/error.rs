//! Errors of an extraction.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::reader::ErofsError;
use crate::tree::display_path;

/// An extraction failed. Paths of type [`PathBuf`] are on the host, others in the file system.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExtractError {
    /// A part of the file system cannot be read.
    #[error("cannot read {}", display_path(path))]
    Read {
        /// The path in the file system.
        path: Vec<u8>,
        /// The cause.
        #[source]
        source: ErofsError,
    },
    /// An inode has an owner that no file can have.
    #[error("cannot read {}: owner {uid}:{gid} is impossible", display_path(path))]
    Owner {
        /// The path in the file system.
        path: Vec<u8>,
        /// The user in the inode.
        uid: u32,
        /// The group in the inode.
        gid: u32,
    },
    /// The path of a file that is not a directory does not end in a name.
    #[error("{} does not end in a name", display_path(path))]
    NoName {
        /// The path in the file system.
        path: Vec<u8>,
    },
    /// The destination cannot be opened.
    #[error("cannot extract into {}", path.display())]
    Destination {
        /// The destination.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A file already exists, and [`Existing::Refuse`](super::Existing) refuses to replace it.
    #[error("cannot create {}: file exists", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// A file or directory cannot be created.
    #[error("cannot create {}", path.display())]
    Create {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A device cannot be created, although the process runs as root.
    #[error("cannot create device {}", path.display())]
    Mknod {
        /// The device.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The kernel has no openat2(2), which Linux has since 5.6.
    #[error(
        "cannot create {}: the kernel lacks openat2(2), which Linux has since 5.6",
        path.display()
    )]
    NoOpenat2 {
        /// The file.
        path: PathBuf,
    },
    /// A further name of an inode cannot be linked to its first one.
    #[error("cannot create {} as a hard link to {}", path.display(), first.display())]
    Link {
        /// The further name.
        path: PathBuf,
        /// The first name.
        first: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The content of a file cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// An attribute of a file cannot be set.
    #[error("cannot set {attribute} of {}", path.display())]
    Attribute {
        /// The file.
        path: PathBuf,
        /// The attribute.
        attribute: Attribute,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The caller cancelled the extraction.
    #[error("cancelled")]
    Cancelled,
}

impl ExtractError {
    /// Whether a part of the file system cannot be read, and the host is intact.
    pub fn is_in_image(&self) -> bool {
        matches!(self, ExtractError::Read { .. } | ExtractError::Owner { .. })
    }
}

/// An attribute of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attribute {
    /// User and group.
    Owner,
    /// The permission bits.
    Mode,
    /// The modification time.
    Time,
    /// The extended attribute of this name.
    Xattr(Vec<u8>),
}

impl fmt::Display for Attribute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Attribute::Owner => f.write_str("the owner"),
            Attribute::Mode => f.write_str("the mode"),
            Attribute::Time => f.write_str("the time"),
            Attribute::Xattr(name) => {
                write!(f, "extended attribute {}", name.escape_ascii())
            }
        }
    }
}

//! Errors of an upper.

use std::path::{Path, PathBuf};

use bcow::NewFileError;
use bcow::format::hex;
use bcow::lock::LockError;
use rustix::io::Errno;

use super::{Driver, Namespace};

/// Why an upper cannot be used. The messages name the directory: `path`, or the first field.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UpperError {
    #[error("{}: no such directory, and its parent is missing too", .0.display())]
    NoParent(PathBuf),
    /// The directory is missing, and this operation does not create it.
    #[error("{}: no such directory", .0.display())]
    Missing(PathBuf),
    /// The name exists, but is not a directory.
    #[error("{}: not a directory", .0.display())]
    NotADirectory(PathBuf),
    #[error("{}: the file system is read-only", .0.display())]
    ReadOnly(PathBuf),
    #[error("{}: the file system does not support extended attributes", .0.display())]
    NoAttributes(PathBuf),
    /// Whiteouts cannot be created, so names of the lower tree could not be removed.
    #[error(
        "{}: the file system or this user cannot create whiteouts \
         (character device 0:0)",
        path.display()
    )]
    NoWhiteouts {
        /// The upper.
        path: PathBuf,
        /// The host's errno.
        #[source]
        source: Errno,
    },
    /// [`META`](super::META) or a directory in it is on another file system.
    #[error("{}: not on the file system of the upper", .0.display())]
    AnotherFileSystem(PathBuf),
    #[error(
        "{}: the upper belongs to the image {} ({}), not to {} ({})",
        path.display(), .belongs.1, hex_start(&.belongs.0, &.image.0),
        .image.1, hex_start(&.image.0, &.belongs.0)
    )]
    AnotherImage {
        /// The upper.
        path: PathBuf,
        /// The identity and the name of the image that the upper belongs to.
        belongs: Box<([u8; 32], String)>,
        /// The identity and the name of the image of this operation.
        image: Box<([u8; 32], String)>,
    },
    #[error("{}: the upper belongs to the {} driver", path.display(), driver_name(*.driver))]
    OtherDriver {
        /// The upper.
        path: PathBuf,
        /// The driver that it belongs to.
        driver: Driver,
    },
    /// The directory has files in it that an upper of the kernel driver would not show.
    #[error("{}: not empty, so it cannot become an upper of the kernel driver", .0.display())]
    NotEmpty(PathBuf),
    #[error("{}: another user can write it, and the kernel trusts its file system", .0.display())]
    Foreign(PathBuf),
    /// A mount did not begin the upper completely.
    #[error("{}: a mount with the kernel driver began it, but did not complete it", .0.display())]
    Incomplete(PathBuf),
    /// The disk of the upper cannot be made.
    #[error("{}: cannot make the disk", path.display())]
    MakeDisk {
        /// The disk.
        path: PathBuf,
        /// The cause.
        #[source]
        source: NewFileError,
    },
    /// The upper has a packed partial file of a development version.
    #[error("{}: {}", .0.display(), MarkError::PackedPartial)]
    PackedPartial(PathBuf),
    /// The upper has a schema that this version does not know.
    #[error("{}: unknown schema {schema:?}", path.display())]
    UnknownSchema {
        /// The file with the schema.
        path: PathBuf,
        schema: String,
    },
    #[error("{}: damaged: {problem}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// The damage.
        problem: String,
    },
    /// The upper's marks are in a namespace that this user cannot use.
    #[error(
        "{}: its marks are in {}, to which this user has no access",
        .0.display(), namespace_name(*.1)
    )]
    NamespaceDenied(PathBuf, Namespace),
    #[error(
        "{}: its files have their owners on the host, and this user \
         cannot set owners",
        .0.display()
    )]
    OwnershipDenied(PathBuf),
    #[error("{}: a snapshot, which never changes", .0.display())]
    Snapshot(PathBuf),
    #[error("{}: no such snapshot", .0.display())]
    NoSnapshot(PathBuf),
    /// There is a file or directory with the name of a new snapshot or upper.
    #[error("{} exists", .0.display())]
    Exists(PathBuf),
    /// Another process uses the upper.
    #[error("{}: {}", .0.display(), .1)]
    InUse(PathBuf, LockError),
    /// The upper lies in an upper that another mount uses.
    #[error("{}: inside the upper {}: {holder}", path.display(), outer.display())]
    Inside {
        /// The upper.
        path: PathBuf,
        /// The upper that contains this one.
        outer: PathBuf,
        /// The holder of that upper's lock.
        holder: LockError,
    },
    /// The upper contains an upper that another mount uses.
    #[error("{}: contains the upper {}: {holder}", path.display(), inner.display())]
    Around {
        /// The upper.
        path: PathBuf,
        /// The upper inside this one.
        inner: PathBuf,
        /// The holder of that upper's lock.
        holder: LockError,
    },
    #[error(
        "{}: mounted with --sync volatile when the machine stopped; \
         its content may be damaged",
        .0.display()
    )]
    Volatile(PathBuf),
    /// The ledger of a mount that another process served cannot be read, or none can be created.
    #[error("cannot use the ledger of the mount")]
    Ledger {
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The host failed.
    #[error("{}: cannot {action}", path.display())]
    Io {
        /// The path of the operation.
        path: PathBuf,
        /// The action that failed.
        action: &'static str,
        /// The host's errno.
        #[source]
        source: Errno,
    },
}

impl UpperError {
    /// The error for an `action` on `path` that failed on the host.
    pub(crate) fn io(path: &Path, action: &'static str, source: Errno) -> UpperError {
        let path = path.to_owned();
        match source {
            Errno::ROFS => UpperError::ReadOnly(path),
            source => UpperError::Io {
                path,
                action,
                source,
            },
        }
    }

    /// The upper that is in use (this one, or one around or inside it), and the holder of its lock;
    /// `None` for other errors.
    pub fn in_use(&self) -> Option<(&Path, &LockError)> {
        match self {
            UpperError::InUse(path, holder)
            | UpperError::Inside {
                outer: path,
                holder,
                ..
            }
            | UpperError::Around {
                inner: path,
                holder,
                ..
            } => Some((path, holder)),
            _ => None,
        }
    }

    /// The host's errno, if the host failed.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            UpperError::Io { source, .. } | UpperError::NoWhiteouts { source, .. } => Some(*source),
            UpperError::ReadOnly(_) => Some(Errno::ROFS),
            _ => None,
        }
    }
}

/// The first 12 hexadecimal digits of an identity, or as many as distinguish it from `other`.
fn hex_start(identity: &[u8; 32], other: &[u8; 32]) -> String {
    let same = identity.iter().zip(other).take_while(|(a, b)| a == b);
    let shown = (same.count() + 1).clamp(6, identity.len());
    hex(&identity[..shown])
}

fn driver_name(driver: Driver) -> &'static str {
    match driver {
        Driver::Fuse => "FUSE",
        Driver::Kernel => "kernel",
    }
}

fn namespace_name(namespace: Namespace) -> &'static str {
    match namespace {
        Namespace::Trusted => "trusted.*",
        Namespace::User => "user.*",
    }
}

/// A mark that cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MarkError {
    /// Its value is invalid.
    #[error("its attribute {name} is damaged: {value}")]
    Damaged {
        /// The attribute's name, without its namespace if it can be in either.
        name: &'static str,
        /// The value, escaped and truncated to 64 bytes.
        value: String,
    },
    #[error(
        "it is a packed partial file, a form that this version does not read; \
         commit the upper with the version of bcow that wrote it"
    )]
    PackedPartial,
}

impl MarkError {
    pub(super) fn new(name: &'static str, value: &[u8]) -> MarkError {
        let shown = &value[..value.len().min(64)];
        let mut text = if value.is_empty() {
            "it is empty".to_string()
        } else {
            shown.escape_ascii().to_string()
        };
        if shown.len() < value.len() {
            text.push_str("...");
        }
        MarkError::Damaged { name, value: text }
    }
}

/// Why the marks of a file could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadMarksError {
    /// The host failed.
    #[error("its attributes cannot be read")]
    Io(#[from] Errno),
    /// One of them is damaged.
    #[error(transparent)]
    Mark(#[from] MarkError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shown_identities_differ() {
        let (a, mut b) = ([0x37; 32], [0x37; 32]);
        b[31] = 0;
        assert_eq!(hex_start(&a, &[0; 32]), "37".repeat(6));
        assert_eq!(hex_start(&a, &b), "37".repeat(32));
        assert_eq!(hex_start(&b, &a), "37".repeat(31) + "00");
    }
}

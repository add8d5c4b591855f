//! Why an upper cannot be used.

use std::path::{Path, PathBuf};

use bcow::lock::LockError;
use rustix::io::Errno;

use super::{Namespace, Ownership};

/// Why an upper cannot be used. Messages name the directory.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum UpperError {
    /// The directory is missing, and so is the one it would be in.
    #[error("{}: there is no such directory, and none to create it in", path.display())]
    NoParent {
        /// The upper.
        path: PathBuf,
    },
    /// It is missing, and this use does not create one.
    #[error("{}: there is no such directory", path.display())]
    Missing {
        /// The upper.
        path: PathBuf,
    },
    /// Something else has the name.
    #[error("{}: it is not a directory", path.display())]
    NotADirectory {
        /// What is no directory.
        path: PathBuf,
    },
    /// It cannot be written to.
    #[error("{}: its file system is read-only", path.display())]
    ReadOnly {
        /// The upper.
        path: PathBuf,
    },
    /// Marks cannot be kept.
    #[error("{}: its file system keeps no extended attributes", path.display())]
    NoAttributes {
        /// The upper.
        path: PathBuf,
    },
    /// Names of the lower tree could not be removed.
    #[error("{}: its file system, or this user, cannot create whiteouts (character device 0:0)", path.display())]
    NoWhiteouts {
        /// The upper.
        path: PathBuf,
        /// What the host said.
        #[source]
        source: Errno,
    },
    /// [`META`](super::META) or what is in it lies on another file system.
    #[error("{}: it is on another file system than the upper", path.display())]
    AnotherFileSystem {
        /// The directory that is.
        path: PathBuf,
    },
    /// It was begun on another image.
    #[error("{}: it belongs to the image {} ({}), not to {} ({})", path.display(), .belongs.1, hex_start(.belongs.0), .image.1, hex_start(.image.0))]
    AnotherImage {
        /// The upper.
        path: PathBuf,
        /// Identity and name of the image it belongs to.
        belongs: Box<([u8; 32], String)>,
        /// Identity and name of the image it shall be used with.
        image: Box<([u8; 32], String)>,
    },
    /// It was made by a version that does things differently.
    #[error("{}: its form is {schema:?}, which this version does not know", path.display())]
    UnknownSchema {
        /// The file that says so.
        path: PathBuf,
        /// What it says.
        schema: String,
    },
    /// What says whose it is makes no sense.
    #[error("{}: it is damaged: {problem}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// Its marks are in a namespace that this user cannot use.
    #[error("{}: its marks are in {}, which this user may not use", path.display(), namespace_name(*.namespace))]
    NamespaceDenied {
        /// The upper.
        path: PathBuf,
        /// Where its marks are.
        namespace: Namespace,
    },
    /// Its files have owners that this user cannot give to files.
    #[error("{}: its files have their owners on the host, which this user cannot set", path.display())]
    OwnershipDenied {
        /// The upper.
        path: PathBuf,
        /// Where its owners are.
        ownership: Ownership,
    },
    /// Somebody else uses it.
    #[error("{}: {holder}", path.display())]
    InUse {
        /// The upper.
        path: PathBuf,
        /// Who.
        holder: LockError,
    },
    /// Another mount uses a directory that it is in.
    #[error("{}: it is inside the upper {}: {holder}", path.display(), outer.display())]
    Inside {
        /// The upper.
        path: PathBuf,
        /// The other one, around it.
        outer: PathBuf,
        /// Who uses that.
        holder: LockError,
    },
    /// Another mount uses a directory in it.
    #[error("{}: the upper {} is inside it: {holder}", path.display(), inner.display())]
    Around {
        /// The upper.
        path: PathBuf,
        /// The other one, in it.
        inner: PathBuf,
        /// Who uses that.
        holder: LockError,
    },
    /// The machine stopped while it was in use without ever being synchronised.
    #[error("{}: it was mounted with --sync volatile when the machine stopped, so what is in it may be anything", path.display())]
    Volatile {
        /// The upper.
        path: PathBuf,
    },
    /// No thread could be started.
    #[error("cannot start a thread")]
    Thread {
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The host failed.
    #[error("{}: cannot {action}", path.display())]
    Io {
        /// What it was done to.
        path: PathBuf,
        /// What could not be done.
        action: &'static str,
        /// Why.
        #[source]
        source: Errno,
    },
}

impl UpperError {
    /// The upper that somebody uses, which may be another one, and who that is.
    pub fn in_use(&self) -> Option<(&Path, &LockError)> {
        match self {
            UpperError::InUse { path, holder }
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

    /// What the host said, if it was the host.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            UpperError::Io { source, .. } | UpperError::NoWhiteouts { source, .. } => Some(*source),
            UpperError::ReadOnly { .. } => Some(Errno::ROFS),
            _ => None,
        }
    }
}

/// The first digits of an identity, enough to tell images apart.
fn hex_start(identity: [u8; 32]) -> String {
    identity[..6]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn namespace_name(namespace: Namespace) -> &'static str {
    match namespace {
        Namespace::Trusted => "trusted.*",
        Namespace::User => "user.*",
    }
}

//! Errors of disks in foreign formats.

use std::io;
use std::path::{Path, PathBuf};

/// A failure to open, read or write a disk in a foreign format.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForeignError {
    /// The host failed to execute an operation on the file.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The operation that failed, such as "open", "read" or "write".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The host's error.
        source: io::Error,
    },
    /// The file cannot be used as a disk.
    #[error("{}: {problem}", path.display())]
    Unsuitable {
        /// The file.
        path: PathBuf,
        /// The reason.
        problem: String,
    },
    /// The file has no qcow2 header.
    #[error("{}: not a qcow2 image", path.display())]
    NotQcow2 {
        /// The file.
        path: PathBuf,
    },
    /// The header of the qcow2 image is damaged, or needs a feature that bcow does not support.
    #[error("{}: {problem}", path.display())]
    Qcow2Header {
        /// The image.
        path: PathBuf,
        /// The reason.
        problem: String,
    },
    /// The qcow2 image is damaged, or uses a feature that bcow does not support.
    #[error("cannot read {} as qcow2: {source}", path.display())]
    Qcow2 {
        /// The image.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// The qcow2 image names another file, which the user has not allowed.
    #[error("{} names another file, {what} {name:?}: {problem}", path.display())]
    NotAllowed {
        /// The image.
        path: PathBuf,
        /// "its backing file" or "its data file".
        what: &'static str,
        /// The name in the image.
        name: String,
        /// Why bcow does not open the file.
        problem: String,
    },
}

impl ForeignError {
    pub(crate) fn io<E: Into<io::Error>>(
        action: &'static str,
        path: &Path,
    ) -> impl Fn(E) -> ForeignError {
        move |source| ForeignError::Io {
            action,
            path: path.to_owned(),
            source: source.into(),
        }
    }

    pub(crate) fn unsuitable(path: &Path, problem: impl Into<String>) -> Self {
        ForeignError::Unsuitable {
            path: path.to_owned(),
            problem: problem.into(),
        }
    }

    /// Advice for the user, if there is any.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            ForeignError::NotAllowed { .. } => Some(
                "put the files that it names into one directory and allow that with \
                 --backing-dir DIR, or merge them into one image with `qemu-img convert`",
            ),
            ForeignError::Qcow2 { .. } | ForeignError::Qcow2Header { .. } => Some(
                "`qemu-img check` says whether it is damaged; `qemu-img convert -O raw` reads \
                     kinds of qcow2 that bcow does not support (zstd, extended L2 entries, \
                     encryption)",
            ),
            _ => None,
        }
    }
}

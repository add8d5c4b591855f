//! What can go wrong with a disk in another form.

use std::io;
use std::path::PathBuf;

/// Failure to open or write a disk in another form.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForeignError {
    /// The host failed to open or read the file.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// "open", "read", "write".
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is none that is read here.
    #[error("{}: {problem}", path.display())]
    Unsuitable {
        /// The file.
        path: PathBuf,
        /// Why.
        problem: String,
    },
    /// A qcow2 image that is damaged, or of a kind that is not read here.
    #[error("cannot read {} as qcow2: {source}", path.display())]
    Qcow2 {
        /// The image.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A qcow2 image needs a file that it names and that the user has not allowed.
    #[error("{} names another file, {what} {name:?}: {problem}", path.display())]
    NotAllowed {
        /// The image.
        path: PathBuf,
        /// "its backing file" or "its data file".
        what: &'static str,
        /// How it names it.
        name: String,
        /// Why it is not opened.
        problem: String,
    },
}

impl ForeignError {
    /// What the user could do about it, if there is something.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            ForeignError::NotAllowed { .. } => Some(
                "put the files it names into one directory and allow that with --backing-dir DIR, or make it stand on \
                 its own with `qemu-img convert`",
            ),
            ForeignError::Qcow2 { .. } => Some(
                "`qemu-img check` says whether it is damaged; `qemu-img convert -O raw` reads kinds of qcow2 that are not \
                 read here (zstd, extended L2 entries, encryption)",
            ),
            _ => None,
        }
    }
}

//! Why a request fails; each variant is one status code of gRPC.

use std::io;
use std::path::{Path, PathBuf};

/// The failure of a request, or of the start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no snapshot of this name.
    #[error("snapshot {0:?} does not exist")]
    NotFound(String),
    /// There is a snapshot of this name.
    #[error("snapshot {0:?} already exists")]
    Exists(String),
    /// The snapshot is not in the state that the request needs.
    #[error("{0}")]
    State(String),
    /// The request is invalid.
    #[error("{0}")]
    Invalid(String),
    /// The request is valid, and this version does not do it.
    #[error("{0} is not supported yet")]
    Unsupported(String),
    /// A record on the disk cannot be used.
    #[error("cannot use {}: {problem}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },
    /// `bcow` failed.
    #[error(transparent)]
    Tool(#[from] bcow_tool::ToolError),
    /// The host failed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// A verb.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// Adds what failed, and where, to an error of the host.
pub trait At<T> {
    /// `action` is a verb, `path` its object.
    fn at(self, action: &'static str, path: &Path) -> Result<T, Error>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, Error> {
        self.map_err(|error| Error::Io {
            action,
            path: path.to_owned(),
            source: error.into(),
        })
    }
}

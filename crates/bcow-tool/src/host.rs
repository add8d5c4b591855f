//! Failures of the host.

use std::io;
use std::path::{Path, PathBuf};

/// A failed operation on a file or a directory.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {source}", path.display())]
pub struct HostError {
    /// A verb.
    action: &'static str,
    /// The file or directory.
    path: PathBuf,
    /// The cause.
    source: io::Error,
}

impl HostError {
    /// The kind of the cause.
    pub fn kind(&self) -> io::ErrorKind {
        self.source.kind()
    }
}

/// Adds what failed, and where, to an error of the host.
pub trait At<T> {
    /// `action` is a verb, `path` its object.
    fn at(self, action: &'static str, path: &Path) -> Result<T, HostError>;
}

impl<T, E: Into<io::Error>> At<T> for Result<T, E> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, HostError> {
        self.map_err(|error| HostError {
            action,
            path: path.to_owned(),
            source: error.into(),
        })
    }
}

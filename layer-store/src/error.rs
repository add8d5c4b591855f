//! Why something of the store fails.

use std::io;
use std::path::{Path, PathBuf};

use bcow_tool::ToolError;

/// A failure.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An option cannot be used, or the state of the machine does not allow the operation.
    #[error("{0}")]
    State(String),
    /// `bcow` failed.
    #[error(transparent)]
    Tool(#[from] ToolError),
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

/// A message of `bcow` on one line.
pub fn on_one_line(error: &impl ToString) -> String {
    let text = error.to_string();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    lines.join("; ")
}

//! Why something of the store fails.

use bcow_tool::{HostError, ToolError};

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
    #[error(transparent)]
    Host(#[from] HostError),
}

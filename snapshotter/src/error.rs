//! Why a request fails; each variant is one status code of gRPC.

use bcow_tool::{HostError, ToolError};

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
    /// A registry has not answered a question. containerd may repeat the request.
    #[error("{0}")]
    Unanswered(String),
    /// The layers of a snapshot cannot be mounted.
    #[error("{0}")]
    Mount(String),
    /// `bcow` failed.
    #[error(transparent)]
    Tool(#[from] ToolError),
    /// The host failed.
    #[error(transparent)]
    Host(#[from] HostError),
}

impl Error {
    /// The kinds of failures in the metrics.
    pub const KINDS: [&'static str; 7] = [
        "state",
        "invalid",
        "unsupported",
        "registry",
        "mount",
        "bcow",
        "host",
    ];

    /// The kind; `None` for answers that are no failures: containerd asks for snapshots that may
    /// not exist, and makes them twice.
    pub fn kind(&self) -> Option<&'static str> {
        Some(match self {
            Error::NotFound(_) | Error::Exists(_) => return None,
            Error::State(_) => "state",
            Error::Invalid(_) => "invalid",
            Error::Unsupported(_) => "unsupported",
            Error::Unanswered(_) => "registry",
            Error::Mount(_) => "mount",
            Error::Tool(_) => "bcow",
            Error::Host(_) => "host",
        })
    }
}

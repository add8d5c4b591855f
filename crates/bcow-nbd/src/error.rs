//! Errors of the server. Errors of single requests are not among them: clients get those as
//! replies.

use std::io;

use bcow_listen::ListenError;

/// An error with which a server fails to start or stops.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The list of exports is empty.
    #[error("the server has no export")]
    NoExport,
    #[error("two exports have the name {0:?}")]
    SameName(String),
    #[error("the name or the description of export {0:?} is longer than 4096 bytes")]
    NameTooLong(String),
    /// The host refused an operation.
    #[error("cannot {action}: {source}")]
    Host {
        /// The operation that failed, such as "wait for clients".
        action: String,
        /// The host's error.
        source: io::Error,
    },
    /// The server cannot listen.
    #[error(transparent)]
    Listen(#[from] ListenError),
    /// The environment variables for passed sockets are invalid.
    #[error("sockets passed by the service manager: {0}")]
    Activation(String),
    /// A certificate or a key is not usable.
    #[error("{path}: {problem}")]
    Tls {
        /// The file.
        path: String,
        /// The problem with the file.
        problem: String,
    },
}

impl Error {
    pub(crate) fn host(action: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Error::Host {
            action: action.into(),
            source: source.into(),
        }
    }
}

/// Why a session ended, if the client did not end it. Only for the log: the session can send no
/// more replies.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionEnd {
    /// The connection failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The client violated the protocol in a way that has no error reply.
    #[error("{0}")]
    Protocol(&'static str),
    #[error("TLS failed: {0}")]
    Tls(String),
    /// The client paused for too long in the middle of a message.
    #[error("timeout in the middle of a message")]
    TimedOut,
}

impl SessionEnd {
    /// Whether the server ended the session, rather than the client or the network.
    pub(crate) fn is_refusal(&self) -> bool {
        match self {
            SessionEnd::Io(_) => false,
            SessionEnd::Protocol(_) | SessionEnd::Tls(_) | SessionEnd::TimedOut => true,
        }
    }
}

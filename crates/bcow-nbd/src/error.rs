//! What can go wrong with serving, apart from requests that fail: those are answered.

use std::io;

/// Failure to begin or to go on serving.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is nothing to serve.
    #[error("there is no export")]
    NoExport,
    /// Two exports have one name.
    #[error("two exports have the name {0:?}")]
    SameName(String),
    /// The name of an export, or its description, is longer than the protocol allows.
    #[error("the name or the description of export {0:?} is longer than 4096 bytes")]
    NameTooLong(String),
    /// The host refused something that serving needs.
    #[error("cannot {action}: {source}")]
    Host {
        /// What was being done: "listen on /run/x".
        action: String,
        /// The host's error.
        source: io::Error,
    },
    /// Somebody else serves at this socket.
    #[error("cannot listen on {0}: a server is there already")]
    InUse(String),
    /// A file at the place of the socket is no socket.
    #[error("cannot listen on {0}: there is a file that is no socket")]
    NoSocket(String),
    /// What the environment says of passed sockets makes no sense.
    #[error("sockets passed by the service manager: {0}")]
    Activation(String),
    /// A certificate or key cannot be used.
    #[error("{path}: {problem}")]
    Tls {
        /// The file.
        path: String,
        /// What is wrong with it.
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

/// Why a session ended otherwise than by the client's wish. For the log: there is nobody to answer any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SessionEnd {
    /// The connection failed.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The client said something that cannot be answered.
    #[error("{0}")]
    Protocol(&'static str),
    /// TLS could not be begun.
    #[error("TLS failed: {0}")]
    Tls(String),
    /// The client kept the server waiting in the middle of something.
    #[error("it took too long in the middle of a message")]
    TimedOut,
}

impl SessionEnd {
    /// Whether the server ended it, rather than the client or what lies between.
    pub(crate) fn is_refusal(&self) -> bool {
        match self {
            SessionEnd::Io(_) => false,
            SessionEnd::Protocol(_) | SessionEnd::Tls(_) | SessionEnd::TimedOut => true,
        }
    }
}

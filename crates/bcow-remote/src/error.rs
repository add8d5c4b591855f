//! Errors of remote files.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A remote file could not be opened, read or written.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{place}: {problem}")]
pub struct RemoteError {
    /// The file, and the range if there is one: `bytes 0..16384 of https://host/image.bcow`. The
    /// text contains no query and no credentials.
    pub place: String,
    /// The cause.
    pub problem: Problem,
}

/// The cause of a [`RemoteError`].
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Problem {
    /// The text is not an address, or not one that bcow accepts.
    #[error("invalid address: {0}")]
    Address(String),
    /// The address, or that of a redirect, has the scheme `http`, which the caller does not allow.
    #[error("{0} is plain HTTP, which is not encrypted")]
    PlainHttp(String),
    /// The certificates with which servers are verified are missing on this machine, or cannot be
    /// read.
    #[error("cannot read the certificates that identify servers: {0}")]
    Certificates(String),
    /// No connection, or a connection that broke.
    #[error("{0}")]
    Connection(String),
    /// The connection is not safe: a wrong certificate, for example.
    #[error("TLS failed: {0}")]
    Tls(String),
    #[error("the server does not answer in TLS: it probably speaks plain HTTP")]
    NoTls,
    /// The server cannot be reached, and the cache does not have enough to open the file without
    /// the server.
    #[error("{problem}; {explanation}")]
    Offline {
        /// Why the server cannot be reached.
        problem: Box<Problem>,
        /// What is missing in the cache.
        explanation: String,
    },
    /// The manifest has no signature that the key of the caller verifies.
    #[error("the signature cannot be accepted: {0}")]
    Signature(String),
    /// The server did not answer in time, or stopped in the middle of an answer. Also if no request
    /// could begin in time, because too many others are running.
    #[error("the server did not answer within {} s", tenths(*.0))]
    Timeout(Duration),
    /// The server requires credentials, or does not accept those that were sent (401, 403).
    #[error("the server denies access (status {status}){}", detail(.explanation))]
    Denied {
        /// 401 or 403.
        status: u16,
        /// The reason, from the server or from the client. Empty if it is not known.
        explanation: String,
    },
    /// The server does not have the file (404, 410).
    #[error("the server does not have it (status {0})")]
    NotFound(u16),
    /// The file ends before the requested range (416).
    #[error("the file on the server ends before these bytes (status 416)")]
    OutOfRange,
    /// The server reports a failure that may be temporary (408, 425, 429, 500, 502, 503, 504).
    #[error("{}", busy(*.0))]
    Busy(u16),
    /// The registry takes no uploads (405).
    #[error("the registry takes no uploads (status 405): it is read-only, or a mirror")]
    ReadOnly,
    /// The repository does not have the manifest to which the upload attaches another one.
    #[error("the repository does not have the ordinary image to which it is attached")]
    NoSubject,
    /// A file of this name exists, and the upload must not replace it.
    #[error("there is a file of this name already")]
    Exists,
    #[error("the server refuses it (status {status}){}", detail(.explanation))]
    Refused {
        status: u16,
        /// The reason that the server gives. Empty if it gives none.
        explanation: String,
    },
    #[error("cannot read what is to be sent: {0}")]
    Content(String),
    /// The server sent a status that has no variant of its own.
    #[error("the server answers with status {0}")]
    Status(u16),
    /// The answer breaks the rules of HTTP, or does not fit the request.
    #[error("the server sent an invalid answer: {0}")]
    Answer(String),
    #[error("more than {0} redirects, one after the other")]
    Redirects(u32),
    /// The server sends whole files only, and a whole file cannot be used. The text says why.
    #[error("the server does not send parts of files (it ignores Range), and {0}")]
    NoRanges(String),
    /// There is no cache, or the cache does not keep the file.
    #[error("it is not kept in the cache: {0}")]
    NotKept(String),
    #[error("the bytes that the server sent do not match the Merkle tree of the file")]
    WrongBytes,
    /// The bytes of a mirror have another digest.
    #[error("the bytes that the server sent have the digest {0}")]
    WrongDigest(String),
    /// The server now has another file under this address.
    #[error("the file on the server has changed since it was opened")]
    Changed,
    /// The file is not a valid BCoW file.
    #[error("{0}")]
    #[serde(skip)]
    Format(bcow::format::FormatError),
    #[error("the file has no Merkle tree, without which bytes from a server cannot be checked")]
    NoTree,
    /// The file has another root hash than the caller requires.
    #[error("the root hash of the file is {found}, not {expected}")]
    WrongRoot {
        /// In hexadecimal.
        found: String,
        /// In hexadecimal.
        expected: String,
    },
}

/// Longest text of a server in a message.
const TEXT_CHARS: usize = 300;

/// A server's text, short enough for a message and without control characters.
pub(crate) fn printable(text: &str) -> String {
    let clean = text.chars().map(|c| if c.is_control() { ' ' } else { c });
    clean.take(TEXT_CHARS).collect()
}

fn busy(status: u16) -> String {
    match status {
        429 => "the server limits the number of requests (status 429)".to_owned(),
        status => format!("the server reports a temporary failure (status {status})"),
    }
}

/// Seconds, rounded to tenths.
fn tenths(time: Duration) -> f64 {
    (time.as_secs_f64() * 10.0).round() / 10.0
}

fn detail(text: &str) -> String {
    match text {
        "" => String::new(),
        text => format!(": {text}"),
    }
}

impl Problem {
    /// The values of [`Problem::kind`].
    pub const KINDS: [&str; 8] = [
        "busy",
        "changed",
        "connection",
        "denied",
        "not-found",
        "other",
        "timeout",
        "wrong-bytes",
    ];

    /// The kind, for counters. New versions may add kinds.
    pub fn kind(&self) -> &'static str {
        match self {
            Problem::Busy(_) => "busy",
            Problem::Changed => "changed",
            Problem::Connection(_) => "connection",
            Problem::Denied { .. } => "denied",
            Problem::NotFound(_) => "not-found",
            Problem::Offline { problem, .. } => problem.kind(),
            Problem::Timeout(_) => "timeout",
            Problem::WrongBytes | Problem::WrongDigest(_) => "wrong-bytes",
            _ => "other",
        }
    }

    /// Whether the server limits the number of requests.
    pub(crate) fn is_throttling(&self) -> bool {
        matches!(self, Problem::Busy(429 | 503))
    }

    /// Whether no server has given a complete answer. A refusal is an answer.
    pub(crate) fn is_unreachable(&self) -> bool {
        matches!(self, Problem::Connection(_) | Problem::Timeout(_))
    }

    /// Whether the same request may succeed after a while without any change by the user.
    pub fn may_pass(&self) -> bool {
        match self {
            Problem::Connection(_) | Problem::Timeout(_) | Problem::Busy(_) => true,
            Problem::Offline { problem, .. } => problem.may_pass(),
            _ => false,
        }
    }

    /// This problem, for a file that the cache cannot open without the server. `explanation` says
    /// what is missing in the cache.
    pub(crate) fn and_not_cached(self, explanation: &str) -> Problem {
        Problem::Offline {
            problem: Box::new(self),
            explanation: explanation.to_owned(),
        }
    }

    /// A denial with status 401 or 403. The explanation may be empty.
    pub(crate) fn denied(status: u16, explanation: impl Into<String>) -> Problem {
        Problem::Denied {
            status,
            explanation: explanation.into(),
        }
    }

    pub(crate) fn at(self, place: impl Into<String>) -> RemoteError {
        RemoteError {
            place: place.into(),
            problem: self,
        }
    }
}

impl RemoteError {
    /// The error of a remote file that caused `error`.
    pub fn below<'e>(error: &'e (dyn std::error::Error + 'static)) -> Option<&'e RemoteError> {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(found) = error.downcast_ref::<RemoteError>() {
                return Some(found);
            }
            // The source of an `io::Error` is that of the error inside.
            let inside = error
                .downcast_ref::<std::io::Error>()
                .and_then(|error| error.get_ref());
            next = match inside {
                Some(inside) => Some(inside),
                None => error.source(),
            };
        }
        None
    }
}

impl From<RemoteError> for std::io::Error {
    fn from(error: RemoteError) -> Self {
        let kind = match error.problem {
            Problem::WrongBytes | Problem::WrongDigest(_) | Problem::Changed => {
                std::io::ErrorKind::InvalidData
            }
            Problem::Timeout(_) => std::io::ErrorKind::TimedOut,
            Problem::NotFound(_) => std::io::ErrorKind::NotFound,
            _ => std::io::ErrorKind::Other,
        };
        std::io::Error::new(kind, error)
    }
}

/// A failed attempt, and whether another one may succeed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Fault {
    pub(crate) problem: Problem,
    pub(crate) is_transient: bool,
}

impl Problem {
    /// The fault of an attempt that is not repeated.
    pub(crate) fn permanent(self) -> Fault {
        Fault {
            problem: self,
            is_transient: false,
        }
    }

    /// The fault of an attempt that may succeed if it is repeated.
    pub(crate) fn transient(self) -> Fault {
        Fault {
            problem: self,
            is_transient: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_of_a_remote_file_is_found_below_others() {
        let error = Problem::Busy(503).at("https://host/image.bcow");
        let nested = std::io::Error::other(std::io::Error::from(error));
        let found = RemoteError::below(&nested).unwrap();
        assert_eq!(found.place, "https://host/image.bcow");
        assert!(found.problem.may_pass());
        assert!(RemoteError::below(&std::io::Error::other("x")).is_none());
    }

    #[test]
    fn only_some_problems_pass() {
        let timeout = Problem::Timeout(Duration::from_secs(10) / 3);
        assert!(timeout.to_string().ends_with("within 3.3 s"), "{timeout}");
        assert!(timeout.clone().may_pass());
        assert!(timeout.and_not_cached("x").may_pass());
        assert!(!Problem::Changed.may_pass());
        assert!(!Problem::Changed.and_not_cached("x").may_pass());
    }

    #[test]
    fn text_of_a_server_is_made_harmless() {
        assert_eq!(printable("a\u{1b}[2Jb"), "a [2Jb");
        assert_eq!(printable(&"x".repeat(5000)).len(), TEXT_CHARS);
    }
}

//! Why a process cannot listen.

use std::io;

/// The failure to listen at an address.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ListenError {
    /// The host refused it.
    #[error("cannot listen on {address}: {source}")]
    Host {
        /// The path of a Unix socket, or a TCP address.
        address: String,
        /// The host's error.
        source: io::Error,
    },
    #[error("cannot listen on {0}: another server listens there")]
    InUse(String),
    /// The path of the socket is an existing file of another type.
    #[error("cannot listen on {0}: the file exists and is not a socket")]
    NoSocket(String),
    /// The address of a page with metrics leads nowhere.
    #[error("{0}; an address is HOST:PORT or unix:PATH")]
    Address(String),
}

impl ListenError {
    pub(crate) fn host(address: impl ToString, source: io::Error) -> Self {
        ListenError::Host {
            address: address.to_string(),
            source,
        }
    }
}

//! The NBD server: serves block devices over the network block device protocol.
//!
//! The path of a request: a client connects to a [`Listener`], and [`Server`] starts a thread for
//! it. The handshake selects an [`Export`]. Then the workers of the connection receive requests,
//! execute them on a [`bcow::BlockDevice`] or [`bcow::WritableDevice`], and send replies.
//!
//! ```no_run
//! use std::{path::Path, sync::Arc};
//! use bcow_nbd::{Device, Export, Exports, Listener, Server, ServerOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let export = Export {
//!     name: "zeros".into(),
//!     description: "a mebibyte of zeros".into(),
//!     device: Device::ReadOnly(Arc::new(vec![0; 1 << 20])),
//! };
//! let server = Server::new(Exports::new(vec![export])?, ServerOptions::default())?;
//! // Serves until another thread calls `stop` of `server.stopper()`.
//! server.serve(&[Listener::unix(Path::new("/run/zeros.sock"))?])?;
//! # Ok(())
//! # }
//! ```

pub mod activation;
mod client;
mod connection;
mod context;
mod errno;
mod error;
mod execute;
mod export;
mod failures;
mod handshake;
mod limits;
pub mod netlink;
pub mod proto;
mod receive;
mod reply;
mod server;
mod shared;
mod socket;
mod sync;
mod tls;
mod turn;

pub use bcow_listen::{ListenAddress, Listener};
pub use error::Error;
pub use export::{Device, Export, Exports};
pub use failures::{FailedRequest, FailureReport};
pub use server::{Server, Stopper};
pub use shared::ServerOptions;
pub use tls::{Tls, TlsWhen};

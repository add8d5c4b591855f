//! Pools: each is a process that serves many mounts of one user, with one cache of decoded blocks.
//!
//! A pool listens at a socket in a directory that only its user can enter. [`protocol`] defines the
//! lines on that socket, and [`client`] sends requests: [`client::mount`] asks for a mount, by its
//! command line. [`start::run`] makes a pool, and [`restart()`] replaces its process.
//!
//! The supervisor of a pool starts the process that serves the mounts, holds what the next process
//! needs to take them over, and starts that process when the first has ended. It is this program
//! again, so the program must call [`start::run`] for the arguments `pool start ...`. The serving
//! process is in a sandbox, and has a starter. If mounts share files, that starts the opener.
//!
//! ```
//! use bcow_pool::protocol::{Request, decode_request, encode_request};
//!
//! let line = encode_request(&Request::Stop { force: true })?;
//! assert_eq!(decode_request(&line).unwrap(), Request::Stop { force: true });
//! # Ok::<(), serde_json::Error>(())
//! ```

mod asked;
pub mod client;
mod directory;
#[cfg(feature = "testing")]
mod fuzz;
mod given;
mod link;
mod opener;
pub mod protocol;
mod record;
mod restart;
mod server;
pub mod start;
pub mod stats;
mod supervisor;

pub use bcow_mounts::PoolName;
#[cfg(feature = "testing")]
pub use fuzz::fuzz_messages;
pub use restart::restart;

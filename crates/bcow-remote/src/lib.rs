//! BCoW files on HTTP servers and in registries, read in ranges.
//!
//! The path of a read through this crate: [`RemoteFile`] is the storage. It cuts the range into the
//! chunks of the file's Merkle tree, and looks for each chunk in memory and in the [`Cache`] on the
//! disk. Missing chunks are fetched from the server in one request, and checked against the tree
//! before use. [`Remote`] holds what all files share: connections, memory and the cache.
//!
//! **Trust.** The root of the tree comes from the caller (a pin), or from the header that the
//! server sends first. Every byte that [`RemoteFile`] returns matches that root, except in the two
//! header slots; of the chosen slot, all fields match it but slot_crc, generation and merkle_root
//! (the canonical header, spec section 9). So a server can withhold bytes, but cannot mix two
//! versions of a file, and with a pin cannot choose the bytes. A file without a Merkle tree is
//! refused. A [`Registry`] takes the root from the annotations of the manifest, so the manifest's
//! digest covers every byte.
//!
//! ```no_run
//! use bcow::Storage;
//! use bcow_remote::{Address, Cache, Expected, Options, Remote, Root};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let remote = Remote::new(Options {
//!     cache: Some(Cache::open("/var/cache/bcow".as_ref())?),
//!     ..Options::default()
//! })?;
//! let root: Root = "5a6f...".parse()?; // `bcow inspect` shows it
//! let pin = Expected { root, file_bytes: None };
//! let file = remote.open(&Address::parse("https://images.example/debian.bcow")?, Some(pin))?;
//! let mut header = [0; 4096];
//! file.read_at(0, &mut header)?;
//! # Ok(())
//! # }
//! ```

mod address;
mod ahead;
mod auth;
mod cache;
mod client;
mod cosign;
mod deadline;
mod demand;
mod download;
mod error;
mod fetcher;
mod fetcher_process;
mod figures;
mod file;
#[cfg(feature = "testing")]
mod fuzz;
mod in_flight;
mod lock;
mod mirrors;
mod refusal;
mod registry;
mod remote;
mod resolver;
mod retry_budget;
mod s3;
mod s3_upload;
mod servers;
mod shared;
mod source;
mod tree;
mod upload;

pub use address::Address;
pub use ahead::{Ahead, Complete, Part};
pub use auth::{Credentials, Keychain};
pub use cache::{Cache, CacheEntry, CacheProblem, EntryKind, Prune, Pruned, Verified};
pub use cosign::PublicKey;
pub use download::Download;
pub use error::{Problem, RemoteError};
pub use fetcher::{Fetcher, Sockets};
pub use fetcher_process::Setup;
pub use figures::{Figures, ServerFigures};
pub use file::{Presence, RemoteFile, Warm};
#[cfg(feature = "testing")]
pub use fuzz::fuzz_answer;
pub use registry::{Reference, Registry};
pub use remote::{Remote, WeakRemote};
pub use s3::{S3, S3Credentials, S3Keychain, S3Name};
pub use s3_upload::{Replace, S3Content, S3Upload};
pub use shared::Options;
pub use tree::{Expected, Root};
pub use upload::{Open, Pushed, Upload};

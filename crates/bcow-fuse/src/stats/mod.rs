//! What a mount knows of itself: for `bcow stats`, and for Prometheus.

pub mod document;
pub mod latency;
mod prometheus;

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use bcow::BlockCache;
use bcow_union::fs::UnionFs;
use rustix::io::Errno;

pub use document::Document;
pub use latency::{Latencies, Operation};

use document::{Cache, Image, OperationFigures, Process, Upper};
use latency::Running;

/// The attribute of a mount's root that holds its [`Document`], as JSON. It is not listed.
pub const STATS_XATTR: &str = "user.bcow.stats";

/// Largest attribute that the kernel passes on (XATTR_SIZE_MAX).
pub const MOST_XATTR_BYTES: usize = 64 << 10;

/// What is mounted.
#[derive(Debug, Clone, Default)]
pub struct About {
    /// The image, as its user calls it.
    pub image: OsString,
    /// What it is recognised by.
    pub identity: [u8; 32],
    /// Its decoded blocks.
    pub cache: BlockCache,
}

/// What a mount counts. The default is of something without a name. Its requests are timed by [`MountStats::time`].
pub struct MountStats {
    about: About,
    started: Instant,
    latencies: Latencies,
    union: OnceLock<Writable>,
}

/// What a writable mount has beyond others.
struct Writable {
    union: Arc<UnionFs>,
    /// Where its end is told.
    outcome: RawFd,
}

impl Default for MountStats {
    fn default() -> Self {
        MountStats::new(About::default())
    }
}

impl MountStats {
    /// Of a mount that starts now.
    pub fn new(about: About) -> Self {
        MountStats {
            about,
            started: Instant::now(),
            latencies: Latencies::default(),
            union: OnceLock::new(),
        }
    }

    /// The mount is writable, and this descriptor tells how that ends.
    pub(crate) fn set_union(&self, union: Arc<UnionFs>, outcome: RawFd) {
        // There is one per mount.
        let _ = self.union.set(Writable { union, outcome });
    }

    /// Times a request until the result is dropped.
    pub(crate) fn time(&self, operation: Operation) -> Running<'_> {
        self.latencies.time(operation)
    }

    /// All of it at this moment.
    pub fn document(&self) -> Document {
        Document {
            schema: document::SCHEMA.to_owned(),
            image: Image {
                name: self.about.image.to_string_lossy().into_owned(),
                identity: hex(&self.about.identity),
            },
            process: Process::this(self.started.elapsed()),
            cache: Cache::of(&self.about.cache.figures()),
            upper: self
                .union
                .get()
                .map(|Writable { union, outcome }| Upper::of(union.report(), *outcome)),
            operations: Operation::ALL
                .into_iter()
                .filter_map(|operation| {
                    OperationFigures::of(operation, &self.latencies.counts(operation))
                })
                .collect(),
        }
    }

    /// As the value of [`STATS_XATTR`].
    pub(crate) fn for_xattr(&self) -> Result<Vec<u8>, Errno> {
        let json = serde_json::to_vec(&self.document()).map_err(|_| Errno::IO)?;
        match json.len() <= MOST_XATTR_BYTES {
            true => Ok(json),
            false => Err(Errno::TOOBIG),
        }
    }

    /// In the text format of Prometheus.
    pub fn for_prometheus(&self) -> String {
        prometheus::text(&self.document())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

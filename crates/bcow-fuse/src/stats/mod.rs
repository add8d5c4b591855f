//! What a mount knows of itself: for `bcow stats`, and for Prometheus.

pub mod document;
pub mod latency;
mod prometheus;

use std::cell::RefCell;
use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use bcow::BlockCache;
use bcow_union::NodeId;
use bcow_union::errors::{ErrorLog, Subject};
use bcow_union::fs::UnionFs;
use rustix::io::Errno;

pub use document::Document;
pub use latency::{Latencies, Operation};

use document::{Cache, Errors, Image, OperationFigures, Process, Upper};
use latency::Running;

/// The attribute of a mount's root that holds its [`Document`], as JSON. It is not listed.
pub const STATS_XATTR: &str = "user.bcow.stats";

/// Largest attribute that the kernel passes on (XATTR_SIZE_MAX).
pub const MOST_XATTR_BYTES: usize = 64 << 10;

/// What is mounted.
#[derive(Debug, Clone, Default)]
pub struct About {
    /// What the kernel lists as the source of the mount.
    pub image: OsString,
    /// The image: its file, or its place in a layout.
    pub file: PathBuf,
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
    mounted: OnceLock<Mounted>,
}

/// What is known once it is mounted.
struct Mounted {
    mountpoint: PathBuf,
    errors: Arc<ErrorLog>,
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
            mounted: OnceLock::new(),
        }
    }

    /// The mount is writable, and this descriptor tells how that ends.
    pub(crate) fn set_union(&self, union: Arc<UnionFs>, outcome: RawFd) {
        // There is one per mount.
        let _ = self.union.set(Writable { union, outcome });
    }

    /// It is mounted here, and this is where its errors are counted and logged, which from now on say what they are of.
    pub(crate) fn set_mounted(&self, mountpoint: &Path, errors: &Arc<ErrorLog>) {
        errors.set_subject(Subject {
            image: self.about.file.display().to_string(),
            mountpoint: mountpoint.display().to_string(),
        });
        // There is one per mount.
        let _ = self.mounted.set(Mounted {
            mountpoint: mountpoint.to_owned(),
            errors: Arc::clone(errors),
        });
    }

    /// Times a request for a node, which this thread answers, until the result is dropped.
    pub(crate) fn time(self: &Arc<Self>, operation: Operation, node: NodeId) -> Running<'_> {
        ANSWERING.with_borrow_mut(|answering| match answering {
            Some(answering) if answering.stats.as_ptr() == Arc::as_ptr(self) => {
                (answering.operation, answering.node) = (operation, node);
            }
            // A thread serves one mount, so that this is seldom.
            answering => {
                *answering = Some(Answering {
                    stats: Arc::downgrade(self),
                    operation,
                    node,
                });
            }
        });
        // What an earlier request of this thread reported is not this one's.
        ErrorLog::take_reported();
        self.latencies.time(operation)
    }

    /// All of it at this moment.
    pub fn document(&self) -> Document {
        let mounted = self.mounted.get();
        Document {
            schema: document::SCHEMA.to_owned(),
            image: Image {
                name: self.about.image.to_string_lossy().into_owned(),
                identity: hex(&self.about.identity),
                file: self.about.file.to_string_lossy().into_owned(),
            },
            mountpoint: mounted.map_or_else(String::new, |mounted| {
                mounted.mountpoint.to_string_lossy().into_owned()
            }),
            process: Process::this(self.started.elapsed()),
            cache: Cache::of(&self.about.cache.figures()),
            upper: self
                .union
                .get()
                .map(|Writable { union, outcome }| Upper::of(union.report(), *outcome)),
            errors: mounted.map_or_else(Errors::none, |mounted| Errors::of(&mounted.errors)),
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
        let mut document = self.document();
        loop {
            let json = serde_json::to_vec(&document).map_err(|_| Errno::IO)?;
            if json.len() <= MOST_XATTR_BYTES {
                return Ok(json);
            }
            // Long paths; the last error is what matters most.
            if document.errors.recent.pop().is_none() {
                return Err(Errno::TOOBIG);
            }
        }
    }

    /// In the text format of Prometheus.
    pub fn for_prometheus(&self) -> String {
        prometheus::text(&self.document())
    }
}

/// The request that a thread answers.
struct Answering {
    stats: Weak<MountStats>,
    operation: Operation,
    node: NodeId,
}

thread_local! {
    /// What this thread answers, or answered last.
    static ANSWERING: RefCell<Option<Answering>> = const { RefCell::new(None) };
}

/// To be called before the request that this thread is answering is answered with an error: who sees the error and asks for
/// the statistics finds it there.
pub(crate) fn note_failure(errno: Errno) {
    ANSWERING.with_borrow(|answering| {
        if let Some(answering) = answering
            && let Some(stats) = answering.stats.upgrade()
        {
            stats.failed(answering.operation, answering.node, errno);
        }
    });
}

impl MountStats {
    fn failed(&self, operation: Operation, node: NodeId, errno: Errno) {
        // What failed below, where more is known of the cause, was reported there. An image reports all that it cannot do.
        if ErrorLog::take_reported() {
            return;
        }
        if let Some(Writable { union, .. }) = self.union.get() {
            union.request_failed(node, operation.action(), errno);
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

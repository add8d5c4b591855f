//! Statistics of a mount, for `bcow stats` and for Prometheus.

pub mod document;
mod latency;
mod prometheus;

use std::cell::RefCell;
use std::ffi::OsString;
use std::fmt;
use std::fs::Metadata;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use bcow::format::hex;
use bcow::operation::LiveDisk;
use bcow::{BlockCache, Disk};
use bcow_union::NodeId;
use bcow_union::errors::{ErrorLog, Subject};
use bcow_union::fs::UnionFs;
use rustix::io::Errno;

use crate::disk::Barriers;

pub use document::{Document, FileSharing, ServedBy};
pub(crate) use latency::Operation;
pub use prometheus::text_of_pool;

use document::{DiskFigures, Errors, Image, OperationFigures, Process, Remote, Upper};
use latency::Latencies;
pub(crate) use latency::Running;

/// The extended attribute of the root directory that contains the [`Document`] as JSON. `listxattr`
/// does not list it.
pub const STATS_XATTR: &str = "user.bcow.stats";

/// Largest attribute value that the kernel passes on, in bytes (XATTR_SIZE_MAX).
pub const MAX_XATTR_BYTES: usize = 64 << 10;

/// The image that is mounted.
#[derive(Debug, Clone, Default)]
pub struct About {
    /// The source of the mount in the kernel's list.
    pub image: OsString,
    /// The image file, or the path of the image in a layout.
    pub file: PathBuf,
    /// The identity of the image.
    pub identity: [u8; 32],
    /// The cache of decoded blocks.
    pub cache: BlockCache,
    /// The driver, and the reason for it.
    pub driver: Option<ServedBy>,
    /// The files of the image that are on other machines.
    pub remote: Option<RemoteReport>,
    /// The pool whose process serves the mount. The process then has other mounts, which share the
    /// cache.
    pub pool: Option<String>,
    /// The trace that the process writes when the mount has ended.
    pub trace: Option<PathBuf>,
}

/// Returns the counters of files on other machines at the moment of the call.
#[derive(Clone)]
pub struct RemoteReport(Arc<dyn Fn() -> Remote + Send + Sync>);

impl RemoteReport {
    /// Counters that `report` returns. It is called for each reader of the statistics.
    pub fn new(report: impl Fn() -> Remote + Send + Sync + 'static) -> Self {
        RemoteReport(Arc::new(report))
    }
}

impl fmt::Debug for RemoteReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("RemoteReport")
    }
}

/// The counters of a mount. The default is for an image without a name. [`MountStats::time`]
/// measures the requests.
pub struct MountStats {
    about: About,
    /// The image file when it was mounted.
    file: Option<FileMark>,
    started: Instant,
    latencies: Latencies,
    union: OnceLock<Writable>,
    disk: OnceLock<DiskUse>,
    mounted: OnceLock<Mounted>,
    sharing: OnceLock<FileSharing>,
    sandbox: OnceLock<Vec<String>>,
}

/// Identifies a file, and a state of its content.
#[derive(PartialEq)]
struct FileMark {
    device_and_inode: (u64, u64),
    size_and_mtime: (u64, i64, i64),
}

impl FileMark {
    /// `None` without a regular file at this path.
    fn of(path: &Path) -> Option<Self> {
        let file = path.metadata().ok().filter(Metadata::is_file)?;
        Some(FileMark {
            device_and_inode: (file.dev(), file.ino()),
            size_and_mtime: (file.size(), file.mtime(), file.mtime_nsec()),
        })
    }
}

/// Known once the image is mounted.
struct Mounted {
    mountpoint: PathBuf,
    errors: Arc<ErrorLog>,
}

/// The disk of a mount with the kernel driver.
pub(crate) struct DiskUse {
    /// The disk, as long as it is open; never for an address space that does not change.
    pub(crate) disk: Weak<LiveDisk>,
    pub(crate) path: PathBuf,
    /// The upper that the disk belongs to.
    pub(crate) upper: Option<PathBuf>,
    /// Size of the address space in bytes.
    pub(crate) size: u64,
    pub(crate) filesystem: &'static str,
    pub(crate) loop_device: PathBuf,
    pub(crate) barriers: Barriers,
    /// The descriptor of the pipe for the outcome.
    pub(crate) outcome: RawFd,
}

/// Only for writable mounts.
struct Writable {
    union: Arc<UnionFs>,
    /// The descriptor of the pipe for the outcome.
    outcome: RawFd,
}

impl Default for MountStats {
    fn default() -> Self {
        MountStats::new(About::default())
    }
}

impl MountStats {
    /// The counters of a mount that starts now.
    pub fn new(about: About) -> Self {
        MountStats {
            file: FileMark::of(&about.file),
            about,
            started: Instant::now(),
            latencies: Latencies::default(),
            union: OnceLock::new(),
            disk: OnceLock::new(),
            mounted: OnceLock::new(),
            sharing: OnceLock::new(),
            sandbox: OnceLock::new(),
        }
    }

    /// Records that the mount is writable, and the descriptor on which the process reports its
    /// outcome.
    pub(crate) fn set_union(&self, union: Arc<UnionFs>, outcome: RawFd) {
        // Called once per mount.
        let _ = self.union.set(Writable { union, outcome });
    }

    /// Records whether the mount shares files with other mounts.
    pub fn set_sharing(&self, sharing: FileSharing) {
        // Called once per mount.
        let _ = self.sharing.set(sharing);
    }

    /// Records the parts of the sandbox of the process.
    pub fn set_sandbox(&self, parts: Vec<String>) {
        // Called once per mount.
        let _ = self.sandbox.set(parts);
    }

    /// Whether the kernel reads and writes whole files of the upper itself; `None` without an
    /// upper.
    fn passthrough(&self) -> Option<FileSharing> {
        let union = &self.union.get()?.union;
        let shared = self.sharing.get()?.reason.clone();
        let reason = shared.or_else(|| union.why_not_passed().map(str::to_owned));
        let on = reason.is_none();
        Some(FileSharing { on, reason })
    }

    /// Records the disk of a mount with the kernel driver.
    pub(crate) fn set_disk(&self, disk: DiskUse) {
        // Called once per mount.
        let _ = self.disk.set(disk);
    }

    /// Records the mountpoint and the error log. The log from now on names the image and the
    /// mountpoint in its messages.
    pub(crate) fn set_mounted(&self, mountpoint: &Path, errors: &Arc<ErrorLog>) {
        errors.set_subject(Subject {
            image: self.about.file.display().to_string(),
            mountpoint: mountpoint.display().to_string(),
        });
        // Called once per mount.
        let _ = self.mounted.set(Mounted {
            mountpoint: mountpoint.to_owned(),
            errors: Arc::clone(errors),
        });
    }

    /// Measures a request for `node` that this thread answers, until the result is dropped.
    pub(crate) fn time(self: &Arc<Self>, operation: Operation, node: NodeId) -> Running<'_> {
        ANSWERING.with_borrow_mut(|answering| match answering {
            Some(answering) if answering.stats.as_ptr() == Arc::as_ptr(self) => {
                (answering.operation, answering.node) = (operation, node);
            }
            // Rare: a thread serves only one mount.
            answering => {
                *answering = Some(Answering {
                    stats: Arc::downgrade(self),
                    operation,
                    node,
                });
            }
        });
        // Clear the mark that an earlier request of this thread left.
        ErrorLog::take_reported();
        self.latencies.time(operation)
    }

    /// The pool whose process serves the mount.
    pub(crate) fn pool(&self) -> Option<&str> {
        self.about.pool.as_deref()
    }

    /// The number of requests that were answered.
    pub fn requests(&self) -> u64 {
        Operation::all()
            .map(|operation| self.latencies.counts(operation).count())
            .sum()
    }

    /// Releases memory that only speeds up requests.
    pub(crate) fn release_memory(&self) {
        if let Some(disk) = self.disk.get().and_then(|used| used.disk.upgrade()) {
            // The next flush meets an error again.
            let _ = disk.with(Disk::release_memory);
        }
        self.about.cache.release();
    }

    /// All statistics at this moment.
    pub fn document(&self) -> Document {
        let mounted = self.mounted.get();
        Document {
            schema: document::SCHEMA.to_owned(),
            image: Image {
                name: self.about.image.to_string_lossy().into_owned(),
                identity: hex(&self.about.identity),
                file: self.about.file.to_string_lossy().into_owned(),
                file_state: self.file_state().map(str::to_owned),
            },
            mountpoint: mounted.map_or_else(String::new, |mounted| {
                mounted.mountpoint.to_string_lossy().into_owned()
            }),
            process: Process::this(self.started.elapsed()),
            cache: self.about.cache.figures(),
            upper: self.union.get().map(|Writable { union, outcome }| Upper {
                outcome_descriptor: Some(*outcome),
                ..union.report()
            }),
            disk: self.disk.get().map(DiskFigures::of),
            remote: self.about.remote.as_ref().map(|report| report.0()),
            driver: self.about.driver.clone(),
            share: self.sharing.get().cloned(),
            passthrough: self.passthrough(),
            sandbox: self.sandbox.get().cloned().unwrap_or_default(),
            pool: self.about.pool.clone(),
            trace: self
                .about
                .trace
                .as_ref()
                .map(|path| path.to_string_lossy().into_owned()),
            errors: mounted.map_or_else(Errors::none, |mounted| Errors::of(&mounted.errors)),
            // The reader's own request is one of them.
            in_flight: Some(self.latencies.in_flight().saturating_sub(1)),
            operations: Operation::all()
                .filter_map(|operation| {
                    OperationFigures::of(operation, &self.latencies.counts(operation))
                })
                .collect(),
        }
    }

    /// See [`Image::file_state`].
    fn file_state(&self) -> Option<&'static str> {
        let before = self.file.as_ref()?;
        let path = &self.about.file;
        // A mount itself changes its disk.
        let is_own_disk = |disk: &DiskUse| disk.path == *path && disk.disk.strong_count() > 0;
        if self.disk.get().is_some_and(is_own_disk) {
            return None;
        }
        Some(match FileMark::of(path) {
            None => "removed",
            Some(now) if now.device_and_inode != before.device_and_inode => "replaced",
            Some(now) if now != *before => "changed",
            Some(_) => "same",
        })
    }

    /// The document as the value of [`STATS_XATTR`].
    pub(crate) fn for_xattr(&self) -> Result<Vec<u8>, Errno> {
        let mut document = self.document();
        loop {
            let json = serde_json::to_vec(&document).map_err(|_| Errno::IO)?;
            if json.len() <= MAX_XATTR_BYTES {
                return Ok(json);
            }
            // Paths can make the document too long. Drop the oldest error first: the last error
            // matters most.
            if document.errors.recent.pop().is_none() {
                return Err(Errno::TOOBIG);
            }
        }
    }

    /// The statistics in the text format of Prometheus.
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
    /// The request that this thread answers, or answered last.
    static ANSWERING: RefCell<Option<Answering>> = const { RefCell::new(None) };
}

/// Records the failure of the request that this thread answers. Call this before the error is sent,
/// so that a program that sees the error finds it in the statistics.
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
        // The layer below has reported this error already, with more detail on its cause. An image
        // reports all its errors itself.
        if ErrorLog::take_reported() {
            return;
        }
        if let Some(Writable { union, .. }) = self.union.get() {
            union.request_failed(node, operation.action(), errno);
        }
    }
}

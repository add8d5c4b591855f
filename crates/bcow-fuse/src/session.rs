//! A mounted image, from the mount to its end.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use bcow_union::UpperError;
use bcow_union::errors::ErrorLog;
use bcow_union::fs::UnionFs;
use fuser::InitFlags;
use parking_lot::Mutex;

use crate::adapter::readonly::ReadOnly;
use crate::adapter::sharing::Sharing;
use crate::adapter::writable::{Gate, Writable};
use crate::error::MountError;
use crate::fs::ImageFs;
use crate::idle;
use crate::mount::{self, Mount};
use crate::mounter::Mounter;
use crate::options::{MountOptions, Writing};
use crate::outcome::Outcome;
use crate::request_threads::RequestThreads;
use crate::shared::SharedImage;
use crate::signals::Signals;
use crate::stats::MountStats;
use crate::takeover::{self, Handover, duplicate};

pub use crate::process::{abort_on_panic, show_closing};
pub use crate::unmount::Unmounted;
pub use bcow_mount::CLOSING;

/// The content of a mount.
pub enum Content {
    /// An image, read-only.
    Image(ImageFs),
    /// An image with an upper. The session closes the upper when the mount has ended.
    Union(Arc<UnionFs>),
    /// The same, and other mounts of the process share the files that it does not change.
    Shared(Arc<UnionFs>, SharedImage),
}

impl From<ImageFs> for Content {
    fn from(fs: ImageFs) -> Self {
        Content::Image(fs)
    }
}

impl From<Arc<UnionFs>> for Content {
    fn from(fs: Arc<UnionFs>) -> Self {
        Content::Union(fs)
    }
}

/// A mount whose requests are not served yet. Dropping it unmounts.
pub struct Session {
    // Dropped first. This closes our end of the connection, so that the unmount does not wait for
    // replies of this process.
    fuse: Serve,
    mount: Arc<Mutex<Mount>>,
    /// The upper to close at the end.
    union: Option<Closing>,
    /// The flags of the protocol that are in use.
    agreed: Arc<AtomicU64>,
    gate: Gate,
    /// The slots of its image and of the layers, if it shares files.
    slots: Vec<u32>,
    stats: Arc<MountStats>,
}

/// Closes an upper and writes the result to the outcome pipe. Several threads may close at the same
/// time.
struct Closing {
    union: Arc<UnionFs>,
    outcome: Arc<Outcome>,
}

/// Answers requests until the mount is gone.
type Serve = Box<dyn FnOnce() -> io::Result<()> + Send>;

/// Closes the upper or the disk of a session from another thread, before the process ends.
#[derive(Clone)]
pub struct Closer(Arc<dyn Fn() -> Result<(), MountError> + Send + Sync>);

/// Stops a [`Session`] with an upper from another thread, for a process that takes it over.
#[derive(Debug, Clone)]
pub struct Stopper {
    union: Weak<UnionFs>,
    gate: Gate,
}

/// Takes snapshots of the upper of a [`Session`] from another thread.
#[derive(Debug, Clone)]
pub struct Snapshotter {
    union: Weak<UnionFs>,
    gate: Gate,
}

/// Ends a session from another thread.
#[derive(Clone)]
pub struct Unmounter(Arc<dyn Fn() -> Unmounted + Send + Sync>);

impl Session {
    /// Mounts `content` at `target`. [`Session::serve`] will serve it with `threads` threads (at
    /// least one), which count their requests in `stats`.
    ///
    /// Once this returns, programs can use the mount. Their requests wait for [`Session::serve`].
    pub fn mount(
        content: impl Into<Content>,
        stats: Arc<MountStats>,
        target: &Path,
        options: &MountOptions,
        threads: usize,
    ) -> Result<Self, MountError> {
        let content = content.into();
        let mut options = options.clone();
        options.settle(content.writing())?;
        let (mount, connection) = mount::mount(target, &options)?;
        let new = (connection, None);
        Self::on(content, stats, mount, new, None, &options, threads)
    }

    /// Takes over a mount whose process has ended. The content and the options must be those of
    /// that process; a union must have taken over its ledger. The kernel sends the requests again
    /// that it has not answered. On failure, the mount is unmounted.
    pub fn take_over(
        content: impl Into<Content>,
        stats: Arc<MountStats>,
        handover: Handover,
        options: &MountOptions,
        threads: usize,
    ) -> Result<Self, MountError> {
        let agreed = handover.agreed;
        let mount = Mount::of(handover.target, handover.device, handover.connection);
        // On failure, the content is dropped before the mount: an unmount needs a descriptor.
        let content = content.into();
        let connection = (duplicate(mount.connection())?, Some(agreed));
        let mut options = options.clone();
        options.settle(content.writing())?;
        let outcome = handover.outcome;
        let session = Self::on(
            content, stats, mount, connection, outcome, &options, threads,
        )?;
        takeover::resend(session.mount.lock().connection())?;
        Ok(session)
    }

    /// A session on a connection to the kernel, for which another process has agreed on flags.
    fn on(
        content: Content,
        stats: Arc<MountStats>,
        mount: Mount,
        (connection, before): (OwnedFd, Option<u64>),
        outcome: Option<OwnedFd>,
        options: &MountOptions,
        threads: usize,
    ) -> Result<Self, MountError> {
        stats.set_mounted(mount.target(), content.errors());
        let (request_threads, config) = RequestThreads::with_settings(threads);
        let (agreed, kept_stats) = (Arc::default(), Arc::clone(&stats));
        let gate = Gate::default();
        let seen = Arc::clone(&agreed);
        let mut slots = Vec::new();
        let (content, sharing) = match content {
            Content::Shared(union, image) => {
                slots = image.slots();
                let sharing = Sharing::new(image, duplicate(connection.as_fd())?);
                (Content::Union(union), Some(sharing))
            }
            content => (content, None),
        };
        let (fuse, union): (Serve, _) = match content {
            Content::Image(fs) => {
                let adapter = ReadOnly::new(fs, stats, request_threads, options, seen);
                let session = takeover::session(adapter, connection, before, config, None)?;
                (Box::new(|| session.run()), None)
            }
            Content::Union(union) | Content::Shared(union, _) => {
                let outcome = Arc::new(Outcome::of(outcome)?);
                stats.set_union(Arc::clone(&union), outcome.descriptor());
                let (fs, gate) = (Arc::clone(&union), gate.clone());
                let adapter =
                    Writable::new(fs, stats, request_threads, options, gate, seen, sharing);
                let first = adapter.first_messages();
                let session =
                    takeover::session(adapter, connection, before, config, first.as_deref())?;
                let closing = Closing { union, outcome };
                let run = || {
                    let ended = session.run();
                    if let Some(first) = first {
                        // If a thread could not be started, the others wait for it.
                        first.end();
                    }
                    ended
                };
                (Box::new(run), Some(closing))
            }
        };
        let shares = agreed.load(Ordering::Relaxed) & InitFlags::FUSE_PASSTHROUGH.bits() != 0;
        Ok(Session {
            fuse,
            mount: Arc::new(Mutex::new(mount)),
            union,
            agreed,
            gate,
            slots: if shares { slots } else { Vec::new() },
            stats: kept_stats,
        })
    }

    /// What another process needs to take the mount over when this process has ended. `None` for a
    /// mount with an upper that has no ledger, and on a kernel before Linux 6.9.
    pub fn hand_over(&self) -> Result<Option<Handover>, MountError> {
        let (ledger, upper, outcome) = match &self.union {
            None => (None, None, None),
            Some(closing) if closing.union.ledger().is_none() => return Ok(None),
            Some(closing) => {
                let upper = closing.union.hold_upper();
                let upper = upper.map_err(MountError::process("duplicate a descriptor"))?;
                let outcome = closing.outcome.hand_over()?;
                (self.ledger()?, Some(upper), Some(outcome))
            }
        };
        let mount = self.mount.lock();
        if !takeover::resend(mount.connection())? {
            return Ok(None);
        }
        Ok(Some(Handover {
            connection: duplicate(mount.connection())?,
            target: mount.target().to_owned(),
            device: mount.device().map(str::to_owned),
            agreed: self.agreed.load(Ordering::Relaxed),
            ledger,
            upper,
            outcome,
        }))
    }

    /// The slots of the image and of its layers; none if the mount shares no files: the kernel may
    /// refuse that.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// The ledger of the upper, for a process that takes the mount over.
    pub fn ledger(&self) -> Result<Option<OwnedFd>, MountError> {
        let union = self.union.as_ref().map(|closing| &closing.union);
        let ledger = union.and_then(|union| union.ledger());
        ledger.map(duplicate).transpose()
    }

    /// The mountpoint with symbolic links resolved, and the mount's device number if the kernel
    /// lists the mount.
    pub fn place(&self) -> (PathBuf, Option<String>) {
        let mount = self.mount.lock();
        (mount.target().to_owned(), mount.device().map(str::to_owned))
    }

    /// Leaves the unmount to a mounter from now on, and with an upper also the look at the
    /// processes that use the mount.
    pub fn unmount_by(&self, mounter: Mounter) -> Result<(), MountError> {
        let has_upper = self.union.is_some();
        self.mount.lock().unmount_by(mounter, has_upper)
    }

    /// A handle that unmounts while the session is being served.
    pub fn unmounter(&self) -> Unmounter {
        let mount = Arc::clone(&self.mount);
        Unmounter::new(move || mount.lock().unmount())
    }

    /// A handle that closes the upper while the session is being served; `None` without an upper.
    pub fn closer(&self) -> Option<Closer> {
        let closing = self.union.as_ref()?;
        let union = Arc::downgrade(&closing.union);
        let outcome = Arc::downgrade(&closing.outcome);
        Some(Closer::new(move || {
            match (union.upgrade(), outcome.upgrade()) {
                (Some(union), Some(outcome)) => Closing { union, outcome }.close(|| {}),
                // The session has ended.
                _ => Ok(()),
            }
        }))
    }

    /// A handle that stops the session for a process that takes it over; `None` without an upper,
    /// or if no process can.
    pub fn stopper(&self) -> Option<Stopper> {
        let closing = self.union.as_ref()?;
        closing.union.ledger()?;
        Some(Stopper {
            union: Arc::downgrade(&closing.union),
            gate: self.gate.clone(),
        })
    }

    /// A handle that takes snapshots of the upper while the session is being served; `None` without
    /// an upper.
    pub fn snapshotter(&self) -> Option<Snapshotter> {
        let closing = self.union.as_ref()?;
        Some(Snapshotter {
            union: Arc::downgrade(&closing.union),
            gate: self.gate.clone(),
        })
    }

    /// Answers requests until the mount is gone. Then the written data is durable, as far as the
    /// union's options require it.
    pub fn serve(self) -> Result<(), MountError> {
        self.serve_and(|| {})
    }

    /// As [`Session::serve`]; calls `let_go` when the written data is durable, or if the mount
    /// cannot be served. From then on, no other process must take the mount over: who learns that
    /// the upper is complete can replace it.
    pub(crate) fn serve_and(self, let_go: impl FnOnce()) -> Result<(), MountError> {
        if let Some(closing) = &self.union
            && let Err(error) = closing.union.start_background()
        {
            let_go();
            return Err(MountError::process("start a thread")(error));
        }
        idle::watch(&self.stats);
        drop(self.stats);
        let served = (self.fuse)().map_err(MountError::Session);
        self.mount.lock().let_mounter_end();
        let Some(union) = self.union else {
            let_go();
            return served;
        };
        show_closing();
        union.close(let_go)?;
        served
    }

    /// Like [`Session::serve`], but SIGTERM, SIGINT and, in the foreground, SIGHUP unmount. If
    /// files are in use, the mount is detached and the process serves it until they are closed. A
    /// second signal closes the upper and ends this process at once.
    pub fn serve_until_signal(self, signals: Signals) -> Result<(), MountError> {
        let (target, _) = self.place();
        let (unmounter, closer) = (self.unmounter(), self.closer());
        let close = move || closer.map_or(Ok(()), |closer| closer.close());
        signals.end_mount(target, move || unmounter.unmount(), close)?;
        self.serve()
    }
}

impl Closing {
    /// Calls `let_go` before it writes the result, and while the upper is locked.
    fn close(&self, let_go: impl FnOnce()) -> Result<(), MountError> {
        let closed = self.union.close();
        let_go();
        if closed.is_ok() && self.union.is_removed() {
            self.outcome.report_removed();
            return Err(MountError::Removed(self.union.upper_path().to_owned()));
        }
        self.outcome.report(closed);
        closed.map_err(|errno| MountError::Close {
            upper: self.union.upper_path().to_owned(),
            source: errno.into(),
        })
    }
}

impl Closer {
    pub(crate) fn new(close: impl Fn() -> Result<(), MountError> + Send + Sync + 'static) -> Self {
        Closer(Arc::new(close))
    }

    /// Makes the written data durable, as the end of the session does. The caller ends the process
    /// afterwards.
    pub fn close(&self) -> Result<(), MountError> {
        (self.0)()
    }
}

impl Stopper {
    /// Ends the requests in progress, stops all later ones for ever, and makes everything durable.
    /// The caller ends the process afterwards. Returns false if the mount is ending.
    pub fn stop(&self) -> Result<bool, MountError> {
        std::mem::forget(self.gate.write());
        let Some(union) = self.union.upgrade() else {
            return Ok(false);
        };
        union.prepare_takeover().map_err(|errno| MountError::Close {
            upper: union.upper_path().to_owned(),
            source: errno.into(),
        })
    }
}

impl Snapshotter {
    /// Whether the session has not ended.
    pub fn is_open(&self) -> bool {
        self.union.strong_count() > 0
    }

    /// Takes the snapshot `name`; `None` if the session has ended. Requests wait until the upper is
    /// copied.
    pub fn take(&self, name: &str) -> Option<Result<(), UpperError>> {
        let union = self.union.upgrade()?;
        Some(union.snapshot(name, || self.gate.write()).map(drop))
    }
}

impl Content {
    fn writing(&self) -> Writing {
        match self {
            Content::Image(_) => Writing::Never,
            Content::Union(_) | Content::Shared(..) => Writing::ToUpper,
        }
    }

    fn errors(&self) -> &Arc<ErrorLog> {
        match self {
            Content::Image(fs) => fs.errors(),
            Content::Union(fs) | Content::Shared(fs, _) => fs.errors(),
        }
    }
}

impl Unmounter {
    pub(crate) fn new(unmount: impl Fn() -> Unmounted + Send + Sync + 'static) -> Self {
        Unmounter(Arc::new(unmount))
    }

    /// Unmounts. If the mount is in use, unmounts lazily.
    pub fn unmount(&self) -> Unmounted {
        (self.0)()
    }
}

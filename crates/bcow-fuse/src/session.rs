//! A mounted image from its mount to its end.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use bcow_union::fs::UnionFs;
use bcow_union::log::{self, Severity};

use crate::adapter::readonly::ReadOnly;
use crate::adapter::writable::Writable;
use crate::error::MountError;
use crate::fs::ImageFs;
use crate::mount::{self, Mount, Unmounted};
use crate::options::{MountOptions, Writing};
use crate::outcome::Outcome;
use crate::signals::Signals;
use crate::stats::MountStats;

/// What a process that ends a writable mount is called meanwhile, for those who wait for it.
pub const CLOSING: &std::ffi::CStr = c"bcow-closing";

/// What is mounted.
pub enum Content {
    /// An image, read-only.
    Image(ImageFs),
    /// An image under an upper. It is closed when the mount has ended.
    Union(Arc<UnionFs>),
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

/// A mount that the kernel knows and that waits to be served. Dropping it unmounts.
pub struct Session {
    // Dropped first: closing our side of the connection, so that an unmount finds nobody waiting for us.
    fuse: Fuse,
    mount: Arc<Mutex<Mount>>,
    /// To be closed.
    union: Option<Closing>,
}

/// What ends the use of an upper, once or by several at a time, and says how that went.
#[derive(Clone)]
struct Closing {
    union: Arc<UnionFs>,
    outcome: Arc<Outcome>,
}

enum Fuse {
    ReadOnly(fuser::Session<ReadOnly>),
    Writable(fuser::Session<Writable>),
}

/// Ends a [`Session`] from another thread.
#[derive(Debug, Clone)]
pub struct Unmounter {
    mount: Arc<Mutex<Mount>>,
}

impl Session {
    /// Mounts `content` at `target`, to be served by `threads` threads (at least one), which count in `stats`.
    ///
    /// Once this returns, programs can use the mount; their requests wait for [`Session::serve`].
    pub fn mount(
        content: impl Into<Content>,
        stats: Arc<MountStats>,
        target: &Path,
        options: &MountOptions,
        threads: usize,
    ) -> Result<Self, MountError> {
        let content = content.into();
        let mut options = options.clone();
        options.settle(match content {
            Content::Image(_) => Writing::Never,
            Content::Union(_) => Writing::ToUpper,
        })?;
        let (mount, connection) = mount::mount(target, &options)?;
        stats.set_mounted(
            mount.target(),
            match &content {
                Content::Image(fs) => fs.errors(),
                Content::Union(fs) => fs.errors(),
            },
        );
        let mut config = fuser::Config::default();
        config.n_threads = Some(threads.max(1));
        // The kernel keeps strangers out by itself (see `Access`), so fuser need not.
        let all = fuser::SessionACL::All;
        let (fuse, union) = match content {
            Content::Image(fs) => {
                let adapter = ReadOnly::new(fs, stats, options.permissions());
                let fuse = fuser::Session::from_fd(adapter, connection, all, config);
                (fuse.map(Fuse::ReadOnly), None)
            }
            Content::Union(fs) => {
                let outcome = Arc::new(Outcome::new()?);
                stats.set_union(Arc::clone(&fs), outcome.descriptor());
                let adapter = Writable::new(Arc::clone(&fs), stats, options.write_cache());
                let fuse = fuser::Session::from_fd(adapter, connection, all, config);
                let union = Closing { union: fs, outcome };
                (fuse.map(Fuse::Writable), Some(union))
            }
        };
        Ok(Session {
            fuse: fuse.map_err(MountError::Session)?,
            mount: Arc::new(Mutex::new(mount)),
            union,
        })
    }

    /// Where it is mounted, links followed, and the mount's device number, if the kernel lists it.
    pub fn place(&self) -> (PathBuf, Option<String>) {
        let mount = self.mount.lock().unwrap_or_else(PoisonError::into_inner);
        (mount.target().to_owned(), mount.device().map(str::to_owned))
    }

    /// Something to unmount with while the session is served.
    pub fn unmounter(&self) -> Unmounter {
        Unmounter {
            mount: Arc::clone(&self.mount),
        }
    }

    /// Answers requests until the mount is gone, whoever unmounts it. What was written is durable then, as far as the
    /// union's options want it.
    pub fn serve(self) -> Result<(), MountError> {
        let served = self.fuse.run().map_err(MountError::Session);
        let Some(union) = self.union else {
            return served;
        };
        // A name is a courtesy to those who wait.
        let _ = rustix::thread::set_name(CLOSING);
        union.close()?;
        served
    }

    /// As [`Session::serve`], but a signal unmounts. If files are in use then, nobody can enter any more, and
    /// it goes on until they are closed; a second signal ends this process at once.
    pub fn serve_until_signal(self, signals: Signals) -> Result<(), MountError> {
        abort_on_panic();
        let unmounter = self.unmounter();
        let union = self.union.clone();
        let target = self
            .mount
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .target()
            .to_owned();
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                let name = signals.wait();
                match unmounter.unmount() {
                    Unmounted::Gone => {}
                    Unmounted::Detached => log::log(
                        Severity::Warning,
                        &format!(
                            "{name}: {} is in use; detached, ends with its last user",
                            target.display()
                        ),
                    ),
                    Unmounted::Stays => log::log(
                        Severity::Warning,
                        &format!(
                            "{name}: {} cannot be unmounted; another signal ends its service",
                            target.display()
                        ),
                    ),
                }
                signals.wait();
                if let Some(union) = union
                    && let Err(error) = union.close()
                {
                    let cause = std::error::Error::source(&error);
                    let cause = cause.map_or_else(String::new, |cause| format!(": {cause}"));
                    log::log(Severity::Error, &format!("{error}{cause}"));
                }
                // The kernel sees the connection close and fails what is under way.
                std::process::exit(1);
            })
            .map_err(|source| MountError::Process {
                action: "start a thread",
                source,
            })?;
        self.serve()
    }
}

impl Closing {
    fn close(&self) -> Result<(), MountError> {
        let closed = self.union.close();
        self.outcome.tell(closed);
        closed.map_err(|errno| MountError::Close {
            upper: self.union.upper_path().to_owned(),
            source: errno.into(),
        })
    }
}

impl Fuse {
    fn run(self) -> io::Result<()> {
        match self {
            Fuse::ReadOnly(session) => session.run(),
            Fuse::Writable(session) => session.run(),
        }
    }
}

impl Unmounter {
    pub(crate) fn unmount(&self) -> Unmounted {
        self.mount
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .unmount()
    }

    /// Unmounts; lazily if the mount is in use.
    pub fn unmount_now(&self) {
        self.unmount();
    }
}

/// A thread that dies leaves whoever waits for its reply waiting for good, beyond the reach of signals.
/// When the process dies, the kernel fails what is under way.
fn abort_on_panic() {
    let say = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        say(info);
        log::log(Severity::Error, &info.to_string());
        std::process::abort();
    }));
}

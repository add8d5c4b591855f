//! A mounted image from its mount to its end.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crate::adapter::Adapter;
use crate::error::MountError;
use crate::fs::ImageFs;
use crate::log::{self, Severity};
use crate::mount::{self, Mount, Unmounted};
use crate::options::MountOptions;
use crate::signals::Signals;

/// A mount that the kernel knows and that waits to be served. Dropping it unmounts.
pub struct Session {
    // Dropped first: closing our side of the connection, so that an unmount finds nobody waiting for us.
    fuse: fuser::Session<Adapter>,
    mount: Arc<Mutex<Mount>>,
}

/// Ends a [`Session`] from another thread.
#[derive(Debug, Clone)]
pub struct Unmounter {
    mount: Arc<Mutex<Mount>>,
}

impl Session {
    /// Mounts `fs` at `target`, to be served by `threads` threads (at least one).
    ///
    /// Once this returns, programs can use the mount; their requests wait for [`Session::serve`].
    pub fn mount(
        fs: ImageFs,
        target: &Path,
        options: &MountOptions,
        threads: usize,
    ) -> Result<Self, MountError> {
        let adapter = Adapter::new(fs, options.permissions());
        let (mount, connection) = mount::mount(target, options)?;
        let mut config = fuser::Config::default();
        config.n_threads = Some(threads.max(1));
        // The kernel keeps strangers out by itself (see `Access`), so fuser need not.
        let fuse = fuser::Session::from_fd(adapter, connection, fuser::SessionACL::All, config)
            .map_err(MountError::Session)?;
        Ok(Session {
            fuse,
            mount: Arc::new(Mutex::new(mount)),
        })
    }

    /// Something to unmount with while the session is served.
    pub fn unmounter(&self) -> Unmounter {
        Unmounter {
            mount: Arc::clone(&self.mount),
        }
    }

    /// Answers requests until the mount is gone, whoever unmounts it.
    pub fn serve(self) -> Result<(), MountError> {
        self.fuse.run().map_err(MountError::Session)
    }

    /// As [`Session::serve`], but a signal unmounts. If files are in use then, nobody can enter any more, and
    /// it goes on until they are closed; a second signal ends this process at once.
    pub fn serve_until_signal(self, signals: Signals) -> Result<(), MountError> {
        abort_on_panic();
        let unmounter = self.unmounter();
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

//! Signals of a mount: SIGTERM and SIGINT unmount; SIGHUP unmounts only in the foreground.

use std::path::PathBuf;

use bcow_union::log::{self, Severity};
use nix::sys::signal::{SigSet, Signal};

use crate::error::MountError;
use crate::process::abort_on_panic;
use crate::unmount::Unmounted;

/// Whether the process belongs to a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ground {
    /// On a terminal: SIGHUP unmounts.
    Foreground,
    /// A daemon: SIGHUP is ignored.
    Background,
}

/// The signals that a mount handles. They are blocked, and a thread waits for them.
#[derive(Debug)]
pub struct Signals {
    set: SigSet,
    ground: Ground,
}

impl Signals {
    /// Blocks the signals in this thread and in all threads that it starts. Call this before other
    /// threads exist.
    pub fn block(ground: Ground) -> Result<Self, MountError> {
        let set: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]
            .into_iter()
            .collect();
        set.thread_block()
            .map_err(MountError::process("block signals"))?;
        Ok(Signals { set, ground })
    }

    /// Delivers the signals that arrived so far, with their default action: they end this process.
    /// Call this while there is nothing to unmount.
    pub fn let_through(&self) -> Result<(), MountError> {
        let failed = MountError::process("unblock signals");
        let mut ending = self.set;
        if self.ground == Ground::Background {
            ending.remove(Signal::SIGHUP);
        }
        ending.thread_unblock().map_err(&failed)?;
        ending.thread_block().map_err(failed)
    }

    /// Starts a thread that unmounts at the first signal. If files are in use, the mount is
    /// detached, and the process serves it until they are closed. At the second signal, the thread
    /// calls `close` and ends this process.
    pub(crate) fn end_mount(
        self,
        target: PathBuf,
        unmount: impl FnOnce() -> Unmounted + Send + 'static,
        close: impl FnOnce() -> Result<(), MountError> + Send + 'static,
    ) -> Result<(), MountError> {
        abort_on_panic();
        let handle = move || {
            let name = self.wait();
            if let Some(warning) = unmount().warning(name, &target) {
                log::log(Severity::Warning, &warning);
            }
            self.wait();
            if let Err(error) = close() {
                let cause = std::error::Error::source(&error);
                let cause = cause.map_or_else(String::new, |cause| format!(": {cause}"));
                log::log(Severity::Error, &format!("{error}{cause}"));
            }
            // The kernel sees that the connection is closed, and fails the requests in flight.
            std::process::exit(1);
        };
        let thread = std::thread::Builder::new().name("signals".into());
        let started = thread.spawn(handle);
        started
            .map(drop)
            .map_err(MountError::process("start a thread"))
    }

    /// Waits for the next signal that requests an unmount, and returns its name.
    pub fn wait(&self) -> &'static str {
        loop {
            match self.set.wait() {
                Ok(Signal::SIGHUP) if self.ground == Ground::Background => {}
                Ok(signal) => return signal.as_str(),
                // sigwait(3) fails only for an invalid set.
                Err(_) => return "a signal",
            }
        }
    }
}

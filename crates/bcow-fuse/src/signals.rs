//! Signals of a mount: SIGTERM and SIGINT unmount; SIGHUP unmounts only in the foreground.

use nix::sys::signal::{SigSet, Signal};

use crate::error::MountError;

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
        set.thread_block().map_err(|errno| MountError::Process {
            action: "block signals",
            source: errno.into(),
        })?;
        Ok(Signals { set, ground })
    }

    /// Delivers the signals that arrived so far, with their default action: they end this process.
    /// Call this while there is nothing to unmount.
    pub fn let_through(&self) -> Result<(), MountError> {
        let failed = |errno: nix::errno::Errno| MountError::Process {
            action: "unblock signals",
            source: errno.into(),
        };
        let mut ending = self.set;
        if self.ground == Ground::Background {
            ending.remove(Signal::SIGHUP);
        }
        ending.thread_unblock().map_err(failed)?;
        ending.thread_block().map_err(failed)
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

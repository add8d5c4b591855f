//! What signals do to a mount: SIGTERM and SIGINT unmount; SIGHUP only in the foreground.

use nix::sys::signal::{SigSet, Signal};

use crate::error::MountError;

/// Whether the terminal's end is ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ground {
    /// On a terminal: SIGHUP unmounts.
    Foreground,
    /// A daemon: SIGHUP is ignored.
    Background,
}

/// The signals a mount reacts to, blocked so that they wait to be asked for.
#[derive(Debug)]
pub struct Signals {
    set: SigSet,
    ground: Ground,
}

impl Signals {
    /// Blocks them for this thread and all it starts: to be called before there are others.
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

    /// Lets those end this process that came before there is anything to unmount.
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

    /// Waits for the next signal that asks to unmount.
    pub(crate) fn wait(&self) -> &'static str {
        loop {
            match self.set.wait() {
                Ok(Signal::SIGHUP) if self.ground == Ground::Background => {}
                Ok(signal) => return signal.as_str(),
                // sigwait(3) fails for an invalid set only.
                Err(_) => return "a signal",
            }
        }
    }
}

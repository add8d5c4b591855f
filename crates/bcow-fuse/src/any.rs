//! One type for the mounts of both drivers, for a process that serves both kinds.

use crate::error::MountError;
use crate::kernel::KernelSession;
use crate::session::{Closer, Session, Unmounter};
use crate::signals::Signals;

/// A mount with either driver.
pub enum AnySession {
    /// Of the FUSE driver.
    Fuse(Session),
    /// Of the kernel driver.
    Kernel(KernelSession),
}

impl AnySession {
    /// Serves until the mount is gone. Then the written data is durable, as far as the options of
    /// the mount require it. `let_go` has the task described at [`KernelSession::serve`].
    pub fn serve(self, let_go: impl FnOnce()) -> Result<(), MountError> {
        match self {
            AnySession::Fuse(session) => session.serve_and(let_go),
            AnySession::Kernel(session) => session.serve(let_go),
        }
    }

    /// As [`AnySession::serve`], but signals end the mount; see [`Session::serve_until_signal`].
    pub fn serve_until_signal(self, signals: Signals) -> Result<(), MountError> {
        match self {
            AnySession::Fuse(session) => session.serve_until_signal(signals),
            AnySession::Kernel(session) => session.serve_until_signal(signals),
        }
    }

    /// A handle that unmounts while the session is being served.
    pub fn unmounter(&self) -> Unmounter {
        match self {
            AnySession::Fuse(session) => session.unmounter(),
            AnySession::Kernel(session) => session.unmounter(),
        }
    }

    /// A handle that makes the written data durable while the session is being served; `None` for a
    /// mount that takes no writes.
    pub fn closer(&self) -> Option<Closer> {
        match self {
            AnySession::Fuse(session) => session.closer(),
            AnySession::Kernel(session) => session.closer(),
        }
    }

    /// The session of a mount with the FUSE driver.
    pub fn fuse(&self) -> Option<&Session> {
        match self {
            AnySession::Fuse(session) => Some(session),
            AnySession::Kernel(_) => None,
        }
    }
}

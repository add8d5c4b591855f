//! Why space cannot be charged.

use std::cell::Cell;

use rustix::io::Errno;

use crate::host::errno_of;

thread_local! {
    /// The limit that refused the last change of this thread.
    static REACHED: Cell<Option<LimitReached>> = const { Cell::new(None) };
}

/// A limit of the upper leaves no room for a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum LimitReached {
    #[error("the size limit of the upper is reached ({0} bytes)")]
    Bytes(u64),
    #[error("the inode limit of the upper is reached ({0} inodes)")]
    Inodes(u64),
}

impl LimitReached {
    /// Notes that a limit refused a change of this thread. The errno alone, `ENOSPC`, does not say
    /// whether a limit is reached or the host's file system is full.
    pub(super) fn note(self) {
        REACHED.set(Some(self));
    }

    /// The limit that refused a change of this thread since the last call.
    pub fn take() -> Option<LimitReached> {
        REACHED.take()
    }
}

/// A charge does not fit below the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no space left: {used} of {limit} bytes are used, {wanted} more are needed")]
pub struct NoSpace {
    /// Bytes that the charge needs.
    pub wanted: u64,
    /// Bytes that are in use.
    pub used: u64,
    /// The limit in bytes.
    pub limit: u64,
}

/// The blocks of a file cannot be charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ChargeError {
    /// The host failed.
    #[error("cannot {action}: {errno}")]
    Host {
        /// The action that failed.
        action: &'static str,
        /// The host's errno.
        errno: Errno,
    },
    /// The size limit leaves no room.
    #[error(transparent)]
    NoSpace(#[from] NoSpace),
}

impl ChargeError {
    /// Converts an error of the host during `action`.
    pub fn host(action: &'static str) -> impl Fn(std::io::Error) -> ChargeError + Copy {
        move |error| ChargeError::Host {
            action,
            errno: errno_of(&error),
        }
    }

    /// The errno that a program gets.
    pub fn errno(&self) -> Errno {
        match self {
            ChargeError::Host { errno, .. } => *errno,
            ChargeError::NoSpace(_) => Errno::NOSPC,
        }
    }
}

//! The limit that refuses a change.

use std::cell::Cell;

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
    pub(super) fn noted(self) -> Self {
        REACHED.set(Some(self));
        self
    }

    /// The limit that refused a change of this thread since the last call.
    pub fn take() -> Option<LimitReached> {
        REACHED.take()
    }
}

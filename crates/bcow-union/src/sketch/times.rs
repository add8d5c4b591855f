//! Keeps the time of last modification of a host's file while bcow writes to the file without a
//! change of its content: when it completes blocks or appends records.
//!
//! Such a writer reads the time before its work and restores it afterwards. If a program changed
//! the file in the meantime, the writer does not restore the time. A change cannot begin between
//! this check and the restoration. Other threads cannot read or set the time while it has a
//! temporary value.
//!
//! # Locks
//!
//! A thread takes `held` first, then waits for `changing`. A thread that changes the file does not
//! wait for a thread that holds its times.

use bcow::sync::atomic::{AtomicU64, Ordering};
use bcow::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use std::sync::TryLockError;

use super::locks::{lock, read, write};
use crate::host::HostFile;

/// The times of a host's file.
#[derive(Debug, Default)]
pub(super) struct Times {
    held: Mutex<()>,
    /// Taken shared during each change of the file.
    changing: RwLock<()>,
    /// The number of changes of the file.
    changes: AtomicU64,
}

/// A change of the file in progress. The drop counts it as done.
pub(super) struct Changing<'a> {
    changes: &'a AtomicU64,
    _changing: RwLockReadGuard<'a, ()>,
}

/// While this exists, no other thread restores the file's times.
pub(super) struct Held<'a> {
    times: &'a Times,
    _held: MutexGuard<'a, ()>,
}

impl Times {
    /// Starts a change of the file. The caller holds the result during the change.
    pub(super) fn changing(&self) -> Changing<'_> {
        Changing {
            _changing: read(&self.changing),
            changes: &self.changes,
        }
    }

    /// Locks the times. The caller holds the result while it reads or sets them.
    pub(super) fn hold(&self) -> Held<'_> {
        Held {
            times: self,
            _held: lock(&self.held),
        }
    }

    /// As [`Times::hold`]; `None` if another thread holds the times.
    pub(super) fn try_hold(&self) -> Option<Held<'_>> {
        let held = match self.held.try_lock() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Held {
            times: self,
            _held: held,
        })
    }
}

impl Held<'_> {
    /// Runs `work`, which writes to the file without a change of its content, and restores the
    /// file's time. A thread that holds [`Changing`] must not call this: it would deadlock.
    pub(super) fn preserve_time<T>(&self, file: &dyn HostFile, work: impl FnOnce() -> T) -> T {
        let times = self.times;
        // The order matters. The time may or may not include a change that is in progress, but the
        // end of that change increments `changes`.
        let before = times.changes.load(Ordering::Acquire);
        let modified = file.modified();
        let done = work();
        let Ok(modified) = modified else {
            return done;
        };
        let is_seen = file.modified().is_ok_and(|now| now != modified);
        if is_seen {
            let _no_change = write(&times.changing);
            if times.changes.load(Ordering::Acquire) == before {
                // A wrong time is not a reason to fail the work.
                let _ = file.set_modified(modified);
            }
        }
        done
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
    }
}

//! Keeps the times of a host's file while bcow writes to the file without a change of its content:
//! when it completes blocks, appends records, or changes marks.
//!
//! Such a writer reads the times before its work and restores the time of last modification
//! afterwards. The time of last change cannot be restored; so the writer notes which one the mount
//! shows in its place, until the host's file changes again. If a program changes the file in the
//! meantime, the change notes its own time, which the writer then uses instead. A change cannot
//! begin while the time is restored. Other threads cannot read or set the times while they have
//! temporary values.
//!
//! # Locks
//!
//! A thread takes `held` first, then waits for `changing`. A thread that changes the file takes
//! `changing`, then `changed`; it does not wait for a thread that holds the file's times.

use bcow::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use bcow::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use std::sync::TryLockError;

use rustix::fs::Timespec;

use super::locks::{lock, read, write};
use crate::host::{HiddenChange, HostFile};

/// The times of a host's file.
#[derive(Debug, Default)]
pub(super) struct Times {
    /// The last change of the file by a writer that preserves its times. Locked while the times are
    /// read, set or preserved.
    held: Mutex<Option<HiddenChange>>,
    /// Taken shared during each change of the file.
    changing: RwLock<()>,
    /// The number of changes of the file.
    changes: AtomicU64,
    /// Whether a thread will restore the time of the file.
    is_restored: AtomicBool,
    /// The file's time after the last change that ended while `is_restored` was set.
    changed: Mutex<Option<Timespec>>,
}

/// A change of the file in progress. The drop counts it as done.
pub(super) struct Changing<'a> {
    times: &'a Times,
    file: &'a dyn HostFile,
    _changing: RwLockReadGuard<'a, ()>,
}

/// While this exists, no other thread restores the file's times.
pub(super) struct Held<'a> {
    times: &'a Times,
    hidden: MutexGuard<'a, Option<HiddenChange>>,
}

impl Times {
    /// Starts a change of `file`. The caller holds the result during the change.
    pub(super) fn changing<'a>(&'a self, file: &'a dyn HostFile) -> Changing<'a> {
        Changing {
            _changing: read(&self.changing),
            times: self,
            file,
        }
    }

    /// Locks the times. The caller holds the result while it reads or sets them.
    pub(super) fn hold(&self) -> Held<'_> {
        Held {
            times: self,
            hidden: lock(&self.held),
        }
    }

    /// As [`Times::hold`]; `None` if another thread holds the times.
    pub(super) fn try_hold(&self) -> Option<Held<'_>> {
        let hidden = match self.held.try_lock() {
            Ok(hidden) => hidden,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Held {
            times: self,
            hidden,
        })
    }
}

impl Held<'_> {
    /// The last change of the file that is no change of its content.
    pub(super) fn hidden_change(&self) -> Option<HiddenChange> {
        *self.hidden
    }

    /// Runs `work`, which writes to the file without a change of its content, and restores the
    /// file's times. A thread that holds [`Changing`] must not call this: it would deadlock.
    pub(super) fn preserve_time<T>(&mut self, file: &dyn HostFile, work: impl FnOnce() -> T) -> T {
        let times = self.times;
        // A change that ends before this store is counted in `before`, and `modified` includes it.
        // A change that ends later notes its time.
        times.is_restored.store(true, Ordering::SeqCst);
        let before = times.changes.load(Ordering::SeqCst);
        let first = file.times();
        let done = work();
        // A wrong time is not a reason to fail the work.
        if let (Ok(first), Ok(now)) = (first, file.times())
            && now != first
        {
            let _no_change = write(&times.changing);
            let is_changed = times.changes.load(Ordering::SeqCst) != before;
            let last = if is_changed {
                // A change of the content sets both times.
                lock(&times.changed).map(|at| (at, at))
            } else {
                Some((first.modified, HiddenChange::shown(*self.hidden, first)))
            };
            if let Some((modified, shown)) = last {
                if now.modified != modified {
                    let _ = file.set_modified(modified);
                }
                *self.hidden = file.times().ok().map(|times| HiddenChange {
                    host: times.changed,
                    shown,
                });
            }
        }
        times.is_restored.store(false, Ordering::SeqCst);
        done
    }
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        let times = self.times;
        times.changes.fetch_add(1, Ordering::SeqCst);
        if times.is_restored.load(Ordering::SeqCst) {
            // The lock covers the reading, so that the last one stays.
            let mut changed = lock(&times.changed);
            *changed = self.file.times().ok().map(|times| times.modified);
        }
    }
}

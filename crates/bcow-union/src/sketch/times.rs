//! Keeps the time of last modification of a host's file while bcow writes to the file without a
//! change of its content: when it completes blocks or appends records.
//!
//! Such a writer reads the time before its work and restores it afterwards. If a program changes
//! the file in the meantime, the change notes its own time, which the writer then restores instead.
//! A change cannot begin while the time is restored. Other threads cannot read or set the time
//! while it has a temporary value.
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
use crate::host::HostFile;

/// The times of a host's file.
#[derive(Debug, Default)]
pub(super) struct Times {
    held: Mutex<()>,
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
    _held: MutexGuard<'a, ()>,
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
        // A change that ends before this store is counted in `before`, and `modified` includes it.
        // A change that ends later notes its time.
        times.is_restored.store(true, Ordering::SeqCst);
        let before = times.changes.load(Ordering::SeqCst);
        let modified = file.modified();
        let done = work();
        let is_seen = match (&modified, file.modified()) {
            (Ok(modified), Ok(now)) => now != *modified,
            _ => false,
        };
        // A wrong time is not a reason to fail the work.
        if is_seen {
            let _no_change = write(&times.changing);
            let is_changed = times.changes.load(Ordering::SeqCst) != before;
            let last = match is_changed {
                true => *lock(&times.changed),
                false => modified.ok(),
            };
            if let Some(last) = last {
                let _ = file.set_modified(last);
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
            *changed = self.file.modified().ok();
        }
    }
}

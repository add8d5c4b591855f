//! The time of the last change of a host's file, while that is written to without being changed: blocks are completed, records made.
//!
//! Whoever does such a thing looks at the time before, and sets it back, unless somebody changed the file meanwhile; then it is the time of
//! what was written last. A change cannot begin between looking whether there was one and setting the time back; nor can the time be set by
//! others, or looked at, while it is not what it will be.
//!
//! # Locks
//!
//! First the times are held, then a change is awaited. Who changes the file does not wait for who holds its times.

use bcow::sync::atomic::{AtomicU64, Ordering};
use bcow::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use std::sync::TryLockError;

use super::host::HostFile;
use super::locks::{lock, read, write};

/// The times of a host's file.
#[derive(Debug, Default)]
pub(super) struct Times {
    held: Mutex<()>,
    /// Shared by those who change the file, while they do it.
    changing: RwLock<()>,
    /// How often it was changed.
    changes: AtomicU64,
}

/// The file is being changed. It was, when this is dropped.
pub(super) struct Changing<'a> {
    changes: &'a AtomicU64,
    _changing: RwLockReadGuard<'a, ()>,
}

/// Nobody else sets the file's times back.
pub(super) struct Held<'a> {
    times: &'a Times,
    _held: MutexGuard<'a, ()>,
}

impl Times {
    /// To be held while the file is changed.
    pub(super) fn changing(&self) -> Changing<'_> {
        Changing {
            _changing: read(&self.changing),
            changes: &self.changes,
        }
    }

    /// To be held while the times are looked at, or set.
    pub(super) fn hold(&self) -> Held<'_> {
        Held {
            times: self,
            _held: lock(&self.held),
        }
    }

    /// As [`Times::hold`], if nobody else holds them.
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
    /// Does what writes to the file without being a change of it. Must not be called by who changes it.
    pub(super) fn unseen<T>(&self, file: &dyn HostFile, work: impl FnOnce() -> T) -> T {
        let times = self.times;
        // In this order: a change that is under way may or may not be in the time, but its end will be noticed.
        let before = times.changes.load(Ordering::Acquire);
        let modified = file.modified();
        let done = work();
        let Ok(modified) = modified else {
            return done;
        };
        let is_seen = file.modified().is_ok_and(|now| now != modified);
        if is_seen {
            let _nobody_changes = write(&times.changing);
            if times.changes.load(Ordering::Acquire) == before {
                // A time that is late is no harm that the work should fail for.
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

//! Waiting for space that is about to be freed.
//!
//! A file that lost its last name keeps its space until the kernel forgets its node, because a
//! program may have it open. If no program has, the kernel sends the forget together with the
//! answer to unlink(2). But requests can overtake it: a write that follows may be handled first. On
//! a full disk that write would fail, although its program has just freed space. So a request that
//! finds no space waits for the files that are about to be freed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;

use super::UnionFs;
use crate::account::LimitReached;

/// The kernel is expected to forget a removed file within this time if no program has it open.
/// After it, the file counts as open.
const SOON: Duration = Duration::from_millis(250);

/// Upper bound of the time that the host takes to free a file, and so of the wait of a request.
const FREEING: Duration = Duration::from_secs(5);

/// Counts files that lost their last name, and how far they are freed.
#[derive(Debug, Default)]
pub(super) struct PendingFrees {
    /// A leaf, held for a few instructions: by removals, and by requests that find no space.
    counts: Mutex<Counts>,
    /// A copy of [`Counts::freed`], which each request reads before its attempt. It changes only
    /// under the lock.
    freed_files: AtomicU64,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Counts {
    removed: u64,
    /// Removed files that the kernel forgot: they are freed, or are being freed.
    forgotten: u64,
    /// Forgotten files whose space is freed.
    freed: u64,
    /// Time of the latest removal.
    newest: Option<Instant>,
    /// Whether a request waits. Only one may wait: the forget that it waits for needs a thread too.
    is_awaited: bool,
}

/// Bounds of a request's wait, fixed when it first finds no space. Later removals do not extend the
/// wait.
#[derive(Debug)]
struct WaitLimits {
    /// End of the wait for a forget of files that were removed before.
    soon: Instant,
    /// End of the wait for a file that is being freed.
    at_last: Instant,
    /// Whether the last attempt, after `soon`, was made.
    is_last: bool,
}

impl PendingFrees {
    /// Counts a file that lost its last name.
    pub(super) fn removed(&self) {
        let mut counts = self.counts.lock();
        counts.removed += 1;
        counts.newest = Some(Instant::now());
    }

    /// Counts a removed file that the kernel forgot; `free` gives back its space.
    pub(super) fn forgotten(&self, free: impl FnOnce()) {
        self.counts.lock().forgotten += 1;
        free();
        let mut counts = self.counts.lock();
        counts.freed += 1;
        self.freed_files.store(counts.freed, Ordering::Release);
        drop(counts);
        self.freed.notify_all();
    }

    fn count(&self) -> u64 {
        self.freed_files.load(Ordering::Acquire)
    }

    /// The bounds of the wait of a request that finds no space now.
    fn wait_limits(&self) -> WaitLimits {
        let now = Instant::now();
        WaitLimits {
            soon: self
                .counts
                .lock()
                .newest
                .map_or(now, |newest| newest + SOON),
            at_last: now + FREEING,
            is_last: false,
        }
    }

    /// Whether more than `before` files are freed; waits for that within the bounds of `limits`.
    fn more_than(&self, before: u64, limits: &mut WaitLimits) -> bool {
        let mut counts = self.counts.lock();
        let is_late = Instant::now() >= limits.soon;
        if is_late && limits.is_last {
            return false;
        }
        limits.is_last = is_late;
        while counts.freed == before && counts.freed < counts.removed && !counts.is_awaited {
            let until = if counts.forgotten > counts.freed { limits.at_last } else { limits.soon };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            counts.is_awaited = true;
            self.freed.wait_for(&mut counts, left);
            counts.is_awaited = false;
        }
        counts.freed > before
    }
}

impl UnionFs {
    /// Makes `attempt`, which may need space. If it finds none (`ENOSPC`, `EDQUOT`), waits for
    /// files that were just removed, and repeats it. A failed attempt must change nothing. (So not
    /// an fsync: the host reports only once that it had no space for written data.)
    pub fn with_room<T>(
        &self,
        mut attempt: impl FnMut(&UnionFs) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let mut limits = None;
        loop {
            let before = self.pending_frees.count();
            let attempted = attempt(self);
            if attempted.is_ok() {
                // A limit that refused only a step is not the cause of a later failure.
                LimitReached::take();
            }
            match attempted {
                Err(Errno::NOSPC | Errno::DQUOT)
                    if self.pending_frees.more_than(
                        before,
                        limits.get_or_insert_with(|| self.pending_frees.wait_limits()),
                    ) => {}
                other => return other,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    fn more_than(pending_frees: &PendingFrees, before: u64) -> bool {
        pending_frees.more_than(before, &mut pending_frees.wait_limits())
    }

    #[test]
    fn request_waits_only_for_files_just_removed() {
        let pending_frees = PendingFrees::default();
        assert!(!more_than(&pending_frees, 0));
        pending_frees.removed();
        // A program has the file open.
        assert!(!more_than(&pending_frees, 0));
        // On a busy machine the other thread may come too late once, but not 100 times.
        assert!((0..100).any(|_| {
            let before = pending_frees.count();
            pending_frees.removed();
            thread::scope(|scope| {
                scope.spawn(|| pending_frees.forgotten(|| ()));
                more_than(&pending_frees, before)
            })
        }));
        // After this time the file that is still open counts as removed too long ago.
        thread::sleep(SOON);
        let before = pending_frees.count();
        assert!(!more_than(&pending_frees, before));
        // The file may be forgotten between the attempt and this call.
        pending_frees.forgotten(|| ());
        assert!(more_than(&pending_frees, before));
        assert!(!more_than(&pending_frees, pending_frees.count()));
    }

    #[test]
    fn request_waits_for_files_that_are_being_freed() {
        let pending_frees = PendingFrees::default();
        pending_frees.removed();
        let began = std::sync::Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                pending_frees.forgotten(|| {
                    began.wait();
                    thread::sleep(SOON * 3);
                });
            });
            began.wait();
            assert!(more_than(&pending_frees, 0));
        });
    }

    #[test]
    fn request_does_not_wait_for_later_removals() {
        let pending_frees = PendingFrees::default();
        // One file stays open.
        pending_frees.removed();
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Acquire) {
                    pending_frees.removed();
                    pending_frees.forgotten(|| thread::sleep(Duration::from_millis(1)));
                }
            });
            let mut limits = pending_frees.wait_limits();
            // The loop must end.
            while pending_frees.more_than(pending_frees.count(), &mut limits) {}
            done.store(true, Ordering::Release);
        });
    }
}

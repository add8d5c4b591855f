//! Waiting for space that is about to be freed.
//!
//! A file that lost its last name keeps its space until the kernel forgets its node, because a
//! program may have it open. If no program has, the kernel sends the forget together with the
//! answer to unlink(2). But requests can overtake it: a write that follows may be handled first. On
//! a full disk that write would fail, although its program has just freed space. So a request that
//! finds no space waits for the files that are about to be freed.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::UnionFs;

/// The kernel is expected to forget a removed file within this time if no program has it open.
/// After it, the file counts as open.
const SOON: Duration = Duration::from_millis(250);

/// Upper bound of the time that the host takes to free a file, and so of the wait of a request.
const FREEING: Duration = Duration::from_secs(5);

/// Counts files that lost their last name, and how far they are freed. The lock is a leaf, held for
/// a few instructions.
#[derive(Debug, Default)]
pub(super) struct Departures {
    counts: Mutex<Counts>,
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
struct Hope {
    /// End of the wait for a forget of files that were removed before.
    soon: Instant,
    /// End of the wait for a file that is being freed.
    at_last: Instant,
    /// Whether the last attempt, after `soon`, was made.
    is_last: bool,
}

impl Departures {
    /// Counts a file that lost its last name.
    pub(super) fn removed(&self) {
        let mut counts = self.lock();
        counts.removed += 1;
        counts.newest = Some(Instant::now());
    }

    /// Counts a removed file that the kernel forgot; `free` gives back its space.
    pub(super) fn forgotten(&self, free: impl FnOnce()) {
        self.lock().forgotten += 1;
        free();
        self.lock().freed += 1;
        self.freed.notify_all();
    }

    fn count(&self) -> u64 {
        self.lock().freed
    }

    /// The bounds of the wait of a request that finds no space now.
    fn hope(&self) -> Hope {
        let now = Instant::now();
        Hope {
            soon: self.lock().newest.map_or(now, |newest| newest + SOON),
            at_last: now + FREEING,
            is_last: false,
        }
    }

    /// Whether more than `before` files are freed; waits for that within the bounds of `hope`.
    fn more_than(&self, before: u64, hope: &mut Hope) -> bool {
        let mut counts = self.lock();
        let is_late = Instant::now() >= hope.soon;
        if is_late && hope.is_last {
            return false;
        }
        hope.is_last = is_late;
        while counts.freed == before && counts.freed < counts.removed && !counts.is_awaited {
            let until = match counts.forgotten > counts.freed {
                true => hope.at_last,
                false => hope.soon,
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            counts.is_awaited = true;
            counts = self
                .freed
                .wait_timeout(counts, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            counts.is_awaited = false;
        }
        counts.freed > before
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
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
        let mut hope = None;
        loop {
            let before = self.departures.count();
            match attempt(self) {
                Err(Errno::NOSPC | Errno::DQUOT)
                    if self
                        .departures
                        .more_than(before, hope.get_or_insert_with(|| self.departures.hope())) => {}
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

    fn more_than(departures: &Departures, before: u64) -> bool {
        departures.more_than(before, &mut departures.hope())
    }

    #[test]
    fn only_what_was_just_removed_is_waited_for() {
        let departures = Departures::default();
        assert!(!more_than(&departures, 0));
        departures.removed();
        // A program has the file open.
        assert!(!more_than(&departures, 0));
        // On a busy machine the other thread may come too late once, but not 100 times.
        assert!((0..100).any(|_| {
            let before = departures.count();
            departures.removed();
            thread::scope(|scope| {
                scope.spawn(|| departures.forgotten(|| ()));
                more_than(&departures, before)
            })
        }));
        // After this time the file that is still open counts as removed too long ago.
        thread::sleep(SOON);
        let before = departures.count();
        assert!(!more_than(&departures, before));
        // The file may be forgotten between the attempt and this call.
        departures.forgotten(|| ());
        assert!(more_than(&departures, before));
        assert!(!more_than(&departures, departures.count()));
    }

    #[test]
    fn what_is_being_freed_is_waited_for() {
        let departures = Departures::default();
        departures.removed();
        let began = std::sync::Barrier::new(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                departures.forgotten(|| {
                    began.wait();
                    thread::sleep(SOON * 3);
                });
            });
            began.wait();
            assert!(more_than(&departures, 0));
        });
    }

    #[test]
    fn who_finds_no_room_in_the_end_does_not_wait_for_what_others_remove_meanwhile() {
        let departures = Departures::default();
        // One file stays open.
        departures.removed();
        let done = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Acquire) {
                    departures.removed();
                    departures.forgotten(|| thread::sleep(Duration::from_millis(1)));
                }
            });
            let mut hope = departures.hope();
            // The loop must end.
            while departures.more_than(departures.count(), &mut hope) {}
            done.store(true, Ordering::Release);
        });
    }
}

//! Room that is about to be there.
//!
//! A file that lost its last name keeps its space until the kernel forgets it, as somebody may have it open. If nobody has, the
//! kernel says so together with the answer to unlink(2), but not in order: a write right behind it may be met first. On a
//! full disk it would fail, though its program has just made room for it. So who finds no room waits for what is about to go.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::UnionFs;

/// How long after a file lost its last name it may still be forgotten because nobody had it open. Later than that, somebody has.
const SOON: Duration = Duration::from_millis(250);

/// How long the host may take to free a file: most of what a request waits.
const FREEING: Duration = Duration::from_secs(5);

/// Files that lost their last name, and what became of them. The lock is a leaf, held for a few instructions.
#[derive(Debug, Default)]
pub(super) struct Departures {
    counts: Mutex<Counts>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Counts {
    removed: u64,
    /// Those of them that the kernel forgot, and that are being freed therefore.
    forgotten: u64,
    /// Those of them that are.
    freed: u64,
    /// When the newest was removed.
    newest: Option<Instant>,
    /// Whether a request waits. Only one does: who tells us that a file is forgotten needs a thread too.
    is_awaited: bool,
}

/// How long a request waits, however many files go in the meantime: for those that were removed before it found no room.
#[derive(Debug)]
struct Hope {
    /// Until when these may be forgotten.
    soon: Instant,
    /// Until when one that is being freed then is waited for.
    at_last: Instant,
    /// Whether that was done.
    is_last: bool,
}

impl Departures {
    /// A file lost its last name.
    pub(super) fn removed(&self) {
        let mut counts = self.lock();
        counts.removed += 1;
        counts.newest = Some(Instant::now());
    }

    /// The kernel forgot one of those: `free` gives back its space.
    pub(super) fn forgotten(&self, free: impl FnOnce()) {
        self.lock().forgotten += 1;
        free();
        self.lock().freed += 1;
        self.freed.notify_all();
    }

    fn count(&self) -> u64 {
        self.lock().freed
    }

    /// What somebody who finds no room now may wait for.
    fn hope(&self) -> Hope {
        let now = Instant::now();
        Hope {
            soon: self.lock().newest.map_or(now, |newest| newest + SOON),
            at_last: now + FREEING,
            is_last: false,
        }
    }

    /// Whether more than `before` are freed, now or soon.
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
    /// Does what may need space. If there is none, it waits for files that were just removed, and does it again: to be given only
    /// what changes nothing when it fails so. (Not an fsync: the host tells once that it had no room for what was written.)
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
        // Somebody has it open.
        assert!(!more_than(&departures, 0));
        // On a busy machine the other thread may come too late, but not again and again.
        assert!((0..100).any(|_| {
            let before = departures.count();
            departures.removed();
            thread::scope(|scope| {
                scope.spawn(|| departures.forgotten(|| ()));
                more_than(&departures, before)
            })
        }));
        // The one that is still open was removed too long ago, after a while.
        thread::sleep(SOON);
        let before = departures.count();
        assert!(!more_than(&departures, before));
        // It may be forgotten between the attempt and the question.
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
        // One is open for good.
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
            // It ends.
            while departures.more_than(departures.count(), &mut hope) {}
            done.store(true, Ordering::Release);
        });
    }
}

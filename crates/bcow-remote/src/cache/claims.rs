//! Claims of processes on the bytes of a cache file that they fetch, so that each byte is fetched
//! once.
//!
//! A claim is a lock on a range of the cache file: a lock of the open file (`F_OFD_SETLK`), which
//! the kernel releases when the process ends. The process unlocks each chunk when the cache has it,
//! so other processes see its progress. The claims only save requests: bytes are checked wherever
//! they come from, and a process waits only for a limited time for one that makes no progress.

use std::fs::File;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use super::CacheFile;

/// The first and the longest pause between two attempts to lock.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(16);
/// How long this process waits for no other one, after a wait that ended without progress.
const UNSHARED: Duration = Duration::from_secs(60);
/// Attempts to lock a range while locks of other processes in it end.
const ATTEMPTS: u32 = 4;
/// A byte behind the end of every file. Its lock is the claim on the bytes that a process fetches
/// before it knows the chunks, and does not conflict with claims on chunks.
const BEGINNING: Range<u64> = 1 << 62..(1 << 62) + 1;

/// A claim of this process, until this value is dropped.
pub(crate) struct Held<'f> {
    file: &'f File,
    range: Range<u64>,
}

/// The answer to one attempt to lock a range.
enum Attempt<'f> {
    Held(Held<'f>),
    /// Another process has locked the first byte of the range, and its lock begins at this byte; or
    /// all attempts met other locks, and this is the first byte of the range.
    Other(u64),
    /// The locks of this file give no information about other processes.
    NoLocks,
}

impl CacheFile {
    /// Claims `range`, or its start up to the claim of another process. If another process has
    /// claimed the first byte, calls `waits` once, and waits as long as that process makes
    /// progress, but without progress only for `longest`. After `None`, the caller fetches without
    /// a claim.
    pub(crate) fn claim(
        &self,
        range: Range<u64>,
        longest: Duration,
        waits: &mut dyn FnMut(),
    ) -> Option<Held<'_>> {
        // This process writes nothing into the cache now, so a claim would not help others.
        if self.is_paused() {
            return None;
        }
        let mut seen = None;
        let mut pause = FIRST_PAUSE;
        loop {
            let other = match attempt(&self.file, range.clone()) {
                Attempt::Held(held) => return Some(held),
                Attempt::NoLocks => return None,
                Attempt::Other(start) => start,
            };
            if self.now() < self.unshared_until.load(Ordering::Relaxed) {
                return None;
            }
            let since = match seen {
                None => {
                    waits();
                    Instant::now()
                }
                Some((start, _)) if start != other => Instant::now(),
                Some((_, since)) => since,
            };
            if since.elapsed() >= longest {
                let until = self.now() + UNSHARED.as_millis() as u64;
                self.unshared_until.store(until, Ordering::Relaxed);
                tracing::debug!(
                    "{}: another process fetches bytes {other}.. and makes no progress",
                    self.name.display()
                );
                return None;
            }
            seen = Some((other, since));
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// As [`CacheFile::claim`], for the beginning of the file, before its chunks are known.
    pub(crate) fn claim_beginning(&self, longest: Duration) -> Option<Held<'_>> {
        self.claim(BEGINNING, longest, &mut || {})
    }
}

impl Held<'_> {
    /// The claimed bytes that are not in the cache yet.
    pub(crate) fn range(&self) -> &Range<u64> {
        &self.range
    }

    /// The cache has the bytes before `next`.
    pub(crate) fn arrived(&mut self, next: u64) {
        let next = next.min(self.range.end);
        self.unlock(next);
        self.range.start = next;
    }

    fn unlock(&self, end: u64) {
        // A length of 0 means all bytes behind.
        if self.range.start < end {
            let lock = lock(libc::F_UNLCK, &(self.range.start..end));
            // On failure, the lock ends with the process.
            let _ = fcntl(self.file, FcntlArg::F_OFD_SETLK(&lock));
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.unlock(self.range.end);
    }
}

fn attempt(file: &File, range: Range<u64>) -> Attempt<'_> {
    let mut end = range.end;
    let mut attempts = 0;
    // Each round makes the range shorter, or counts.
    while attempts < ATTEMPTS {
        let range = range.start..end;
        let mut lock = lock(libc::F_WRLCK, &range);
        match fcntl(file, FcntlArg::F_OFD_SETLK(&lock)) {
            Ok(_) => return Attempt::Held(Held { file, range }),
            Err(Errno::EAGAIN | Errno::EACCES) => {}
            Err(_) => return Attempt::NoLocks,
        }
        if fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock)).is_err() {
            return Attempt::NoLocks;
        }
        match (i32::from(lock.l_type), u64::try_from(lock.l_start)) {
            // It ended between the two calls.
            (libc::F_UNLCK, _) => attempts += 1,
            (libc::F_WRLCK, Ok(start)) if start > range.start => end = start,
            (libc::F_WRLCK, Ok(start)) => return Attempt::Other(start),
            // A lock for reading is no claim: some network file systems implement the flock(2) lock
            // on a file in use by such a lock.
            _ => return Attempt::NoLocks,
        }
    }
    Attempt::Other(range.start)
}

fn lock(kind: i32, range: &Range<u64>) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        // All ranges end below 2^63.
        l_start: range.start as i64,
        l_len: (range.end - range.start) as i64,
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The end of what is claimed, or where another claim begins.
    fn result(attempt: &Attempt<'_>) -> Result<u64, Option<u64>> {
        match attempt {
            Attempt::Held(held) => Ok(held.range().end),
            Attempt::Other(start) => Err(Some(*start)),
            Attempt::NoLocks => Err(None),
        }
    }

    fn files() -> (tempfile::TempDir, File, File) {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("cached");
        let first = File::create_new(&path).expect("a file");
        let second = File::options().read(true).write(true).open(&path);
        (directory, first, second.expect("a file"))
    }

    #[test]
    fn a_range_is_claimed_by_one_open_file_at_a_time() {
        let (_directory, first, second) = files();
        let Attempt::Held(mut held) = attempt(&first, 100..200) else {
            panic!("no other claim");
        };
        assert_eq!(result(&attempt(&second, 100..200)), Err(Some(100)));
        assert_eq!(result(&attempt(&second, 199..300)), Err(Some(100)));
        assert_eq!(result(&attempt(&second, 200..300)), Ok(300));
        // Up to the range of the other.
        assert_eq!(result(&attempt(&second, 0..300)), Ok(100));
        assert_eq!(result(&attempt(&second, BEGINNING)), Ok(BEGINNING.end));
        held.arrived(150);
        assert_eq!(result(&attempt(&second, 100..200)), Ok(150));
        assert_eq!(result(&attempt(&second, 199..300)), Err(Some(150)));
        held.arrived(200);
        assert_eq!(result(&attempt(&second, 0..300)), Ok(300));
        drop(held);
        let Attempt::Held(held) = attempt(&first, 0..1) else {
            panic!("no other claim");
        };
        drop(held);
        assert_eq!(result(&attempt(&second, 0..300)), Ok(300));
    }

    #[test]
    fn bytes_before_the_claims_of_many_are_claimed() {
        let (directory, first, _second) = files();
        let path = directory.path().join("cached");
        // The kernel names the oldest lock of the file first, or the lowest one.
        let others: Vec<File> = (1..10)
            .map(|_| {
                let file = File::options().read(true).write(true).open(&path);
                file.expect("a file")
            })
            .collect();
        let held: Vec<Attempt<'_>> = (1..10)
            .rev()
            .zip(&others)
            .map(|(at, file)| attempt(file, at * 100..at * 100 + 50))
            .collect();
        assert!(held.iter().all(|held| matches!(held, Attempt::Held(_))));
        assert_eq!(result(&attempt(&first, 0..2000)), Ok(100));
    }

    #[test]
    fn a_lock_for_reading_is_no_claim() {
        let (_directory, first, second) = files();
        let reads = lock(libc::F_RDLCK, &(0..1));
        fcntl(&second, FcntlArg::F_OFD_SETLK(&reads)).expect("locked");
        assert_eq!(result(&attempt(&first, 0..300)), Err(None));
    }
}

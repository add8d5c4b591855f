//! Which bytes of a cache file are being fetched by other processes, so that each is fetched once.
//!
//! A process that fetches bytes holds a lock on their range of the cache file: a lock of the open
//! file (`F_OFD_SETLK`), which the kernel releases when the process ends. It unlocks each chunk
//! when the cache has it, so other processes see that it makes progress. The locks only save
//! requests: bytes are checked wherever they come from, and no process waits for long for one that
//! makes no progress.

use std::fs::File;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;

use super::CacheFile;

/// The pauses between two looks at the lock of another process.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(16);
/// How long this process does not wait for others after a wait in vain.
const UNSHARED: Duration = Duration::from_secs(60);
/// Attempts at a lock while the locks of other processes change.
const ATTEMPTS: u32 = 4;
/// A byte behind the end of every file. Its lock is for the bytes that a process fetches before it
/// knows the chunks, and does not conflict with those of the chunks among them.
const BEGINNING: Range<u64> = 1 << 62..(1 << 62) + 1;

/// Bytes that this process fetches, until this value is dropped.
pub(crate) struct Held<'f> {
    file: &'f File,
    range: Range<u64>,
}

/// The answer to one attempt to lock a range.
enum Attempt<'f> {
    Held(Held<'f>),
    /// Another process has locked bytes from this one on, the first of the range among them.
    Other(u64),
    /// Locks say nothing here about other processes.
    NoLocks,
}

impl CacheFile {
    /// Claims the bytes of `range`, or as many of them, from the first on, as no other process
    /// fetches. Waits while another process fetches the first byte and makes progress, and without
    /// progress for `longest`; calls `waits` before. After `None`, the caller fetches all the same.
    pub(crate) fn claim(
        &self,
        range: Range<u64>,
        longest: Duration,
        waits: &mut dyn FnMut(),
    ) -> Option<Held<'_>> {
        // Bytes that are not written are of no use to other processes.
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

    /// Claims the beginning of the file, before its chunks are known; as [`CacheFile::claim`].
    pub(crate) fn claim_beginning(&self, longest: Duration) -> Option<Held<'_>> {
        self.claim(BEGINNING, longest, &mut || {})
    }
}

impl Held<'_> {
    /// The bytes that no other process finds in the cache yet.
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
    for _ in 0..ATTEMPTS {
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
            (libc::F_UNLCK, _) => {}
            (libc::F_WRLCK, Ok(start)) if start > range.start => end = start,
            (libc::F_WRLCK, Ok(start)) => return Attempt::Other(start),
            // No claim: some network file systems turn the flock(2) of a file in use into one.
            _ => return Attempt::NoLocks,
        }
    }
    Attempt::Other(range.start)
}

fn lock(kind: i32, range: &Range<u64>) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        // A file on a server is shorter than 2^63 bytes.
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
    fn a_lock_for_reading_is_no_claim() {
        let (_directory, first, second) = files();
        let reads = lock(libc::F_RDLCK, &(0..1));
        fcntl(&second, FcntlArg::F_OFD_SETLK(&reads)).expect("locked");
        assert_eq!(result(&attempt(&first, 0..300)), Err(None));
    }
}

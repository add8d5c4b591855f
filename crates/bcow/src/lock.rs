//! File locks: one writer at a time, and no writer while a reader has the file open.
//!
//! A writer holds an exclusive lock on its file; a reader of a file that may change holds a shared
//! lock, also when the file is a backing. The locks are those of flock(2): they belong to the open
//! file description and end with it, however the process ends. Sealed files never change and are
//! not locked.
//!
//! A writer writes a note into the file (spec section 3) that names it to a process that is
//! refused.

use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

/// Offset of the note in the file, in bytes. The note has at most `NOTE_BYTES` bytes.
const NOTE_AT: u64 = 1024;
const NOTE_BYTES: usize = 256;

/// How long, and how often, a lock without a note is waited for. A program that starts another one
/// has copies of all its descriptors between fork(2) and execve(2), so a lock outlives the close of
/// its file for that long, on a busy machine for tens of milliseconds. Where a few pauses take all
/// of the time, it is the number that counts.
const PASSING_WITHIN: Duration = Duration::from_millis(250);
const PASSING_TRIES: usize = 20;
const RETRY_PAUSE: Duration = Duration::from_millis(2);

/// Length in bytes that a page of the kernel's list of locks exceeds if more of the list follows:
/// the smallest page of Linux, less a few locks.
const LAST_PAGE: usize = 3 << 10;
/// Space in bytes for the largest page of Linux.
const LARGEST_PAGE: usize = 64 << 10;
/// How many locks two pages that follow one another have in common. One could be a lock that was
/// released and taken again elsewhere in the list.
const IN_COMMON: usize = 4;
/// How often a page is read again, further in front, before it counts as it is.
const AGAIN: usize = 200;

/// A flock(2) lock of a process.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HeldLock {
    /// The process that took it.
    pub pid: u32,
    /// Whether it is a writer's lock.
    pub is_exclusive: bool,
    /// The file: `MAJOR:MINOR:INODE`, the device in hexadecimal digits.
    pub file: String,
}

/// The flock(2) locks that processes hold, as far as this process can see them (proc_locks(5)).
/// Some may have been released already.
///
/// The kernel returns at most a page of its list for each read, and a lock that is released between
/// two reads moves all that follow. So each page begins in the middle of the one before it, and a
/// page that has nothing in common with that one is read again, further in front. The locks that
/// stay keep their order, so a lock that is held all the time is in one of the pages.
pub fn held_locks() -> BTreeSet<HeldLock> {
    let Ok(file) = File::open("/proc/locks") else {
        return BTreeSet::new();
    };
    held_in_list(|buffer, at| file.read_at(buffer, at))
}

/// The locks of the list that `read_at` reads. A list that cannot be read counts as far as it was
/// read.
fn held_in_list(
    mut read_at: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
) -> BTreeSet<HeldLock> {
    let mut held = BTreeSet::new();
    let mut buffer = vec![0; LARGEST_PAGE];
    let mut before = BTreeSet::new();
    let (mut at, mut back, mut again) = (0u64, 0, 0);
    while let Ok(length) = read_at(&mut buffer, at) {
        let page = String::from_utf8_lossy(&buffer[..length]);
        // A page that does not begin the list may begin in the middle of a line.
        let lines = page.lines().skip(usize::from(at > 0));
        // The number of a lock is its place in the list.
        let locks = lines.filter_map(|line| Some(line.split_once(':')?.1));
        let page: BTreeSet<String> = locks.map(str::to_owned).collect();
        let follows = at == 0 || page.intersection(&before).count() >= IN_COMMON;
        held.extend(page.iter().filter_map(|lock| held_lock(lock)));
        if !follows && again < AGAIN {
            again += 1;
            back = (back * 2).max(LAST_PAGE as u64 / 2);
            at = at.saturating_sub(back);
            continue;
        }
        if length < LAST_PAGE {
            break;
        }
        back = 0;
        at += length as u64 / 2;
        before = page;
    }
    held
}

fn held_lock(lock: &str) -> Option<HeldLock> {
    // Locks that are waited for have an arrow before the kind.
    let fields: Vec<&str> = lock.split_whitespace().collect();
    let ["FLOCK", _mandatory, access, pid, file, ..] = fields[..] else {
        return None;
    };
    Some(HeldLock {
        // 0 and -1: a process that this one cannot see.
        pid: pid.parse().ok().filter(|&pid| pid > 0)?,
        is_exclusive: access == "WRITE",
        file: file.to_owned(),
    })
}

/// An exclusive lock. Dropping this erases the note; the lock lasts as long as the file is open.
#[derive(Debug)]
pub struct FileLock {
    file: File,
}

/// The reason why a file was not locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// A writer has locked the file; the text is its note.
    #[error("it is being written by {0}")]
    Writer(String),
    /// A reader has locked the file, or a writer without a note.
    #[error("it is in use by another program")]
    InUse,
    /// The host cannot lock the file.
    #[error("it cannot be locked: {0}")]
    Io(#[source] io::Error),
}

impl FileLock {
    /// Locks `file`, which is open for writing, for a writer. `note` names the process and its
    /// purpose.
    pub fn exclusive(file: &File, note: &str) -> Result<FileLock, LockError> {
        Self::exclusive_after(pause, file, note)
    }

    fn exclusive_after(
        pause: impl FnMut(),
        file: &File,
        note: &str,
    ) -> Result<FileLock, LockError> {
        when_passed(pause, || match file.try_lock() {
            Ok(()) => Ok(()),
            // Only readers hold the lock, so a note in the file is that of a killed writer.
            Err(TryLockError::WouldBlock) if file.try_lock_shared().is_ok() => {
                file.unlock().map_err(LockError::Io)?;
                Err(LockError::InUse)
            }
            Err(TryLockError::WouldBlock) => Err(refused(file)),
            Err(TryLockError::Error(error)) => Err(LockError::Io(error)),
        })?;
        let lock = FileLock {
            file: file.try_clone().map_err(LockError::Io)?,
        };
        let mut bytes = [0; NOTE_BYTES];
        let mut end = note.len().min(NOTE_BYTES - 1);
        while !note.is_char_boundary(end) {
            end -= 1;
        }
        bytes[..end].copy_from_slice(&note.as_bytes()[..end]);
        // An error, for example of a full disk, must not prevent the lock.
        let _ = lock.file.write_all_at(&bytes, NOTE_AT);
        Ok(lock)
    }

    /// The locked file. The lock lasts as long as any descriptor of this open file exists.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Locks a file that may change for a reader. The lock lasts as long as the file is open.
    pub fn shared(file: &File) -> Result<(), LockError> {
        Self::shared_after(pause, file)
    }

    fn shared_after(pause: impl FnMut(), file: &File) -> Result<(), LockError> {
        when_passed(pause, || match file.try_lock_shared() {
            Ok(()) => Ok(()),
            Err(TryLockError::WouldBlock) => Err(refused(file)),
            Err(TryLockError::Error(error)) => Err(LockError::Io(error)),
        })
    }
}

/// A reader's lock that is exclusive as long as this exists: no other process reads the file or
/// makes a disk over it. Dropping this makes it a reader's lock again.
#[derive(Debug)]
pub(crate) struct AloneWith<'f>(&'f File);

impl<'f> AloneWith<'f> {
    /// `file` has a reader's lock, and keeps it if this fails.
    pub(crate) fn new(file: &'f File) -> Result<Self, LockError> {
        when_passed(pause, || match file.try_lock() {
            Ok(()) => Ok(()),
            Err(TryLockError::WouldBlock) => {
                // The attempt has released the earlier lock (flock(2)).
                FileLock::shared(file)?;
                Err(LockError::InUse)
            }
            Err(TryLockError::Error(error)) => Err(LockError::Io(error)),
        })?;
        Ok(AloneWith(file))
    }
}

impl Drop for AloneWith<'_> {
    fn drop(&mut self) {
        // No other process can have a lock yet, so only the host could refuse it.
        let _ = self.0.try_lock_shared();
    }
}

fn pause() {
    std::thread::sleep(RETRY_PAUSE);
}

/// Locks with `lock`, again for `PASSING_WITHIN` and `PASSING_TRIES` while the holder has no note,
/// with a `pause` between. A writer has a note until it closes its file, so it is reported at once.
fn when_passed(
    mut pause: impl FnMut(),
    lock: impl Fn() -> Result<(), LockError>,
) -> Result<(), LockError> {
    let start = Instant::now();
    let mut tries = 1;
    loop {
        match lock() {
            Err(LockError::InUse) if tries < PASSING_TRIES || start.elapsed() < PASSING_WITHIN => {
                tries += 1;
                pause();
            }
            other => return other,
        }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // If this fails, the stale note is ignored unless the file is locked.
        let _ = self.file.write_all_at(&[0; NOTE_BYTES], NOTE_AT);
    }
}

/// The error for a lock that another process holds.
fn refused(file: &File) -> LockError {
    let mut bytes = [0; NOTE_BYTES];
    if file.read_exact_at(&mut bytes, NOTE_AT).is_err() {
        return LockError::InUse;
    }
    let end = bytes.iter().position(|&byte| byte == 0);
    let note = String::from_utf8_lossy(&bytes[..end.unwrap_or(NOTE_BYTES)]);
    // The file is untrusted, and the note goes to a terminal.
    let note: String = note
        .chars()
        .map(|c| if c.is_control() { '?' } else { c })
        .collect();
    if note.is_empty() { LockError::InUse } else { LockError::Writer(note) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_writer_is_refused_by_name_of_the_first() {
        let path = tempfile::NamedTempFile::new().unwrap();
        path.as_file().set_len(4096).unwrap();
        let open = || {
            let mut options = File::options();
            options.read(true).write(true).open(path.path()).unwrap()
        };
        let (one, two) = (open(), open());
        let lock = FileLock::exclusive(&one, "a test\u{1b}, process 7").unwrap();
        let refusal = FileLock::exclusive(&two, "x").unwrap_err().to_string();
        assert_eq!(refusal, "it is being written by a test?, process 7");
        assert!(matches!(FileLock::shared(&two), Err(LockError::Writer(_))));
        drop((lock, one));
        FileLock::shared(&two).unwrap();
        let three = open();
        FileLock::shared(&three).unwrap();
        let refusal = FileLock::exclusive(&three, "x").unwrap_err();
        assert!(matches!(refusal, LockError::InUse), "{refusal}");
        // The note of a killed writer does not name the present readers.
        two.write_all_at(b"a test, process 7", NOTE_AT).unwrap();
        let refusal = FileLock::exclusive(&three, "x").unwrap_err();
        assert!(matches!(refusal, LockError::InUse), "{refusal}");
        drop(two);
        FileLock::exclusive(&three, &"ü".repeat(300)).unwrap();
        let mut note = [1; 256];
        three.read_exact_at(&mut note, 1024).unwrap();
        assert_eq!(note, [0; 256]);
    }

    #[test]
    fn a_lock_is_listed_while_others_come_and_go() {
        // Many, so that some of them are where a page of the list ends.
        check_list(200, 150);
    }

    #[test]
    fn a_lock_is_in_a_short_list_while_others_come_and_go() {
        check_list(5, 4);
    }

    #[test]
    fn a_lock_is_listed_though_most_of_those_in_front_of_it_end() {
        let line = |inode: usize| format!("FLOCK  ADVISORY  WRITE 7 fe:00:{inode} 0 EOF");
        for (front, kept, returns) in [
            (0, 300, false),
            (90, 1, false),
            (90, 1, true),
            (400, 300, false),
            (400, 300, true),
        ] {
            // The first read finds all the locks in front, and the others few of them, or every
            // second one all of them again.
            let mut reads = 0;
            let held = held_in_list(|buffer, at| {
                reads += 1;
                let few = if returns { reads % 2 == 0 } else { reads > 1 };
                let of_front = 1000..1000 + if few { front / 20 } else { front };
                let mut list = Vec::new();
                for (place, inode) in of_front.chain(0..kept).enumerate() {
                    list.push(format!("{}: {}\n", place + 1, line(inode)));
                }
                // As the kernel does: whole locks from the place on, up to a page.
                let (mut length, mut start) = (0, 0);
                for lock in &list {
                    let end = start + lock.len();
                    let from = (at as usize).clamp(start, end) - start;
                    if from < lock.len() {
                        if length + lock.len() - from > 4096 {
                            break;
                        }
                        let part = &lock.as_bytes()[from..];
                        buffer[length..length + part.len()].copy_from_slice(part);
                        length += part.len();
                    }
                    start = end;
                }
                Ok(length)
            });
            let missing: Vec<usize> = (0..kept)
                .filter(|inode| {
                    !held
                        .iter()
                        .any(|lock| lock.file == format!("fe:00:{inode}"))
                })
                .collect();
            assert!(
                missing.is_empty(),
                "{front}, {kept}, {returns}: {missing:?}"
            );
        }
    }

    fn check_list(kept: usize, changing: usize) {
        use std::os::unix::fs::MetadataExt;
        use std::sync::atomic::{AtomicBool, Ordering};

        let directory = tempfile::tempdir().unwrap();
        let file = |name: String| File::create(directory.path().join(name)).unwrap();
        let kept: Vec<File> = (0..kept).map(|n| file(format!("kept-{n}"))).collect();
        let inodes: BTreeSet<String> = kept
            .iter()
            .map(|file| {
                file.lock().unwrap();
                file.metadata().unwrap().ino().to_string()
            })
            .collect();
        let listed = || {
            let locks = held_locks().into_iter();
            let found = locks.filter_map(|lock| Some(lock.file.rsplit_once(':')?.1.to_owned()));
            found.filter(|inode| inodes.contains(inode)).count()
        };
        let has_ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let files: Vec<File> = (0..changing)
                    .map(|n| file(format!("{thread}-{n}")))
                    .collect();
                let has_ended = &has_ended;
                scope.spawn(move || {
                    // At least half of the locks of each round exist.
                    let mut step = 7;
                    while !has_ended.load(Ordering::Relaxed) {
                        step = (step * 31 + 17) % 9973;
                        let file = &files[step % files.len()];
                        if step % 4 == 0 { file.unlock() } else { file.lock() }.unwrap();
                    }
                });
            }
            let incomplete = (0..300).filter(|_| listed() < inodes.len()).count();
            has_ended.store(true, Ordering::Relaxed);
            assert_eq!(incomplete, 0);
        });
        drop(kept);
        assert_eq!(listed(), 0);
    }

    #[test]
    fn a_lock_that_a_program_being_started_keeps_for_a_moment_is_waited_for() {
        let path = tempfile::NamedTempFile::new().unwrap();
        path.as_file().set_len(4096).unwrap();
        let open = || {
            let mut options = File::options();
            options.read(true).write(true).open(path.path()).unwrap()
        };
        // At the last pause, the second descriptor of the same open file is closed, as that of a
        // process at its execve(2).
        let at_last = |file: File| {
            let (mut copy, mut pauses) = (Some(file.try_clone().unwrap()), 0);
            move || {
                pauses += 1;
                if pauses == PASSING_TRIES - 1 {
                    drop(copy.take());
                }
            }
        };
        let reader = open();
        FileLock::shared(&reader).unwrap();
        let writer = open();
        let lock = FileLock::exclusive_after(at_last(reader), &writer, "a test").unwrap();
        drop(lock);
        FileLock::shared_after(at_last(writer), &open()).unwrap();
    }
}

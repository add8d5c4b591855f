//! Eviction: the cache removes the least recently used data when it exceeds its limit.
//!
//! An eviction first removes files that no process uses, the least recently used one first. If the
//! cache is still too large, the eviction punches ranges out of files in use. A reader detects that
//! the bytes of such a range do not match the Merkle tree, and fetches them again. Ranges that this
//! process has used recently are evicted after the other ranges of all files; the header and the
//! Merkle tree of a file are evicted last.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use bcow::header_of;
use rustix::fs::{FallocateFlags, FlockOperation, OFlags};

use super::entries::{Removal, Scanned};
use super::{Cache, EntryKind, set_last_use};
use crate::lock::lock;
use crate::tree::Hash;

/// The unit of eviction from a file that is in use.
const RANGE_BYTES: u64 = 1 << 20;
/// An eviction frees the limit divided by this number, so that the next one is not due at once.
const FREED_DIVISOR: u64 = 10;
/// This process compares the size of the cache with the limit each time it has written the limit
/// divided by this number, but at least [`MIN_UNCOMPARED_BYTES`] and at most
/// [`MAX_UNCOMPARED_BYTES`].
const INTERVAL_DIVISOR: u64 = 64;
const MIN_UNCOMPARED_BYTES: u64 = 256 << 10;
const MAX_UNCOMPARED_BYTES: u64 = 64 << 20;

/// The ranges of one file that this process has used since it last evicted ranges of the file.
pub(super) struct RecentRanges {
    /// One bit for each of the first [`MAX_RANGES`] ranges. Later ranges count as not used.
    bits: Vec<AtomicU64>,
}

/// The recent ranges of each file, by the root hash of the file. The lock is held for a lookup. No
/// other lock is acquired while it is held.
#[derive(Default)]
pub(super) struct RecentRangesByRoot(Mutex<HashMap<Hash, Weak<RecentRanges>>>);

/// Ranges of a file with a mark: those of its first 64 GiB.
const MAX_RANGES: u64 = 64 << 10;

impl RecentRangesByRoot {
    /// The recent ranges of a file. All readers of the file in this process share them.
    pub(super) fn of(&self, root: &Hash) -> Arc<RecentRanges> {
        let mut all = lock(&self.0);
        if let Some(found) = all.get(root).and_then(Weak::upgrade) {
            return found;
        }
        all.retain(|_, recent| recent.strong_count() > 0);
        let recent = Arc::<RecentRanges>::default();
        all.insert(*root, Arc::downgrade(&recent));
        recent
    }
}

impl Default for RecentRanges {
    fn default() -> Self {
        RecentRanges {
            bits: (0..MAX_RANGES / 64).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

impl RecentRanges {
    /// Marks the range that contains a byte.
    pub(super) fn mark(&self, offset: u64) {
        let range = offset / RANGE_BYTES;
        let Some(word) = self.bits.get((range / 64) as usize) else {
            return;
        };
        let bit = 1 << (range % 64);
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Returns the marks and clears them.
    fn take(&self) -> Vec<u64> {
        let words = self.bits.iter();
        words.map(|word| word.swap(0, Ordering::Relaxed)).collect()
    }
}

fn is_marked(bits: &[u64], range: u64) -> bool {
    let word = bits.get((range / 64) as usize);
    word.is_some_and(|word| word & (1 << (range % 64)) != 0)
}

impl Cache {
    /// Counts bytes that this process has written into the cache.
    pub(super) fn count_written(&self, bytes: u64) {
        self.0.uncompared_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Evicts data if the cache exceeds its limit. Compares the size with the limit only if this
    /// process has written enough bytes since the last comparison.
    pub(super) fn enforce_limit(&self) {
        let Some(limit) = self.0.limit else { return };
        let interval = (limit / INTERVAL_DIVISOR).clamp(MIN_UNCOMPARED_BYTES, MAX_UNCOMPARED_BYTES);
        if self.0.uncompared_bytes.load(Ordering::Relaxed) < interval {
            return;
        }
        // An eviction by another thread or process serves this thread too.
        let Ok(_evicting) = self.0.evicting.try_lock() else {
            return;
        };
        self.0.uncompared_bytes.store(0, Ordering::Relaxed);
        let directory = &self.0.directory;
        let failed = |error: &io::Error| {
            tracing::warn!("{}: cannot evict: {error}", self.0.path.display());
        };
        match rustix::fs::flock(directory, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => return,
            // Without locks, two processes can evict at the same time, which is more than needed.
            Err(error) => failed(&error.into()),
            Ok(()) => {}
        }
        if let Err(error) = self.evict(limit) {
            failed(&error);
        }
        let _ = rustix::fs::flock(directory, FlockOperation::Unlock);
    }

    fn evict(&self, limit: u64) -> io::Result<()> {
        let mut files = self.scan()?;
        files.retain(|file| file.kind != EntryKind::Unknown);
        let mut held: u64 = files.iter().map(|file| file.held_bytes).sum();
        if held <= limit {
            return Ok(());
        }
        let goal = limit - limit / FREED_DIVISOR;
        tracing::debug!(
            "{}: {held} bytes exceed the limit of {limit}: evicting",
            self.0.path.display()
        );
        files.sort_by_key(|file| file.last_use);
        let in_use = self.remove_unused_files(files, &mut held, goal);
        self.punch_files_in_use(&in_use, &mut held, goal);
        Ok(())
    }

    /// Removes files that no process uses, until the files take up at most `goal` bytes. `held` is
    /// the number of bytes that they take up. Returns the files in use.
    fn remove_unused_files(&self, files: Vec<Scanned>, held: &mut u64, goal: u64) -> Vec<Scanned> {
        let mut in_use = Vec::new();
        for file in files {
            if *held <= goal {
                break;
            }
            match self.remove_unused(&file.name) {
                Ok(Removal::Removed | Removal::Missing) => {
                    *held = held.saturating_sub(file.held_bytes);
                }
                Ok(Removal::InUse) => in_use.push(file),
                Err(error) => self.cannot_evict(&file, &error),
            }
        }
        in_use
    }

    /// Punches ranges out of files in use, until the files take up at most `goal` bytes.
    fn punch_files_in_use(&self, in_use: &[Scanned], held: &mut u64, goal: u64) {
        for evictable in [
            Evictable::UnmarkedContent,
            Evictable::Content,
            Evictable::All,
        ] {
            for file in in_use {
                if *held <= goal {
                    return;
                }
                match self.punch(file, *held - goal, evictable) {
                    Ok(freed) => *held = held.saturating_sub(freed),
                    Err(error) => self.cannot_evict(file, &error),
                }
            }
        }
    }

    /// Logs that a file stays. Its data must not keep that of all other files.
    fn cannot_evict(&self, file: &Scanned, error: &io::Error) {
        let path = self.0.path.join(&file.name);
        tracing::warn!("{}: cannot evict: {error}", path.display());
    }

    /// Punches `evictable` ranges out of a file, until `wanted` bytes are free or no such range is
    /// left. Returns the number of bytes freed.
    fn punch(&self, found: &Scanned, wanted: u64, evictable: Evictable) -> io::Result<u64> {
        let EntryKind::File(root) = &found.kind else {
            return Ok(0);
        };
        let file = match self.open_file(&found.name, OFlags::empty()) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found.held_bytes),
            Err(error) => return Err(error),
        };
        let freed = match evictable {
            Evictable::All => punch_all(&file),
            Evictable::UnmarkedContent => {
                let marks = self.0.recent_ranges.of(&root.0).take();
                punch_content(&file, wanted, &marks)
            }
            Evictable::Content => punch_content(&file, wanted, &[]),
        };
        // Punching a hole has changed it, also before a failure.
        let (seconds, nanoseconds) = found.last_use;
        let _ = set_last_use(&file, seconds, nanoseconds);
        freed
    }
}

/// Punches all bytes of a file out. Returns the number of bytes freed.
fn punch_all(file: &File) -> io::Result<u64> {
    let before = held_bytes(file)?;
    punch_out(file, 0, file.metadata()?.len())?;
    Ok(before.saturating_sub(held_bytes(file)?))
}

/// Punches ranges of content without a mark out of a file, until `wanted` bytes are free or no such
/// range is left. Returns the number of bytes freed.
fn punch_content(file: &File, wanted: u64, marks: &[u64]) -> io::Result<u64> {
    let before = held_bytes(file)?;
    let length = file.metadata()?.len();
    // The first range contains the header, and the Merkle tree follows the content.
    let content = tree_offset(file).unwrap_or(0).min(length);
    let ranges = (content / RANGE_BYTES).saturating_sub(1);
    // A random first range: two processes that evict one after the other should not select the same
    // ranges.
    let first = match ranges {
        0 => return Ok(0),
        ranges => RandomState::new().build_hasher().finish() % ranges,
    };
    let mut freed = 0;
    for n in 0..ranges {
        let range = 1 + (first + n) % ranges;
        if is_marked(marks, range) {
            continue;
        }
        punch_out(file, range * RANGE_BYTES, RANGE_BYTES)?;
        if n % 16 == 15 || n + 1 == ranges {
            freed = before.saturating_sub(held_bytes(file)?);
            if freed >= wanted {
                break;
            }
        }
    }
    Ok(before.saturating_sub(held_bytes(file)?).max(freed))
}

/// The ranges that may be evicted from a file in use. Each value includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Evictable {
    /// Content without a mark in [`RecentRanges`].
    UnmarkedContent,
    /// All content, except the first range.
    Content,
    /// The whole file, with its header and its Merkle tree.
    All,
}

/// The bytes that a file takes up on the disk.
fn held_bytes(file: &File) -> io::Result<u64> {
    let found = rustix::fs::fstat(file)?;
    Ok(found.st_blocks as u64 * 512)
}

/// The offset of the Merkle tree according to the header in the cache file. The value is not
/// reliable: the header is not verified here.
fn tree_offset(file: &File) -> Option<u64> {
    Some(header_of(file)?.merkle?.offset)
}

/// Frees the disk space of a range of a file. The range then reads as zeros.
pub(super) fn punch_out(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, mode, offset, bytes)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_count_towards_the_limit() {
        const LIMIT: u64 = 512 << 10;
        let directory = tempfile::tempdir().expect("a directory");
        let cache = Cache::open(directory.path()).expect("a cache");
        let cache = cache.with_limit(LIMIT).expect("a limit");
        // The first comparison of a process.
        cache.enforce_limit();
        for number in 0..4_u8 {
            let document = vec![number; 300 << 10];
            cache.keep_document(&crate::cache::sha256(&document), &document);
        }
        cache.enforce_limit();
        let entries = cache.entries().expect("a list");
        let held: u64 = entries.iter().map(|entry| entry.held_bytes).sum();
        assert!(held <= LIMIT, "{held}");
    }
}

//! The limit of the cache: the least recently used data is evicted.
//!
//! Files that are not in use are removed, the one that was used last at the end. If that is not
//! enough, ranges of files in use are punched out: a reader finds that their bytes do not match the
//! Merkle tree, and fetches them again. The Merkle tree of a file, and ranges that this process has
//! used since the last eviction, are evicted after all others.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use bcow::format::{HEADER_AREA_BYTES, choose_header};
use rustix::fs::{FallocateFlags, FlockOperation, OFlags};

use super::entries::{Removal, Scanned};
use super::{Cache, EntryKind};
use crate::tree::Hash;

/// The unit of eviction from a file that is in use.
const RANGE_BYTES: u64 = 1 << 20;
/// An eviction makes this part of the limit free, so that the next one is not due at once.
const FREE_PART: u64 = 10;
/// The cache is compared with its limit after each write of this part of the limit, within bounds.
const COMPARED_PART: u64 = 64;
const FEWEST_UNCOMPARED_BYTES: u64 = 256 << 10;
const MAX_UNCOMPARED_BYTES: u64 = 64 << 20;

/// The ranges of one file that this process has used since its last eviction.
pub(super) struct Recent {
    /// One bit for each range of the first 64 GiB.
    bits: Vec<AtomicU64>,
}

/// Those of all files, by root. The lock is held for a lookup, and no other lock is taken under it.
#[derive(Default)]
pub(super) struct Recents(Mutex<HashMap<Hash, Weak<Recent>>>);

const MAX_RANGES: u64 = 64 << 10;

impl Recents {
    pub(super) fn of(&self, root: &Hash) -> Arc<Recent> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = all.get(root).and_then(Weak::upgrade) {
            return found;
        }
        all.retain(|_, recent| recent.strong_count() > 0);
        let recent = Arc::<Recent>::default();
        all.insert(*root, Arc::downgrade(&recent));
        recent
    }
}

impl Default for Recent {
    fn default() -> Self {
        Recent {
            bits: (0..MAX_RANGES / 64).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

impl Recent {
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

    /// The marks, which are forgotten here.
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
    /// Counts bytes that were written.
    pub(super) fn wrote(&self, bytes: u64) {
        self.0.uncompared_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Evicts what is too much, if there is a limit and enough was written since the last time.
    pub(super) fn keep_limit(&self) {
        let Some(limit) = self.0.limit else { return };
        let interval = (limit / COMPARED_PART).clamp(FEWEST_UNCOMPARED_BYTES, MAX_UNCOMPARED_BYTES);
        if self.0.uncompared_bytes.load(Ordering::Relaxed) < interval {
            return;
        }
        // Another thread or process that evicts does it for this one too.
        let Ok(_evicting) = self.0.evicting.try_lock() else {
            return;
        };
        self.0.uncompared_bytes.store(0, Ordering::Relaxed);
        let directory = &self.0.directory;
        if rustix::fs::flock(directory, FlockOperation::NonBlockingLockExclusive).is_err() {
            return;
        }
        if let Err(error) = self.evict(limit) {
            tracing::warn!("{}: cannot evict: {error}", self.0.path.display());
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
        let goal = limit - limit / FREE_PART;
        tracing::debug!(
            "{}: {held} bytes, of {limit}: evicting",
            self.0.path.display()
        );
        files.sort_by_key(|file| file.last_use);
        let mut in_use = Vec::new();
        for file in files {
            if held <= goal {
                return Ok(());
            }
            match self.remove_unused(&file.name)? {
                Removal::Removed | Removal::Missing => held = held.saturating_sub(file.held_bytes),
                Removal::InUse => in_use.push(file),
            }
        }
        for depth in [Depth::Unmarked, Depth::Content, Depth::All] {
            for file in &in_use {
                if held <= goal {
                    return Ok(());
                }
                held = held.saturating_sub(self.punch(file, held - goal, depth)?);
            }
        }
        Ok(())
    }

    /// Punches ranges out of a file until it has `wanted` bytes less. Returns the difference.
    fn punch(&self, found: &Scanned, wanted: u64, depth: Depth) -> io::Result<u64> {
        let EntryKind::File(root) = &found.kind else {
            return Ok(0);
        };
        let file = match self.open_file(&found.name, OFlags::empty()) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found.held_bytes),
            Err(error) => return Err(error),
        };
        let before = held_bytes(&file)?;
        let length = file.metadata()?.len();
        if depth == Depth::All {
            punch_out(&file, 0, length)?;
            return Ok(before.saturating_sub(held_bytes(&file)?));
        }
        // The first range has the header; the tree is at the end.
        let content = tree_offset(&file).unwrap_or(0).min(length);
        let ranges = (content / RANGE_BYTES).saturating_sub(1);
        let marks = match depth {
            Depth::Unmarked => self.0.recents.of(&root.0).take(),
            _ => Vec::new(),
        };
        // Two processes that evict one after the other should not choose the same ranges.
        let first = match ranges {
            0 => return Ok(0),
            ranges => RandomState::new().build_hasher().finish() % ranges,
        };
        let mut freed = 0;
        for n in 0..ranges {
            let range = 1 + (first + n) % ranges;
            if is_marked(&marks, range) {
                continue;
            }
            punch_out(&file, range * RANGE_BYTES, RANGE_BYTES)?;
            if n % 16 == 15 || n + 1 == ranges {
                freed = before.saturating_sub(held_bytes(&file)?);
                if freed >= wanted {
                    break;
                }
            }
        }
        restore_last_use(&file, found);
        Ok(before.saturating_sub(held_bytes(&file)?).max(freed))
    }
}

/// What may be evicted from a file that is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Depth {
    /// Content that this process has not used lately.
    Unmarked,
    Content,
    All,
}

fn held_bytes(file: &File) -> io::Result<u64> {
    let found = rustix::fs::fstat(file)?;
    Ok(found.st_blocks as u64 * 512)
}

/// Where the Merkle tree begins, as the header in the file says. It is only a guess: the file may
/// be damaged.
fn tree_offset(file: &File) -> Option<u64> {
    use std::os::unix::fs::FileExt;
    let mut slots = [0; HEADER_AREA_BYTES];
    file.read_exact_at(&mut slots, 0).ok()?;
    Some(choose_header(&slots).ok()?.merkle?.offset)
}

/// Frees a range of a file, which then reads as zeros.
pub(super) fn punch_out(file: &File, offset: u64, bytes: u64) -> io::Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, mode, offset, bytes)?;
    Ok(())
}

/// Eviction is no use.
fn restore_last_use(file: &File, found: &Scanned) {
    let time = rustix::fs::Timespec {
        tv_sec: found.last_use.0,
        tv_nsec: found.last_use.1 as _,
    };
    let _ = rustix::fs::futimens(
        file,
        &rustix::fs::Timestamps {
            last_access: time,
            last_modification: time,
        },
    );
}

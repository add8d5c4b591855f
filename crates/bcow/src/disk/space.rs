//! Allocation of space in the file.
//!
//! There are two levels of locks, acquired in this order and never held across I/O: a *chunk* (one
//! of several; a region always uses the same one), and the *pool* from which chunks are cut. The
//! pool is locked once per chunk, so writers to different regions rarely contend.

use std::io;
use std::ops::Range;

use bcow_format::{MAX_ADDRESS, SECTOR_BYTES, Stored};

use super::extents::Extents;
use crate::Error;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, SMALL, lock};

const CHUNKS: usize = 16;
/// Bytes that a chunk takes from the pool at a time.
const CHUNK_BYTES: u64 = if SMALL { SECTOR_BYTES } else { 1 << 20 };
/// Free space is reused once there is this much of it, and a sixteenth of the file. Until then the
/// file grows, because data that is written sequentially is also read so.
const LEAST_REUSE_BYTES: u64 = 4 << 20;
/// Bytes that are initialised ahead: a sixteenth of the file, within these limits.
const LEAST_AHEAD_BYTES: u64 = if SMALL { SECTOR_BYTES } else { 256 << 10 };
const MAX_AHEAD_BYTES: u64 = 8 << 20;
/// Shorter holes are not initialised ahead.
const LEAST_HOLE_BYTES: u64 = if SMALL { SECTOR_BYTES } else { 64 << 10 };

pub(super) struct Space {
    chunks: [Mutex<Piece>; CHUNKS],
    pool: Mutex<Pool>,
    /// Whether `ready` of the pool is not empty; changed under the lock of the pool.
    has_ready: AtomicBool,
}

struct Pool {
    /// Free ranges that the host stores, as far as is known.
    free: Extents,
    /// Free ranges that the host probably does not store.
    holes: Extents,
    /// Free ranges that were filled with zeros. A write there changes no metadata of the host.
    ready: Extents,
    /// All space from here on is free and reads as zeros.
    end: u64,
}

/// Space to initialise ahead, in bytes.
enum Ahead {
    /// A part of a hole, of at most this length.
    Hole(u64),
    /// At the end of the file.
    End(u64),
}

/// An allocated range, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Piece {
    pub(super) start: u64,
    pub(super) bytes: u64,
    /// Whether the range reads as zeros.
    pub(super) blank: bool,
    /// Whether the host stores the range, as far as is known.
    pub(super) stored: bool,
}

impl Piece {
    fn new(range: Range<u64>, blank: bool, stored: bool) -> Self {
        Piece {
            start: range.start,
            bytes: range.end - range.start,
            blank,
            stored,
        }
    }

    fn cut(&mut self, bytes: u64) -> Piece {
        let piece = Piece { bytes, ..*self };
        self.start += bytes;
        self.bytes -= bytes;
        piece
    }

    pub(super) fn range(&self) -> Range<u64> {
        self.start..self.start + self.bytes
    }
}

impl Space {
    /// The ranges `free` are free, and all space from `end` on, where the file ends.
    pub(super) fn new(free: Extents, end: u64) -> Self {
        Space {
            chunks: Default::default(),
            pool: Mutex::new(Pool::new(free, end)),
            has_ready: AtomicBool::new(false),
        }
    }

    /// Allocates at least `unit` and at most `most` bytes. The result is a multiple of `unit`,
    /// which is a multiple of the sector size. Calls with the same `near` get neighbouring ranges.
    pub(super) fn allocate(&self, near: u64, unit: u64, most: u64) -> Result<Piece, Error> {
        let mut chunk = lock(&self.chunks[near as usize % CHUNKS]);
        if chunk.bytes < unit || (!chunk.stored && self.has_ready.load(Ordering::Relaxed)) {
            let mut pool = lock(&self.pool);
            let left = std::mem::take(&mut *chunk);
            if left.stored {
                pool.free.insert(left.range())
            } else {
                pool.holes.insert(left.range())
            }
            let cut = pool.cut(unit, most.max(CHUNK_BYTES));
            self.note_ready(&pool);
            *chunk = cut?;
        }
        let bytes = chunk.bytes.min(most) / unit * unit;
        Ok(chunk.cut(bytes))
    }

    /// Allocates `bytes`, rounded up to sectors, for a table or section.
    pub(super) fn allocate_section(&self, bytes: u64) -> Result<Piece, Error> {
        let bytes = bytes.next_multiple_of(SECTOR_BYTES);
        let mut pool = lock(&self.pool);
        // A gap that fits is preferred, because it keeps the file short.
        if let Some(range) = pool.free.take(bytes, bytes) {
            return Ok(Piece::new(range, false, true));
        }
        let cut = pool.cut(bytes, bytes);
        self.note_ready(&pool);
        cut
    }

    /// Allocates space that the host does not store yet: the caller fills it with zeros, and then
    /// calls [`Space::add_ready`] or frees it. `None` if there is enough.
    pub(super) fn allocate_ahead(&self) -> Option<Range<u64>> {
        let mut pool = lock(&self.pool);
        match pool.wants_ahead()? {
            Ahead::Hole(most) => pool.holes.take(SECTOR_BYTES, most),
            Ahead::End(bytes) => {
                let start = pool.end;
                pool.end += bytes;
                Some(start..pool.end)
            }
        }
    }

    /// Whether [`Space::allocate_ahead`] would allocate.
    pub(super) fn wants_ahead(&self) -> bool {
        lock(&self.pool).wants_ahead().is_some()
    }

    /// Frees ranges. The host no longer stores `holes`, which are parts of them.
    pub(super) fn free_punched(
        &self,
        ranges: impl IntoIterator<Item = Range<u64>>,
        holes: impl IntoIterator<Item = Range<u64>>,
    ) {
        let mut pool = lock(&self.pool);
        for range in ranges {
            pool.free.insert(range);
        }
        for hole in holes {
            pool.free.remove(hole.clone());
            pool.holes.insert(hole);
        }
    }

    /// Makes a range available that reads as zeros because zeros were written.
    pub(super) fn add_ready(&self, range: Range<u64>) {
        let mut pool = lock(&self.pool);
        pool.ready.insert(range);
        self.note_ready(&pool);
    }

    fn note_ready(&self, pool: &Pool) {
        let has_ready = pool.ready.total() > 0;
        self.has_ready.store(has_ready, Ordering::Relaxed);
    }

    /// Free bytes that were filled with zeros.
    pub(super) fn zeroed_bytes(&self) -> u64 {
        lock(&self.pool).ready.total()
    }

    /// Frees ranges.
    pub(super) fn free(&self, ranges: impl IntoIterator<Item = Range<u64>>) {
        self.free_punched(ranges, []);
    }

    /// Starts over with `free` and all space from `end` on as the free space. The caller knows that
    /// all other space is in use and that no allocation is in flight.
    pub(super) fn reset(&self, free: Extents, end: u64) {
        for chunk in &self.chunks {
            *lock(chunk) = Piece::default();
        }
        let mut pool = lock(&self.pool);
        *pool = Pool::new(free, end);
        self.note_ready(&pool);
    }

    /// Free bytes before the end of the file.
    pub(super) fn free_bytes(&self) -> u64 {
        let in_chunks: u64 = self.chunks.iter().map(|chunk| lock(chunk).bytes).sum();
        let pool = lock(&self.pool);
        in_chunks + pool.free.total() + pool.holes.total() + pool.ready.total()
    }
}

impl Pool {
    fn new(free: Extents, end: u64) -> Self {
        // The end of the last use of the file released all long ranges.
        let (mut stored, mut holes) = (Extents::default(), Extents::default());
        for range in free.iter() {
            if range.end - range.start >= LEAST_HOLE_BYTES {
                holes.insert(range)
            } else {
                stored.insert(range)
            }
        }
        Pool {
            free: stored,
            holes,
            ready: Extents::default(),
            end: end.next_multiple_of(SECTOR_BYTES),
        }
    }

    /// Free space from which on the file does not grow, in bytes.
    fn reuse_bytes(&self) -> u64 {
        LEAST_REUSE_BYTES.max(self.end / 16)
    }

    /// The space to initialise ahead now, if any. Near the limit of reuse the file may grow again
    /// soon, so up to twice the limit there is initialised space.
    fn wants_ahead(&self) -> Option<Ahead> {
        let wanted = (self.end / 16).clamp(LEAST_AHEAD_BYTES, MAX_AHEAD_BYTES);
        let wanted = wanted.next_multiple_of(SECTOR_BYTES);
        if self.ready.total() >= wanted / 2 {
            return None;
        }
        if self.holes.longest() >= LEAST_HOLE_BYTES {
            return Some(Ahead::Hole(wanted));
        }
        let grows = self.free.total() < 2 * self.reuse_bytes();
        (grows && self.end + wanted <= MAX_ADDRESS).then_some(Ahead::End(wanted))
    }

    fn cut(&mut self, unit: u64, most: u64) -> Result<Piece, Error> {
        let most = most.next_multiple_of(unit);
        if let Some(range) = self.ready.take(unit, most) {
            return Ok(Piece::new(range, true, true));
        }
        if SMALL || self.free.total() + self.holes.total() >= self.reuse_bytes() {
            let is_ample = self.free.longest() >= most;
            if !is_ample
                && self.holes.longest() >= LEAST_HOLE_BYTES
                && let Some(range) = self.holes.take(unit, most)
            {
                return Ok(Piece::new(range, false, false));
            }
            if let Some(range) = self.free.take(unit, most) {
                return Ok(Piece::new(range, false, true));
            }
        }
        if self.end + most > MAX_ADDRESS {
            let full = io::Error::new(
                io::ErrorKind::StorageFull,
                "the file has reached 2^48 bytes, which is all the format has room for",
            );
            return Err(Error::io("write", self.end, full));
        }
        let start = self.end;
        self.end += most;
        Ok(Piece::new(start..self.end, true, false))
    }
}

/// The sectors of a stored range. In a writable file every stored range starts at a sector and owns
/// its sectors (spec section 10, "Places").
pub(super) fn sectors(stored: Stored) -> Range<u64> {
    debug_assert!(stored.at.0.is_multiple_of(SECTOR_BYTES));
    stored.at.0..stored.end().next_multiple_of(SECTOR_BYTES)
}

#[cfg(test)]
mod tests {
    use std::iter;

    use super::*;

    #[test]
    fn neighbours_get_one_range_behind_the_other() {
        let space = Space::new(Extents::default(), 5000);
        let first = space.allocate(3, 4096, 8192).unwrap();
        let second = space.allocate(3, 4096, 4096).unwrap();
        let other = space.allocate(4, 4096, 4096).unwrap();
        assert_eq!((first.start, first.bytes, first.blank), (8192, 8192, true));
        assert_eq!(second.start, 16384);
        assert_eq!(other.start, 8192 + CHUNK_BYTES);
    }

    #[test]
    fn much_free_space_is_used_before_the_file_grows() {
        let space = Space::new(Extents::default(), 4096);
        let large = space.allocate(0, 32 << 20, 32 << 20).unwrap();
        space.free([large.range()]);
        let again = space.allocate(0, 4096, 4096).unwrap();
        assert!(large.range().contains(&again.start) && !again.blank);
    }

    #[test]
    fn initialised_space_is_used_before_any_other() {
        let space = Space::new(Extents::default(), 4096);
        let first = space.allocate(0, 4096, 4096).unwrap();
        let ready = space.allocate_ahead().unwrap();
        assert_eq!(ready.end - ready.start, LEAST_AHEAD_BYTES);
        space.add_ready(ready.clone());
        assert!(!space.wants_ahead());
        // The chunk that begins with `first` is left, although it has room.
        let second = space.allocate(0, 4096, 4096).unwrap();
        assert_eq!((second.start, second.blank), (ready.start, true));
        assert!(first.start < second.start);
        assert_eq!(
            space.free_bytes(),
            CHUNK_BYTES + LEAST_AHEAD_BYTES - 2 * 4096
        );
    }

    #[test]
    fn holes_are_initialised_before_the_file_grows() {
        let space = Space::new(Extents::default(), 4096);
        let large = space.allocate(0, 32 << 20, 32 << 20).unwrap().range();
        let hole = large.start..large.start + (3 << 20);
        let stored = hole.end..hole.end + (3 << 20);
        let whole = hole.start..stored.end;
        space.free_punched(iter::once(whole), iter::once(hole.clone()));
        let mut initialised = 0;
        while initialised < 3 << 20 {
            let range = space.allocate_ahead().unwrap();
            assert!(
                hole.start <= range.start && range.end <= hole.end,
                "{range:?}"
            );
            initialised += range.end - range.start;
            space.add_ready(range.clone());
            let used = space.allocate(0, 4096, range.end - range.start).unwrap();
            assert_eq!((used.range(), used.blank), (range, true));
        }
        assert_eq!(space.free_bytes(), 3 << 20);
        assert!(space.allocate_ahead().unwrap().start >= large.end);
        // With much space that the host stores, none needs to be initialised.
        space.free(iter::once(large.end - (6 << 20)..large.end));
        assert!(!space.wants_ahead());
    }

    #[test]
    fn the_rest_of_the_last_sector_comes_back_too() {
        let stored = Stored {
            at: bcow_format::Uba(8192),
            bytes: 5000,
            crc: 0,
        };
        assert_eq!(sectors(stored), 8192..16384);
    }
}

//! Allocation of space in the file.
//!
//! There are two levels of locks, acquired in this order and never held across I/O: a *chunk* (one
//! of several; a region always uses the same one), and the *pool* from which chunks are cut. The
//! pool is locked once per chunk, so writers to different regions rarely contend.

use std::io;
use std::ops::Range;

use bcow_format::{MAX_ADDRESS, SECTOR_BYTES, Stored};

use super::extents::Extents;
use super::locks::lock;
use crate::Error;
use crate::sync::{Mutex, SMALL};

const CHUNKS: usize = 16;
/// Bytes that a chunk takes from the pool at a time.
const CHUNK_BYTES: u64 = if SMALL { SECTOR_BYTES } else { 1 << 20 };
/// Free space is reused once there is this much of it, and a sixteenth of the file. Until then the
/// file grows, because data that is written sequentially is also read so.
const LEAST_REUSE_BYTES: u64 = 4 << 20;

pub(super) struct Space {
    chunks: [Mutex<Piece>; CHUNKS],
    pool: Mutex<Pool>,
}

struct Pool {
    free: Extents,
    /// All space from here on is free and reads as zeros.
    end: u64,
}

/// An allocated range, in bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Piece {
    pub(super) start: u64,
    pub(super) bytes: u64,
    /// Whether the range reads as zeros.
    pub(super) blank: bool,
}

impl Piece {
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
            pool: Mutex::new(Pool {
                free,
                end: end.next_multiple_of(SECTOR_BYTES),
            }),
        }
    }

    /// Allocates at least `unit` and at most `most` bytes. The result is a multiple of `unit`,
    /// which is a multiple of the sector size. Calls with the same `near` get neighbouring ranges.
    pub(super) fn allocate(&self, near: u64, unit: u64, most: u64) -> Result<Piece, Error> {
        let mut chunk = lock(&self.chunks[near as usize % CHUNKS]);
        if chunk.bytes < unit {
            let mut pool = lock(&self.pool);
            let left = std::mem::take(&mut *chunk);
            pool.free.insert(left.range());
            *chunk = pool.cut(unit, most.max(CHUNK_BYTES))?;
        }
        let bytes = chunk.bytes.min(most) / unit * unit;
        Ok(chunk.cut(bytes))
    }

    /// Allocates `bytes`, rounded up to sectors, for a table or section.
    pub(super) fn allocate_section(&self, bytes: u64) -> Result<Piece, Error> {
        let bytes = bytes.next_multiple_of(SECTOR_BYTES);
        let mut pool = lock(&self.pool);
        // A gap that fits is preferred, because it keeps the file short.
        match pool.free.take(bytes, bytes) {
            Some(range) => Ok(Piece {
                start: range.start,
                bytes,
                blank: false,
            }),
            None => pool.cut(bytes, bytes),
        }
    }

    /// Frees ranges.
    pub(super) fn free(&self, ranges: impl IntoIterator<Item = Range<u64>>) {
        let mut pool = lock(&self.pool);
        for range in ranges {
            pool.free.insert(range);
        }
    }

    /// Starts over with `free` and all space from `end` on as the free space. The caller knows that
    /// all other space is in use and that no allocation is in flight.
    pub(super) fn reset(&self, free: Extents, end: u64) {
        for chunk in &self.chunks {
            *lock(chunk) = Piece::default();
        }
        *lock(&self.pool) = Pool {
            free,
            end: end.next_multiple_of(SECTOR_BYTES),
        };
    }

    /// Free bytes before the end of the file.
    pub(super) fn free_bytes(&self) -> u64 {
        let in_chunks: u64 = self.chunks.iter().map(|chunk| lock(chunk).bytes).sum();
        in_chunks + lock(&self.pool).free.total()
    }
}

impl Pool {
    fn cut(&mut self, unit: u64, most: u64) -> Result<Piece, Error> {
        let most = most.next_multiple_of(unit);
        if (SMALL || self.free.total() >= LEAST_REUSE_BYTES.max(self.end / 16))
            && let Some(range) = self.free.take(unit, most)
        {
            return Ok(Piece {
                start: range.start,
                bytes: range.end - range.start,
                blank: false,
            });
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
        Ok(Piece {
            start,
            bytes: most,
            blank: true,
        })
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
    fn the_rest_of_the_last_sector_comes_back_too() {
        let stored = Stored {
            at: bcow_format::Uba(8192),
            bytes: 5000,
            crc: 0,
        };
        assert_eq!(sectors(stored), 8192..16384);
    }
}

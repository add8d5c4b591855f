//! Allocates space in the metadata area: whole blocks in order, inodes also in gaps.

use super::WriteError;
use crate::format::{BLOCK_BYTES, SLOT_BYTES};

/// Number of partly filled blocks that stay open for small inodes. A larger number wastes less
/// space, but spreads the inodes of a directory: 16 keep them within 64 KiB.
const OPEN_REGIONS: usize = 16;

const BLOCK: u64 = BLOCK_BYTES as u64;
const SLOT: u64 = SLOT_BYTES as u64;

/// Allocates from the metadata area. Positions are bytes from its start.
pub(super) struct Space {
    metadata_start: u64,
    next: u64,
    /// Free parts of blocks. Each is inside one block and starts at a slot.
    regions: Vec<(u64, u64)>,
}

impl Space {
    /// Only slot 0 is in use.
    pub(super) fn new(metadata_start: u64) -> Result<Self, WriteError> {
        let mut space = Space {
            metadata_start,
            next: 0,
            regions: Vec::with_capacity(OPEN_REGIONS + 1),
        };
        let first = space.take(1)?;
        space.open(first + SLOT, first + BLOCK);
        Ok(space)
    }

    pub(super) fn used_blocks(&self) -> u64 {
        self.next / BLOCK
    }

    /// Allocates contiguous blocks; returns the first block's number and its slot.
    pub(super) fn blocks(&mut self, count: u64) -> Result<(u32, u32), WriteError> {
        let start = self.take(count)?;
        // `take` has checked that the slot fits, and there are more slots than blocks.
        Ok(((start / BLOCK) as u32, (start / SLOT) as u32))
    }

    /// Allocates `head` bytes (an inode of `inode_bytes`, its xattrs and its chunk table) and
    /// directly behind them `tail` bytes (at most [`super::MAX_INLINE`] unless both fit into a
    /// block). Neither the tail nor the inode without its xattrs crosses a block boundary. Returns
    /// the slot.
    pub(super) fn inode(
        &mut self,
        head: u64,
        inode_bytes: u64,
        tail: u64,
    ) -> Result<u32, WriteError> {
        let total = head + tail;
        let start = if total <= BLOCK {
            self.best_fit(total)?
        } else {
            let skip = skip_for_tail(head, inode_bytes, tail);
            let start = self.take((skip + total).div_ceil(BLOCK))?;
            let end = start + skip + total;
            self.open(start, start + skip);
            self.open(end.next_multiple_of(SLOT), end.next_multiple_of(BLOCK));
            start + skip
        };
        Ok((start / SLOT) as u32)
    }

    /// The open region with the least space left over, or else a new block.
    fn best_fit(&mut self, bytes: u64) -> Result<u64, WriteError> {
        let fits = self.regions.iter().enumerate();
        let best = fits
            .filter(|(_, (start, end))| end - start >= bytes)
            .min_by_key(|(_, (start, end))| end - start)
            .map(|(index, _)| index);
        let (start, end) = match best {
            Some(index) => self.regions.swap_remove(index),
            None => {
                let start = self.take(1)?;
                (start, start + BLOCK)
            }
        };
        self.open((start + bytes).next_multiple_of(SLOT), end);
        Ok(start)
    }

    fn open(&mut self, start: u64, end: u64) {
        // The smallest inode takes one slot.
        if end < start + SLOT {
            return;
        }
        self.regions.push((start, end));
        if self.regions.len() > OPEN_REGIONS {
            let smallest = (0..self.regions.len())
                .min_by_key(|&index| self.regions[index].1 - self.regions[index].0);
            if let Some(index) = smallest {
                self.regions.swap_remove(index);
            }
        }
    }

    fn take(&mut self, blocks: u64) -> Result<u64, WriteError> {
        let start = self.next;
        let end = blocks
            .checked_mul(BLOCK)
            .and_then(|bytes| start.checked_add(bytes))
            .filter(|end| end / SLOT <= u64::from(u32::MAX))
            .ok_or(WriteError::TooLarge {
                start: self.metadata_start,
                end: self.metadata_start.saturating_add(start),
            })?;
        self.next = end;
        Ok(start)
    }
}

/// The offset in a new block at which an inode that does not fit into one block must start, so that
/// its tail lies in one block. An offset exists for every tail up to MAX_INLINE: from a suitable
/// slot, `head` ends in the first slot of a block, or in the second slot if that start is not
/// allowed.
fn skip_for_tail(head: u64, inode_bytes: u64, tail: u64) -> u64 {
    if tail == 0 {
        return 0;
    }
    (0..=BLOCK - inode_bytes)
        .step_by(SLOT_BYTES)
        .find(|skip| (skip + head) % BLOCK + tail <= BLOCK)
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::writer::MAX_INLINE;

    #[test]
    fn every_tail_up_to_the_limit_fits_in_one_block() {
        for inode_bytes in [32, 64] {
            for xattr_bytes in (0..3 * BLOCK).step_by(4) {
                let head = inode_bytes + xattr_bytes;
                let tail = u64::from(MAX_INLINE);
                let skip = skip_for_tail(head, inode_bytes, tail);
                assert!((skip + head) % BLOCK + tail <= BLOCK, "{head} {skip}");
                assert!(skip + inode_bytes <= BLOCK);
            }
        }
    }

    #[test]
    fn small_inodes_fill_the_gaps_of_large_ones() {
        let mut space = Space::new(4096).unwrap();
        for _ in 0..100 {
            space.inode(32, 32, 3000).unwrap();
            for _ in 0..30 {
                space.inode(32, 32, 0).unwrap();
            }
        }
        let used = 100 * (3040 + 30 * 32);
        assert!(space.used_blocks() * BLOCK < used * 104 / 100);
    }
}

//! For one region of the address space of a chain: the entries of the blocks, each from the table
//! of the file that has the block.

use std::ops::Range;

use bcow_format::Entry;

use crate::owners::{BLOCK_BYTES, BLOCKS, MOST_FILES, REGION_BYTES};
use crate::piece::Piece;

/// In the place of the number of a file.
const UNKNOWN: u8 = u8::MAX;
const _: () = assert!(MOST_FILES <= UNKNOWN as usize);

/// The entries of a region, as far as they are known. Takes about as much memory as the table of
/// one file with blocks of 4 KiB.
#[derive(Clone)]
pub(crate) struct MergedTable {
    entries: Box<[Entry]>,
    /// The number of the file that has the entry.
    files: Box<[u8]>,
    /// Binary logarithms of the lengths of the pieces, rounded up. A piece begins at a multiple of
    /// that length.
    shifts: Box<[u8]>,
}

impl MergedTable {
    /// Nothing is known.
    pub(crate) fn new() -> Self {
        MergedTable {
            entries: vec![Entry::Absent; BLOCKS].into(),
            files: vec![UNKNOWN; BLOCKS].into(),
            shifts: vec![0; BLOCKS].into(),
        }
    }

    /// Bytes of memory.
    pub(crate) fn bytes() -> u64 {
        // With the counters of the `Arc` and the place in the cache.
        (BLOCKS * (size_of::<Entry>() + 2) + size_of::<Self>() + 64) as u64
    }

    /// The piece that covers byte `at` of the address space, if it is known and in this file, whose
    /// address space has `size` bytes.
    pub(crate) fn piece(&self, at: u64, file: usize, size: u64) -> Option<Piece> {
        let block = (at % REGION_BYTES / BLOCK_BYTES) as usize;
        if usize::from(self.files[block]) != file {
            return None;
        }
        let shift = self.shifts[block];
        let start = at >> shift << shift;
        Some(Piece {
            start,
            length: (size - start).min(1 << shift),
            entry: self.entries[block],
        })
    }

    /// Sets the entry of `blocks`, which a piece of this file covers.
    pub(crate) fn set(&mut self, blocks: Range<usize>, file: usize, piece: &Piece) {
        let shift = piece.length.next_power_of_two().trailing_zeros() as u8;
        self.entries[blocks.clone()].fill(piece.entry);
        self.files[blocks.clone()].fill(file.min(MOST_FILES) as u8);
        self.shifts[blocks].fill(shift);
    }

    /// Takes the entry of a block from another table of the region, in which the file `above` here
    /// is the first one.
    pub(crate) fn copy(&mut self, block: usize, from: &MergedTable, above: usize) {
        if from.files[block] != UNKNOWN {
            self.entries[block] = from.entries[block];
            self.files[block] = (usize::from(from.files[block]) + above).min(MOST_FILES) as u8;
            self.shifts[block] = from.shifts[block];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_is_found_from_each_of_its_blocks() {
        // The last piece is a short one of a block of 64 KiB.
        let size = 16 * BLOCK_BYTES + 3 * BLOCK_BYTES;
        let pieces = [(0, 1), (1, 1), (2, 2), (16, 3)].map(|(start, blocks)| Piece {
            start: start * BLOCK_BYTES,
            length: blocks * BLOCK_BYTES,
            entry: Entry::Zero,
        });
        for piece in pieces {
            let region = piece.start / REGION_BYTES * REGION_BYTES;
            let block = |byte: u64| ((byte - region).min(REGION_BYTES) / BLOCK_BYTES) as usize;
            let blocks = block(piece.start)..block(piece.start + piece.length);
            let mut table = MergedTable::new();
            table.set(blocks.clone(), 7, &piece);
            let mut over = MergedTable::new();
            for block in blocks {
                let at = region + block as u64 * BLOCK_BYTES + 5;
                assert_eq!(table.piece(at, 7, size), Some(piece));
                assert_eq!(table.piece(at, 6, size), None);
                over.copy(block, &table, 2);
                assert_eq!(over.piece(at, 9, size), Some(piece));
            }
        }
    }
}

//! Ranges of the address space of one file.

use bcow_format::{Entry, SubBlockTable};

/// A range of the address space with one entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) start: u64,
    pub(crate) length: u64,
    /// Never [`Entry::Table`].
    pub(crate) entry: Entry,
}

impl Piece {
    /// The block that covers byte `at` of a region of `length` bytes with this table. It counts
    /// from the start of the region.
    pub(crate) fn of_table(table: &SubBlockTable, at: u64, length: u64) -> Self {
        let block = u64::from(table.block_shift.bytes());
        let start = at / block * block;
        Piece {
            start,
            length: block.min(length - start),
            entry: table.entries[(at / block) as usize],
        }
    }
}

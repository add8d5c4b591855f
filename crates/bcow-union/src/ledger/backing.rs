//! Records of backings: files that the kernel reads, and may write, instead of a node.

use std::sync::Arc;

use super::Ledger;
use super::node::{CELL_BYTES, Spot, TAG_BACKING};
use crate::bytes::u64_at;

/// The number of cells of a record, as an index of the sizes.
const SIZE: usize = 0;

/// What a backing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BackingKind {
    /// A file with the content of the image.
    Image,
    /// The node's file in the upper.
    Upper,
}

/// The backing of a node in the ledger of a process that has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackingRecord {
    /// The node id.
    pub node: u64,
    pub kind: BackingKind,
    /// The number that the kernel gave.
    pub number: u32,
}

/// The record of a node's backing, until the drop.
#[derive(Debug)]
pub struct BackingEntry {
    ledger: Arc<Ledger>,
    spot: Spot,
}

impl BackingEntry {
    /// Records that the kernel has a backing for a node.
    pub fn new(ledger: &Arc<Ledger>, record: BackingRecord) -> Self {
        let (spot, _) = ledger.take_cells(SIZE);
        let mut cell = [0; CELL_BYTES as usize];
        cell[0] = TAG_BACKING;
        cell[1] = SIZE as u8;
        cell[2] = u8::from(record.kind == BackingKind::Upper);
        cell[8..16].copy_from_slice(&record.node.to_le_bytes());
        cell[16..20].copy_from_slice(&record.number.to_le_bytes());
        ledger.write(&cell, spot.at);
        BackingEntry {
            ledger: Arc::clone(ledger),
            spot,
        }
    }
}

impl BackingRecord {
    /// The record in a cell with [`TAG_BACKING`].
    pub(super) fn of_cell(cell: &[u8]) -> Self {
        BackingRecord {
            node: u64_at(cell, 8),
            kind: if cell[2] == 0 { BackingKind::Image } else { BackingKind::Upper },
            // The number has 32 bits.
            number: u64_at(cell, 16) as u32,
        }
    }
}

impl Drop for BackingEntry {
    fn drop(&mut self) {
        self.ledger.free(self.spot);
    }
}

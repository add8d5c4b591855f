//! Records of backings: files that the kernel reads, and may write, instead of a node.

use std::sync::Arc;

use super::Ledger;
use super::node::{BackingKind, BackingRecord, CELL_BYTES, Spot, TAG_BACKING};

/// The number of cells of a record, as an index of the sizes.
const SIZE: usize = 0;

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

impl Drop for BackingEntry {
    fn drop(&mut self) {
        self.ledger.free(self.spot);
    }
}

//! Records of backings: files that the kernel reads instead of a node.

use std::sync::Arc;

use super::Ledger;
use super::node::{CELL_BYTES, Spot, TAG_BACKING};

/// The number of cells of a record, as an index of the sizes.
const SIZE: usize = 0;

/// The record of a node's backing, until the drop.
#[derive(Debug)]
pub struct BackingEntry {
    ledger: Arc<Ledger>,
    spot: Spot,
}

impl BackingEntry {
    /// Records that the kernel has the backing `number` for a node.
    pub fn new(ledger: &Arc<Ledger>, node: u64, number: u32) -> Self {
        let (spot, _) = ledger.take_cells(SIZE);
        let mut cell = [0; CELL_BYTES as usize];
        cell[0] = TAG_BACKING;
        cell[1] = SIZE as u8;
        cell[8..16].copy_from_slice(&node.to_le_bytes());
        cell[16..20].copy_from_slice(&number.to_le_bytes());
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

//! Space for the metadata of a packed sketch at the size limit.
//!
//! A write is acknowledged only if the limit has room for the record and the tables that make it
//! durable. So a write charges them in advance. A flush may exceed the limit: otherwise an estimate
//! that is too small would lose acknowledged writes.

use bcow::format::{ENTRY_BYTES, MAPPING_BYTES, record_bytes};
use bcow::sync::Mutex;
use std::ops::Range;
use std::sync::Arc;

use super::super::SketchError;
use super::super::locks::lock;
use crate::account::{Account, ChargeError, NoSpace};
use crate::blocks::{BLOCK_BYTES, BlockSet};

/// Bytes of the file whose blocks are in one table.
const REGION_BYTES: u64 = 4 << 20;
/// Bytes of a table, with its header.
const TABLE_BYTES: u64 = (REGION_BYTES / BLOCK_BYTES + 1) * ENTRY_BYTES as u64;

/// The charge for the metadata that later flushes write. Without a limit, this type does nothing.
pub(super) struct Promise {
    account: Arc<Account>,
    /// A thread that changes the state holds the lock until it has changed the charge accordingly.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The blocks for the next record.
    blocks: BlockSet,
    /// The regions whose tables the next checkpoint writes.
    regions: BlockSet,
    /// Bytes of the root table.
    root_bytes: u64,
    charged: u64,
}

impl State {
    fn wanted(&self) -> u64 {
        if self.regions.is_empty() {
            return 0;
        }
        let whole = |bytes: u64| bytes.next_multiple_of(BLOCK_BYTES);
        // A record begins in the middle of a block, and the free list takes one.
        let record = whole(record_bytes(0) as u64 + self.blocks.len() * MAPPING_BYTES as u64);
        let tables = self.regions.len() * whole(TABLE_BYTES) + whole(self.root_bytes);
        record + tables + 2 * BLOCK_BYTES
    }
}

impl Promise {
    pub(super) fn new(account: Arc<Account>) -> Self {
        Promise {
            account,
            state: Mutex::default(),
        }
    }

    /// Calls `write`, which changes this range of the file, if there is room for its metadata. The
    /// root table has `root_bytes` bytes.
    pub(super) fn charge_for<T>(
        &self,
        range: Range<u64>,
        root_bytes: u64,
        write: impl FnOnce() -> Result<T, SketchError>,
    ) -> Result<T, SketchError> {
        if self.account.limit().is_none() {
            return write();
        }
        let within = |unit| range.start / unit..range.end.div_ceil(unit);
        let (blocks, regions) = {
            let mut state = lock(&self.state);
            state.root_bytes = root_bytes;
            let blocks = insert(&mut state.blocks, within(BLOCK_BYTES));
            let regions = insert(&mut state.regions, within(REGION_BYTES));
            if let Err(error) = self.settle(&mut state) {
                self.take_back(&mut state, &blocks, &regions);
                return Err(ChargeError::from(error).into());
            }
            (blocks, regions)
        };
        let result = write();
        if result.is_err() {
            self.take_back(&mut lock(&self.state), &blocks, &regions);
        }
        result
    }

    /// A record has the changed blocks.
    pub(super) fn recorded(&self) {
        self.release(|state| state.blocks = BlockSet::default());
    }

    /// The tables have the changed blocks.
    pub(super) fn folded(&self) {
        self.release(|state| {
            *state = State {
                charged: state.charged,
                ..State::default()
            }
        });
    }

    fn release(&self, change: impl FnOnce(&mut State)) {
        let mut state = lock(&self.state);
        change(&mut state);
        // A smaller charge always fits.
        let _ = self.settle(&mut state);
    }

    fn take_back(&self, state: &mut State, blocks: &[Range<u64>], regions: &[Range<u64>]) {
        for run in blocks {
            state.blocks.remove(run.clone());
        }
        for run in regions {
            state.regions.remove(run.clone());
        }
        let _ = self.settle(state);
    }

    fn settle(&self, state: &mut State) -> Result<(), NoSpace> {
        let wanted = state.wanted();
        match wanted > state.charged {
            true => self.account.charge(wanted - state.charged)?,
            false => self.account.release(state.charged - wanted),
        }
        state.charged = wanted;
        Ok(())
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.folded();
    }
}

/// Adds a range to a set, and returns its parts that were not in the set.
fn insert(set: &mut BlockSet, range: Range<u64>) -> Vec<Range<u64>> {
    let mut new = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let (is_known, end) = set.run(at, range.end);
        if !is_known {
            new.push(at..end);
        }
        at = end;
    }
    set.insert(range);
    new
}

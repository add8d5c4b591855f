//! Changes of the entries of a region, which the next record and the ledger get.

use std::ops::Range;

use bcow_format::{BlockShift, Entry, Stored};

use super::ledger::{LedgerRecord, NewEntry};
use super::region::{IncompleteBlock, Region, RegionState};
use super::space::sectors;
use super::{Inner, RegionBlock, block_at};
use crate::Error;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, RwLockWriteGuard};

/// The effects of a change of entries that are still to come.
#[derive(Default)]
pub(super) struct Edit {
    /// Space that no record ever named.
    freed: Vec<Stored>,
    /// The records for the ledger, if the disk has one.
    records: Vec<LedgerRecord>,
}

impl Edit {
    fn note(&mut self, record: LedgerRecord) {
        if !self
            .records
            .last_mut()
            .is_some_and(|last| last.extend(&record))
        {
            self.records.push(record);
        }
    }
}

impl Inner {
    /// Cuts a region that is absent or zero as a whole into blocks of this size.
    pub(super) fn cut_into(&self, state: &mut RegionState, shift: BlockShift, region: &Region) {
        let dropped = state.cut(shift, region.length);
        self.unflushed.fetch_sub(dropped, Ordering::Relaxed);
    }

    /// Sets an entry, and lists the region for the next record. The caller calls
    /// [`Inner::finish`], after all its changes of the region.
    pub(super) fn set(
        &self,
        region: &Arc<Region>,
        state: &mut RegionState,
        index: u32,
        entry: Entry,
        incomplete: Option<IncompleteBlock>,
        edit: &mut Edit,
    ) {
        if self.ledger.is_some() {
            edit.note(self.change_of(region, state, index, entry, incomplete.as_ref()));
        }
        let (unused, newly) = state.set(index, entry, incomplete);
        edit.freed.extend(unused);
        if newly {
            self.unflushed.fetch_add(1, Ordering::Relaxed);
        }
        self.list(region, state.blocks().weight());
        self.is_dirty.store(true, Ordering::Release);
    }

    /// The record of the ledger for a new entry.
    fn change_of(
        &self,
        region: &Region,
        state: &RegionState,
        index: u32,
        entry: Entry,
        incomplete: Option<&IncompleteBlock>,
    ) -> LedgerRecord {
        let shift = state.blocks().shift(self.region_shift);
        let block = block_at(u64::from(index) << shift, shift, region.length);
        LedgerRecord::Set {
            at: self.lba(region, block.start).0,
            length: block.length,
            shift,
            entry: match (entry.stored(), incomplete) {
                (Some(stored), None) => NewEntry::Stored(stored.at.0),
                (Some(stored), Some(incomplete)) => {
                    NewEntry::Incomplete(stored.at.0, incomplete.written.first().into())
                }
                (None, _) if entry == Entry::Zero => NewEntry::Zero,
                (None, _) => NewEntry::Absent,
            },
        }
    }

    /// Adds a range to the written ranges of an incomplete block. The block is complete if no gap
    /// is left.
    pub(super) fn write_incomplete(
        &self,
        region: &Region,
        state: &mut RegionState,
        block: &RegionBlock,
        range: Range<u32>,
        edit: &mut Edit,
    ) {
        if self.ledger.is_some() {
            edit.records.push(LedgerRecord::Wrote {
                at: self.lba(region, block.start).0,
                shift: state.blocks().shift(self.region_shift),
                range: range.clone().into(),
            });
        }
        state.wrote_incomplete(block.index, range, block.length as u32);
    }

    /// Makes an incomplete block complete: all its bytes are in place.
    pub(super) fn complete_block(
        &self,
        region: &Region,
        state: &mut RegionState,
        index: u32,
        edit: &mut Edit,
    ) {
        if self.ledger.is_some() && state.is_incomplete(index) {
            let shift = state.blocks().shift(self.region_shift);
            let at = self.lba(region, u64::from(index) << shift).0;
            edit.records.push(LedgerRecord::Completed { at, shift });
        }
        state.completed(index);
    }

    /// Ends a change of entries: adds it to the ledger, releases the lock of the region, and frees
    /// space that no record ever named, so that it is reusable at once.
    pub(super) fn finish(
        &self,
        state: RwLockWriteGuard<'_, RegionState>,
        edit: Edit,
    ) -> Result<(), Error> {
        let noted = match &self.ledger {
            Some(ledger) if !edit.records.is_empty() => ledger.append(&edit.records),
            _ => Ok(()),
        };
        drop(state);
        if !edit.freed.is_empty() {
            self.space.free(edit.freed.into_iter().map(sectors));
        }
        noted
    }
}

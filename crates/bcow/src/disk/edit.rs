//! Changes of the entries of a region, which the next record and the ledger get.

use std::ops::Range;

use bcow_format::{BlockShift, Entry, Stored};

use super::ledger::{LedgerRecord, NewEntry, Noted};
use super::region::{IncompleteBlock, Region, RegionState};
use super::space::sectors;
use super::{Inner, Operation, RegionBlock};
use crate::Error;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, RwLockWriteGuard};

/// A region that is locked for changes of its entries. [`Edit::finish`] ends them.
pub(super) struct Edit<'a> {
    disk: &'a Inner,
    pub(super) region: &'a Arc<Region>,
    pub(super) state: RwLockWriteGuard<'a, RegionState>,
    /// Space that no record ever named.
    freed: Vec<Stored>,
    /// The records for the ledger, if the disk has one.
    records: Vec<LedgerRecord>,
}

impl<'a> Operation<'a> {
    /// Locks a region for changes. Reads the table from the file if necessary.
    pub(super) fn edit<'b>(self, region: &'b Arc<Region>) -> Result<Edit<'b>, Error>
    where
        'a: 'b,
    {
        let header = &self.config.header;
        Ok(Edit {
            disk: self.disk,
            region,
            state: self.regions.write(region, &self.file, header)?,
            freed: Vec::new(),
            records: Vec::new(),
        })
    }
}

impl Edit<'_> {
    /// log2 of the block size of the region.
    pub(super) fn shift(&self) -> u8 {
        self.state.blocks().shift(self.disk.region_shift)
    }

    /// Cuts the region, which is absent or zero as a whole, into blocks of this size.
    pub(super) fn cut(&mut self, shift: BlockShift) {
        let dropped = self.state.cut(shift, self.region.length);
        self.disk.unflushed.fetch_sub(dropped, Ordering::Relaxed);
    }

    /// Sets an entry, and lists the region for the next record.
    pub(super) fn set(&mut self, index: u32, entry: Entry, incomplete: Option<IncompleteBlock>) {
        if self.disk.ledger.is_some() {
            let block = self.region.block(index, self.shift());
            let new = match (entry.stored(), &incomplete) {
                (Some(stored), None) => NewEntry::Stored(stored.at.0),
                (Some(stored), Some(incomplete)) => {
                    NewEntry::Incomplete(stored.at.0, incomplete.written.first().into())
                }
                (None, _) if entry == Entry::Zero => NewEntry::Zero,
                (None, _) => NewEntry::Absent,
            };
            self.note(block.start, Noted::Set(block.length, new));
        }
        let (unused, newly) = self.state.set(index, entry, incomplete);
        self.freed.extend(unused);
        if newly {
            self.disk.unflushed.fetch_add(1, Ordering::Relaxed);
        }
        self.disk.list(self.region, self.state.blocks().weight());
        self.disk.is_dirty.store(true, Ordering::Release);
    }

    /// Adds a record for the ledger of the block at byte `start` of the region.
    fn note(&mut self, start: u64, change: Noted) {
        let record = LedgerRecord {
            at: self.disk.lba(self.region, start).0,
            shift: self.shift(),
            change,
        };
        let last = self.records.last_mut();
        if !last.is_some_and(|last| last.extend(&record)) {
            self.records.push(record);
        }
    }

    /// Adds a range to the written ranges of an incomplete block. The block is complete if no gap
    /// is left.
    pub(super) fn write_incomplete(&mut self, block: &RegionBlock, range: Range<u32>) {
        if self.disk.ledger.is_some() {
            self.note(block.start, Noted::Wrote(range.clone().into()));
        }
        let length = block.length as u32;
        self.state.wrote_incomplete(block.index, range, length);
    }

    /// Makes an incomplete block complete: all its bytes are in place.
    pub(super) fn complete(&mut self, index: u32) {
        if self.disk.ledger.is_some() && self.state.is_incomplete(index) {
            self.note(u64::from(index) << self.shift(), Noted::Completed);
        }
        self.state.completed(index);
    }

    /// Adds the changes to the ledger, releases the lock of the region, and frees space that no
    /// record ever named, so that it is reusable at once.
    pub(super) fn finish(self) -> Result<(), Error> {
        let noted = match &self.disk.ledger {
            Some(ledger) if !self.records.is_empty() => ledger.append(&self.records),
            _ => Ok(()),
        };
        drop(self.state);
        if !self.freed.is_empty() {
            let freed = self.freed.into_iter().map(sectors);
            self.disk.space.free(freed);
        }
        noted
    }
}

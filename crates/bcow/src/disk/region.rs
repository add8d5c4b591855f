//! One region of an open disk: the entries of its blocks, and the blocks whose entries are in no
//! record yet.

use std::collections::BTreeMap;
use std::ops::Range;

use bcow_format::{BlockShift, Entry, Lba, LogMapping, Stored};

use super::blocks::{Blocks, Table};
use super::extents::Ranges;
use super::{RegionBlock, block_at};
use crate::sync::RwLock;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A region. A thread that reads a block, or writes into a block in place, holds the lock of
/// `state` shared. A thread that changes an entry holds it exclusively. So the exclusive holder
/// knows that no other thread uses a block of the region, except a completion that is reading old
/// data (see [`IncompleteBlock::id`]).
pub(super) struct Region {
    pub(super) index: u64,
    /// Length of the region in bytes.
    pub(super) length: u64,
    /// Whether the region is in the list of changed regions.
    pub(super) listed: AtomicBool,
    /// Whether the region was used since eviction last examined it.
    pub(super) used: AtomicBool,
    pub(super) state: RwLock<RegionState>,
}

/// The entries of a region and their state.
///
/// The *published* entry of a block is its entry in the newest record that has the block, which may
/// be the record in flight, or else in the table of the region.
#[derive(Debug)]
pub(super) struct RegionState {
    /// `None` until the table is read from the file.
    pub(super) blocks: Option<Blocks>,
    /// Blocks whose entry is newer than the published one. In a region that is not cut into blocks,
    /// block 0 is the whole region.
    pub(super) pending: BTreeMap<u32, Pending>,
    /// Set if the region was cut into blocks while it was pending as a whole: its entry when it was
    /// cut, and its published entry. The next record takes it.
    whole: Option<(Entry, Entry)>,
    /// The blocks of this region in the record in flight.
    committing: Option<Committing>,
    /// Whether the log has entries of the region that are newer than its table in the file.
    pub(super) logged: bool,
    /// Memory in bytes that the committer counts for the region while it is logged.
    pub(super) counted: u64,
}

/// A block whose entry is newer than the published one.
#[derive(Debug)]
pub(super) struct Pending {
    /// The published entry. Its space is free when the next record with the block is durable.
    pub(super) published: Entry,
    /// Set while the block is incomplete.
    pub(super) incomplete: Option<IncompleteBlock>,
}

impl Pending {
    fn new(published: Entry, incomplete: Option<IncompleteBlock>) -> Self {
        Pending {
            published,
            incomplete,
        }
    }
}

/// A block that was written in part; the rest is still to be copied.
#[derive(Debug, Clone)]
pub(super) struct IncompleteBlock {
    /// The identity of this state of the block. The place of the block does not identify it: the
    /// place may be released, and allocated to the next write of the same block, while a completion
    /// reads the old data without the lock of the region.
    pub(super) id: IncompleteId,
    /// The entry from which the rest is copied.
    pub(super) source: Entry,
    /// The ranges of the block that were written.
    pub(super) written: Ranges,
}

/// Identifies an incomplete block. A block that becomes incomplete again gets a new number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct IncompleteId(u64);

/// Allocates the identities of incomplete blocks.
#[derive(Debug, Default)]
pub(super) struct IncompleteIds(AtomicU64);

impl IncompleteIds {
    pub(super) fn next(&self) -> IncompleteId {
        IncompleteId(self.0.fetch_add(1, Ordering::Relaxed))
    }
}

/// The blocks of a region in the record in flight, with the entries that were published before it.
#[derive(Debug, Default)]
struct Committing {
    whole: Option<(Entry, Entry)>,
    blocks: BTreeMap<u32, Replaced>,
}

/// A block whose published entry the record in flight replaces.
#[derive(Debug, Clone, Copy)]
struct Replaced {
    /// The entry that was published before the record.
    published: Entry,
    /// Whether the new entry stores no data.
    given_up: bool,
}

/// Space that becomes free when a record is durable.
#[derive(Debug, Clone, Copy)]
pub(super) struct Freed {
    pub(super) stored: Stored,
    /// Whether the new entry stores no data. The space is then not needed soon, and can be punched.
    pub(super) given_up: bool,
}

impl Replaced {
    fn freed(&self) -> Option<Freed> {
        Some(Freed {
            stored: self.published.stored()?,
            given_up: self.given_up,
        })
    }
}

impl Region {
    /// A block, if the blocks have `1 << shift` bytes.
    pub(super) fn block(&self, index: u32, shift: u8) -> RegionBlock {
        block_at(u64::from(index) << shift, shift, self.length)
    }

    pub(super) fn new(index: u64, length: u64, blocks: Option<Blocks>) -> Self {
        Region {
            index,
            length,
            listed: AtomicBool::new(false),
            used: AtomicBool::new(true),
            state: RwLock::new(RegionState {
                blocks,
                pending: BTreeMap::new(),
                whole: None,
                committing: None,
                logged: false,
                counted: 0,
            }),
        }
    }

    pub(super) fn touch(&self) {
        // Only the first use after an eviction scan writes to the shared cache line.
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the table in the file has all entries of the region, so that eviction loses nothing.
    /// The caller holds the only reference.
    pub(super) fn is_clean(&self) -> bool {
        self.state.try_read().is_ok_and(|state| {
            state.pending.is_empty()
                && state.whole.is_none()
                && state.committing.is_none()
                && !state.logged
        })
    }

    /// First byte of the region in the address space.
    pub(super) fn start(&self, region_shift: u8) -> u64 {
        self.index << region_shift
    }
}

impl RegionState {
    /// The entries. The caller has made sure that they were read.
    pub(super) fn blocks(&self) -> &Blocks {
        const UNREAD: &Blocks = &Blocks::Whole(Entry::Absent);
        debug_assert!(self.blocks.is_some());
        self.blocks.as_ref().unwrap_or(UNREAD)
    }

    pub(super) fn is_incomplete(&self, index: u32) -> bool {
        self.incomplete(index).is_some()
    }

    pub(super) fn incomplete(&self, index: u32) -> Option<&IncompleteBlock> {
        self.pending.get(&index)?.incomplete.as_ref()
    }

    /// Whether the entry of the block is in no record yet, so that the block may be overwritten in
    /// place.
    pub(super) fn is_fresh(&self, index: u32) -> bool {
        self.pending.contains_key(&index)
    }

    /// Cuts a region that is absent or zero as a whole into blocks. Returns the number of blocks
    /// that are no longer pending: 1 if the region was pending as a whole, else 0.
    pub(super) fn cut(&mut self, shift: BlockShift, length: u64) -> u64 {
        let Some(Blocks::Whole(entry @ (Entry::Absent | Entry::Zero))) = self.blocks else {
            return 0;
        };
        let mut dropped = 0;
        // An entry of the whole region must not become an entry of block 0.
        if let Some(pending) = self.pending.remove(&0) {
            self.whole = Some((entry, pending.published));
            dropped = 1;
        }
        if let Some(committing) = &mut self.committing
            && let Some(replaced) = committing.blocks.remove(&0)
        {
            committing.whole = Some((entry, replaced.published));
        }
        let count = length.div_ceil(shift.bytes().into());
        self.blocks = Some(Blocks::Cut(Table::uniform(shift, count as u32, entry)));
        dropped
    }

    /// Sets the entry of a block. Returns the space of the old entry if no record ever named it,
    /// and whether the block is newly pending.
    pub(super) fn set(
        &mut self,
        index: u32,
        entry: Entry,
        incomplete: Option<IncompleteBlock>,
    ) -> (Option<Stored>, bool) {
        let Some(blocks) = &mut self.blocks else {
            return (None, false);
        };
        let before = blocks.replace(index, entry);
        match self.pending.get_mut(&index) {
            Some(pending) => {
                pending.incomplete = incomplete;
                (before.stored(), false)
            }
            None => {
                self.pending.insert(index, Pending::new(before, incomplete));
                (None, true)
            }
        }
    }

    /// Changes the entry of a fresh block, which stays at its place.
    pub(super) fn rewrite(&mut self, index: u32, entry: Entry) {
        if let Some(blocks) = &mut self.blocks {
            blocks.replace(index, entry);
        }
    }

    /// Makes an incomplete block complete: all its bytes are in place.
    pub(super) fn completed(&mut self, index: u32) {
        if let Some(pending) = self.pending.get_mut(&index) {
            pending.incomplete = None;
        }
    }

    /// Adds a range to the written ranges of an incomplete block. The block is complete if no gap
    /// is left.
    pub(super) fn wrote_incomplete(&mut self, index: u32, range: Range<u32>, length: u32) {
        if let Some(pending) = self.pending.get_mut(&index)
            && let Some(incomplete) = &mut pending.incomplete
        {
            incomplete.written.insert(range);
            if incomplete.written.gaps(length).is_empty() {
                pending.incomplete = None;
            }
        }
    }

    /// The published entries.
    pub(super) fn published(&self) -> Blocks {
        let mut blocks = self.blocks().clone();
        for (index, pending) in &self.pending {
            blocks.replace(*index, pending.published);
        }
        match self.whole {
            // No record has the cut yet.
            Some((_, published)) => Blocks::Whole(published),
            None => blocks,
        }
    }

    /// Moves all complete pending blocks into the record in flight and appends their mappings.
    /// `finish` turns the entry of a block into the entry to record. If `finish` fails, nothing is
    /// moved.
    pub(super) fn take_for_record<E>(
        &mut self,
        region_start: u64,
        region_shift: u8,
        finish: impl Fn(Entry) -> Result<Entry, E>,
        mappings: &mut Vec<LogMapping>,
    ) -> Result<(), E> {
        let Some(blocks) = &mut self.blocks else {
            return Ok(());
        };
        let shift = blocks.shift(region_shift);
        let first = mappings.len();
        let mapping_of_all = |entry| LogMapping {
            at: Lba(region_start),
            shift: region_shift,
            entry,
        };
        if let Some((entry, _)) = self.whole {
            mappings.push(mapping_of_all(entry));
        }
        let complete: Vec<u32> = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.incomplete.is_none())
            .map(|(index, _)| *index)
            .collect();
        let whole = (shift < region_shift && complete.len() == blocks.count() as usize)
            .then(|| blocks.uniform())
            .flatten();
        if let Some(entry) = whole {
            mappings.truncate(first);
            mappings.push(mapping_of_all(entry));
        } else {
            for &index in &complete {
                let entry = match finish(blocks.entry(index)) {
                    Ok(entry) => entry,
                    Err(error) => {
                        mappings.truncate(first);
                        return Err(error);
                    }
                };
                blocks.replace(index, entry);
                mappings.push(LogMapping {
                    at: Lba(region_start + (u64::from(index) << shift)),
                    shift,
                    entry,
                });
            }
        }
        let mut committing = Committing {
            whole: self.whole.take(),
            blocks: BTreeMap::new(),
        };
        for index in complete {
            if let Some(pending) = self.pending.remove(&index) {
                let replaced = Replaced {
                    published: pending.published,
                    given_up: blocks.entry(index).stored().is_none(),
                };
                committing.blocks.insert(index, replaced);
            }
        }
        debug_assert!(self.committing.is_none());
        self.committing = Some(committing);
        Ok(())
    }

    /// The space that the record in flight frees.
    pub(super) fn freed_by_record(&self) -> impl Iterator<Item = Freed> + '_ {
        self.committing.iter().flat_map(|committing| {
            // The space of a region that was stored as one block, before it was zeroed and cut.
            let whole = committing.whole.and_then(|(_, published)| {
                Some(Freed {
                    stored: published.stored()?,
                    given_up: true,
                })
            });
            let blocks = committing.blocks.values();
            blocks.filter_map(Replaced::freed).chain(whole)
        })
    }

    /// Marks the record in flight as durable.
    pub(super) fn record_is_durable(&mut self) {
        self.logged |= self.committing.take().is_some();
    }

    /// Makes the blocks of a failed record pending again. Of a block that was changed after the
    /// record took it, adds to `freed` the space that the record named. Returns the number of the
    /// other blocks, which were no longer pending.
    pub(super) fn record_failed(&mut self, freed: &mut Vec<Stored>) -> u64 {
        let Some(committing) = self.committing.take() else {
            return 0;
        };
        let mut again = 0;
        for (index, Replaced { published, .. }) in committing.blocks {
            match self.pending.get_mut(&index) {
                Some(pending) => {
                    let between = std::mem::replace(&mut pending.published, published);
                    match &pending.incomplete {
                        Some(incomplete) if incomplete.source == between => {
                            // The completion still copies from this space, so the space stays
                            // allocated until the file is opened again.
                        }
                        _ => freed.extend(between.stored()),
                    }
                }
                None => {
                    again += 1;
                    self.pending.insert(index, Pending::new(published, None));
                }
            }
        }
        self.whole = committing.whole.or(self.whole);
        again
    }
}

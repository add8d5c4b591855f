//! One region of an open disk: what stands at each of its blocks, and what of that no record has said yet.

use std::collections::BTreeMap;
use std::ops::Range;

use bcow_format::{BlockShift, Entry, Lba, LogMapping, Stored};

use super::blocks::{Blocks, Table};
use super::extents::Ranges;
use crate::sync::RwLock;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// A region. Its lock is held shared by those who read its blocks or write into them in place, and exclusively to
/// change an entry; so whoever holds it exclusively knows that nobody is at any block of the region.
pub(super) struct Region {
    pub(super) index: u64,
    /// Bytes of the address space in it.
    pub(super) length: u64,
    /// Whether it stands in the list of changed regions.
    pub(super) listed: AtomicBool,
    /// Whether it was used since it was last looked at for eviction.
    pub(super) used: AtomicBool,
    pub(super) state: RwLock<State>,
}

/// What stands in a region.
#[derive(Debug)]
pub(super) struct State {
    /// `None` until it was read.
    pub(super) blocks: Option<Blocks>,
    /// Blocks that are not as the newest record or table has them. In a region that is a whole, block 0 is all of it.
    pub(super) pending: BTreeMap<u32, Pending>,
    /// A region that was cut into blocks while, as a whole, it was pending: what it was made then, and what it is
    /// published as.
    whole: Option<(Entry, Entry)>,
    /// What the record being written has of this region.
    committing: Option<Committing>,
    /// Whether the table in the file is older than the newest record.
    pub(super) logged: bool,
    /// Memory that the committer counts for it while it is logged.
    pub(super) counted: u64,
}

/// A block that is not as the newest record or table has it.
#[derive(Debug)]
pub(super) struct Pending {
    /// What that has. Its space is free when the next record is durable.
    pub(super) published: Entry,
    /// Set while the block is not complete.
    pub(super) transit: Option<Transit>,
}

/// A block that was written in part; the rest is still to be copied.
#[derive(Debug, Clone)]
pub(super) struct Transit {
    /// Which one it is. Where the block lies does not tell: its place may be given up, and given to
    /// the next write of the same block, while the rest is read without the region's lock.
    pub(super) id: TransitId,
    /// What the rest is copied from.
    pub(super) source: Entry,
    /// What was written.
    pub(super) written: Ranges,
}

/// Tells transits apart: no two of an open disk have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TransitId(u64);

/// Gives each transit of a disk its own identity.
#[derive(Debug, Default)]
pub(super) struct TransitIds(AtomicU64);

impl TransitIds {
    pub(super) fn next(&self) -> TransitId {
        TransitId(self.0.fetch_add(1, Ordering::Relaxed))
    }
}

/// What a record being written says of a region: what was published before.
#[derive(Debug, Default)]
struct Committing {
    whole: Option<(Entry, Entry)>,
    blocks: BTreeMap<u32, Replaced>,
}

/// A block that the record being written replaces.
#[derive(Debug, Clone, Copy)]
struct Replaced {
    published: Entry,
    /// Whether nothing is stored in its stead.
    given_up: bool,
}

/// Space that a record freed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Freed {
    pub(super) stored: Stored,
    /// Whether nothing was stored in its stead: then as much is free for long.
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
    pub(super) fn new(index: u64, length: u64, blocks: Option<Blocks>) -> Self {
        Region {
            index,
            length,
            listed: AtomicBool::new(false),
            used: AtomicBool::new(true),
            state: RwLock::new(State {
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
        // Only the first use since the last look writes to the shared line.
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
    }

    /// Whether nothing of it would be lost if it were forgotten. The caller has the only reference.
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

impl State {
    /// The entries, once the region was read.
    pub(super) fn blocks(&self) -> &Blocks {
        const UNREAD: &Blocks = &Blocks::Whole(Entry::Absent);
        debug_assert!(self.blocks.is_some());
        self.blocks.as_ref().unwrap_or(UNREAD)
    }

    pub(super) fn is_in_transit(&self, index: u32) -> bool {
        self.transit(index).is_some()
    }

    pub(super) fn transit(&self, index: u32) -> Option<&Transit> {
        self.pending.get(&index)?.transit.as_ref()
    }

    /// Whether the block was written since the last record and may so be written again in place.
    pub(super) fn is_fresh(&self, index: u32) -> bool {
        self.pending.contains_key(&index)
    }

    /// Cuts a region that is absent or zero as a whole into blocks. Gives the number of blocks that
    /// were pending and are not any more: the region as a whole, 0 or 1.
    pub(super) fn cut(&mut self, shift: BlockShift, length: u64) -> u64 {
        let Some(Blocks::Whole(entry @ (Entry::Absent | Entry::Zero))) = self.blocks else {
            return 0;
        };
        let mut dropped = 0;
        // What was said of the region as a whole is not about its block 0.
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

    /// Puts an entry into its place. Gives back the space of the one before, if no record ever named it, and whether
    /// the block is newly pending.
    pub(super) fn set(
        &mut self,
        index: u32,
        entry: Entry,
        transit: Option<Transit>,
    ) -> (Option<Stored>, bool) {
        let Some(blocks) = &mut self.blocks else {
            return (None, false);
        };
        let before = blocks.replace(index, entry);
        match self.pending.get_mut(&index) {
            Some(pending) => {
                pending.transit = transit;
                (before.stored(), false)
            }
            None => {
                let published = before;
                self.pending.insert(index, Pending { published, transit });
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

    /// A block has all its bytes.
    pub(super) fn completed(&mut self, index: u32) {
        if let Some(pending) = self.pending.get_mut(&index) {
            pending.transit = None;
        }
    }

    /// A further part of a block in transit was written.
    pub(super) fn wrote_in_transit(&mut self, index: u32, range: Range<u32>, length: u32) {
        if let Some(pending) = self.pending.get_mut(&index)
            && let Some(transit) = &mut pending.transit
        {
            transit.written.insert(range);
            if transit.written.gaps(length).is_empty() {
                pending.transit = None;
            }
        }
    }

    /// The entry that the newest record or table has, and the record being written, if there is one.
    pub(super) fn published(&self) -> Blocks {
        let mut blocks = self.blocks().clone();
        for (index, pending) in &self.pending {
            blocks.replace(*index, pending.published);
        }
        match self.whole {
            // Before it was cut it was one and the same everywhere.
            Some((_, published)) => Blocks::Whole(published),
            None => blocks,
        }
    }

    /// Takes all complete pending blocks for a record and says what it must say. `finish` makes the entry of a block
    /// the one to be recorded. If it fails, nothing was taken.
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
        if let Some((entry, _)) = self.whole {
            mappings.push(LogMapping {
                at: Lba(region_start),
                shift: region_shift,
                entry,
            });
        }
        let complete: Vec<u32> = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.transit.is_none())
            .map(|(index, _)| *index)
            .collect();
        let whole = (shift < region_shift && complete.len() == blocks.count() as usize)
            .then(|| blocks.uniform())
            .flatten();
        if let Some(entry) = whole {
            mappings.truncate(first);
            mappings.push(LogMapping {
                at: Lba(region_start),
                shift: region_shift,
                entry,
            });
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

    /// The space that the record being written frees.
    pub(super) fn freed_by_record(&self) -> impl Iterator<Item = Freed> + '_ {
        self.committing.iter().flat_map(|committing| {
            // What a region had as a whole before it was zeroed and cut.
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

    /// The record is durable.
    pub(super) fn record_is_durable(&mut self) {
        self.logged |= self.committing.take().is_some();
    }

    /// The record was not written: what it was to say is pending again. Gives the space of blocks that were written
    /// again since, and the number of blocks that are pending again.
    pub(super) fn record_failed(&mut self, freed: &mut Vec<Stored>) -> u64 {
        let Some(committing) = self.committing.take() else {
            return 0;
        };
        let mut again = 0;
        for (index, Replaced { published, .. }) in committing.blocks {
            match self.pending.get_mut(&index) {
                Some(pending) => {
                    let between = std::mem::replace(&mut pending.published, published);
                    // A block in transit may still be copied from it.
                    match &pending.transit {
                        Some(transit) if transit.source == between => {
                            // Keeps it as what is published, and leaks it if the file is not closed before.
                        }
                        _ => freed.extend(between.stored()),
                    }
                }
                None => {
                    again += 1;
                    let transit = None;
                    self.pending.insert(index, Pending { published, transit });
                }
            }
        }
        if let Some(whole) = committing.whole {
            self.whole = Some(whole);
        }
        again
    }
}

//! Continues a disk whose process was killed: restores the changes of its ledger.
//!
//! The file alone is as after a crash: its tables and records have the state of the last flush, or
//! of the one that was in progress. The changes of the ledger are newer, or are in that last record
//! already. They become pending changes again. Blocks get their checksums at the next flush, from
//! their bytes in the file.

use std::collections::BTreeMap;
use std::ops::Range;

use bcow_format::{BlockShift, Entry, Header, MAX_ADDRESS, SECTOR_BYTES, Stored, Uba};

use super::blocks::CHECKED_SHIFT;
use super::edit::Edit;
use super::extents::{Extents, Ranges};
use super::ledger::{Ledger, LedgerRecord, NewEntry, Noted, Part};
use super::region::{IncompleteBlock, Region};
use super::space::sectors;
use super::{Operation, RegionBlock, block_at};
use crate::Error;
use crate::sync::{Arc, lock};

/// The changes of a ledger.
#[derive(Default)]
pub(super) struct Changes(BTreeMap<u64, RegionChanges>);

/// The changes of a region.
#[derive(Default)]
struct RegionChanges {
    /// The new entry of the region as one block. Blocks that were cut from it later are in
    /// `blocks`.
    whole: Option<Change>,
    /// log2 of the size of the blocks in `blocks`.
    shift: u8,
    blocks: BTreeMap<u32, Change>,
}

/// The newest entry of a block.
#[derive(Clone)]
struct Change {
    entry: NewEntry,
    /// Set while the block is incomplete.
    incomplete: Option<Incomplete>,
}

#[derive(Clone)]
struct Incomplete {
    /// The entry from which the rest is copied; `None` if it is the one in the file.
    source: Option<NewEntry>,
    written: Ranges,
}

impl Changes {
    /// Reads the ledger of a disk with this header.
    pub(super) fn read(ledger: &Ledger, header: &Header) -> Result<Self, Error> {
        ledger.check_complete()?;
        let mut changes = Changes::default();
        ledger.replay(|record| changes.apply(record, header))?;
        Ok(changes)
    }

    fn apply(&mut self, record: LedgerRecord, header: &Header) -> Result<(), Error> {
        let (at, shift) = (record.at, record.shift);
        let region_shift = header.region_shift;
        let length = match record.change {
            Noted::Set(length, _) => length,
            _ => 1,
        };
        if length == 0
            || at.checked_add(length).is_none_or(|end| end > header.size)
            || !(CHECKED_SHIFT..=region_shift).contains(&shift)
            || !at.is_multiple_of(1 << shift)
        {
            return Err(inconsistent(
                at,
                "the ledger names a block that does not exist",
            ));
        }
        record.check(header)?;
        let region = self.0.entry(at >> region_shift).or_default();
        let first = ((at & ((1 << region_shift) - 1)) >> shift) as u32;
        match record.change {
            Noted::Set(length, entry) => {
                let count = length.div_ceil(1 << shift) as u32;
                for number in 0..count {
                    let entry = entry.behind(u64::from(number) << shift);
                    region.set(first + number, shift, region_shift, entry, at)?;
                }
            }
            Noted::Wrote(range) => {
                let bytes = (header.size - at).min(1 << shift) as u32;
                if let Some(change) = region.get(first, shift, region_shift)
                    && let Some(incomplete) = &mut change.incomplete
                {
                    incomplete.written.insert(range.start..range.end);
                    if incomplete.written.gaps(bytes).is_empty() {
                        change.complete();
                    }
                }
            }
            // A flush may have recorded the block and dropped its other records.
            Noted::Completed => {
                if let Some(change) = region.get(first, shift, region_shift) {
                    change.complete();
                }
            }
        }
        Ok(())
    }

    /// The end of the part of the file that the changes use.
    pub(super) fn end(&self, header: &Header) -> u64 {
        let mut end = 0;
        for (&index, region) in &self.0 {
            let length = header.region_length(index);
            for (_, block, change) in region.blocks(header.region_shift, length) {
                let places = [Some(change.entry), change.source()].into_iter().flatten();
                for stored in places.filter_map(|entry| entry.entry(block.length).stored()) {
                    end = end.max(sectors(stored).end);
                }
            }
        }
        end
    }
}

impl LedgerRecord {
    /// Checks a record of blocks that exist.
    fn check(&self, header: &Header) -> Result<(), Error> {
        let at = self.at;
        let region = at >> header.region_shift;
        let region_end = (region << header.region_shift) + header.region_length(region);
        let block_bytes = (region_end - at).min(1 << self.shift);
        let is_part = |part: Part| part.start <= part.end && u64::from(part.end) <= block_bytes;
        let problem = match self.change {
            Noted::Set(length, _) if at + length > region_end => {
                "the ledger names blocks of two regions"
            }
            Noted::Set(length, NewEntry::Incomplete(_, part))
                if length != block_bytes || !is_part(part) =>
            {
                "the ledger has a part of several blocks"
            }
            Noted::Set(length, entry)
                if entry.place().is_some_and(|place| {
                    !place.is_multiple_of(SECTOR_BYTES)
                        || place
                            .checked_add(length)
                            .is_none_or(|end| end > MAX_ADDRESS)
                }) =>
            {
                "the ledger names a place where no block can be"
            }
            Noted::Wrote(part) if !is_part(part) => "the ledger has a part of several blocks",
            _ => return Ok(()),
        };
        Err(inconsistent(at, problem))
    }
}

impl RegionChanges {
    fn set(
        &mut self,
        index: u32,
        shift: u8,
        region_shift: u8,
        entry: NewEntry,
        at: u64,
    ) -> Result<(), Error> {
        let before = self.get(index, shift, region_shift).cloned();
        let before = before.or_else(|| self.whole.clone());
        let incomplete = match entry {
            NewEntry::Incomplete(_, part) => {
                if before
                    .as_ref()
                    .is_some_and(|before| before.incomplete.is_some())
                {
                    return Err(inconsistent(
                        at,
                        "the ledger has a block that is incomplete twice",
                    ));
                }
                let mut written = Ranges::default();
                written.insert(part.start..part.end);
                Some(Incomplete {
                    source: before.map(|before| before.entry),
                    written,
                })
            }
            _ => None,
        };
        let change = Change { entry, incomplete };
        if shift == region_shift {
            *self = RegionChanges {
                whole: Some(change),
                ..RegionChanges::default()
            };
            return Ok(());
        }
        if !self.blocks.is_empty() && self.shift != shift {
            return Err(inconsistent(at, "the ledger has blocks of two sizes"));
        }
        self.shift = shift;
        self.blocks.insert(index, change);
        Ok(())
    }

    fn get(&mut self, index: u32, shift: u8, region_shift: u8) -> Option<&mut Change> {
        match shift == region_shift {
            true => self.whole.as_mut(),
            false if shift == self.shift => self.blocks.get_mut(&index),
            false => None,
        }
    }

    /// The changed blocks of the region, which has `length` bytes, with log2 of their size; first
    /// the region as one block.
    fn blocks(
        &self,
        region_shift: u8,
        length: u64,
    ) -> impl Iterator<Item = (u8, RegionBlock, &Change)> {
        let whole = self
            .whole
            .iter()
            .map(move |change| (0, region_shift, change));
        let blocks = self.blocks.iter();
        let blocks = blocks.map(|(&index, change)| (u64::from(index), self.shift, change));
        whole.chain(blocks).map(move |(index, shift, change)| {
            (shift, block_at(index << shift, shift, length), change)
        })
    }
}

impl Change {
    fn source(&self) -> Option<NewEntry> {
        self.incomplete.as_ref()?.source
    }

    fn complete(&mut self) {
        self.incomplete = None;
        if let NewEntry::Incomplete(place, _) = self.entry {
            self.entry = NewEntry::Stored(place);
        }
    }
}

impl NewEntry {
    /// The entry of the block that is this many bytes behind the first one.
    fn behind(self, bytes: u64) -> Self {
        match self {
            NewEntry::Stored(place) => NewEntry::Stored(place + bytes),
            other => other,
        }
    }

    fn place(self) -> Option<u64> {
        match self {
            NewEntry::Stored(place) | NewEntry::Incomplete(place, _) => Some(place),
            NewEntry::Absent | NewEntry::Zero => None,
        }
    }

    /// The entry of a block of this length.
    fn entry(self, bytes: u64) -> Entry {
        match (self, self.place()) {
            (_, Some(place)) => Entry::Open(Stored {
                at: Uba(place),
                bytes: bytes as u32,
                crc: 0,
            }),
            (NewEntry::Zero, None) => Entry::Zero,
            (_, None) => Entry::Absent,
        }
    }
}

impl Operation<'_> {
    /// Restores changes as pending ones. No other operation runs yet. The free space of the disk is
    /// that of the header and the records, without the places of the changes. If the header
    /// `lists_all_free` ranges, changes that name other space are refused.
    pub(super) fn resume(self, changes: &Changes, lists_all_free: bool) -> Result<(), Error> {
        let mut free = {
            let committer = lock(&self.committer);
            let end = committer.file_bytes.max(changes.end(&committer.header));
            let mut free = committer.free.clone();
            free.insert(committer.file_bytes..end);
            FreeSpace {
                unused: lists_all_free.then(|| free.clone()),
                free,
                end,
            }
        };
        for (&index, changes) in &changes.0 {
            let region = self.region(index);
            self.resume_region(&region, changes, &mut free)?;
        }
        self.space.reset(free.free, free.end);
        Ok(())
    }

    fn resume_region(
        self,
        region: &Arc<Region>,
        changes: &RegionChanges,
        free: &mut FreeSpace,
    ) -> Result<(), Error> {
        let mut edit = self.edit(region)?;
        let start = region.start(self.region_shift);
        for (shift, block, change) in changes.blocks(self.region_shift, region.length) {
            let now = edit.shift();
            if shift == self.region_shift && now < shift && change.entry.place().is_none() {
                // A region that was zeroed as one block, and then cut. The file has it cut, and can
                // have the newer entries of blocks already.
                let all = 0..edit.state.blocks().count();
                let older = all.filter(|index| !changes.blocks.contains_key(index));
                for index in older {
                    let block = region.block(index, now);
                    self.resume_block(&mut edit, &block, change, free)?;
                }
                continue;
            }
            if now == self.region_shift
                && let Some(shift) = BlockShift::new(shift)
                && shift.get() < now
            {
                edit.cut(shift);
            }
            if edit.shift() != shift {
                return Err(inconsistent(start, "the ledger has blocks of another size"));
            }
            self.resume_block(&mut edit, &block, change, free)?;
        }
        // The ledger has the changes, and no other change of the blocks is pending.
        Ok(())
    }

    fn resume_block(
        self,
        edit: &mut Edit<'_>,
        block: &RegionBlock,
        change: &Change,
        free: &mut FreeSpace,
    ) -> Result<(), Error> {
        let now = edit.state.blocks().entry(block.index);
        let entry = change.entry.entry(block.length);
        let place = |entry: Entry| entry.stored().map(|stored| stored.at);
        if place(now) == place(entry) && (place(entry).is_some() || now == entry) {
            // The last record has the change already.
            return Ok(());
        }
        let source = change.source().map(|source| source.entry(block.length));
        // The last record can have the block from which the rest is copied.
        let copied = source.filter(|source| place(*source) != place(now));
        for stored in [Some(entry), copied]
            .into_iter()
            .flatten()
            .filter_map(|one| one.stored())
        {
            if !free.take(sectors(stored)) {
                let at = self.lba(edit.region, block.start).0;
                return Err(inconsistent(at, "the ledger names space that is in use"));
            }
        }
        let incomplete = change
            .incomplete
            .as_ref()
            .map(|incomplete| IncompleteBlock {
                id: self.incomplete_blocks.next(),
                source: source.unwrap_or(now),
                written: incomplete.written.clone(),
            });
        edit.set(block.index, entry, incomplete);
        Ok(())
    }
}

/// The space of a file whose changes are being restored.
struct FreeSpace {
    /// Ranges that neither the header, nor a record, nor a restored change uses; `None` if not all
    /// of them are known.
    unused: Option<Extents>,
    /// The known ones that no restored change uses.
    free: Extents,
    /// The end of the part that is in use.
    end: u64,
}

impl FreeSpace {
    /// Takes a range for a change. Returns whether the range was free, as far as this is known.
    fn take(&mut self, range: Range<u64>) -> bool {
        if let Some(unused) = &mut self.unused {
            if !unused.contains(&range) {
                return false;
            }
            unused.remove(range.clone());
        }
        self.free.remove(range);
        true
    }
}

fn inconsistent(at: u64, problem: &str) -> Error {
    Error::Inconsistent(format!("the block at byte {at}: {problem}"))
}

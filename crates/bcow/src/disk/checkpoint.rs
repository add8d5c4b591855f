//! Checkpoint: records become tables, and the log starts over (spec section 10, "Checkpoint").

use std::iter;
use std::ops::Range;

use bcow_format::{
    Entry, FormatError, FreeRange, Header, MAX_FREE_BYTES, SECTOR_BYTES, SLOT_BYTES, Section,
    encode_free, encode_table,
};

use super::blocks::Blocks;
use super::commit::punched;
use super::committer::{Committer, Taken};
use super::extents::Extents;
use super::region::Region;
use super::space::sectors;
use super::{Inner, Operation};
use crate::Error;
use crate::root::Root;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, write};

/// Spare entries in the place allocated for the free list: the allocation itself splits ranges.
const FREE_SLACK: usize = 16;
const FREE_ENTRY_BYTES: usize = 16;
/// Number of places that are tried for a free list.
const MAX_PLACES: u32 = 8;
/// Most ranges in a free list.
pub(super) const MAX_FREE: usize = MAX_FREE_BYTES as usize / FREE_ENTRY_BYTES - FREE_SLACK;

/// New tables and sections, which nothing names yet, and the ranges that they replace.
#[derive(Default)]
pub(super) struct Change {
    pub(super) used: Vec<Range<u64>>,
    pub(super) freed: Vec<Range<u64>>,
    /// The freed ranges that writes will not reuse soon.
    pub(super) given_up: Extents,
}

impl Operation<'_> {
    /// Folds the log, and the blocks of a record that does not fit into it, into the tables.
    pub(super) fn checkpoint(self, committer: &mut Committer, taken: &Taken) -> Result<(), Error> {
        let mut change = Change::default();
        let mut root = self.regions.root();
        let mut changed = committer.logged.clone();
        changed.extend(taken.regions.iter().cloned());
        changed.sort_by_key(|region| region.index);
        changed.dedup_by_key(|region| region.index);
        let header = committer.header.clone();
        let written = self
            .write_tables(&changed, &mut root, &mut change)
            .and_then(|()| self.prepare(committer, header, &root, taken.used(), &mut change));
        let prepared = self.or_free(written, &change)?;
        self.switch(committer, prepared)?;
        self.regions.set_root(root);
        for region in &changed {
            let mut state = write(&region.state);
            state.record_is_durable();
            state.logged = false;
            state.counted = 0;
        }
        committer.logged.clear();
        committer.logged_bytes = 0;
        self.unflushed.fetch_sub(taken.blocks, Ordering::Relaxed);
        self.punch(&change.given_up);
        self.space
            .free_punched(change.freed, punched(&change.given_up));
        // The checkpoint is durable without this copy. If it fails, the next write or flush is
        // refused with the cause.
        let _ = self.write_other_slot(committer);
        Ok(())
    }

    fn write_tables(
        self,
        regions: &[Arc<Region>],
        root: &mut Root,
        change: &mut Change,
    ) -> Result<(), Error> {
        for region in regions {
            let blocks = {
                let state = self.read_state(region)?;
                for freed in state.freed_by_record() {
                    let range = sectors(freed.stored);
                    if freed.given_up {
                        change.given_up.insert(range.clone());
                    }
                    change.freed.push(range);
                }
                state.published()
            };
            self.write_table(region.index, &blocks, root, change)?;
        }
        Ok(())
    }
}

impl Inner {
    /// Writes the entries of a region into the root table, or into a new sub-block table that the
    /// root table names.
    pub(super) fn write_table(
        &self,
        region: u64,
        blocks: &Blocks,
        root: &mut Root,
        change: &mut Change,
    ) -> Result<(), Error> {
        if let Entry::Table(stored) = root[region as usize] {
            change.freed.push(sectors(stored));
        }
        let entry = match blocks {
            Blocks::Whole(entry) => *entry,
            Blocks::Cut(table) => match blocks.uniform() {
                Some(entry) => entry,
                None => {
                    let bytes = encode_table(region, &table.to_table());
                    Entry::Table(self.write_section(&bytes, change)?.stored())
                }
            },
        };
        root.set(region as usize, entry);
        Ok(())
    }

    pub(super) fn write_section(
        &self,
        bytes: &[u8],
        change: &mut Change,
    ) -> Result<Section, Error> {
        self.write_section_except(iter::empty(), bytes, change)
    }

    /// Writes a section of which `zeros` are parts, in order, that need not be written where the
    /// file has a hole already: the first root table of a large disk is mostly zeros.
    fn write_section_except(
        &self,
        zeros: impl Iterator<Item = Range<usize>>,
        bytes: &[u8],
        change: &mut Change,
    ) -> Result<Section, Error> {
        if bytes.is_empty() {
            return Ok(Section::default());
        }
        let piece = self.space.allocate_section(bytes.len() as u64)?;
        change.used.push(piece.start..piece.start + piece.bytes);
        let mut written = 0;
        for part in zeros {
            let data = self.file.storage.data_from(piece.start + part.start as u64);
            if data >= piece.start + part.end as u64 {
                let before = &bytes[written..part.start];
                self.write_storage(piece.start + written as u64, before)?;
                written = part.end;
            }
        }
        self.write_storage(piece.start + written as u64, &bytes[written..])?;
        Ok(Section::of(piece.start, bytes))
    }

    /// On an error, frees the space that was allocated for the change.
    pub(super) fn or_free<T>(
        &self,
        outcome: Result<T, Error>,
        change: &Change,
    ) -> Result<T, Error> {
        outcome.inspect_err(|_| self.space.free(change.used.iter().cloned()))
    }

    /// Writes the root table and the free list, and makes a header that names them. `mapped` are
    /// ranges in use from now on, in addition to those of `change`.
    pub(super) fn prepare(
        &self,
        committer: &Committer,
        mut header: Header,
        root: &Root,
        mapped: impl Iterator<Item = Range<u64>>,
        change: &mut Change,
    ) -> Result<Prepared, Error> {
        let old = &committer.header;
        // Only a forged file has the greatest one.
        let Some(generation) = old.generation.checked_add(1) else {
            let (field, problem) = ("generation", "no greater one is possible".to_owned());
            return Err(FormatError::HeaderField { field, problem }.into());
        };
        for section in [&old.root, &old.free] {
            change.freed.push(section_range(section));
        }
        let zeros = root.absent_parts();
        header.root = self.write_section_except(zeros, &root.encode(), change)?;
        let mut free = committer.free.clone();
        let mut end = committer.file_bytes;
        let mut used: Vec<Range<u64>> = mapped.collect();
        used.extend(change.used.iter().cloned());
        // Builds the free list as it will be, without its own place, to learn how large a place it
        // needs.
        let last = used.iter().map(|range| range.end).fold(end, u64::max);
        free.insert(end..last);
        end = last;
        let freed = change.freed.iter().cloned();
        freed.for_each(|range| free.insert(range));
        used.iter().for_each(|range| free.remove(range.clone()));
        let own = self.place_free_list(&mut free, &mut end, change)?;
        let bytes = encode_free(&largest(&free));
        header.free = if bytes.is_empty() {
            Section::default()
        } else {
            self.write_storage(own, &bytes)?;
            Section::of(own, &bytes)
        };
        header.generation = generation;
        header.file_bytes = end;
        // A section has to lie inside the file, even if its last sector is not filled.
        self.lengthen(end)?;
        Ok(Prepared { header, free })
    }

    /// Allocates a place for the free list of a file that ends at `end`. Sets `free` and `end` to
    /// the state with this place, and frees the part of the place that the list does not need.
    fn place_free_list(
        &self,
        free: &mut Extents,
        end: &mut u64,
        change: &mut Change,
    ) -> Result<u64, Error> {
        let mut attempts = 0;
        let mut exact = None;
        loop {
            let count = free.iter().count().min(MAX_FREE) + FREE_SLACK;
            let ample = (count * FREE_ENTRY_BYTES) as u64;
            let place = self.space.allocate_section(exact.unwrap_or(ample))?;
            let own = place.start..place.start + place.bytes;
            change.used.push(own.clone());
            let (mut list, mut list_end) = (free.clone(), *end);
            list.insert(list_end..own.start.max(list_end));
            list.remove(own.clone());
            list_end = list_end.max(own.end);
            cut_end(&mut list, &mut list_end);
            let needed = list_bytes(&list);
            let rest = (own.start + needed).min(own.end)..own.end;
            let (mut with_rest, mut with_rest_end) = (list.clone(), list_end);
            with_rest.insert(rest.clone());
            cut_end(&mut with_rest, &mut with_rest_end);
            attempts += 1;
            let fits = needed <= place.bytes;
            if fits && list_bytes(&with_rest) == needed {
                change.freed.push(rest);
                (*free, *end) = (with_rest, with_rest_end);
                return Ok(own.start);
            }
            // With the unused rest of its place in it, the list would need that rest. So another
            // place is tried: one of the exact size, or one that gives a list of another length. If
            // all attempts fail, the rest is leaked.
            if fits && attempts >= MAX_PLACES {
                (*free, *end) = (list, list_end);
                return Ok(own.start);
            }
            exact = (fits && needed > 0 && attempts < MAX_PLACES - 1).then_some(needed);
            free.insert(*end..own.end.max(*end));
            free.insert(own.clone());
            *end = own.end.max(*end);
            change.freed.push(own);
        }
    }

    /// Makes the prepared header the header of the file. After any failure here the disk refuses
    /// writes: the next opening finds out which header the file has.
    pub(super) fn switch(
        &self,
        committer: &mut Committer,
        prepared: Prepared,
    ) -> Result<(), Error> {
        let Prepared { header, free } = prepared;
        self.barrier()?;
        let slot = 1 - committer.slot;
        self.write_slot(slot, &header)?;
        self.barrier()?;
        committer.slot = slot;
        committer.tail = 0;
        committer.sequence = 1;
        committer.file_bytes = header.file_bytes;
        committer.free = free;
        committer.header = header;
        self.has_new_identity.store(true, Ordering::Release);
        self.checkpoints.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Copies the newest header to the other slot. The next barrier, for any purpose, makes
    /// the copy durable.
    pub(super) fn write_other_slot(&self, committer: &Committer) -> Result<(), Error> {
        self.write_slot(1 - committer.slot, &committer.header)
    }

    fn write_slot(&self, slot: usize, header: &Header) -> Result<(), Error> {
        self.write_storage((slot * SLOT_BYTES) as u64, &header.encode())
            .inspect_err(|error| self.refuse_writes(error))
    }

    /// Extends the file to `end` bytes, if it is shorter. The caller owns the last byte. This
    /// writes that byte instead of setting the length, because `set_len` could truncate what
    /// another thread writes behind it at the same time.
    pub(super) fn lengthen(&self, end: u64) -> Result<(), Error> {
        if end > 0 && self.file.storage.length()? < end {
            self.write_storage(end - 1, &[0])?;
        }
        Ok(())
    }
}

/// A header whose sections are written.
pub(super) struct Prepared {
    header: Header,
    free: Extents,
}

/// Bytes that an encoded free list takes, in whole sectors.
fn list_bytes(free: &Extents) -> u64 {
    let entries = free.iter().count().min(MAX_FREE);
    ((entries * FREE_ENTRY_BYTES) as u64).next_multiple_of(SECTOR_BYTES)
}

/// Removes free ranges at the end of the file from the list and from the file.
fn cut_end(free: &mut Extents, end: &mut u64) {
    loop {
        let last = free.iter().next_back();
        let Some(last) = last.filter(|last| last.end == *end) else {
            return;
        };
        *end = last.start;
        free.remove(last);
    }
}

/// The sectors of a section.
pub(super) fn section_range(section: &Section) -> Range<u64> {
    section.offset..(section.offset + u64::from(section.bytes)).next_multiple_of(SECTOR_BYTES)
}

/// The free ranges in order; only the largest, if there are too many.
fn largest(free: &Extents) -> Vec<FreeRange> {
    let mut ranges: Vec<FreeRange> = free
        .iter()
        .map(|range| FreeRange {
            start: range.start,
            bytes: range.end - range.start,
        })
        .collect();
    if ranges.len() > MAX_FREE {
        ranges.sort_unstable_by_key(|range| std::cmp::Reverse(range.bytes));
        ranges.truncate(MAX_FREE);
        ranges.sort_unstable_by_key(|range| range.start);
    }
    ranges
}

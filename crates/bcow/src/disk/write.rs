//! Write, zero, discard.
//!
//! Blocks of one sector have a checksum and are never overwritten after a record names them: each
//! write goes to a new place. Larger blocks are *open*: they are overwritten in place.

use std::ops::Range;

use bcow_format::{BlockShift, Entry, Stored, Uba, crc32c};

use super::blocks::{Blocks, CHECKED_SHIFT};
use super::edit::Edit;
use super::extents::Ranges;
use super::incomplete::Job;
use super::region::{IncompleteBlock, Region};
use super::regions::FoundRegion;
use super::space::{Piece, sectors};
use super::{Disk, Operation, RegionBlock, block_at, by_region};
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, SMALL};
use crate::{Error, Layout, Space as Under, WritableDevice};

/// log2 of the block size of regions whose first write has at least `STREAM_BYTES`: 64 KiB.
const STREAM_SHIFT: u8 = 16;
/// Least length in bytes of a first write that selects `STREAM_SHIFT`.
const STREAM_BYTES: u64 = if SMALL { 4096 } else { 128 << 10 };
/// A part of a block of up to this size over zeros is written as a whole block, in bytes.
const WHOLE_BYTES: u64 = if SMALL { 4096 } else { 64 << 10 };
/// Zeros that must be stored are written in pieces of this size.
///
/// They begin at a page. If the process is killed while the kernel loads a page of them, the kernel
/// ends the write in front of that page, so no sector holds a part of the zeros.
static ZEROS: Zeros = Zeros([0; 256 << 10]);

#[repr(align(4096))]
struct Zeros([u8; 256 << 10]);
/// Number of pending blocks at which a flush starts in the background. At four times as many, the
/// writer flushes. Each pending block takes some hundred bytes of memory.
const MANY_PENDING: u64 = if SMALL { 4 } else { 1 << 16 };
/// The same limit for the memory of the tables of regions with pending blocks, in bytes.
const MANY_BYTES: u64 = 16 << 20;

impl WritableDevice for Disk {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.change(offset, bytes.len() as u64, |operation| {
            operation.write(offset, bytes)
        })
    }

    fn write_zeroes(&self, offset: u64, length: u64, space: Under) -> Result<(), Error> {
        self.change(offset, length, |operation| match space {
            Under::Free => operation.zero(offset, length, Edges::Write),
            Under::Keep => operation.write_zeros(offset, length),
        })
    }

    fn discard(&self, offset: u64, length: u64) -> Result<(), Error> {
        self.change(offset, length, |operation| {
            operation.zero(offset, length, Edges::Leave)
        })
    }

    fn flush(&self) -> Result<(), Error> {
        self.inner.operation(&self.inner.enter()).flush()
    }
}

/// How blocks that a zeroed range covers in part are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Edges {
    Write,
    Leave,
}

impl Disk {
    /// Changes this range of the address space.
    fn change(
        &self,
        offset: u64,
        length: u64,
        change: impl FnOnce(Operation<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.access(offset, length, |operation, _| {
            operation.check_not_failed()?;
            change(operation)?;
            operation.limit_pending()
        })
    }
}

impl Operation<'_> {
    fn write(self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let mut bytes = bytes;
        for (index, at, length) in by_region(offset, bytes.len() as u64, self.region_shift) {
            let (piece, rest) = bytes.split_at(length as usize);
            bytes = rest;
            let region = self.region(index);
            self.write_region(&region, at, piece)?;
        }
        Ok(())
    }

    fn write_zeros(self, offset: u64, length: u64) -> Result<(), Error> {
        zeros(offset..offset + length).try_for_each(|(at, bytes)| self.write(at, bytes))
    }

    fn write_region(self, region: &Arc<Region>, at: u64, bytes: &[u8]) -> Result<(), Error> {
        let shift = self.cut(region, bytes.len() as u64)?;
        let mut done = 0;
        while done < bytes.len() {
            let from = at + done as u64;
            let left = &bytes[done..];
            let block = block_at(from, shift, region.length);
            let skip = from - block.start;
            if skip > 0 || (left.len() as u64) < block.length {
                let take = left.len().min((block.length - skip) as usize);
                self.write_part(region, &block, skip as u32, &left[..take])?;
                done += take;
            } else if shift == CHECKED_SHIFT {
                let take = left.len() >> CHECKED_SHIFT << CHECKED_SHIFT;
                self.write_checked(region, block.index, &left[..take])?;
                done += take;
            } else {
                let take = block.length as usize;
                self.write_open(region, &block, &left[..take])?;
                done += take;
            }
        }
        Ok(())
    }

    /// Returns log2 of the block size of a region before a write, and cuts the region if necessary.
    fn cut(self, region: &Arc<Region>, length: u64) -> Result<u8, Error> {
        let wanted = self.shift_for(length);
        {
            let state = self.read_state(region)?;
            let shift = state.blocks().shift(self.region_shift);
            let uncut = matches!(state.blocks(), Blocks::Whole(Entry::Absent | Entry::Zero));
            if !uncut || wanted.get() == self.region_shift {
                return Ok(shift);
            }
        }
        let wanted = self.as_below(region, wanted)?;
        let mut edit = self.edit(region)?;
        edit.cut(wanted);
        Ok(edit.shift())
    }

    /// `wanted`, or the size of the smallest block that a disk below has in the region. This disk
    /// can take the blocks of that one then, when a snapshot is removed: with larger blocks, it
    /// would need what the others show around them, which can be an image that the command does not
    /// have.
    fn as_below(self, region: &Region, wanted: BlockShift) -> Result<BlockShift, Error> {
        let start = region.start(self.region_shift);
        let smallest = match &self.config.backing {
            Some(below) if wanted.get() > CHECKED_SHIFT && self.block_shift.is_none() => {
                below.smallest_block(start..start + region.length)?
            }
            _ => None,
        };
        let smallest = smallest.and_then(BlockShift::new);
        Ok(smallest.map_or(wanted, |shift| shift.min(wanted)))
    }

    /// Block size for a region whose first write has `length` bytes.
    fn shift_for(self, length: u64) -> BlockShift {
        let shift = match (self.layout, self.block_shift) {
            (Layout::Performance, _) => self.region_shift,
            (_, Some(chosen)) => chosen.get(),
            (Layout::Space, None) => CHECKED_SHIFT,
            // Only where such blocks are smaller than a region: the first write then cuts the
            // region, under its lock. If one block were the whole region, one writer would leave
            // the region uncut while another cuts it.
            (Layout::Auto, None) if length >= STREAM_BYTES && STREAM_SHIFT < self.region_shift => {
                STREAM_SHIFT
            }
            (Layout::Auto, None) => CHECKED_SHIFT,
        };
        BlockShift::new(shift.min(self.region_shift)).unwrap_or(BlockShift::MIN)
    }

    /// Writes whole blocks with checksums.
    fn write_checked(self, region: &Arc<Region>, first: u32, bytes: &[u8]) -> Result<(), Error> {
        let block_bytes = 1 << CHECKED_SHIFT;
        if bytes.len() == block_bytes && self.rewrite_fresh(region, first, bytes)? {
            return Ok(());
        }
        let mut entries = Vec::with_capacity(bytes.len() / block_bytes);
        let mut written = 0;
        while written < bytes.len() {
            let left = &bytes[written..];
            let outcome = self
                .space
                .allocate(region.index, block_bytes as u64, left.len() as u64)
                .and_then(|piece| {
                    let part = &left[..piece.bytes as usize];
                    self.write_or_free(&piece, part)?;
                    for (at, block) in (piece.start..)
                        .step_by(block_bytes)
                        .zip(part.chunks(block_bytes))
                    {
                        entries.push(Stored {
                            at: Uba(at),
                            bytes: block_bytes as u32,
                            crc: crc32c(block),
                        });
                    }
                    Ok(part.len())
                });
            match outcome {
                Ok(bytes) => written += bytes,
                Err(error) => {
                    self.space.free(entries.iter().copied().map(sectors));
                    return Err(error);
                }
            }
        }
        let mut edit = self.edit(region)?;
        for (index, stored) in (first..).zip(entries) {
            edit.set(index, Entry::Raw(stored), None);
        }
        edit.finish()
    }

    /// Overwrites a block in place if no record names it. Returns whether it did.
    fn rewrite_fresh(self, region: &Arc<Region>, index: u32, bytes: &[u8]) -> Result<bool, Error> {
        if !self.read_state(region)?.is_fresh(index) {
            return Ok(false);
        }
        let mut edit = self.edit(region)?;
        let state = &mut edit.state;
        let entry = state.blocks().entry(index);
        let (Entry::Raw(stored) | Entry::Open(stored)) = entry else {
            return Ok(false);
        };
        if !state.is_fresh(index) {
            return Ok(false);
        }
        // If the write fails midway, no checksum matches the data; so the block is open until the
        // write has succeeded.
        state.rewrite(index, Entry::Open(Stored { crc: 0, ..stored }));
        self.write_storage(stored.at.0, bytes)?;
        let crc = crc32c(bytes);
        state.rewrite(index, Entry::Raw(Stored { crc, ..stored }));
        edit.complete(index);
        edit.finish()?;
        Ok(true)
    }

    /// Writes a whole open block.
    fn write_open(
        self,
        region: &Arc<Region>,
        block: &RegionBlock,
        bytes: &[u8],
    ) -> Result<(), Error> {
        if self.write_in_place(region, block, 0, bytes)? {
            return Ok(());
        }
        let piece = self
            .space
            .allocate(region.index, block.length, block.length)?;
        self.write_or_free(&piece, bytes)?;
        let mut edit = self.edit(region)?;
        edit.set(block.index, open_entry(&piece), None);
        edit.finish()
    }

    /// Writes into a complete open block in place. Returns false if the block is not one.
    fn write_in_place(
        self,
        region: &Region,
        block: &RegionBlock,
        skip: u32,
        bytes: &[u8],
    ) -> Result<bool, Error> {
        loop {
            {
                let state = self.read_state(region)?;
                let Entry::Open(stored) = state.blocks().entry(block.index) else {
                    return Ok(false);
                };
                if state.is_incomplete(block.index) {
                    return Ok(false);
                }
                if state.is_fresh(block.index) || self.has_new_identity.load(Ordering::Acquire) {
                    self.write_storage(stored.at.0 + u64::from(skip), bytes)?;
                    self.is_dirty.store(true, Ordering::Release);
                    return Ok(true);
                }
            }
            // This is the first overwrite of a block that an earlier opening left. The file must
            // get a new identity first, because readers recognise the content by the identity.
            self.is_dirty.store(true, Ordering::Release);
            self.flush()?;
        }
    }

    /// Writes a part of a block.
    fn write_part(
        self,
        region: &Arc<Region>,
        block: &RegionBlock,
        skip: u32,
        bytes: &[u8],
    ) -> Result<(), Error> {
        loop {
            if self.write_in_place(region, block, skip, bytes)? {
                return Ok(());
            }
            let mut edit = self.edit(region)?;
            let outcome = self.write_part_exclusively(&mut edit, block, skip, bytes);
            let finished = edit.finish();
            let outcome = outcome?;
            finished?;
            match outcome {
                Part::Written => return Ok(()),
                Part::Changed => continue,
                Part::Incomplete if self.fills.is_behind() => {
                    return self.complete(region, block.index);
                }
                Part::Incomplete => {
                    self.disk.later(Job::Fill(Arc::clone(region), block.index));
                    return Ok(());
                }
            }
        }
    }

    /// Writes `bytes` into a block from its byte `skip` on.
    fn write_part_exclusively(
        self,
        edit: &mut Edit<'_>,
        block: &RegionBlock,
        skip: u32,
        bytes: &[u8],
    ) -> Result<Part, Error> {
        let state = &mut edit.state;
        let index = block.index;
        let range = skip..skip + bytes.len() as u32;
        match state.blocks().entry(index) {
            Entry::Open(stored) => {
                if !state.is_incomplete(index) {
                    return Ok(Part::Changed);
                }
                self.write_storage(stored.at.0 + u64::from(skip), bytes)?;
                edit.write_incomplete(block, range);
                self.is_dirty.store(true, Ordering::Release);
                Ok(Part::Written)
            }
            Entry::Raw(stored) if state.is_fresh(index) => {
                // The flush computes the new checksum.
                state.rewrite(index, Entry::Open(Stored { crc: 0, ..stored }));
                self.write_storage(stored.at.0 + u64::from(skip), bytes)?;
                Ok(Part::Written)
            }
            before => {
                let piece = self
                    .space
                    .allocate(edit.region.index, block.length, block.length)?;
                let zeros = self.config.is_zeros(&before);
                if zeros && block.length <= WHOLE_BYTES {
                    let mut whole = vec![0; block.length as usize];
                    whole[range.start as usize..range.end as usize].copy_from_slice(bytes);
                    self.write_or_free(&piece, &whole)?;
                    edit.set(index, open_entry(&piece), None);
                    return Ok(Part::Written);
                }
                let part = Piece {
                    start: piece.start + u64::from(skip),
                    ..piece
                };
                self.write_storage(part.start, bytes).inspect_err(|_| {
                    self.space.free(Some(piece.range()));
                })?;
                if zeros && piece.blank {
                    // The rest reads as zeros only inside the file.
                    self.lengthen(piece.range().end).inspect_err(|_| {
                        self.space.free(Some(piece.range()));
                    })?;
                    edit.set(index, open_entry(&piece), None);
                    return Ok(Part::Written);
                }
                let mut written = Ranges::default();
                written.insert(range);
                let incomplete = IncompleteBlock {
                    id: self.incomplete_blocks.next(),
                    source: before,
                    written,
                };
                edit.set(index, open_entry(&piece), Some(incomplete));
                Ok(Part::Incomplete)
            }
        }
    }

    /// Makes a range read as zeros. Only zeros of partly covered blocks are stored, if `edges` says
    /// so.
    fn zero(self, offset: u64, length: u64, edges: Edges) -> Result<(), Error> {
        for (index, at, length) in by_region(offset, length, self.region_shift) {
            let region_length = self.config.header.region_length(index);
            if let FoundRegion::Whole(entry) = self.regions.find(index, region_length)
                && self.config.is_zeros(&entry)
            {
                continue;
            }
            let region = self.region(index);
            self.zero_region(&region, at, length, edges)?;
            self.limit_pending()?;
        }
        Ok(())
    }

    fn zero_region(
        self,
        region: &Arc<Region>,
        at: u64,
        length: u64,
        edges: Edges,
    ) -> Result<(), Error> {
        let end = at + length;
        let mut left = Vec::new();
        {
            let mut edit = self.edit(region)?;
            let whole = length == region.length;
            if !whole && self.shift_for(0).get() < self.region_shift {
                edit.cut(self.shift_for(0));
            }
            let shift = edit.shift();
            let mut from = at;
            while from < end {
                let block = block_at(from, shift, region.length);
                let block_end = block.start + block.length;
                let take = block_end.min(end) - from;
                if self
                    .config
                    .is_zeros(&edit.state.blocks().entry(block.index))
                {
                    // The block already reads as zeros.
                } else if take == block.length {
                    edit.set(block.index, self.config.zeros(), None);
                } else if edges == Edges::Write {
                    left.push((from, take));
                }
                from += take;
            }
            edit.finish()?;
        }
        for (from, take) in left {
            let start = self.lba(region, from).0;
            self.write_zeros(start, take)?;
        }
        Ok(())
    }

    fn write_or_free(self, piece: &Piece, bytes: &[u8]) -> Result<(), Error> {
        self.write_storage(piece.start, bytes).inspect_err(|_| {
            self.space.free(Some(piece.range()));
        })
    }

    /// Bounds the memory of pending changes: queues a flush, or flushes if far too much is pending.
    fn limit_pending(self) -> Result<(), Error> {
        let pending = (self.unflushed.load(Ordering::Relaxed) / MANY_PENDING)
            .max(self.listed_bytes.load(Ordering::Relaxed) / MANY_BYTES);
        if pending >= 4 {
            return self.flush();
        }
        if pending >= 1 && !self.flush_queued.swap(true, Ordering::AcqRel) {
            self.disk.later(Job::Flush);
        }
        Ok(())
    }
}

/// Outcome of a write to a part of a block.
enum Part {
    Written,
    /// The rest of the block is still to be copied.
    Incomplete,
    /// Another thread changed the block; retry.
    Changed,
}

/// Zeros for the bytes of `range`, in pieces, each with its offset.
pub(super) fn zeros(range: Range<u64>) -> impl Iterator<Item = (u64, &'static [u8])> {
    range.clone().step_by(ZEROS.0.len()).map(move |at| {
        let length = (range.end - at).min(ZEROS.0.len() as u64);
        (at, &ZEROS.0[..length as usize])
    })
}

fn open_entry(piece: &Piece) -> Entry {
    Entry::Open(Stored {
        at: Uba(piece.start),
        bytes: piece.bytes as u32,
        crc: 0,
    })
}

//! Write, zero, discard.
//!
//! Blocks of one sector have a checksum and are never overwritten after a record names them: each
//! write goes to a new place. Larger blocks are *open*: they are overwritten in place.

use bcow_format::{BlockShift, Entry, Stored, Uba, crc32c};

use super::blocks::{Blocks, CHECKED_SHIFT};
use super::edit::Edit;
use super::extents::Ranges;
use super::incomplete::Job;
use super::region::{IncompleteBlock, Region, RegionState};
use super::regions::FoundRegion;
use super::space::{Piece, sectors};
use super::{Disk, DiskConfig, Inner, RegionBlock, block_at, by_region};
use crate::device::checked_range;
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
pub(super) static ZEROS: Zeros = Zeros([0; 256 << 10]);

#[repr(align(4096))]
pub(super) struct Zeros(pub(super) [u8; 256 << 10]);
/// Number of pending blocks at which a flush starts in the background. At four times as many, the
/// writer flushes. Each pending block takes some hundred bytes of memory.
const MANY_PENDING: u64 = if SMALL { 4 } else { 1 << 16 };
/// The same limit for the memory of the tables of regions with pending blocks, in bytes.
const MANY_BYTES: u64 = 16 << 20;

impl WritableDevice for Disk {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let config = self.inner.enter();
        checked_range(offset, bytes.len() as u64, config.header.size)?;
        self.inner.check_not_failed()?;
        self.inner.write(&config, offset, bytes)?;
        self.inner.limit_pending(&config)
    }

    fn write_zeroes(&self, offset: u64, length: u64, space: Under) -> Result<(), Error> {
        let config = self.inner.enter();
        checked_range(offset, length, config.header.size)?;
        self.inner.check_not_failed()?;
        match space {
            Under::Free => self.inner.zero(&config, offset, length, Edges::Write)?,
            Under::Keep => self.inner.write_zeros(&config, offset, length)?,
        }
        self.inner.limit_pending(&config)
    }

    fn discard(&self, offset: u64, length: u64) -> Result<(), Error> {
        let config = self.inner.enter();
        checked_range(offset, length, config.header.size)?;
        self.inner.check_not_failed()?;
        self.inner.zero(&config, offset, length, Edges::Leave)?;
        self.inner.limit_pending(&config)
    }

    fn flush(&self) -> Result<(), Error> {
        let config = self.inner.enter();
        self.inner.flush(&config)
    }
}

/// How blocks that a zeroed range covers in part are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Edges {
    Write,
    Leave,
}

impl Inner {
    pub(super) fn write(
        self: &Arc<Self>,
        config: &DiskConfig,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let mut bytes = bytes;
        for (index, at, length) in by_region(offset, bytes.len() as u64, self.region_shift) {
            let (piece, rest) = bytes.split_at(length as usize);
            bytes = rest;
            let region = self.region(config, index);
            self.write_region(config, &region, at, piece)?;
        }
        Ok(())
    }

    fn write_zeros(
        self: &Arc<Self>,
        config: &DiskConfig,
        offset: u64,
        length: u64,
    ) -> Result<(), Error> {
        let mut done = 0;
        while done < length {
            let n = (length - done).min(ZEROS.0.len() as u64);
            self.write(config, offset + done, &ZEROS.0[..n as usize])?;
            done += n;
        }
        Ok(())
    }

    fn write_region(
        self: &Arc<Self>,
        config: &DiskConfig,
        region: &Arc<Region>,
        at: u64,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let shift = self.cut(config, region, bytes.len() as u64)?;
        let mut done = 0;
        while done < bytes.len() {
            let from = at + done as u64;
            let left = &bytes[done..];
            let block = block_at(from, shift, region.length);
            let skip = from - block.start;
            if skip > 0 || (left.len() as u64) < block.length {
                let take = left.len().min((block.length - skip) as usize);
                self.write_part(config, region, &block, skip as u32, &left[..take])?;
                done += take;
            } else if shift == CHECKED_SHIFT {
                let take = left.len() >> CHECKED_SHIFT << CHECKED_SHIFT;
                self.write_checked(config, region, block.index, &left[..take])?;
                done += take;
            } else {
                let take = block.length as usize;
                self.write_open(config, region, &block, &left[..take])?;
                done += take;
            }
        }
        Ok(())
    }

    /// Returns log2 of the block size of a region before a write, and cuts the region if necessary.
    fn cut(&self, config: &DiskConfig, region: &Region, length: u64) -> Result<u8, Error> {
        let wanted = self.shift_for(length);
        {
            let state = self.regions.read(region, &self.file, &config.header)?;
            let shift = state.blocks().shift(self.region_shift);
            let uncut = matches!(state.blocks(), Blocks::Whole(Entry::Absent | Entry::Zero));
            if !uncut || wanted.get() == self.region_shift {
                return Ok(shift);
            }
        }
        let mut state = self.regions.write(region, &self.file, &config.header)?;
        self.cut_into(&mut state, wanted, region);
        Ok(state.blocks().shift(self.region_shift))
    }

    /// Block size for a region whose first write has `length` bytes.
    fn shift_for(&self, length: u64) -> BlockShift {
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
    fn write_checked(
        self: &Arc<Self>,
        config: &DiskConfig,
        region: &Arc<Region>,
        first: u32,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let block_bytes = 1 << CHECKED_SHIFT;
        if bytes.len() == block_bytes && self.rewrite_fresh(config, region, first, bytes)? {
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
        let mut state = self.regions.write(region, &self.file, &config.header)?;
        let mut edit = Edit::default();
        for (index, stored) in (first..).zip(entries) {
            let entry = Entry::Raw(stored);
            self.set(region, &mut state, index, entry, None, &mut edit);
        }
        self.finish(state, edit)
    }

    /// Overwrites a block in place if no record names it. Returns whether it did.
    fn rewrite_fresh(
        &self,
        config: &DiskConfig,
        region: &Region,
        index: u32,
        bytes: &[u8],
    ) -> Result<bool, Error> {
        {
            let state = self.regions.read(region, &self.file, &config.header)?;
            if !state.is_fresh(index) {
                return Ok(false);
            }
        }
        let mut state = self.regions.write(region, &self.file, &config.header)?;
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
        let mut edit = Edit::default();
        self.complete_block(region, &mut state, index, &mut edit);
        self.finish(state, edit)?;
        Ok(true)
    }

    /// Writes a whole open block.
    fn write_open(
        self: &Arc<Self>,
        config: &DiskConfig,
        region: &Arc<Region>,
        block: &RegionBlock,
        bytes: &[u8],
    ) -> Result<(), Error> {
        if self.write_in_place(config, region, block, 0, bytes)? {
            return Ok(());
        }
        let piece = self
            .space
            .allocate(region.index, block.length, block.length)?;
        self.write_or_free(&piece, bytes)?;
        let mut state = self.regions.write(region, &self.file, &config.header)?;
        let mut edit = Edit::default();
        let entry = open_entry(&piece);
        self.set(region, &mut state, block.index, entry, None, &mut edit);
        self.finish(state, edit)
    }

    /// Writes into a complete open block in place. Returns false if the block is not one.
    fn write_in_place(
        self: &Arc<Self>,
        config: &DiskConfig,
        region: &Region,
        block: &RegionBlock,
        skip: u32,
        bytes: &[u8],
    ) -> Result<bool, Error> {
        loop {
            {
                let state = self.regions.read(region, &self.file, &config.header)?;
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
            self.flush(config)?;
        }
    }

    /// Writes a part of a block.
    fn write_part(
        self: &Arc<Self>,
        config: &DiskConfig,
        region: &Arc<Region>,
        block: &RegionBlock,
        skip: u32,
        bytes: &[u8],
    ) -> Result<(), Error> {
        loop {
            if self.write_in_place(config, region, block, skip, bytes)? {
                return Ok(());
            }
            let mut edit = Edit::default();
            let mut state = self.regions.write(region, &self.file, &config.header)?;
            let piece = PieceOfBlock { block, skip, bytes };
            let outcome =
                self.write_part_exclusively(config, region, &mut state, &piece, &mut edit);
            let finished = self.finish(state, edit);
            let outcome = outcome?;
            finished?;
            match outcome {
                Part::Written => return Ok(()),
                Part::Changed => continue,
                Part::Incomplete if self.fills.is_behind() => {
                    return self.complete(config, region, block.index);
                }
                Part::Incomplete => {
                    self.later(Job::Fill(Arc::clone(region), block.index));
                    return Ok(());
                }
            }
        }
    }

    fn write_part_exclusively(
        &self,
        config: &DiskConfig,
        region: &Arc<Region>,
        state: &mut RegionState,
        piece: &PieceOfBlock<'_>,
        edit: &mut Edit,
    ) -> Result<Part, Error> {
        let PieceOfBlock { block, skip, bytes } = *piece;
        let index = block.index;
        let range = skip..skip + bytes.len() as u32;
        match state.blocks().entry(index) {
            Entry::Open(stored) => {
                if !state.is_incomplete(index) {
                    return Ok(Part::Changed);
                }
                self.write_storage(stored.at.0 + u64::from(skip), bytes)?;
                self.write_incomplete(region, state, block, range, edit);
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
                    .allocate(region.index, block.length, block.length)?;
                let zeros = config.is_zeros(&before);
                if zeros && block.length <= WHOLE_BYTES {
                    let mut whole = vec![0; block.length as usize];
                    whole[range.start as usize..range.end as usize].copy_from_slice(bytes);
                    self.write_or_free(&piece, &whole)?;
                    self.set(region, state, index, open_entry(&piece), None, edit);
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
                    self.set(region, state, index, open_entry(&piece), None, edit);
                    return Ok(Part::Written);
                }
                let mut written = Ranges::default();
                written.insert(range);
                let incomplete = IncompleteBlock {
                    id: self.incomplete_blocks.next(),
                    source: before,
                    written,
                };
                let entry = open_entry(&piece);
                self.set(region, state, index, entry, Some(incomplete), edit);
                Ok(Part::Incomplete)
            }
        }
    }

    /// Makes a range read as zeros. Only zeros of partly covered blocks are stored, if `edges` says
    /// so.
    fn zero(
        self: &Arc<Self>,
        config: &DiskConfig,
        offset: u64,
        length: u64,
        edges: Edges,
    ) -> Result<(), Error> {
        for (index, at, length) in by_region(offset, length, self.region_shift) {
            let region_length = config.header.region_length(index);
            if let FoundRegion::Whole(entry) = self.regions.find(index, region_length)
                && config.is_zeros(&entry)
            {
                continue;
            }
            let region = self.region(config, index);
            self.zero_region(config, &region, at, length, edges)?;
            self.limit_pending(config)?;
        }
        Ok(())
    }

    fn zero_region(
        self: &Arc<Self>,
        config: &DiskConfig,
        region: &Arc<Region>,
        at: u64,
        length: u64,
        edges: Edges,
    ) -> Result<(), Error> {
        let end = at + length;
        let mut left = Vec::new();
        let mut edit = Edit::default();
        {
            let mut state = self.regions.write(region, &self.file, &config.header)?;
            let whole = length == region.length;
            if !whole && self.shift_for(0).get() < self.region_shift {
                self.cut_into(&mut state, self.shift_for(0), region);
            }
            let shift = state.blocks().shift(self.region_shift);
            let mut from = at;
            while from < end {
                let block = block_at(from, shift, region.length);
                let block_end = block.start + block.length;
                let take = block_end.min(end) - from;
                if config.is_zeros(&state.blocks().entry(block.index)) {
                    // The block already reads as zeros.
                } else if take == block.length {
                    let zeros = config.zeros();
                    self.set(region, &mut state, block.index, zeros, None, &mut edit);
                } else if edges == Edges::Write {
                    left.push((from, take));
                }
                from += take;
            }
            self.finish(state, edit)?;
        }
        for (from, take) in left {
            let start = self.lba(region, from).0;
            self.write_zeros(config, start, take)?;
        }
        Ok(())
    }

    fn write_or_free(&self, piece: &Piece, bytes: &[u8]) -> Result<(), Error> {
        self.write_storage(piece.start, bytes).inspect_err(|_| {
            self.space.free(Some(piece.range()));
        })
    }

    /// Bounds the memory of pending changes: queues a flush, or flushes if far too much is pending.
    fn limit_pending(self: &Arc<Self>, config: &DiskConfig) -> Result<(), Error> {
        let pending = (self.unflushed.load(Ordering::Relaxed) / MANY_PENDING)
            .max(self.listed_bytes.load(Ordering::Relaxed) / MANY_BYTES);
        if pending >= 4 {
            return self.flush(config);
        }
        if pending >= 1 && !self.flush_queued.swap(true, Ordering::AcqRel) {
            self.later(Job::Flush);
        }
        Ok(())
    }
}

/// Bytes for a part of a block, from its byte `skip` on.
struct PieceOfBlock<'a> {
    block: &'a RegionBlock,
    skip: u32,
    bytes: &'a [u8],
}

/// Outcome of a write to a part of a block.
enum Part {
    Written,
    /// The rest of the block is still to be copied.
    Incomplete,
    /// Another thread changed the block; retry.
    Changed,
}

fn open_entry(piece: &Piece) -> Entry {
    Entry::Open(Stored {
        at: Uba(piece.start),
        bytes: piece.bytes as u32,
        crc: 0,
    })
}

//! Reads: stored blocks from the file, absent blocks from the backing.

use std::ops::Range;

use bcow_format::{Entry, Stored};

use super::region::{Region, RegionState};
use super::regions::FoundRegion;
use super::{Disk, Inner, Operation, RegionBlock, block_at, by_region};
use crate::cache::BlockKey;
use crate::checked::{check_raw, read_block};
use crate::piece::Piece;
use crate::sync::Arc;
use crate::{BlockDevice, Error, Extent, Status};

/// Blocks of up to this size are read into a buffer on the stack, to verify the checksum.
const SECTOR: usize = 4096;

impl BlockDevice for Disk {
    fn size(&self) -> u64 {
        self.inner.enter().header.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        let length = buf.len() as u64;
        self.access(offset, length, |operation, _| operation.read(offset, buf))
    }

    fn status(&self, offset: u64, length: u64) -> Result<Status, Error> {
        let length = length.max(1);
        self.access(offset, length, |operation, range| operation.status(range))
    }

    fn identity(&self) -> Option<crate::FileIdentity> {
        // The content changes, so that two reads of it need not be the same.
        None
    }
}

impl Disk {
    /// Returns the entry at byte `offset` of the address space, and the range for which it holds.
    pub fn map(&self, offset: u64) -> Result<Extent, Error> {
        self.access(offset, 1, |operation, _| operation.map(offset))
    }
}

impl Operation<'_> {
    fn read(self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        let mut buf = buf;
        for (index, at, length) in by_region(offset, buf.len() as u64, self.region_shift) {
            let (piece, rest) = std::mem::take(&mut buf).split_at_mut(length as usize);
            buf = rest;
            let length = self.config.header.region_length(index);
            match self.regions.find(index, length) {
                FoundRegion::Region(region) => self.read_region(&region, at, piece)?,
                FoundRegion::Whole(entry) => {
                    let start = (index << self.region_shift) + at;
                    self.read_below(&entry, start, piece)?;
                }
            }
        }
        Ok(())
    }

    fn read_region(self, region: &Arc<Region>, at: u64, buf: &mut [u8]) -> Result<(), Error> {
        let mut completes = true;
        while let Some(index) = self.try_read_region(region, at, buf, completes)? {
            if !completes {
                continue;
            }
            match self.complete(region, index) {
                // The host does not store the rest of the block. A read does not need that.
                Err(Error::Io {
                    action: "write", ..
                }) => completes = false,
                done => done?,
            }
        }
        Ok(())
    }

    /// Reads, or returns the index of an incomplete block, and the caller tries again: after it has
    /// completed the block if `completes` is set, else because the block has changed meanwhile.
    /// Data of the backing is read after the lock of the region is released, because the backing
    /// does not change.
    fn try_read_region(
        self,
        region: &Region,
        at: u64,
        buf: &mut [u8],
        completes: bool,
    ) -> Result<Option<u32>, Error> {
        let mut below: Vec<(Range<usize>, Entry)> = Vec::new();
        let mut incomplete: Vec<(Range<usize>, u32)> = Vec::new();
        {
            let state = self.read_state(region)?;
            let shift = state.blocks().shift(self.region_shift);
            let mut done = 0;
            while done < buf.len() {
                let from = at + done as u64;
                let block = block_at(from, shift, region.length);
                let entry = state.blocks().entry(block.index);
                let most = from - block.start + (buf.len() - done) as u64;
                let run = self.run_length(&state, region, &block, entry, most);
                let take = ((block.start + run - from) as usize).min(buf.len() - done);
                let piece = &mut buf[done..done + take];
                match entry {
                    Entry::Open(_) if state.is_incomplete(block.index) => {
                        if completes {
                            return Ok(Some(block.index));
                        }
                        incomplete.push((done..done + take, block.index));
                    }
                    Entry::Open(stored) => {
                        self.read_stored(stored.at.0 + (from - block.start), piece)?;
                    }
                    Entry::Raw(_) => {
                        self.read_raw(&state, region, from, shift, piece)?;
                    }
                    Entry::Zstd(stored) => {
                        let skip = (from - block.start) as usize;
                        let block = self.read_zstd(region, &block, stored)?;
                        piece.copy_from_slice(&block[skip..skip + take]);
                    }
                    entry => match below.last_mut() {
                        Some((range, last)) if range.end == done && *last == entry => {
                            range.end += take;
                        }
                        _ => below.push((done..done + take, entry)),
                    },
                }
                done += take;
            }
        }
        for (range, entry) in below {
            let start = self.lba(region, at + range.start as u64).0;
            self.read_below(&entry, start, &mut buf[range])?;
        }
        for (range, index) in incomplete {
            let start = at + range.start as u64;
            if !self.read_incomplete(region, index, start, &mut buf[range])? {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }

    /// Length from the start of a block up to which raw blocks are contiguous in the file, as far
    /// as `most` needs.
    fn run_length(
        self,
        state: &RegionState,
        region: &Region,
        block: &RegionBlock,
        entry: Entry,
        most: u64,
    ) -> u64 {
        let Entry::Raw(first) = entry else {
            return block.length;
        };
        let mut length = block.length;
        let blocks = state.blocks();
        for index in block.index + 1..blocks.count() {
            match blocks.entry(index) {
                Entry::Raw(stored) if length < most && stored.at.0 == first.at.0 + length => {
                    length += u64::from(stored.bytes);
                }
                _ => break,
            }
        }
        length.min(region.length - block.start)
    }

    /// Reads raw blocks that are contiguous in the file. Blocks that `buf` holds as a whole take
    /// one read.
    fn read_raw(
        self,
        state: &RegionState,
        region: &Region,
        at: u64,
        shift: u8,
        buf: &mut [u8],
    ) -> Result<(), Error> {
        let mut at = at;
        let mut buf = buf;
        while !buf.is_empty() {
            let block = block_at(at, shift, region.length);
            let skip = at - block.start;
            let take;
            if skip > 0 || (buf.len() as u64) < block.length {
                take = ((block.length - skip) as usize).min(buf.len());
                let stored = raw(state, block.index);
                let (mut sector, mut large) = ([0; SECTOR], Vec::new());
                let whole = match block.length as usize {
                    length @ ..=SECTOR => &mut sector[..length],
                    length => {
                        large.resize(length, 0);
                        &mut large[..]
                    }
                };
                self.read_stored(stored.at.0, whole)?;
                check_raw(self.lba(region, block.start).0, &stored, whole)?;
                buf[..take].copy_from_slice(&whole[skip as usize..skip as usize + take]);
            } else {
                // Whole blocks; the last of the region may be shorter than the others.
                let mut whole = 0;
                while let Some(next) = (whole < buf.len())
                    .then(|| block_at(at + whole as u64, shift, region.length))
                    .filter(|next| whole + next.length as usize <= buf.len())
                {
                    whole += next.length as usize;
                }
                take = whole;
                self.read_stored(raw(state, block.index).at.0, &mut buf[..take])?;
                let mut seen = 0;
                while seen < take {
                    let block = block_at(at + seen as u64, shift, region.length);
                    let end = seen + block.length as usize;
                    let stored = raw(state, block.index);
                    check_raw(self.lba(region, block.start).0, &stored, &buf[seen..end])?;
                    seen = end;
                }
            }
            at += take as u64;
            buf = &mut buf[take..];
        }
        Ok(())
    }

    fn read_zstd(
        self,
        region: &Region,
        block: &RegionBlock,
        stored: Stored,
    ) -> Result<Arc<Vec<u8>>, Error> {
        let piece = Piece {
            start: self.lba(region, block.start).0,
            length: block.length,
            entry: Entry::Zstd(stored),
        };
        let key = BlockKey {
            file: self.id,
            entry: piece.entry,
            length: block.length as u32,
        };
        let read = || read_block(&self.file, &piece, &stored);
        self.cache.block(key, read)
    }

    /// Reads the content at `start` of the address space where the entry is absent or zero.
    pub(super) fn read_below(self, entry: &Entry, start: u64, buf: &mut [u8]) -> Result<(), Error> {
        match (&self.config.backing, entry) {
            (Some(below), Entry::Absent) => below.read_at(start, buf),
            _ => {
                buf.fill(0);
                Ok(())
            }
        }
    }

    /// Reads `range` of a block according to `entry`. Verifies the checksum, if the block has one.
    pub(super) fn read_entry(
        self,
        region: &Region,
        block: &RegionBlock,
        entry: &Entry,
        range: Range<u32>,
        buf: &mut [u8],
    ) -> Result<(), Error> {
        let (start, end) = (range.start as usize, range.end as usize);
        match entry {
            Entry::Open(stored) => self.read_stored(stored.at.0 + u64::from(range.start), buf),
            Entry::Raw(stored) => {
                let mut whole = vec![0; block.length as usize];
                self.read_stored(stored.at.0, &mut whole)?;
                check_raw(self.lba(region, block.start).0, stored, &whole)?;
                buf.copy_from_slice(&whole[start..end]);
                Ok(())
            }
            Entry::Zstd(stored) => {
                let whole = self.read_zstd(region, block, *stored)?;
                buf.copy_from_slice(&whole[start..end]);
                Ok(())
            }
            entry => {
                let at = self.lba(region, block.start + u64::from(range.start)).0;
                self.read_below(entry, at, buf)
            }
        }
    }

    fn map(self, offset: u64) -> Result<Extent, Error> {
        let index = offset >> self.region_shift;
        let length = self.config.header.region_length(index);
        let start = index << self.region_shift;
        let (block, entry) = match self.regions.find(index, length) {
            FoundRegion::Whole(entry) => (block_at(0, self.region_shift, length), entry),
            FoundRegion::Region(region) => {
                let state = self.read_state(&region)?;
                let shift = state.blocks().shift(self.region_shift);
                let block = block_at(offset - start, shift, length);
                (block, state.blocks().entry(block.index))
            }
        };
        let piece = Piece {
            start: start + block.start,
            length: block.length,
            entry,
        };
        Ok(Extent::of(&piece, self.config.backing.is_some()))
    }

    fn status(self, range: Range<u64>) -> Result<Status, Error> {
        let index = range.start >> self.region_shift;
        let start = index << self.region_shift;
        let length = self.config.header.region_length(index);
        let most = range.end - range.start;
        let (entry, holds) = match self.regions.find(index, length) {
            FoundRegion::Whole(entry) => (entry, start + length - range.start),
            FoundRegion::Region(region) => {
                let state = self.read_state(&region)?;
                let shift = state.blocks().shift(self.region_shift);
                let at = range.start - start;
                let first = block_at(at, shift, length);
                let blocks = state.blocks();
                let entry = blocks.entry(first.index);
                let last = block_at(at + (most - 1).min(length - at - 1), shift, length).index;
                let same = (first.index..=last)
                    .take_while(|index| kind(&blocks.entry(*index)) == kind(&entry))
                    .count() as u64;
                let end = (first.start + (same << shift)).min(length);
                (entry, end - at)
            }
        };
        let length = holds.min(most);
        match (&self.config.backing, entry) {
            (Some(below), Entry::Absent) => below.status(range.start, length),
            (None, Entry::Absent) => Ok(Status::hole(length)),
            (_, Entry::Zero) => Ok(Status::zeros(length)),
            _ => Ok(Status::data(length)),
        }
    }
}

impl Inner {
    pub(super) fn read_stored(&self, at: u64, buf: &mut [u8]) -> Result<(), Error> {
        self.file.read_at(at, buf)
    }
}

fn kind(entry: &Entry) -> std::mem::Discriminant<Entry> {
    std::mem::discriminant(entry)
}

/// The stored range of a block that is known to be raw.
fn raw(state: &RegionState, index: u32) -> Stored {
    // If nothing is stored, no data matches this checksum.
    const NOWHERE: Stored = Stored {
        at: bcow_format::Uba(0),
        bytes: 0,
        crc: 0,
    };
    state.blocks().entry(index).stored().unwrap_or(NOWHERE)
}

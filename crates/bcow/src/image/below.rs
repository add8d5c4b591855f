//! The backing of a disk, with all files below it.
//!
//! A disk with many snapshots is over a chain of files, each with the blocks that changed before
//! the next snapshot. To ask one file after the other for each read costs a lookup in as many
//! tables. So a map in memory has the file of each block ([`Owners`], in the [`BlockCache`]), and a
//! read goes to that file at once.
//!
//! The map has the files that are open as [`Image`]s, whose tables do not change while they are
//! open, down to the first other device, or the first file that shows no other one in its absent
//! blocks. That one, the last of the list, is asked for all blocks that the others do not have, and
//! its tables are not searched. A window or a fragment counts as content of the file that has it,
//! which reads it itself.
//!
//! The map of a region is filled when blocks of it are read: from the table of the nearest file,
//! then of the next one, until all blocks of the read are found. So the first read of a region
//! searches no more tables than without a map, and each table is searched once for all blocks of
//! the region. After a snapshot, the new disk has a new map, which takes over what the map of the
//! earlier disk knows ([`Search::take_over`]).
//!
//! A wrong answer is impossible as long as no file above the owner has the block, because each file
//! can continue the search itself. So if a table cannot be read, its file is asked for the blocks
//! that are still unknown: it fails with its own error, or finds them after all.
//!
//! [`Search::take_over`]: crate::owners::Search::take_over

use std::ops::Range;
use std::sync::Arc;

use bcow_format::{BackingEntry, Entry};

use super::{Image, give_zeros};
use crate::cache::{FileId, TableKey};
use crate::owners::{BLOCK_BYTES, BLOCKS, MOST_FILES, Owner, Owners, REGION_BYTES, Search};
use crate::{BlockCache, BlockDevice, Error, Status};

/// The backing of a disk, and the files below it.
pub(crate) struct Below {
    /// The backing first. There is at least one.
    files: Vec<Arc<FileBelow>>,
    cache: BlockCache,
    /// Identifies the map in the cache.
    id: FileId,
}

/// A file of a chain, as the file above it names it.
struct FileBelow {
    entry: BackingEntry,
    device: Arc<dyn BlockDevice>,
    /// The same device and what is below it, if its absent blocks show that.
    over: Option<(Arc<Image>, Arc<Below>)>,
}

impl Below {
    /// The backing `device` of a disk, which names it by `entry`. The map is in `cache`.
    pub(crate) fn new(
        entry: BackingEntry,
        device: Arc<dyn BlockDevice>,
        cache: &BlockCache,
    ) -> Arc<Self> {
        let image = Arc::clone(&device).into_any();
        let image = image.and_then(|device| device.downcast::<Image>().ok());
        let over = image.and_then(|image| {
            let below = image.below.clone()?;
            Some((image, below))
        });
        let nearest = Arc::new(FileBelow {
            entry,
            device,
            over,
        });
        let others = nearest.over.iter().flat_map(|(_, below)| &below.files);
        let files = std::iter::once(&nearest).chain(others).take(MOST_FILES);
        Arc::new(Below {
            files: files.cloned().collect(),
            cache: cache.clone(),
            id: FileId::next(),
        })
    }

    /// The entry of the backing.
    pub(crate) fn entry(&self) -> &BackingEntry {
        &self.files[0].entry
    }

    /// The backing.
    pub(crate) fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.files[0].device
    }

    /// Fills `buf` with the content at `start`, and with zeros beyond the end of the backing.
    pub(crate) fn read_at(&self, start: u64, buf: &mut [u8]) -> Result<(), Error> {
        let shown = self.shown(start, buf.len() as u64);
        let (shown_buf, behind) = buf.split_at_mut((shown.end - shown.start) as usize);
        behind.fill(0);
        self.walk(shown, |owner, range| {
            let part = &mut shown_buf[(range.start - start) as usize..(range.end - start) as usize];
            match owner {
                Owner::Hole => part.fill(0),
                Owner::File(number) => {
                    let device = &self.files[number].device;
                    let read = device.read_at(range.start, part);
                    read.map_err(|error| self.in_backings(number, error))?;
                }
            }
            Ok(())
        })
    }

    /// Same as [`Below::read_at`], for a sink as that of [`BlockDevice::read_with`].
    pub(crate) fn read_with(
        &self,
        start: u64,
        length: u64,
        sink: &mut dyn FnMut(&[u8]),
    ) -> Result<(), Error> {
        let shown = self.shown(start, length);
        let behind = start + length - shown.end;
        self.walk(shown, |owner, range| {
            let length = range.end - range.start;
            match owner {
                Owner::Hole => give_zeros(length, sink),
                Owner::File(number) => {
                    let device = &self.files[number].device;
                    let read = device.read_with(range.start, length, sink);
                    read.map_err(|error| self.in_backings(number, error))?;
                }
            }
            Ok(())
        })?;
        give_zeros(behind, sink);
        Ok(())
    }

    /// The status of a piece from `start` on, of at most `length` bytes, as that of the disk.
    pub(crate) fn status(&self, start: u64, length: u64) -> Result<Status, Error> {
        let shown = self.shown(start, length);
        if shown.is_empty() {
            return Ok(Status::hole(length));
        }
        let (owner, length) = self.first(shown);
        let number = match owner {
            Owner::Hole => return Ok(Status::hole(length)),
            Owner::File(number) => number,
        };
        let status = self.files[number].device.status(start, length);
        let status = status.map_err(|error| self.in_backings(number, error))?;
        Ok((0..=number).fold(status, |status, _| status.one_deeper()))
    }

    /// The part of a range that the backing shows; the range begins at the same byte.
    fn shown(&self, start: u64, length: u64) -> Range<u64> {
        start..start + self.entry().size.saturating_sub(start).min(length)
    }

    /// Calls `each` with the owners of a range, in order, each with the part that it has.
    fn walk(
        &self,
        range: Range<u64>,
        mut each: impl FnMut(Owner, Range<u64>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if self.has_one_file() {
            return if range.is_empty() { Ok(()) } else { each(Owner::File(0), range) };
        }
        let mut at = range.start;
        while at < range.end {
            let (region, blocks) = region_of(&(at..range.end));
            let owners = self.owners(region);
            let unknown = self.find(&owners, region, blocks.clone());
            let mut block = blocks.start;
            while block < blocks.end {
                let (owner, count) = owners.run(block..blocks.end);
                block += count;
                let end = range.end.min(byte_of(region, block));
                each(owner.unwrap_or(unknown), at..end)?;
                at = end;
            }
        }
        Ok(())
    }

    /// The owner of the first block of a range, and the number of bytes from its start for which
    /// that is known.
    fn first(&self, range: Range<u64>) -> (Owner, u64) {
        if self.has_one_file() {
            return (Owner::File(0), range.end - range.start);
        }
        let (region, blocks) = region_of(&range);
        let owners = self.owners(region);
        let unknown = self.find(&owners, region, blocks.start..blocks.start + 1);
        let (owner, count) = match owners.run(blocks.clone()) {
            (Some(owner), count) => (owner, count),
            // Of the blocks behind it, nothing is known.
            (None, _) => (unknown, 1),
        };
        let end = range.end.min(byte_of(region, blocks.start + count));
        (owner, end - range.start)
    }

    fn has_one_file(&self) -> bool {
        self.files.len() == 1
    }

    fn owners(&self, region: u64) -> Arc<Owners> {
        self.cache.owners(self.key(region))
    }

    fn key(&self, region: u64) -> TableKey {
        TableKey {
            file: self.id,
            region,
        }
    }

    /// Finds the owners of `blocks`. If the table of a file cannot be read, returns that file as
    /// the owner of all blocks that are still unknown.
    fn find(&self, owners: &Owners, region: u64, blocks: Range<usize>) -> Owner {
        if !owners.has(blocks.clone()) {
            let search = owners.search();
            while !owners.has(blocks.clone()) {
                let number = search.searched().min(self.files.len() - 1);
                if self.search(&search, number, region).is_err() {
                    return Owner::File(number);
                }
            }
        }
        Owner::File(0)
    }

    /// Searches one file for the blocks of a region that have no owner.
    fn search(&self, search: &Search<'_>, number: usize, region: u64) -> Result<(), Error> {
        let last = self.files.len() - 1;
        let file = &self.files[number];
        let start = region * REGION_BYTES;
        let shown = file.entry.size.saturating_sub(start).min(REGION_BYTES);
        // The end of a file hides the end of a larger one below it.
        search.give((shown / BLOCK_BYTES) as usize..BLOCKS, Owner::Hole);
        let (image, below) = match &file.over {
            Some(over) if number < last => over,
            _ => {
                search.give(0..BLOCKS, Owner::File(number));
                return Ok(());
            }
        };
        let mut searched = number + 1;
        image.each_piece(start..start + shown, |piece| {
            if piece.entry != Entry::Absent {
                let end = (piece.start + piece.length).min(start + shown);
                let first = piece.start.max(start) - start;
                let blocks = first / BLOCK_BYTES..(end - start).div_ceil(BLOCK_BYTES);
                search.give(
                    blocks.start as usize..blocks.end as usize,
                    Owner::File(number),
                );
            }
        })?;
        if let Some(known) = below.cache.known_owners(below.key(region)) {
            searched = search.take_over(&known, searched, last);
        }
        search.set_searched(searched);
        Ok(())
    }

    /// The error of a file, with the names that lead to it.
    fn in_backings(&self, number: usize, error: Error) -> Error {
        let files = self.files[..=number].iter().rev();
        files.fold(error, |error, file| error.in_backing(&file.entry.name))
    }
}

/// The region of the first byte of a range, and the blocks of that region with bytes of the range.
fn region_of(range: &Range<u64>) -> (u64, Range<usize>) {
    let region = range.start / REGION_BYTES;
    let start = region * REGION_BYTES;
    let end = range.end.min(start + REGION_BYTES);
    let blocks = (range.start - start) / BLOCK_BYTES..(end - start).div_ceil(BLOCK_BYTES);
    (region, blocks.start as usize..blocks.end as usize)
}

/// The first byte of a block of a region.
fn byte_of(region: u64, block: usize) -> u64 {
    region * REGION_BYTES + block as u64 * BLOCK_BYTES
}

//! The backing of a disk, with all files below it.
//!
//! A disk with many snapshots is over a chain of files, each with the blocks that changed before
//! the next snapshot. To ask one file after the other for each read costs a lookup in as many
//! tables. So a map in memory, in the [`BlockCache`], has the owner of each block, which is the
//! number of the file that has it ([`Owners`]), and the entry of the block in the table of that
//! file ([`MergedTable`]). A read goes to that file at once.
//!
//! The two parts have different sizes. Owners take a byte for each 4 KiB, so those of a whole disk
//! are in memory: a search in many tables is rare. Entries take as much memory as the tables of one
//! file. If they do not fit into the cache, a read costs the lookup of one table, as without
//! snapshots.
//!
//! The map has the files that are open as [`Image`]s, whose tables do not change while they are
//! open, down to the first other device, or the first file that shows no other one in its absent
//! blocks. That one, the last of the list, has all blocks that the others do not have, and is not
//! searched. A window or a fragment counts as content of the file that has it, which reads it
//! itself.
//!
//! The map of a region is filled when blocks of it are read: from the table of the nearest file,
//! then of the next one, until all blocks of the read are found. So the first read of a region
//! searches no more tables than without a map, and each table is searched once for all blocks of
//! the region. After a snapshot, the new disk has a new map, which takes over what the map of the
//! earlier disk knows ([`Search::take_over`]).
//!
//! The content is right as long as no file above the owner has the block, because each file can
//! continue the search itself. So if a table cannot be read, its file is asked for the blocks that
//! are still unknown: it fails with its own error, or finds them after all.
//!
//! [`Search::take_over`]: crate::owners::Search::take_over

use std::ops::Range;
use std::sync::Arc;

use bcow_format::{BackingEntry, BlockShift, Entry};

use super::{Image, give_zeros};
use crate::cache::{FileId, TableKey};
use crate::merged::MergedTable;
use crate::owners::{BLOCK_BYTES, BLOCKS, MOST_FILES, Owner, Owners, REGION_BYTES, Search};
use crate::piece::Piece;
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
    /// The same device, if it is an image.
    image: Option<Arc<Image>>,
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
        let nearest = Arc::new(FileBelow {
            entry,
            device,
            image,
        });
        let others = nearest.over().map(|(_, below)| &below.files);
        let others = others.into_iter().flatten();
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

    /// The files, the nearest first. The last one can have others below it.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&BackingEntry, &Arc<dyn BlockDevice>)> {
        let files = self.files.iter();
        files.map(|file| (&file.entry, &file.device))
    }

    /// log2 of the size of the smallest block of its own that a disk has in this range; `None` if
    /// no disk has one. A sealed image counts as none: no disk takes its blocks.
    pub(crate) fn smallest_block(&self, range: Range<u64>) -> Result<Option<u8>, Error> {
        let mut smallest = None;
        let images = self.files.iter().filter_map(|file| file.image.as_ref());
        for (number, image) in images.enumerate() {
            let range = range.start..range.end.min(image.size());
            let found = image.smallest_block(range);
            let found = found.map_err(|error| self.in_backings(number, error))?;
            smallest = smallest.into_iter().chain(found).min();
            if smallest == Some(BlockShift::MIN.get()) {
                break;
            }
        }
        Ok(smallest)
    }

    /// Fills `buf` with the content at `start`, and with zeros beyond the end of the backing.
    pub(crate) fn read_at(&self, start: u64, buf: &mut [u8]) -> Result<(), Error> {
        let shown = self.shown(start, buf.len() as u64);
        let (shown_buf, behind) = buf.split_at_mut((shown.end - shown.start) as usize);
        behind.fill(0);
        self.walk(shown, |part, range| {
            let buf = &mut shown_buf[(range.start - start) as usize..(range.end - start) as usize];
            match part {
                Part::Zeros => buf.fill(0),
                Part::Device(device) => device.read_at(range.start, buf)?,
                Part::Image(image, pieces) => image.read_pieces(range.start, buf, pieces)?,
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
        self.walk(shown, |part, range| {
            let length = range.end - range.start;
            match part {
                Part::Zeros => give_zeros(length, sink),
                Part::Device(device) => device.read_with(range.start, length, sink)?,
                Part::Image(image, pieces) => image.give_pieces(range, pieces, sink)?,
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
        let (number, status) = if self.has_one_file() {
            (0, self.device().status(start, shown.end - start))
        } else {
            let (region, blocks) = region_of(&shown);
            let owners = self.owners(region);
            let unknown = self.find(&owners, region, blocks.start..blocks.start + 1);
            let (owner, count) = match owners.run(blocks.clone()) {
                (Some(owner), count) => (owner, count),
                // Of the blocks behind it, nothing is known.
                (None, _) => (unknown, 1),
            };
            let length = shown.end.min(byte_of(region, blocks.start + count)) - start;
            let Owner::File(number) = owner else {
                return Ok(Status::hole(length));
            };
            let file = &self.files[number];
            let status = match &file.image {
                None => file.device.status(start, length),
                Some(image) => self
                    .piece(number, image, &owners, start)
                    .and_then(|piece| image.piece_status(&piece, start, length)),
            };
            (number, status)
        };
        let status = status.map_err(|error| self.in_backings(number, error))?;
        Ok((0..=number).fold(status, |status, _| status.one_deeper()))
    }

    /// The part of a range that the backing shows; the range begins at the same byte.
    fn shown(&self, start: u64, length: u64) -> Range<u64> {
        start..start + self.entry().size.saturating_sub(start).min(length)
    }

    /// Calls `each` with the parts of a range, in order.
    fn walk(
        &self,
        range: Range<u64>,
        mut each: impl FnMut(Part<'_>, Range<u64>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if self.has_one_file() {
            if range.is_empty() {
                return Ok(());
            }
            let read = each(Part::Device(&*self.files[0].device), range);
            return read.map_err(|error| self.in_backings(0, error));
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
                match owner.unwrap_or(unknown) {
                    Owner::Hole => each(Part::Zeros, at..end)?,
                    Owner::File(number) => {
                        let file = &self.files[number];
                        let read = match &file.image {
                            None => each(Part::Device(&*file.device), at..end),
                            Some(image) => {
                                let piece = |at| self.piece(number, image, &owners, at);
                                each(Part::Image(image, &piece), at..end)
                            }
                        };
                        read.map_err(|error| self.in_backings(number, error))?;
                    }
                }
                at = end;
            }
        }
        Ok(())
    }

    /// The piece of a file that covers `at`, whose owner it is. If the merged table does not have
    /// it, all pieces of this file are added.
    fn piece(
        &self,
        number: usize,
        image: &Image,
        owners: &Owners,
        at: u64,
    ) -> Result<Piece, Error> {
        let region = at / REGION_BYTES;
        let known = self.cache.merged(self.key(region));
        let size = image.size();
        if let Some(piece) = known
            .as_ref()
            .and_then(|table| table.piece(at, number, size))
        {
            return Ok(piece);
        }
        let mut table = copied(known);
        let start = region * REGION_BYTES;
        let read = image.each_piece(start..size.min(start + REGION_BYTES), |piece| {
            add_piece(&mut table, owners, number, piece, region);
        });
        match table.piece(at, number, size) {
            Some(piece) if read.is_ok() => {
                self.cache.set_merged(self.key(region), table);
                Ok(piece)
            }
            // The file was not searched, because its table cannot be read. It may have this piece
            // in its log, or in a file below it.
            _ => image.piece(at),
        }
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
            let mut table = None;
            while !owners.has(blocks.clone()) {
                let number = search.searched().min(self.files.len() - 1);
                if self.search(&search, number, region, &mut table).is_err() {
                    return Owner::File(number);
                }
            }
            if let Some(table) = table {
                self.cache.set_merged(self.key(region), table);
            }
        }
        Owner::File(0)
    }

    /// Searches one file for the blocks of a region that have no owner, and adds those that it has
    /// to `table`, the merged table of the region.
    fn search(
        &self,
        search: &Search<'_>,
        number: usize,
        region: u64,
        table: &mut Option<MergedTable>,
    ) -> Result<(), Error> {
        let last = self.files.len() - 1;
        let file = &self.files[number];
        let start = region * REGION_BYTES;
        let shown = file.entry.size.saturating_sub(start).min(REGION_BYTES);
        // The end of a file hides the end of a larger one below it.
        search.give((shown / BLOCK_BYTES) as usize..BLOCKS, Owner::Hole);
        let (image, below) = match file.over() {
            Some(over) if number < last => over,
            _ => {
                search.give(0..BLOCKS, Owner::File(number));
                return Ok(());
            }
        };
        let table = table.get_or_insert_with(|| copied(self.cache.merged(self.key(region))));
        let mut searched = number + 1;
        image.each_piece(start..start + shown, |piece| {
            if piece.entry != Entry::Absent {
                search.give(blocks_of(piece, region), Owner::File(number));
                add_piece(table, search.owners(), number, piece, region);
            }
        })?;
        if let Some(known) = below.cache.known_owners(below.key(region)) {
            let entries = below.cache.merged(below.key(region));
            searched = search.take_over(&known, searched, last, |block| {
                if let Some(entries) = &entries {
                    table.copy(block, entries, number + 1);
                }
            });
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

/// How a part of a range is read.
enum Part<'a> {
    /// No file has it.
    Zeros,
    /// The device at the end of the list has it.
    Device(&'a dyn BlockDevice),
    /// An image has it, in the pieces that the function finds.
    Image(&'a Image, &'a dyn Fn(u64) -> Result<Piece, Error>),
}

impl FileBelow {
    /// The file and what is below it, if its absent blocks show that.
    fn over(&self) -> Option<(&Image, &Below)> {
        let image = self.image.as_ref()?;
        Some((image, image.below.as_ref()?))
    }
}

fn copied(table: Option<Arc<MergedTable>>) -> MergedTable {
    table.map_or_else(MergedTable::new, |table| MergedTable::clone(&table))
}

/// Adds a piece of a file to the merged table of a region, where the file is the owner.
fn add_piece(table: &mut MergedTable, owners: &Owners, number: usize, piece: &Piece, region: u64) {
    let mut blocks = blocks_of(piece, region);
    while !blocks.is_empty() {
        let (owner, count) = owners.run(blocks.clone());
        let same = blocks.start..blocks.start + count;
        blocks.start = same.end;
        if owner == Some(Owner::File(number)) {
            table.set(same, number, piece);
        }
    }
}

/// The blocks of a region that a piece covers.
fn blocks_of(piece: &Piece, region: u64) -> Range<usize> {
    let start = region * REGION_BYTES;
    let block = |byte: u64| (byte.saturating_sub(start).min(REGION_BYTES) / BLOCK_BYTES) as usize;
    block(piece.start)..block(piece.start + piece.length)
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

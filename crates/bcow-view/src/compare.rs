//! A disk beside the view that it was made over: which inodes have changed.
//!
//! The blocks that the disk stores say where changes can be; all others are the view's. An inode
//! is *unchanged* if the view uses it, and on the disk
//!
//! - its entry in the inode table has the same bytes, without the access time, and
//! - each block that it has in the view (content, nodes of its extent tree, attributes) has the
//!   same bytes.
//!
//! By the first rule, the roots of its extent tree and of its attributes are the same; by the
//! second one, everything that these lead to. So an unchanged inode is the inode of the image. The
//! rule needs no time stamp and no journal of the guest, and holds after a crash: a content block
//! that a guest made durable without its inode is found by the second rule.

use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use bcow::{BlockDevice, Image, Mapping, ShownBy};
use bcow_ext4::{FilesystemBytes, InodeNumber, ReadError, Reader};

use CompareError::{Disk, View};

use crate::BLOCK_BYTES;
use crate::numbers::Numbers;
use crate::ranges::Ranges;

/// Blocks of one comparison.
const PIECE_BLOCKS: u64 = 64;
/// Blocks of a group.
const GROUP: u64 = 32_768;
/// Bytes of an inode in the table.
const INODE_BYTES: usize = 256;
/// The fields of an inode that a read changes, and the checksum over all: offset and length.
const UNCOMPARED: [(usize, usize); 4] = [(8, 4), (124, 2), (130, 2), (140, 4)];
/// The first inode that is not ext4's own.
const FIRST_INODE: u32 = 11;

/// Why a disk cannot be compared with its view.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CompareError {
    #[error(transparent)]
    Disk(ReadError),
    #[error("the view: {0}")]
    View(#[source] ReadError),
    #[error("cannot read the block map")]
    Map(#[source] bcow::Error),
    /// The file system is not the one that the view had.
    #[error("the file system on the disk is not the one that shows the image: it was made anew")]
    Other,
}

/// A disk and the view below it, and what is different.
pub struct Compared {
    disk: Reader,
    view: Reader,
    changed: BTreeSet<InodeNumber>,
    /// Blocks that the view uses for content and that are different on the disk.
    differing: Ranges,
}

impl Compared {
    /// Compares `disk` with `view`. `above` are the files of the disk in front of the view, in any
    /// order; `numbers` are those of the image. Reads the blocks that the disk stores and that the
    /// view uses, and no others.
    pub fn new(
        disk: Arc<dyn BlockDevice>,
        above: &[Arc<Image>],
        view: Arc<dyn BlockDevice>,
        numbers: &Numbers,
    ) -> Result<Compared, CompareError> {
        let disk = Reader::open(Box::new(Device(disk))).map_err(Disk)?;
        let view = Reader::open(Box::new(Device(view))).map_err(View)?;
        let mut stored = Vec::new();
        for file in above {
            stored_blocks(file, &mut stored).map_err(CompareError::Map)?;
        }
        stored.extend(disk.replayed_blocks().map(|block| block..block + 1));
        let mut compared = Compared {
            disk,
            view,
            changed: BTreeSet::new(),
            differing: Ranges::default(),
        };
        let stored = Ranges::new(stored);
        compared.tables(&stored, numbers.last())?;
        compared.content(&stored)?;
        compared.owners(numbers.last())?;
        Ok(compared)
    }

    /// The file system of the disk.
    pub fn disk(&self) -> &Reader {
        &self.disk
    }

    /// The file system of the view.
    pub fn view(&self) -> &Reader {
        &self.view
    }

    /// The inodes of the view that have changed, or whose number is free or of another inode.
    pub fn changed(&self) -> &BTreeSet<InodeNumber> {
        &self.changed
    }

    /// The parts of `blocks` that are different on the disk, if the view uses `blocks` for content.
    pub fn differing(&self, blocks: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        self.differing.inside(blocks)
    }

    fn tables(&mut self, stored: &Ranges, last: InodeNumber) -> Result<(), CompareError> {
        let mut group = 0;
        loop {
            let table = self.view.inode_table(group).map_err(View)?;
            if table.first > last {
                return Ok(());
            }
            let found = self.disk.inode_table(group).map_err(Disk)?;
            if found != table {
                return Err(CompareError::Other);
            }
            let range = table.blocks.start..table.blocks.end();
            for block in stored.inside(range.clone()).flatten() {
                let before = self.view.block(block).map_err(View)?;
                let after = self.disk.block(block).map_err(Disk)?;
                let (before, _) = before.as_chunks::<INODE_BYTES>();
                let (after, _) = after.as_chunks::<INODE_BYTES>();
                let per_block = before.len() as u32;
                let first = table.first.get() + (block - range.start) as u32 * per_block;
                for ((before, after), number) in before.iter().zip(after).zip(first..) {
                    let number = InodeNumber::new(number);
                    let counts = number == InodeNumber::ROOT || number.get() >= FIRST_INODE;
                    if counts && number <= last && compared(before) != compared(after) {
                        self.changed.insert(number);
                    }
                }
            }
            group += 1;
        }
    }

    /// Compares the stored blocks that the view uses, except the metadata of the file system
    /// itself.
    fn content(&mut self, stored: &Ranges) -> Result<(), CompareError> {
        let metadata = self.view.metadata_blocks().map_err(View)?;
        let metadata = metadata.iter().map(|range| range.start..range.end());
        let rest = stored.without(&Ranges::new(metadata.collect()));
        let mut differing = Vec::new();
        let mut bitmap = None;
        for range in rest.iter() {
            let mut start = range.start;
            while start < range.end.min(self.view.blocks()) {
                let group = start / GROUP;
                let end = range.end.min((group + 1) * GROUP).min(self.view.blocks());
                if bitmap.as_ref().is_none_or(|(known, _)| *known != group) {
                    let found = self.view.block_bitmap(group as u32);
                    bitmap = Some((group, found.map_err(View)?));
                }
                if let Some((_, Some(used))) = &bitmap {
                    let is_used = |block: u64| {
                        let bit = (block % GROUP) as usize;
                        used[bit / 8] & 1 << (bit % 8) != 0
                    };
                    self.compare_used(start..end, &is_used, &mut differing)?;
                }
                start = end;
            }
        }
        self.differing = Ranges::new(differing);
        Ok(())
    }

    /// Compares the blocks of a range that are in use.
    fn compare_used(
        &self,
        range: Range<u64>,
        is_used: &dyn Fn(u64) -> bool,
        differing: &mut Vec<Range<u64>>,
    ) -> Result<(), CompareError> {
        let mut before = vec![0; (PIECE_BLOCKS * BLOCK_BYTES) as usize];
        let mut after = before.clone();
        let mut at = range.start;
        while at < range.end {
            if !is_used(at) {
                at += 1;
                continue;
            }
            let most = range.end.min(at + PIECE_BLOCKS);
            let end = (at..most).find(|block| !is_used(*block)).unwrap_or(most);
            let bytes = ((end - at) * BLOCK_BYTES) as usize;
            let (before, after) = (&mut before[..bytes], &mut after[..bytes]);
            self.view.read_blocks(at, before).map_err(View)?;
            self.disk.read_blocks(at, after).map_err(Disk)?;
            let pairs = before
                .chunks(BLOCK_BYTES as usize)
                .zip(after.chunks(BLOCK_BYTES as usize));
            for (block, (before, after)) in (at..).zip(pairs) {
                if before == after {
                    continue;
                }
                match differing.last_mut() {
                    Some(last) if last.end == block => last.end += 1,
                    _ => differing.push(block..block + 1),
                }
            }
            at = end;
        }
        Ok(())
    }

    /// Adds the inodes of the view that have a different block. Reads all inodes of the view only
    /// if such a block is not one of an inode that changed anyway.
    fn owners(&mut self, last: InodeNumber) -> Result<(), CompareError> {
        if self.differing.is_empty() {
            return Ok(());
        }
        let mut known = Vec::new();
        for number in &self.changed {
            self.blocks_of(*number, &mut known)?;
        }
        let mut left = self.differing.without(&Ranges::new(known));
        let all = std::iter::once(InodeNumber::ROOT)
            .chain((FIRST_INODE..=last.get()).map(InodeNumber::new));
        for number in all {
            if left.is_empty() {
                break;
            }
            if self.changed.contains(&number) {
                continue;
            }
            let mut blocks = Vec::new();
            self.blocks_of(number, &mut blocks)?;
            let has = |range: &Range<u64>| left.inside(range.clone()).next().is_some();
            if blocks.iter().any(has) {
                left = left.without(&Ranges::new(blocks));
                self.changed.insert(number);
            }
        }
        Ok(())
    }

    /// Appends the blocks of an inode of the view.
    fn blocks_of(
        &self,
        number: InodeNumber,
        blocks: &mut Vec<Range<u64>>,
    ) -> Result<(), CompareError> {
        let view = &self.view;
        let inode = view.inode(number).map_err(View)?;
        let extents = view.extents(&inode).map_err(View)?;
        let single = extents.nodes.iter().copied().chain(inode.xattr_block());
        blocks.extend(single.map(|block| block..block + 1));
        let runs = extents.content.iter();
        blocks.extend(runs.map(|run| run.physical..run.physical + u64::from(run.blocks)));
        Ok(())
    }
}

/// An inode without the fields that are not compared.
fn compared(inode: &[u8; INODE_BYTES]) -> [u8; INODE_BYTES] {
    let mut inode = *inode;
    for (at, bytes) in UNCOMPARED {
        inode[at..at + bytes].fill(0);
    }
    inode
}

/// Appends the blocks that a file of a disk has itself.
fn stored_blocks(file: &Image, blocks: &mut Vec<Range<u64>>) -> Result<(), bcow::Error> {
    for extent in file.extents() {
        let extent = extent?;
        let is_below = matches!(
            extent.mapping,
            Mapping::Backing {
                by: ShownBy::Absent,
                ..
            }
        );
        if is_below {
            continue;
        }
        let start = extent.offset / BLOCK_BYTES;
        let end = (extent.offset + extent.length).div_ceil(BLOCK_BYTES);
        match blocks.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => blocks.push(start..end),
        }
    }
    Ok(())
}

/// An address space as the bytes of a file system.
pub(crate) struct Device(pub Arc<dyn BlockDevice>);

impl FilesystemBytes for Device {
    fn bytes(&self) -> u64 {
        self.0.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, buf).map_err(io::Error::other)
    }
}

//! Which blocks are in use.

use crate::format::{BLOCK_BYTES, BLOCKS_PER_GROUP};
use crate::geometry::{Geometry, has_backup};
use crate::{BlockRange, Ext4Error};

/// The block bitmap of a group: a bit for each block in use.
pub(crate) type Bitmap = [u8; BLOCK_BYTES];

/// The blocks in use. A group has a bitmap from the first block on that is used in it.
pub(crate) struct Space<'g> {
    geometry: &'g Geometry,
    bitmaps: Vec<Option<Box<Bitmap>>>,
    /// Areas for content, in ascending order. Metadata lies elsewhere.
    content: Vec<BlockRange>,
    /// No block for metadata is free in front of this one.
    cursor: u64,
}

impl<'g> Space<'g> {
    /// The state in which the tables and the journal are in use.
    pub fn new(geometry: &'g Geometry, content: &[BlockRange]) -> Result<Space<'g>, Ext4Error> {
        let mut space = Space {
            geometry,
            bitmaps: vec![None; geometry.groups() as usize],
            content: checked_areas(geometry, content)?,
            cursor: 0,
        };
        // Linux and e2fsck expect these two to be initialized.
        space.bitmap(0);
        space.bitmap(geometry.groups() - 1);
        for group in 0..geometry.groups() {
            let tables = geometry.tables(group);
            space.mark_all(tables.block_bitmap, 1);
            space.mark_all(tables.inode_bitmap, 1);
            space.mark_all(tables.inode_table, geometry.table_blocks());
        }
        for range in geometry.journal() {
            space.mark_all(range.start, range.count);
        }
        Ok(space)
    }

    /// Takes up to `wanted` blocks in one piece for metadata.
    pub fn allocate(&mut self, wanted: u64) -> Result<BlockRange, Ext4Error> {
        let start = self.next_free()?;
        let mut count = 0;
        while count < wanted && self.is_free(start + count) {
            self.mark(start + count);
            count += 1;
        }
        self.cursor = start + count;
        Ok(BlockRange { start, count })
    }

    /// Takes `wanted` blocks for metadata, in as few pieces as there are.
    pub fn allocate_all(&mut self, wanted: u64) -> Result<Vec<BlockRange>, Ext4Error> {
        let mut ranges = Vec::new();
        let mut left = wanted;
        while left > 0 {
            let range = self.allocate(left)?;
            left -= range.count;
            ranges.push(range);
        }
        Ok(ranges)
    }

    /// Whether all blocks of a range are in one of the content areas.
    pub fn is_content(&self, range: BlockRange) -> bool {
        let behind = self
            .content
            .partition_point(|area| area.start <= range.start);
        let area = behind.checked_sub(1).map(|at| self.content[at]);
        area.is_some_and(|area| range.end() <= area.end())
    }

    /// Marks the blocks of content up to the first that is in use. `false`: there is one.
    pub fn mark_content(&mut self, range: BlockRange) -> bool {
        (range.start..range.end()).all(|block| self.mark(block))
    }

    /// The bitmap of a group, or `None` where only the group's own superblock backup is in use.
    pub fn group(&self, group: u32) -> Option<&Bitmap> {
        self.bitmaps[group as usize].as_deref()
    }

    pub fn free_blocks(&self, group: u32) -> u32 {
        let blocks = self.geometry.group_range(group).count;
        match self.group(group) {
            None => (blocks - self.geometry.base_blocks(group)) as u32,
            Some(bitmap) => bitmap.iter().map(|byte| byte.count_zeros()).sum(),
        }
    }

    fn next_free(&mut self) -> Result<u64, Ext4Error> {
        while self.cursor < self.geometry.blocks() {
            let behind = self
                .content
                .partition_point(|area| area.end() <= self.cursor);
            match self.content.get(behind) {
                Some(area) if area.start <= self.cursor => self.cursor = area.end(),
                _ if self.is_free(self.cursor) => return Ok(self.cursor),
                _ => self.cursor += 1,
            }
        }
        Err(Ext4Error::NoSpace { blocks: 1 })
    }

    /// Whether metadata may take a block.
    fn is_free(&self, block: u64) -> bool {
        if block >= self.geometry.blocks() {
            return false;
        }
        let (group, bit) = place(block);
        let is_used = match &self.bitmaps[group] {
            None => (bit as u64) < self.geometry.base_blocks(group as u32),
            Some(bitmap) => bitmap[bit / 8] & (1 << (bit % 8)) != 0,
        };
        let one = BlockRange {
            start: block,
            count: 1,
        };
        !is_used && !self.is_content(one)
    }

    /// Marks a block as used. `false`: it was in use.
    fn mark(&mut self, block: u64) -> bool {
        let (group, bit) = place(block);
        let byte = &mut self.bitmap(group as u32)[bit / 8];
        let is_free = *byte & (1 << (bit % 8)) == 0;
        *byte |= 1 << (bit % 8);
        is_free
    }

    fn mark_all(&mut self, start: u64, count: u64) {
        for block in start..start + count {
            self.mark(block);
        }
    }

    /// The bitmap of a group. A new one has the group's superblock backup in use, and the blocks
    /// behind the end of the file system.
    fn bitmap(&mut self, group: u32) -> &mut Bitmap {
        let base = self.geometry.base_blocks(group);
        let blocks = self.geometry.group_range(group).count;
        self.bitmaps[group as usize].get_or_insert_with(|| {
            let mut bitmap = Box::new([0; BLOCK_BYTES]);
            set_bits(&mut bitmap, 0, base as usize);
            set_bits(&mut bitmap, blocks as usize, BLOCKS_PER_GROUP as usize);
            bitmap
        })
    }
}

/// Sets the bits from `start` on in front of `end`.
pub(crate) fn set_bits(bitmap: &mut Bitmap, start: usize, end: usize) {
    for bit in start..end {
        bitmap[bit / 8] |= 1 << (bit % 8);
    }
}

/// Group of a block, and its bit there.
fn place(block: u64) -> (usize, usize) {
    (
        (block / BLOCKS_PER_GROUP) as usize,
        (block % BLOCKS_PER_GROUP) as usize,
    )
}

/// The areas in ascending order.
fn checked_areas(
    geometry: &Geometry,
    content: &[BlockRange],
) -> Result<Vec<BlockRange>, Ext4Error> {
    let mut areas: Vec<BlockRange> = content.to_vec();
    areas.retain(|area| area.count > 0);
    areas.sort_unstable_by_key(|area| area.start);
    let mut from = geometry.front_end();
    for &range in &areas {
        let refuse = |problem| Ext4Error::ContentArea { range, problem };
        if range
            .start
            .checked_add(range.count)
            .is_none_or(|end| end > geometry.blocks())
        {
            return Err(refuse("the file system ends before"));
        }
        if range.start < from {
            return Err(refuse("tables, the journal or another area is there"));
        }
        let first = (range.start / BLOCKS_PER_GROUP) as u32;
        let last = ((range.end() - 1) / BLOCKS_PER_GROUP) as u32;
        let has_base = |group: u32| {
            let base_end = geometry.group_range(group).start + geometry.base_blocks(group);
            has_backup(group) && base_end > range.start
        };
        if (first..=last).any(has_base) {
            return Err(refuse("a backup of the superblock is there"));
        }
        from = range.end();
    }
    Ok(areas)
}

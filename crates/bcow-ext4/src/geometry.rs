//! The geometry: the places of superblocks, descriptors, bitmaps, inode tables and the journal.
//!
//! All of them are at the front of the file system, except backups of the superblock:
//!
//! ```text
//! | superblock | descriptors | block bitmaps | inode bitmaps | inode tables | journal | free ...
//! ```
//!
//! A backup of the superblock and descriptors is at the start of groups 1, 3, 5, 7 and their
//! powers; what comes at the front passes around it. The feature `sparse_super2` would make backups
//! unnecessary, but Linux refuses to grow such a file system while it is mounted. The feature
//! `meta_bg`, with the first such group behind the last one, has Linux place the descriptors of
//! further groups in these groups: nothing needs to be reserved for growth.

use crate::format::{BLOCK_BYTES, BLOCKS_PER_GROUP, DESCRIPTORS_PER_BLOCK, INODES_PER_BLOCK};
use crate::{BlockRange, Ext4Error};

/// The greatest size in bytes.
pub const MAX_BYTES: u64 = 1 << 44;

/// The smallest size in bytes.
pub const MIN_BYTES: u64 = 8 << 20;

/// A group takes at most as many inodes as one block of a bitmap has bits.
const MAX_INODES_PER_GROUP: u64 = BLOCKS_PER_GROUP;

/// Blocks that a short last group must have behind its own metadata, or it is left out.
const MIN_LAST_GROUP: u64 = 50;

/// What a geometry is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Bytes of the file system. What is not a whole block, and a very short last group, are left
    /// out.
    pub bytes: u64,
    /// Inodes that must find room, besides the reserved ones. There are more: by default one for
    /// each 16 KiB, as `mke2fs` has it, each 4 KiB below 512 MiB, each 32 KiB from 4 TiB on.
    pub inodes: u32,
    /// Blocks of the journal, or `None` for a length by the size of the file system, at most
    /// 64 MiB.
    pub journal_blocks: Option<u32>,
}

/// The places of tables and journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    blocks: u64,
    groups: u32,
    inodes_per_group: u32,
    descriptor_blocks: u64,
    /// Groups with a superblock, in ascending order.
    backups: Vec<u32>,
    journal: Vec<BlockRange>,
    tables: Vec<Tables>,
    front_end: u64,
}

/// The blocks with the metadata of a group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tables {
    pub block_bitmap: u64,
    pub inode_bitmap: u64,
    pub inode_table: u64,
}

impl Geometry {
    /// Computes the geometry of a file system.
    pub fn new(size: Size) -> Result<Geometry, Ext4Error> {
        let refuse = |problem| Ext4Error::Size {
            bytes: size.bytes,
            problem,
        };
        if size.bytes > MAX_BYTES {
            return Err(refuse("is larger than 16 TiB"));
        }
        if size.bytes < MIN_BYTES {
            return Err(refuse("is smaller than 8 MiB"));
        }
        let blocks = whole_groups(size.bytes / BLOCK_BYTES as u64);
        let groups = blocks.div_ceil(BLOCKS_PER_GROUP);
        let inodes_per_group = inodes_per_group(blocks, size.inodes)
            .ok_or_else(|| refuse("is too small for the inodes"))?;
        let mut geometry = Geometry {
            blocks,
            groups: groups as u32,
            inodes_per_group,
            descriptor_blocks: groups.div_ceil(DESCRIPTORS_PER_BLOCK),
            backups: (0..groups as u32)
                .filter(|&group| has_backup(group))
                .collect(),
            journal: Vec::new(),
            tables: vec![Tables::default(); groups as usize],
            front_end: 0,
        };
        let too_small = || refuse("is too small for its own metadata");
        geometry.place_tables().ok_or_else(too_small)?;
        let journal_blocks = match size.journal_blocks {
            Some(blocks) if blocks < MIN_JOURNAL => {
                return Err(refuse("needs a journal of 1024 blocks"));
            }
            Some(blocks) => blocks,
            None => default_journal(blocks),
        };
        geometry
            .place_journal(journal_blocks.into())
            .ok_or_else(too_small)?;
        Ok(geometry)
    }

    /// Blocks of the file system.
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Inodes of the file system, with the reserved ones.
    pub fn inodes(&self) -> u32 {
        self.inodes_per_group * self.groups
    }

    /// The first block behind the tables and the journal. Content areas begin here or later.
    pub fn front_end(&self) -> u64 {
        self.front_end
    }

    /// Blocks from the first one of a group to the next backup of the superblock: areas for content
    /// that is not to be interrupted. The areas are in ascending order and begin behind block
    /// `from`; each begins and ends at the border of a group, except at the end of the file system.
    pub fn whole_areas(&self, from: u64) -> impl Iterator<Item = BlockRange> + '_ {
        let mut group = from.max(self.front_end).div_ceil(BLOCKS_PER_GROUP) as u32;
        std::iter::from_fn(move || {
            while group < self.groups && self.has_backup(group) {
                group += 1;
            }
            let first = group;
            while group < self.groups && !self.has_backup(group) {
                group += 1;
            }
            let start = u64::from(first) * BLOCKS_PER_GROUP;
            let end = (u64::from(group) * BLOCKS_PER_GROUP).min(self.blocks);
            (start < end).then(|| BlockRange {
                start,
                count: end - start,
            })
        })
    }

    pub(crate) fn groups(&self) -> u32 {
        self.groups
    }

    pub(crate) fn inodes_per_group(&self) -> u32 {
        self.inodes_per_group
    }

    pub(crate) fn descriptor_blocks(&self) -> u64 {
        self.descriptor_blocks
    }

    pub(crate) fn journal(&self) -> &[BlockRange] {
        &self.journal
    }

    pub(crate) fn tables(&self, group: u32) -> Tables {
        self.tables[group as usize]
    }

    /// Blocks of the inode table of a group.
    pub(crate) fn table_blocks(&self) -> u64 {
        u64::from(self.inodes_per_group / INODES_PER_BLOCK)
    }

    /// The blocks of a group, fewer in the last one.
    pub(crate) fn group_range(&self, group: u32) -> BlockRange {
        let start = u64::from(group) * BLOCKS_PER_GROUP;
        BlockRange {
            start,
            count: (self.blocks - start).min(BLOCKS_PER_GROUP),
        }
    }

    /// Whether the group begins with the superblock or a backup of it, and the descriptors.
    pub(crate) fn has_backup(&self, group: u32) -> bool {
        has_backup(group)
    }

    /// The groups that begin with a backup of the superblock.
    pub(crate) fn backups(&self) -> &[u32] {
        &self.backups[1..]
    }

    /// Blocks of superblock and descriptors at the start of a group.
    pub(crate) fn base_blocks(&self, group: u32) -> u64 {
        if has_backup(group) {
            1 + self.descriptor_blocks
        } else {
            0
        }
    }

    fn place_tables(&mut self) -> Option<()> {
        let table_blocks = self.table_blocks();
        let mut at = 1 + self.descriptor_blocks;
        for group in 0..self.groups as usize {
            self.tables[group].block_bitmap = self.take(&mut at, 1)?;
        }
        for group in 0..self.groups as usize {
            self.tables[group].inode_bitmap = self.take(&mut at, 1)?;
        }
        for group in 0..self.groups as usize {
            self.tables[group].inode_table = self.take(&mut at, table_blocks)?;
        }
        self.front_end = at;
        Some(())
    }

    fn place_journal(&mut self, blocks: u64) -> Option<()> {
        let mut left = blocks;
        while left > 0 {
            let mut start = self.front_end;
            // Up to the next backup.
            let first = self.take(&mut start, 1)?;
            let until = self.next_base(first).unwrap_or(self.blocks);
            let count = left.min(until - first);
            self.journal.push(BlockRange {
                start: first,
                count,
            });
            self.front_end = first + count;
            left -= count;
        }
        (self.front_end < self.blocks).then_some(())
    }

    /// `count` blocks from `at` on that no backup interrupts.
    fn take(&self, at: &mut u64, count: u64) -> Option<u64> {
        loop {
            let group = (*at / BLOCKS_PER_GROUP) as u32;
            let base_end = u64::from(group) * BLOCKS_PER_GROUP + self.base_blocks(group);
            let start = base_end.max(*at);
            if start + count > self.blocks {
                return None;
            }
            match self.next_base(start) {
                Some(next) if next < start + count => *at = next,
                _ => {
                    *at = start + count;
                    return Some(start);
                }
            }
        }
    }

    /// The next block behind `block` where a backup begins.
    fn next_base(&self, block: u64) -> Option<u64> {
        let group = (block / BLOCKS_PER_GROUP) as u32;
        let at = self.backups.partition_point(|&backup| backup <= group);
        Some(u64::from(*self.backups.get(at)?) * BLOCKS_PER_GROUP)
    }
}

/// The shortest journal that the kernel accepts.
const MIN_JOURNAL: u32 = 1024;

/// The lengths of `mke2fs`, up to 64 MiB: a journal is written all over again and again, and then
/// its blocks are all stored.
fn default_journal(blocks: u64) -> u32 {
    match blocks {
        ..32_768 => MIN_JOURNAL,
        32_768..262_144 => 4096,
        262_144..524_288 => 8192,
        _ => 16_384,
    }
}

/// Leaves out a last group that would be too short.
fn whole_groups(blocks: u64) -> u64 {
    let groups = blocks.div_ceil(BLOCKS_PER_GROUP);
    let last = blocks % BLOCKS_PER_GROUP;
    let base = if has_backup(groups.saturating_sub(1) as u32) {
        1 + groups.div_ceil(DESCRIPTORS_PER_BLOCK)
    } else {
        0
    };
    if groups > 1 && last > 0 && last < base + MIN_LAST_GROUP {
        blocks - last
    } else {
        blocks
    }
}

fn inodes_per_group(blocks: u64, inodes: u32) -> Option<u32> {
    let bytes = blocks * BLOCK_BYTES as u64;
    let bytes_per_inode = match bytes {
        ..0x2000_0000 => 4096,
        0x2000_0000..0x400_0000_0000 => 16_384,
        _ => 32_768,
    };
    let groups = blocks.div_ceil(BLOCKS_PER_GROUP);
    let wanted = u64::from(inodes) + u64::from(crate::format::inode_number::FIRST) + 1;
    // Half as many again, so that there is room to write.
    let per_group = (bytes / bytes_per_inode)
        .max(wanted + wanted / 2)
        .div_ceil(groups)
        .next_multiple_of(u64::from(INODES_PER_BLOCK))
        .min(MAX_INODES_PER_GROUP);
    (per_group * groups >= wanted && per_group * groups <= u64::from(u32::MAX))
        .then_some(per_group as u32)
}

/// Groups 0 and 1, and powers of 3, 5 and 7.
pub(crate) fn has_backup(group: u32) -> bool {
    let is_power = |base: u32| {
        let mut rest = group;
        while rest.is_multiple_of(base) {
            rest /= base;
        }
        rest == 1
    };
    group <= 1 || is_power(3) || is_power(5) || is_power(7)
}

#[cfg(test)]
mod tests {
    use super::{Geometry, Size, has_backup};
    use crate::BlockRange;

    fn geometry(bytes: u64) -> Geometry {
        let size = Size {
            bytes,
            inodes: 0,
            journal_blocks: None,
        };
        Geometry::new(size).expect("a geometry")
    }

    #[test]
    fn backups_are_in_powers_of_three_five_and_seven() {
        let backups: Vec<u32> = (0..130).filter(|&group| has_backup(group)).collect();
        assert_eq!(backups, [0, 1, 3, 5, 7, 9, 25, 27, 49, 81, 125]);
    }

    #[test]
    fn areas_lie_between_backups() {
        let geometry = geometry(64 << 30);
        let areas: Vec<BlockRange> = geometry.whole_areas(0).take(3).collect();
        let groups: Vec<(u64, u64)> = areas
            .iter()
            .map(|area| (area.start / 32_768, area.count / 32_768))
            .collect();
        assert_eq!(groups, [(10, 15), (26, 1), (28, 21)]);
    }

    #[test]
    fn sixteen_tebibytes_have_a_geometry() {
        let geometry = geometry(16 << 40);
        assert_eq!(geometry.blocks(), 1 << 32);
        assert_eq!(geometry.inodes(), 1 << 29);
    }

    #[test]
    fn more_inodes_than_bits_of_bitmaps_are_refused() {
        let size = Size {
            bytes: 128 << 20,
            inodes: 40_000,
            journal_blocks: None,
        };
        let message = Geometry::new(size).expect_err("too many").to_string();
        assert!(
            message.ends_with("is too small for the inodes"),
            "{message}"
        );
    }
}

//! The geometry: the blocks of the superblock, the descriptors, the bitmaps, the inode tables and
//! the journal.
//!
//! All of them are at the front of the file system, except for the backups of the superblock:
//!
//! ```text
//! | superblock | descriptors | block bitmaps | inode bitmaps | inode tables | journal | free ...
//! ```
//!
//! A backup of the superblock and of the descriptors is at the start of groups 1, 3, 5, 7 and their
//! powers. If such a group begins within the tables or the journal, these continue behind the
//! backup.
//!
//! The feature `sparse_super2` would make backups unnecessary, but Linux refuses to grow such a
//! file system while it is mounted. With the feature `meta_bg`, Linux stores the descriptors of
//! added groups in these groups, so no blocks are reserved for growth. (The superblock says that
//! `meta_bg` applies only behind the groups whose descriptors fit into the descriptor blocks at the
//! front.)

use crate::format::{BLOCK_BYTES, BLOCKS_PER_GROUP, DESCRIPTORS_PER_BLOCK, INODES_PER_BLOCK};
use crate::{BlockRange, Ext4Error};

/// The largest size of a file system in bytes.
pub const MAX_BYTES: u64 = 1 << 44;

/// The smallest size of a file system in bytes.
pub const MIN_BYTES: u64 = 8 << 20;

/// Inodes in a group: at most the number of bits in its inode bitmap, which is one block.
const MAX_INODES_PER_GROUP: u64 = BLOCKS_PER_GROUP;

/// A short last group is omitted if it has fewer blocks than this behind its superblock and
/// descriptors.
const MIN_LAST_GROUP: u64 = 50;

/// The properties of a file system that determine its geometry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GeometryOptions {
    /// Bytes of the file system. A partial block at the end is not used, and neither is a last
    /// group of a few blocks.
    pub bytes: u64,
    /// Least number of inodes, besides the reserved ones. Like `mke2fs`, the geometry has at least
    /// one inode per 16 KiB; per 4 KiB below 512 MiB, and per 32 KiB from 4 TiB on. It also has
    /// half as many again as required here, if the inode bitmaps have enough bits for them.
    pub inodes: u32,
    /// Blocks of the journal. With `None`, the length depends on the size of the file system, and
    /// is at most 64 MiB.
    pub journal_blocks: Option<u32>,
}

/// The blocks of the tables and of the journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    blocks: u64,
    groups: u32,
    inodes_per_group: u32,
    descriptor_blocks: u64,
    /// Groups that begin with the superblock or a backup of it, in ascending order.
    superblocks: Vec<u32>,
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
    pub fn new(options: GeometryOptions) -> Result<Geometry, Ext4Error> {
        let refuse = |problem| Ext4Error::Size {
            bytes: options.bytes,
            problem,
        };
        if options.bytes > MAX_BYTES {
            return Err(refuse("is larger than 16 TiB"));
        }
        if options.bytes < MIN_BYTES {
            return Err(refuse("is smaller than 8 MiB"));
        }
        let blocks = whole_groups(options.bytes / BLOCK_BYTES as u64);
        let groups = blocks.div_ceil(BLOCKS_PER_GROUP);
        let inodes_per_group = inodes_per_group(blocks, options.inodes)
            .ok_or_else(|| refuse("is too small for the inodes"))?;
        let mut geometry = Geometry {
            blocks,
            groups: groups as u32,
            inodes_per_group,
            descriptor_blocks: groups.div_ceil(DESCRIPTORS_PER_BLOCK),
            superblocks: (0..groups as u32)
                .filter(|&group| has_backup(group))
                .collect(),
            journal: Vec::new(),
            tables: vec![Tables::default(); groups as usize],
            front_end: 0,
        };
        let too_small = || refuse("is too small for its own metadata");
        geometry.place_tables().ok_or_else(too_small)?;
        let journal_blocks = match options.journal_blocks {
            Some(blocks) if blocks < MIN_JOURNAL_BLOCKS => {
                return Err(refuse("needs a journal of at least 1024 blocks"));
            }
            Some(blocks) => blocks,
            None => default_journal_blocks(blocks),
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

    /// Inodes of the file system, the reserved ones included.
    pub fn inodes(&self) -> u32 {
        self.inodes_per_group * self.groups
    }

    /// The first block behind the tables and the journal. No content area begins before this block.
    pub fn front_end(&self) -> u64 {
        self.front_end
    }

    /// The runs of whole groups without a backup of the superblock: areas in which content can be
    /// contiguous. The areas are in ascending order, behind the tables and the journal. The last
    /// one may end with a short group.
    pub fn whole_areas(&self) -> impl Iterator<Item = BlockRange> + '_ {
        let mut group = self.front_end.div_ceil(BLOCKS_PER_GROUP) as u32;
        std::iter::from_fn(move || {
            while group < self.groups && has_backup(group) {
                group += 1;
            }
            let first = group;
            while group < self.groups && !has_backup(group) {
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

    /// The blocks of a group. The last group can be shorter than the others.
    pub(crate) fn group_range(&self, group: u32) -> BlockRange {
        let start = u64::from(group) * BLOCKS_PER_GROUP;
        BlockRange {
            start,
            count: (self.blocks - start).min(BLOCKS_PER_GROUP),
        }
    }

    /// The groups that begin with a backup of the superblock.
    pub(crate) fn backups(&self) -> &[u32] {
        &self.superblocks[1..]
    }

    /// Number of blocks of the superblock and the descriptors, or of their backup, at the start of
    /// a group.
    pub(crate) fn base_blocks(&self, group: u32) -> u64 {
        if has_backup(group) { 1 + self.descriptor_blocks } else { 0 }
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
            // A part of the journal ends at the next backup.
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

    /// Takes the first `count` contiguous blocks from `at` on that contain no backup. `at` becomes
    /// the block behind them. `None` if the file system has no such blocks.
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

    /// The first block of the next backup behind `block`.
    fn next_base(&self, block: u64) -> Option<u64> {
        let group = (block / BLOCKS_PER_GROUP) as u32;
        let at = self
            .superblocks
            .partition_point(|&superblock| superblock <= group);
        Some(u64::from(*self.superblocks.get(at)?) * BLOCKS_PER_GROUP)
    }
}

/// Length of the shortest journal that the kernel accepts.
const MIN_JOURNAL_BLOCKS: u32 = 1024;

/// The lengths of `mke2fs`, limited to 64 MiB: the kernel writes the blocks of a journal in turn,
/// so a sparse disk soon stores all of them.
fn default_journal_blocks(blocks: u64) -> u32 {
    match blocks {
        ..32_768 => MIN_JOURNAL_BLOCKS,
        32_768..262_144 => 4096,
        262_144..524_288 => 8192,
        _ => 16_384,
    }
}

/// The number of blocks without a last group that would be too short.
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
    // Half as many again, for files that are created later.
    let per_group = (bytes / bytes_per_inode)
        .max(wanted + wanted / 2)
        .div_ceil(groups)
        .next_multiple_of(u64::from(INODES_PER_BLOCK))
        .min(MAX_INODES_PER_GROUP);
    (per_group * groups >= wanted && per_group * groups <= u64::from(u32::MAX))
        .then_some(per_group as u32)
}

/// Whether a group begins with the superblock or a backup of it: groups 0 and 1, and powers of 3, 5
/// and 7.
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
    use super::{Geometry, GeometryOptions, has_backup};
    use crate::BlockRange;

    fn geometry(bytes: u64) -> Geometry {
        let options = GeometryOptions {
            bytes,
            inodes: 0,
            journal_blocks: None,
        };
        Geometry::new(options).expect("a geometry")
    }

    #[test]
    fn backups_are_in_powers_of_three_five_and_seven() {
        let backups: Vec<u32> = (0..130).filter(|&group| has_backup(group)).collect();
        assert_eq!(backups, [0, 1, 3, 5, 7, 9, 25, 27, 49, 81, 125]);
    }

    #[test]
    fn areas_lie_between_backups() {
        let geometry = geometry(64 << 30);
        let areas: Vec<BlockRange> = geometry.whole_areas().take(3).collect();
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
        let options = GeometryOptions {
            bytes: 128 << 20,
            inodes: 40_000,
            journal_blocks: None,
        };
        let message = Geometry::new(options).expect_err("too many").to_string();
        assert!(
            message.ends_with("is too small for the inodes"),
            "{message}"
        );
    }
}

//! The inode tables, and the counts of groups that depend on inodes.

use crate::Ext4Error;
use crate::format::{BLOCK_BYTES, INODE_BYTES, INODES_PER_BLOCK};
use crate::geometry::Geometry;
use crate::inode::InodeBytes;
use crate::node::InodeNumber;
use crate::output::{BlockBuffer, Output};

/// Writes inodes in ascending order of their numbers. The first block has the reserved inodes, and
/// is written last.
pub(crate) struct InodeTable {
    first: BlockBuffer,
    current: BlockBuffer,
    /// Which block of the tables `current` is.
    block: u32,
    inodes_per_group: u32,
    /// Directories of each group.
    directories: Vec<u32>,
}

impl InodeTable {
    pub fn new(geometry: &Geometry) -> InodeTable {
        InodeTable {
            first: [0; BLOCK_BYTES],
            current: [0; BLOCK_BYTES],
            block: 0,
            inodes_per_group: geometry.inodes_per_group(),
            directories: vec![0; geometry.groups() as usize],
        }
    }

    pub fn count_directory(&mut self, number: InodeNumber) {
        self.directories[((number.0 - 1) / self.inodes_per_group) as usize] += 1;
    }

    pub fn directories(&self, group: u32) -> u32 {
        self.directories[group as usize]
    }

    /// Stores an inode.
    pub fn put(
        &mut self,
        number: InodeNumber,
        bytes: &InodeBytes,
        geometry: &Geometry,
        output: &mut Output<'_>,
    ) -> Result<(), Ext4Error> {
        let block = (number.0 - 1) / INODES_PER_BLOCK;
        let at = ((number.0 - 1) % INODES_PER_BLOCK) as usize * INODE_BYTES;
        if block == 0 {
            self.first[at..at + INODE_BYTES].copy_from_slice(bytes);
            return Ok(());
        }
        if block != self.block {
            self.write_current(geometry, output)?;
            self.current = [0; BLOCK_BYTES];
            self.block = block;
        }
        self.current[at..at + INODE_BYTES].copy_from_slice(bytes);
        Ok(())
    }

    /// Writes what is left.
    pub fn finish(
        &mut self,
        geometry: &Geometry,
        output: &mut Output<'_>,
    ) -> Result<(), Ext4Error> {
        self.write_current(geometry, output)?;
        output.write(geometry.tables(0).inode_table, &self.first)
    }

    fn write_current(
        &mut self,
        geometry: &Geometry,
        output: &mut Output<'_>,
    ) -> Result<(), Ext4Error> {
        if self.block == 0 {
            return Ok(());
        }
        let per_group = self.inodes_per_group / INODES_PER_BLOCK;
        let table = geometry.tables(self.block / per_group).inode_table;
        output.write(table + u64::from(self.block % per_group), &self.current)
    }
}

//! Blocks of metadata, allocated and written.

use std::io;

use crate::checksum::Checksum;
use crate::format::BLOCK_BYTES;
use crate::space::Space;
use crate::{BlockRange, Ext4Error};

/// Receives metadata. Every byte is written at most once, in no particular order. What is not
/// written must read as zeros, except in the content areas.
pub trait Sink {
    /// Stores `bytes` at byte `offset` of the file system.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// A block in memory.
pub(crate) type BlockBuffer = [u8; BLOCK_BYTES];

/// The sink, and which blocks are free.
pub(crate) struct Output<'a> {
    pub space: Space<'a>,
    pub sink: &'a mut dyn Sink,
    /// The seed of the file system's checksums.
    pub seed: Checksum,
}

impl Output<'_> {
    pub fn write(&mut self, block: u64, bytes: &BlockBuffer) -> Result<(), Ext4Error> {
        Ok(self.sink.write_at(block * BLOCK_BYTES as u64, bytes)?)
    }

    /// Takes a block for metadata.
    pub fn allocate(&mut self) -> Result<u64, Ext4Error> {
        Ok(self.space.allocate(1)?.start)
    }
}

/// The blocks of a file in order.
pub(crate) fn blocks_of(ranges: &[BlockRange]) -> impl Iterator<Item = u64> {
    let blocks = |range: &BlockRange| range.start..range.start + range.count;
    ranges.iter().flat_map(blocks)
}

//! The parts of a stack: where the images are in its address space, and the tails in them.

use std::io;

use bcow::{BlockDevice, Image};
use bcow_erofs::tree::TailSource;

use crate::space::{BLOCK_BYTES, REGION_BYTES};

/// The shift of the part's number in the address of a tail. EROFS addresses have 44 bits (16 TiB).
pub(crate) const TAIL_SHIFT: u32 = 44;

/// Location of a part in the address space of the stack, in blocks from the start of the windows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockRange {
    pub first: u64,
    pub blocks: u64,
}

/// Places parts of these lengths one after the other, each at a region boundary.
pub(crate) fn place_regions(lengths: impl Iterator<Item = u64>) -> Vec<BlockRange> {
    let mut next: u64 = 0;
    lengths
        .map(|bytes| {
            let first = next;
            let blocks = bytes / BLOCK_BYTES;
            next = first + bytes.next_multiple_of(REGION_BYTES) / BLOCK_BYTES;
            BlockRange { first, blocks }
        })
        .collect()
}

/// Reads the tails of a merged tree from the metadata of the parts. The offset of a tail has the
/// number of its part in the bits from [`TAIL_SHIFT`] on.
pub(crate) struct Tails<'a>(pub Vec<&'a Image>);

impl TailSource for Tails<'_> {
    fn read_tail(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let image = self
            .0
            .get((offset >> TAIL_SHIFT) as usize)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let at = offset & ((1 << TAIL_SHIFT) - 1);
        image.read_at(at, buf).map_err(io::Error::other)
    }
}

//! The address space of a spliced device.
//!
//! ```text
//! 0          superblock, metadata (in memory)
//! 1 TiB      content of the upper's files, a segment for each run of it
//! 8 TiB      the image's address space
//! ```

use crate::blocks::BLOCK_BYTES;

/// The address at which the upper's content begins.
pub(super) const OWN_FROM: u64 = 1 << 40;
/// The address at which the image's address space begins.
pub const LOWER_FROM: u64 = 8 << 40;

/// The offset in the image of a byte of a [`Spliced`](super::Spliced) device; `None` for a byte
/// outside the image's part.
pub fn lower_offset(offset: u64) -> Option<u64> {
    offset.checked_sub(LOWER_FROM)
}

/// The addresses of the upper's content.
#[derive(Debug, Default)]
pub(super) struct Segments {
    all: Vec<Segment>,
    /// The number of blocks that have addresses.
    blocks: u64,
}

/// A run of addresses, and the content at it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
    /// The first block, relative to [`OWN_FROM`].
    first: u64,
    /// The length in bytes.
    pub(super) length: u64,
    /// The index of the body, and the offset in it.
    pub(super) body: u32,
    pub(super) offset: u64,
}

impl Segments {
    /// Allocates an address, as a block number, for `length` bytes at `offset` of a body. `None` if
    /// no address is left.
    pub(super) fn add(&mut self, body: u32, offset: u64, length: u64) -> Option<u32> {
        let first = self.blocks;
        let end = first.checked_add(length.div_ceil(BLOCK_BYTES))?;
        if end > (LOWER_FROM - OWN_FROM) / BLOCK_BYTES {
            return None;
        }
        self.blocks = end;
        self.all.push(Segment {
            first,
            length,
            body,
            offset,
        });
        u32::try_from(OWN_FROM / BLOCK_BYTES + first).ok()
    }

    /// The segment of the upper's content at an address, and the offset in the segment; `None` if
    /// no segment covers it.
    pub(super) fn at(&self, offset: u64) -> Option<(Segment, u64)> {
        let block = offset.checked_sub(OWN_FROM)? / BLOCK_BYTES;
        let after = self.all.partition_point(|s| s.first <= block);
        let segment = *self.all.get(after.checked_sub(1)?)?;
        Some((segment, offset - OWN_FROM - segment.first * BLOCK_BYTES))
    }
}

//! The address space of a [`Spliced`](super::Spliced) device.
//!
//! ```text
//! 0          superblock and metadata, in memory
//! 1 TiB      content of the upper, in segments
//! 8 TiB      address space of the image
//! ```

use crate::blocks::BLOCK_BYTES;

/// The address where the content of the upper begins.
pub(super) const UPPER_START: u64 = 1 << 40;
/// The address where the address space of the image begins.
pub const LOWER_START: u64 = 8 << 40;

/// The address in the image of byte `offset` of a [`Spliced`](super::Spliced) device; `None` for a
/// byte in front of the address space of the image.
pub fn lower_offset(offset: u64) -> Option<u64> {
    offset.checked_sub(LOWER_START)
}

/// The segments of a device: runs of addresses, and the content that each shows.
#[derive(Debug, Default)]
pub(super) struct Segments {
    /// In the order of their addresses, without gaps.
    all: Vec<Segment>,
    /// The number of blocks of all segments.
    blocks: u64,
}

/// A run of addresses, and the part of a body that it shows.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment {
    /// The first block, relative to [`UPPER_START`].
    first: u64,
    /// The length in bytes. The segment has whole blocks; zeros follow the content.
    pub(super) length: u64,
    /// The index of the body.
    pub(super) body: u32,
    /// The offset of the content in the body, in bytes.
    pub(super) offset: u64,
}

impl Segments {
    /// Adds a segment for `length` bytes at `offset` of a body. Returns its first block of the
    /// device, or `None` if too few addresses are free.
    pub(super) fn add(&mut self, body: u32, offset: u64, length: u64) -> Option<u32> {
        let first = self.blocks;
        let end = first.checked_add(length.div_ceil(BLOCK_BYTES))?;
        if end > (LOWER_START - UPPER_START) / BLOCK_BYTES {
            return None;
        }
        self.blocks = end;
        self.all.push(Segment {
            first,
            length,
            body,
            offset,
        });
        u32::try_from(UPPER_START / BLOCK_BYTES + first).ok()
    }

    /// The last segment that begins at or before the address `offset`, and the distance of the
    /// address from its first byte. The address may be after the end of the segment. `None` if all
    /// segments begin after the address.
    pub(super) fn at(&self, offset: u64) -> Option<(Segment, u64)> {
        let block = offset.checked_sub(UPPER_START)? / BLOCK_BYTES;
        let after = self.all.partition_point(|s| s.first <= block);
        let segment = *self.all.get(after.checked_sub(1)?)?;
        Some((segment, offset - UPPER_START - segment.first * BLOCK_BYTES))
    }
}

//! Space for writes to a file.

use std::ops::Range;

use super::{Account, LimitReached, Reservation};
use crate::Seek;
use crate::blocks::BLOCK_BYTES;
use crate::host::HostFile;

impl Account {
    /// Reserves the blocks of the bytes `range` of a file before a write. Gives also the end of the
    /// part of the range for which there is space: the end of the range, or of a block. Fails if
    /// not even one byte fits.
    ///
    /// If there is no space for all blocks, this finds out which of them the host stores already,
    /// and reserves the others only.
    pub fn reserve_write(
        &self,
        file: &dyn HostFile,
        range: Range<u64>,
    ) -> Result<(Reservation<'_>, u64), LimitReached> {
        let blocks = range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES);
        let bytes = (blocks.end - blocks.start) * BLOCK_BYTES;
        if self.limits.bytes.is_none() || range.is_empty() {
            return Ok((self.reserve_up_to(0, 0, 0), range.end));
        }
        let reserved = self.reserve_up_to(bytes, bytes, 0);
        if reserved.bytes == bytes {
            return Ok((reserved, range.end));
        }
        let missing = missing(file, blocks);
        let bytes = missing.iter().map(|run| run.end - run.start).sum::<u64>() * BLOCK_BYTES;
        self.wait_for_others(bytes, 0);
        let reserved = self.reserve_up_to(bytes, BLOCK_BYTES, 0);
        let mut left = reserved.bytes / BLOCK_BYTES;
        let mut end = range.end;
        for run in missing {
            let length = run.end - run.start;
            if left < length {
                end = (run.start + left) * BLOCK_BYTES;
                break;
            }
            left -= length;
        }
        if end <= range.start {
            return Err(self.size_reached());
        }
        Ok((reserved, end))
    }

    /// As [`Account::reserve_write`], but reserves space for the whole range or fails.
    pub fn reserve_whole_write(
        &self,
        file: &dyn HostFile,
        range: Range<u64>,
    ) -> Result<Reservation<'_>, LimitReached> {
        let left = self.left().unwrap_or(u64::MAX);
        let bytes = range.end - range.start;
        // No search through a range that is much larger than the limit.
        if bytes > left && bytes > left.saturating_add(file.stored_bytes().unwrap_or(0)) {
            return Err(self.size_reached());
        }
        let (reserved, end) = self.reserve_write(file, range.clone())?;
        if end < range.end { Err(self.size_reached()) } else { Ok(reserved) }
    }

    fn size_reached(&self) -> LimitReached {
        LimitReached::Bytes(self.limits.bytes.unwrap_or(u64::MAX)).noted()
    }
}

/// Those of `blocks` that the host does not store. If the host cannot say it, a block counts as not
/// stored.
fn missing(file: &dyn HostFile, blocks: Range<u64>) -> Vec<Range<u64>> {
    let seek = |offset, what| file.seek(offset, what).ok().flatten();
    let mut missing: Vec<Range<u64>> = Vec::new();
    let mut at = blocks.start;
    while at < blocks.end {
        let offset = at * BLOCK_BYTES;
        let data = seek(offset, Seek::Data).map_or(blocks.end, |data| data / BLOCK_BYTES);
        for block in at..data.min(blocks.end) {
            if !is_preallocated(file, block) {
                match missing.last_mut() {
                    Some(run) if run.end == block => run.end += 1,
                    _ => missing.push(block..block + 1),
                }
            }
        }
        let data = data.max(at);
        let hole =
            seek(data * BLOCK_BYTES, Seek::Hole).map_or(0, |hole| hole.div_ceil(BLOCK_BYTES));
        at = hole.max(data + 1);
    }
    missing
}

/// Whether a block that the host does not report as data is allocated.
///
/// A host that has read such a block into its page cache reports the block as data (ext4, xfs). A
/// hole is no data after a read. Other hosts (btrfs, tmpfs), and blocks behind the end of the file,
/// give `false`.
fn is_preallocated(file: &dyn HostFile, block: u64) -> bool {
    let offset = block * BLOCK_BYTES;
    file.read_at(offset, &mut [0]).is_ok_and(|read| read > 0)
        && matches!(file.seek(offset, Seek::Data), Ok(Some(data)) if data == offset)
}

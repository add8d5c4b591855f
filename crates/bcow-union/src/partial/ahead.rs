//! Completes blocks ahead of a program that writes sequentially and syncs after each write, such as
//! the log of a database.
//!
//! A flush with new blocks needs one more barrier than a flush without: the one for the map. Both
//! barriers wait for the journal of the host's file system. A log adds new blocks in nearly every
//! commit. So after [`IN_ORDER`] flushes that each continue near the end of the previous one, the
//! flush also completes the next blocks (1 MiB by default) from the lower file and records them.
//! The following flushes then cost the same as on a plain file.

use bcow::sync::atomic::Ordering;
use std::ops::Range;

use super::locks::{lock, read};
use super::{Frame, Partial, PartialError, RunSource, UNIT_BLOCKS};
use crate::blocks::BLOCK_BYTES;
use crate::host::write_all;

/// The number of sequential flushes before blocks are completed ahead.
const IN_ORDER: u32 = 4;
/// The greatest distance between the end of a flush and the start of the next one that still counts
/// as sequential.
const NEAR_BLOCKS: u64 = 4;

/// The positions of recent flushes.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// The block after the last one that a flush recorded.
    next: u64,
    /// The number of consecutive flushes that continued there.
    in_order: u32,
}

impl Partial {
    /// Completes blocks ahead if flushes are sequential. A flush calls this before it takes the
    /// unrecorded blocks.
    ///
    /// Does nothing if the upper has a size limit: the space under the limit belongs to the
    /// program.
    pub(super) fn complete_ahead(&self, frame: &Frame) {
        let most = self.shared.options.ahead_blocks;
        if most == 0 || self.shared.account.limits().bytes.is_some() || !frame.marked {
            return;
        }
        let new = {
            let presence = read(&self.presence);
            let mut runs = presence.unrecorded.runs(0..u64::MAX);
            match runs.next() {
                Some(first) => first.start..runs.last().unwrap_or(first).end,
                None => return,
            }
        };
        let mut ahead = lock(&self.ahead);
        let is_near = new.start <= ahead.next.saturating_add(NEAR_BLOCKS)
            && ahead.next <= new.start.saturating_add(NEAR_BLOCKS)
            && new.end > ahead.next;
        ahead.in_order = if is_near { ahead.in_order.saturating_add(1) } else { 0 };
        ahead.next = new.end;
        if ahead.in_order < IN_ORDER {
            return;
        }
        let end = new.end.saturating_add(most).min(frame.covered());
        ahead.next = end.max(new.end);
        drop(ahead);
        // A read or write of the block meets the same error again. The content does not change, so
        // the file keeps its time.
        let _ = self.fetch(frame, new.end..end);
    }

    /// The number of untouched blocks that the file needs of the lower file, if it has been read
    /// and written by at least as many requests: each would have been cheaper in a whole file, by
    /// about as much as it costs to copy a block.
    pub fn worth_completing(&self) -> Option<u64> {
        let frame = read(&self.gate);
        let known = read(&self.presence).present.len() + self.incomplete.load(Ordering::Relaxed);
        let lacking = frame.covered().saturating_sub(known);
        let is_worth = frame.marked
            && lacking > 0
            && lacking <= self.requests.load(Ordering::Relaxed)
            && self.fence.check().is_ok();
        is_worth.then_some(lacking)
    }

    /// Copies up to `most` untouched blocks from the lower file.
    pub fn complete_some(&self, most: u64) -> Result<(), PartialError> {
        let (mut at, mut left) = (0, most);
        while left > 0 {
            // The lower file can take long, so a truncation waits for some of the blocks only.
            let frame = read(&self.gate);
            let covered = frame.covered();
            if !frame.marked || at >= covered {
                break;
            }
            let (is_present, end) = read(&self.presence).present.run(at, covered);
            if is_present {
                at = end;
                continue;
            }
            let end = end.min(at + left.min(UNIT_BLOCKS));
            self.fetch(&frame, at..end)?;
            left -= end - at;
            at = end;
        }
        Ok(())
    }

    /// As after an open: the file is completed only after further requests.
    pub fn is_not_worth_completing(&self) {
        self.requests.store(0, Ordering::Relaxed);
    }

    /// Copies unwritten blocks from the lower file and marks them as present.
    fn fetch(&self, frame: &Frame, blocks: Range<u64>) -> Result<(), PartialError> {
        let mut at = blocks.start;
        while at < blocks.end {
            let end = ((at / UNIT_BLOCKS + 1) * UNIT_BLOCKS).min(blocks.end);
            let start = at * BLOCK_BYTES;
            let length = (end * BLOCK_BYTES).min(self.size()).saturating_sub(start);
            let mut bytes = vec![0; length as usize];
            self.read_lower(frame, start, &mut bytes)?;
            let store = || self.store_lower(frame, at..end, &bytes);
            self.times.hold().preserve_time(self.content(), store)?;
            at = end;
        }
        Ok(())
    }

    /// Stores the blocks of a range that no write has touched. `bytes` has the range's bytes before
    /// the end of the file.
    fn store_lower(
        &self,
        frame: &Frame,
        blocks: Range<u64>,
        bytes: &[u8],
    ) -> Result<(), PartialError> {
        let within = |block: u64| {
            let offset = (block - blocks.start) * BLOCK_BYTES;
            offset.min(bytes.len() as u64) as usize
        };
        let stripe = self.stripe(blocks.start);
        let mut block = blocks.start;
        while block < blocks.end {
            let (source, until) = self.source(frame, &stripe, block, blocks.end);
            let run = block..until;
            block = until;
            if source != RunSource::Lower {
                continue;
            }
            let piece = &bytes[within(run.start)..within(run.end)];
            write_all(self.content(), run.start * BLOCK_BYTES, piece)
                .map_err(PartialError::host("complete a block of a partial file"))?;
            self.set_present(run);
        }
        Ok(())
    }
}

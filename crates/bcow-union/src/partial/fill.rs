//! Completion of incomplete blocks.

use bcow::sync::atomic::Ordering;
use std::time::Instant;

use super::locks::{lock, read};
use super::shared::Completer;
use super::{Frame, Partial, PartialError};
use crate::blocks::BLOCK_BYTES;
use crate::host::write_all;

/// The blocks that are read from the lower file before any of them is stored.
const AT_ONCE: usize = 64;

/// The bytes that an incomplete block lacked when they were read from the lower file. The bytes of
/// its written ranges are zeros.
pub(super) struct Rest {
    block: u64,
    bytes: Box<[u8; BLOCK_BYTES as usize]>,
}

impl Partial {
    /// Completes a block if it is incomplete, for a thread that changes the file.
    pub(super) fn complete(
        &self,
        frame: &Frame,
        block: u64,
        by: Completer,
    ) -> Result<(), PartialError> {
        match self.read_rest(frame, block)? {
            Some(rest) => self.store_rest(&rest, by),
            None => Ok(()),
        }
    }

    /// Reads what an incomplete block lacks; `None` if the block is not incomplete. The lower file
    /// can take long, so the caller holds neither the block's stripe nor the file's times.
    pub(super) fn read_rest(
        &self,
        frame: &Frame,
        block: u64,
    ) -> Result<Option<Rest>, PartialError> {
        let start = block * BLOCK_BYTES;
        let gaps = match self.stripe(block).get(&block) {
            Some(incomplete) => incomplete.written.gaps(self.length(block)),
            None => return Ok(None),
        };
        let mut bytes = Box::new([0; BLOCK_BYTES as usize]);
        if let (Some(first), Some(last)) = (gaps.first(), gaps.last()) {
            let piece = &mut bytes[first.start as usize..last.end as usize];
            self.read_lower(frame, start + first.start, piece)?;
        }
        Ok(Some(Rest { block, bytes }))
    }

    /// Completes the block of `rest` if it is still incomplete.
    pub(super) fn store_rest(&self, rest: &Rest, by: Completer) -> Result<(), PartialError> {
        let block = rest.block;
        let start = block * BLOCK_BYTES;
        let mut stripe = self.stripe(block);
        let Some(incomplete) = stripe.get(&block) else {
            return Ok(());
        };
        // Since the read, a gap can only have become smaller. If the file has grown, there is also
        // a gap behind its old end, which is zeros, as in `rest`.
        for gap in incomplete.written.gaps(self.length(block)) {
            let piece = &rest.bytes[gap.start as usize..gap.end as usize];
            write_all(self.content(), start + gap.start, piece)
                .map_err(PartialError::host("complete a block of a partial file"))?;
        }
        // The order matters: `incomplete` must not reach zero before the block is in the set of
        // unrecorded blocks.
        self.set_present(block..block + 1);
        stripe.remove(&block);
        self.completion_ended(1);
        drop(stripe);
        self.shared.filled(by);
        Ok(())
    }

    /// Completes blocks without a change of the file's times. Calls `failed` for each block that
    /// cannot be completed.
    fn complete_blocks(
        &self,
        frame: &Frame,
        blocks: &[u64],
        by: Completer,
        mut failed: impl FnMut(u64, PartialError),
    ) {
        for blocks in blocks.chunks(AT_ONCE) {
            let mut rests = Vec::new();
            for &block in blocks {
                match self.read_rest(frame, block) {
                    Ok(rest) => rests.extend(rest),
                    Err(error) => failed(block, error),
                }
            }
            self.times.hold().preserve_time(self.content(), || {
                for rest in &rests {
                    if let Err(error) = self.store_rest(rest, by) {
                        failed(rest.block, error);
                    }
                }
            });
        }
    }

    /// The number of bytes of a block that lie before the end of the file.
    pub(super) fn length(&self, block: u64) -> u64 {
        self.size()
            .saturating_sub(block * BLOCK_BYTES)
            .min(BLOCK_BYTES)
    }

    /// Completes all blocks that are incomplete now. After an error it continues with the other
    /// blocks and returns the first error.
    pub(super) fn complete_all(&self, frame: &Frame) -> Result<(), PartialError> {
        let mut result = Ok(());
        if self.incomplete.load(Ordering::Acquire) > 0 {
            for stripe in &self.stripes {
                let blocks: Vec<u64> = lock(stripe).keys().copied().collect();
                self.complete_blocks(frame, &blocks, Completer::Flush, |_, error| {
                    if result.is_ok() {
                        result = Err(error);
                    }
                });
            }
        }
        // The thread that completed the last block may be about to restore the time.
        drop(self.times.hold());
        result
    }

    /// Completes up to `most` blocks whose delay has passed, or any blocks while the fillers are
    /// behind. Returns the time of the next call, if blocks are left and no other thread has queued
    /// the partial file.
    pub(super) fn fill_due(&self, most: usize) -> Option<Instant> {
        // A write that leaves an incomplete block after this store queues the partial file again.
        self.queued.store(false, Ordering::Release);
        let frame = read(&self.gate);
        let delay = self.shared.options.fill_delay;
        let mut left = most;
        let mut again: Option<Instant> = None;
        for stripe in &self.stripes {
            let now = Instant::now();
            let behind = self.shared.is_behind();
            let mut due = Vec::new();
            for (block, incomplete) in lock(stripe).iter() {
                if incomplete.has_failed {
                    continue;
                }
                let when = incomplete.first_written + delay;
                if due.len() < left && (behind || when <= now) {
                    due.push(*block);
                } else {
                    again = Some(again.map_or(when, |again| again.min(when)));
                }
            }
            left -= due.len();
            self.complete_blocks(&frame, &due, Completer::Background, |block, error| {
                self.shared.log("cannot complete a block", &error);
                if let Some(incomplete) = lock(stripe).get_mut(&block) {
                    incomplete.has_failed = true;
                }
            });
        }
        // The caller queues the partial file again. `queued` keeps other threads from doing the
        // same.
        if again.is_some() && self.queued.swap(true, Ordering::AcqRel) {
            return None;
        }
        again
    }
}

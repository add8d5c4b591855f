//! Writes into a partial file.
//!
//! A write goes to its place in the host's file first, so that the host reports a lack of space to
//! the writer. Then a block is present if it was written completely, and incomplete otherwise.

use bcow::sync::atomic::Ordering;
use std::ops::Range;
use std::sync::Weak;
use std::time::Instant;

use super::incomplete::{IncompleteBlock, Stripe, Written};
use super::locks::{lock, read};
use super::shared::Completer;
use super::{Frame, Partial, PartialError, PartialMark, UNIT_BLOCKS, end_of};
use crate::blocks::BLOCK_BYTES;

/// Bytes of the adjacent blocks that share a stripe's lock.
const UNIT_BYTES: u64 = UNIT_BLOCKS * BLOCK_BYTES;

impl Partial {
    /// Writes at `offset` and returns the number of bytes written. The file grows if needed. The
    /// number is less than the length of `data`, but at least one, if the host or the size limit
    /// has no room for the rest, or if the host failed after the first byte.
    pub fn write_at(&self, offset: u64, data: &[u8]) -> Result<usize, PartialError> {
        if data.is_empty() {
            return Ok(0);
        }
        let end = end_of(offset, data.len() as u64)?;
        self.requests.fetch_add(1, Ordering::Relaxed);
        let frame = read(&self.gate);
        self.fence.check()?;
        let _changing = self.times.changing(self.content());
        if end > self.size() {
            self.before_growth(&frame)?;
        }
        let account = &self.shared.account;
        let (_reserved, end) = account.reserve_write(self.content(), offset..end)?;
        let fits = &data[..(end - offset) as usize];
        let result = self.write_reserved(&frame, offset, fits);
        self.measure();
        result
    }

    /// Writes bytes for which space is reserved. An error after the first byte becomes a short
    /// write.
    pub(super) fn write_reserved(
        &self,
        frame: &Frame,
        offset: u64,
        data: &[u8],
    ) -> Result<usize, PartialError> {
        let end = offset + data.len() as u64;
        let covered = frame.covered();
        let stop = end.div_ceil(BLOCK_BYTES).min(covered);
        let first = offset / BLOCK_BYTES;
        if first >= stop || read(&self.presence).present.contains_all(first..stop) {
            return self.write_host(offset, data);
        }
        self.expect_flush()?;
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let piece_end = if at / BLOCK_BYTES < covered {
                ((at / UNIT_BYTES + 1) * UNIT_BYTES).min(covered * BLOCK_BYTES)
            } else {
                end
            };
            let piece = &data[done..(piece_end.min(end) - offset) as usize];
            let result = if at / BLOCK_BYTES < covered {
                self.write_unit(frame, at, piece)
            } else {
                self.write_host(at, piece)
            };
            match result {
                Ok(written) => {
                    done += written;
                    if written < piece.len() {
                        break;
                    }
                }
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
        }
        let _ = self.expect_flush();
        Ok(done)
    }

    /// Writes into the host's file and returns the number of bytes written. An error after the
    /// first byte becomes a short write.
    fn write_host(&self, offset: u64, data: &[u8]) -> Result<usize, PartialError> {
        let mut done = 0;
        while done < data.len() {
            match self.content().write_at(offset + done as u64, &data[done..]) {
                Ok(written) => done += written,
                Err(error) if done == 0 => {
                    return Err(PartialError::host("write to a partial file")(error));
                }
                Err(_) => break,
            }
        }
        self.size.fetch_max(offset + done as u64, Ordering::AcqRel);
        Ok(done)
    }

    /// Writes within blocks of one stripe.
    fn write_unit(&self, frame: &Frame, offset: u64, data: &[u8]) -> Result<usize, PartialError> {
        let blocks = offset / BLOCK_BYTES..(offset + data.len() as u64).div_ceil(BLOCK_BYTES);
        let mut stripe = self.stripe(blocks.start);
        let written = self.write_host(offset, data)?;
        let began = self.note(&mut stripe, offset..offset + written as u64);
        drop(stripe);
        for block in began.into_iter().flatten() {
            self.later(frame, block);
        }
        Ok(written)
    }

    /// Notes that bytes were written in blocks of one stripe. Returns the blocks that are newly
    /// incomplete: at most the first and the last.
    fn note(&self, stripe: &mut Stripe, bytes: Range<u64>) -> [Option<u64>; 2] {
        if bytes.is_empty() {
            [None; 2]
        } else {
            self.shared
                .written(self.id, bytes.clone(), || self.note_blocks(stripe, bytes))
        }
    }

    fn note_blocks(&self, stripe: &mut Stripe, bytes: Range<u64>) -> [Option<u64>; 2] {
        let size = self.size();
        let blocks = bytes.start / BLOCK_BYTES..bytes.end.div_ceil(BLOCK_BYTES);
        let mut began = [None; 2];
        let mut ended = 0;
        let mut complete = blocks.start..blocks.start;
        for block in blocks {
            let start = block * BLOCK_BYTES;
            let length = (size - start).min(BLOCK_BYTES);
            let range = bytes.start.max(start) - start..bytes.end.min(start + BLOCK_BYTES) - start;
            let is_complete = if range.start == 0 && range.end >= length {
                ended += u64::from(stripe.remove(&block).is_some());
                true
            } else if read(&self.presence).present.contains(block) {
                false
            } else {
                let incomplete = stripe.entry(block).or_insert_with(|| {
                    began[usize::from(began[0].is_some())] = Some(block);
                    self.incomplete.fetch_add(1, Ordering::AcqRel);
                    self.shared.incomplete_began();
                    IncompleteBlock {
                        written: Written::default(),
                        first_written: Instant::now(),
                        has_failed: false,
                    }
                });
                incomplete.written.insert(range);
                let covered = incomplete.written.covers(length);
                if covered {
                    stripe.remove(&block);
                    ended += 1;
                }
                covered
            };
            if is_complete && length < BLOCK_BYTES {
                // The ledger has its bytes up to the end of the file only, and later writes behind
                // that end are not recorded, since the block is present.
                self.set_present(block..block + 1);
            } else if is_complete {
                if complete.end != block {
                    self.set_recorded_present(complete);
                    complete = block..block;
                }
                complete.end = block + 1;
            }
        }
        if !complete.is_empty() {
            self.set_recorded_present(complete);
        }
        // The order matters. A flush that finds `incomplete` at zero must find the completed blocks
        // in the set of present blocks.
        self.completion_ended(ended);
        began
    }

    /// Takes over bytes that another process has written into the host's file and not recorded.
    pub fn restore(&self, written: &[Range<u64>]) -> Result<(), PartialError> {
        let frame = read(&self.gate);
        self.fence.check()?;
        let end = self.size().min(frame.covered() * BLOCK_BYTES);
        for bytes in written {
            let mut at = bytes.start;
            while at < bytes.end.min(end) {
                let unit_end = (at / UNIT_BYTES + 1) * UNIT_BYTES;
                let piece = at..unit_end.min(bytes.end).min(end);
                at = piece.end;
                let began = self.note(&mut self.stripe(piece.start / BLOCK_BYTES), piece);
                for block in began.into_iter().flatten() {
                    self.later(&frame, block);
                }
            }
        }
        let _ = self.expect_flush();
        Ok(())
    }

    /// Subtracts `blocks` from the counters of incomplete blocks. The blocks are present now, or
    /// truncated.
    pub(super) fn completion_ended(&self, blocks: u64) {
        if blocks > 0 {
            self.incomplete.fetch_sub(blocks, Ordering::AcqRel);
            self.shared.completion_ended(blocks);
        }
    }

    /// Queues the partial file for the fillers, or completes the block if the fillers are behind.
    fn later(&self, frame: &Frame, block: u64) {
        if self.shared.is_behind() {
            // The write itself succeeded. The next read or flush that needs the block meets the
            // error again.
            let _ = self.complete(frame, block, Completer::Writer);
            return;
        }
        if !self.queued.swap(true, Ordering::AcqRel) {
            self.shared.fill_later(Weak::clone(&self.me));
        }
    }

    /// Writes the reduced limit into the mark, if a truncation could not. The caller does this
    /// before the file grows.
    pub(super) fn before_growth(&self, frame: &Frame) -> Result<(), PartialError> {
        if !self.mark_is_stale.load(Ordering::Acquire) || !frame.marked {
            return Ok(());
        }
        let mut state = lock(&self.mark);
        let mark = PartialMark {
            lower_limit: frame.limit,
            ..state.written
        };
        state.change(&*self.host, mark)?;
        self.mark_is_stale.store(false, Ordering::Release);
        Ok(())
    }
}

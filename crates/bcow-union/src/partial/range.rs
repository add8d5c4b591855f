//! Operations on a range of a partial file: size, holes, space.

use bcow::sync::atomic::Ordering;
use std::ops::Range;

use super::locks::{lock, read, write};
use super::{Frame, KeepSize, Partial, PartialError, end_of};
use crate::blocks::BLOCK_BYTES;

/// Zeros are written in pieces of this size.
const ZEROS: &[u8] = &[0; 64 << 10];

impl Partial {
    /// Truncates or extends the file to `size` bytes. Truncated content never becomes visible
    /// again. An extension reads as zeros.
    pub fn set_size(&self, size: u64) -> Result<(), PartialError> {
        end_of(0, size)?;
        let mut frame = write(&self.gate);
        self.fence.check()?;
        let _changing = self.times.changing(self.content());
        if size < self.size() {
            self.cut(&mut frame, size)
        } else {
            self.grow(&frame, size)
        }
    }

    /// The caller holds the gate exclusively.
    fn grow(&self, frame: &Frame, size: u64) -> Result<(), PartialError> {
        if size > self.size() {
            self.before_growth(frame)?;
            self.content()
                .set_size(size)
                .map_err(PartialError::host("extend a partial file"))?;
            self.size.store(size, Ordering::Release);
        }
        Ok(())
    }

    fn cut(&self, frame: &mut Frame, size: u64) -> Result<(), PartialError> {
        self.content()
            .set_size(size)
            .map_err(PartialError::host("truncate a partial file"))?;
        self.size.store(size, Ordering::Release);
        self.measure();
        self.end_incomplete(size.div_ceil(BLOCK_BYTES)..u64::MAX);
        let edge = size / BLOCK_BYTES;
        let length = size % BLOCK_BYTES;
        if length > 0 {
            let mut stripe = self.stripe(edge);
            if let Some(incomplete) = stripe.get_mut(&edge) {
                incomplete.written.truncate(length);
                let complete = incomplete.written.covers(length);
                let untouched = incomplete.written.is_empty();
                if complete {
                    self.set_present(edge..edge + 1);
                }
                if complete || untouched {
                    stripe.remove(&edge);
                    self.completion_ended(1);
                }
            }
        }
        if size < frame.limit {
            let counters = &self.shared.counters;
            counters
                .lower_bytes
                .fetch_sub(frame.limit - size, Ordering::Relaxed);
            frame.limit = size;
            self.mark_is_stale.store(true, Ordering::Release);
            let mut presence = write(&self.presence);
            let gone = presence.present.remove(frame.covered()..u64::MAX);
            presence.unrecorded.remove(frame.covered()..u64::MAX);
            counters.present.fetch_sub(gone, Ordering::Relaxed);
            drop(presence);
            // If this fails, the next growth of the file tries it again.
            if let Err(error) = self.before_growth(frame) {
                self.shared.log("cannot finish a truncation", &error);
            }
        }
        Ok(())
    }

    /// Removes blocks from the set of incomplete blocks.
    fn end_incomplete(&self, blocks: Range<u64>) {
        for stripe in &self.stripes {
            let mut stripe = lock(stripe);
            while let Some((&block, _)) = stripe.range(blocks.clone()).next() {
                stripe.remove(&block);
                self.completion_ended(1);
            }
        }
    }

    /// Makes a range read as zeros, and frees its space where possible.
    pub fn zero(&self, offset: u64, length: u64, size: KeepSize) -> Result<(), PartialError> {
        let end = end_of(offset, length)?;
        let frame = write(&self.gate);
        self.fence.check()?;
        let _changing = self.times.changing(self.content());
        if size == KeepSize::Grow {
            self.grow(&frame, end)?;
        }
        let size = self.size();
        let end = end.min(size);
        if offset >= end {
            return Ok(());
        }
        // A range that reaches the end of the file includes the rest of the last block.
        let hole_end = if end == size { end.next_multiple_of(BLOCK_BYTES) } else { end };
        let mut hole = offset..hole_end;
        for edge in [offset, hole_end] {
            let block = edge / BLOCK_BYTES;
            let block_bytes = block * BLOCK_BYTES..(block + 1) * BLOCK_BYTES;
            let is_host = block >= frame.covered() || read(&self.presence).present.contains(block);
            if edge == block_bytes.start || is_host {
                continue;
            }
            // Another part of this block is, or may be, the lower file's.
            let part = hole.start.max(block_bytes.start)..hole.end.min(block_bytes.end);
            if part.is_empty() {
                continue;
            }
            self.write_zeros(&frame, part.start..part.end.min(size))?;
            if edge == offset { hole.start = part.end } else { hole.end = part.start }
        }
        if hole.start >= hole.end {
            return Ok(());
        }
        self.expect_flush()?;
        self.punch(&frame, hole.clone())?;
        let whole = hole.start.div_ceil(BLOCK_BYTES)..hole.end / BLOCK_BYTES;
        let whole = whole.start..whole.end.min(frame.covered());
        if !whole.is_empty() {
            self.set_present(whole.clone());
            self.end_incomplete(whole);
            let _ = self.expect_flush();
        }
        Ok(())
    }

    /// Punches a hole into the host's file, or writes zeros if the host cannot punch holes.
    fn punch(&self, frame: &Frame, hole: Range<u64>) -> Result<(), PartialError> {
        match self.content().punch(hole.start, hole.end - hole.start) {
            Ok(()) => {
                self.measure();
                Ok(())
            }
            Err(error) if error.kind() == std::io::ErrorKind::Unsupported => {
                self.write_zeros(frame, hole.start..hole.end.min(self.size()))
            }
            Err(error) => Err(PartialError::host("punch a hole in a partial file")(error)),
        }
    }

    fn write_zeros(&self, frame: &Frame, range: Range<u64>) -> Result<(), PartialError> {
        let account = &self.shared.account;
        let _reserved = account.reserve_whole_write(self.content(), range.clone())?;
        let mut at = range.start;
        while at < range.end {
            let n = (range.end - at).min(ZEROS.len() as u64) as usize;
            match self.write_reserved(frame, at, &ZEROS[..n]) {
                // The next write reports the error that caused a short write.
                Ok(written) => at += written as u64,
                Err(error) => {
                    self.measure();
                    return Err(error);
                }
            }
        }
        self.measure();
        Ok(())
    }

    /// Allocates space for a range, so that later writes to the range do not fail for lack of
    /// space. The content does not change.
    pub fn allocate(&self, offset: u64, length: u64, size: KeepSize) -> Result<(), PartialError> {
        let end = end_of(offset, length)?;
        if length == 0 {
            return Ok(());
        }
        let frame = write(&self.gate);
        self.fence.check()?;
        let _changing = self.times.changing(self.content());
        if size == KeepSize::Grow && end > self.size() {
            self.before_growth(&frame)?;
        }
        let account = &self.shared.account;
        let _reserved = account.reserve_whole_write(self.content(), offset..end)?;
        let allocated = self.content().allocate(offset, length);
        self.measure();
        allocated.map_err(PartialError::host("allocate space for a partial file"))?;
        match size {
            KeepSize::Grow => self.grow(&frame, end),
            KeepSize::Keep => Ok(()),
        }
    }
}

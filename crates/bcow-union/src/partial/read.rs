//! Reads and seeks in a partial file.

use bcow::sync::atomic::Ordering;

use super::locks::read;
use super::shared::Completer;
use super::{Frame, Partial, PartialError, RunSource};
use crate::Seek;
use crate::blocks::BLOCK_BYTES;
use crate::host::read_all;

impl Partial {
    /// Reads from `offset` and returns the number of bytes read. It is less than the buffer's
    /// length only at the end of the file.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, PartialError> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let frame = read(&self.gate);
        let size = self.size();
        let end = offset.saturating_add(buf.len() as u64).min(size);
        if offset >= end {
            return Ok(0);
        }
        let mut at = offset;
        while at < end {
            let last = end.div_ceil(BLOCK_BYTES);
            let (source, until) = self.find(&frame, at / BLOCK_BYTES, last);
            let stop = until.saturating_mul(BLOCK_BYTES).min(end);
            let piece = &mut buf[(at - offset) as usize..(stop - offset) as usize];
            match source {
                RunSource::Host => self.read_host(at, piece)?,
                RunSource::Lower => self.read_lower(&frame, at, piece)?,
                RunSource::Incomplete => self.read_incomplete(&frame, at, piece)?,
            }
            at = stop;
        }
        Ok((end - offset) as usize)
    }

    pub(super) fn read_host(&self, at: u64, buf: &mut [u8]) -> Result<(), PartialError> {
        read_all(self.content(), at, buf)
            .map_err(PartialError::host("read the stored data of a partial file"))
    }

    /// Reads the visible bytes of the lower file, and zeros behind `limit`.
    pub(super) fn read_lower(
        &self,
        frame: &Frame,
        at: u64,
        buf: &mut [u8],
    ) -> Result<(), PartialError> {
        let shown = frame.limit.saturating_sub(at).min(buf.len() as u64) as usize;
        let (shown, beyond) = buf.split_at_mut(shown);
        beyond.fill(0);
        if shown.is_empty() {
            return Ok(());
        }
        self.lower
            .read_at(at, shown)
            .map_err(|errno| PartialError::Lower { offset: at, errno })
    }

    /// Reads from one incomplete block.
    fn read_incomplete(&self, frame: &Frame, at: u64, buf: &mut [u8]) -> Result<(), PartialError> {
        let block = at / BLOCK_BYTES;
        // The read does not wait for another thread that completes blocks, because that thread may
        // have many of them.
        let may_complete = self.times.try_hold().is_some();
        if may_complete
            && let Ok(Some(rest)) = self.read_rest(frame, block)
            && let Some(mut times) = self.times.try_hold()
        {
            let store = || self.store_rest(&rest, Completer::Reader);
            if times.preserve_time(self.content(), store).is_ok() {
                return self.read_host(at, buf);
            }
        }
        // Another thread holds the times or has completed the block, the host has no room for the
        // block, or the lower file is damaged in the missing part of it. The read still returns all
        // bytes that can be read.
        self.read_merged(frame, at, buf)
    }

    fn read_merged(&self, frame: &Frame, at: u64, buf: &mut [u8]) -> Result<(), PartialError> {
        let block = at / BLOCK_BYTES;
        let start = block * BLOCK_BYTES;
        let stripe = self.stripe(block);
        self.read_host(at, buf)?;
        let Some(incomplete) = stripe.get(&block) else {
            return Ok(());
        };
        let end = at + buf.len() as u64;
        for gap in incomplete.written.gaps(BLOCK_BYTES) {
            let from = (start + gap.start).max(at);
            let to = (start + gap.end).min(end);
            if from < to {
                let piece = &mut buf[(from - at) as usize..(to - at) as usize];
                self.read_lower(frame, from, piece)?;
            }
        }
        Ok(())
    }

    /// The offset of the first byte of data, or of the first byte in a hole, at or behind `offset`;
    /// `None` if the file ends before one.
    pub fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, PartialError> {
        let frame = read(&self.gate);
        let size = self.size();
        if offset >= size {
            return Ok(None);
        }
        let last = size.div_ceil(BLOCK_BYTES);
        let mut in_lower = Next::default();
        // The end of the host's data, from the last seek for a hole. No hole is made while the gate
        // is held shared. But blocks are completed, so a hole can become data, and more data can
        // follow the last data.
        let mut data_until = 0;
        let mut at = offset;
        while at < size {
            let (source, until) = self.find(&frame, at / BLOCK_BYTES, last);
            let stop = until.saturating_mul(BLOCK_BYTES).min(size);
            let found = match source {
                RunSource::Incomplete => match what {
                    Seek::Data => at,
                    Seek::Hole => stop,
                },
                RunSource::Host if at < data_until => data_until,
                RunSource::Host => {
                    let found = self
                        .content()
                        .seek(at, what)
                        .map_err(PartialError::host("look for holes"))?
                        .unwrap_or(u64::MAX);
                    if what == Seek::Hole {
                        data_until = found;
                    }
                    found
                }
                RunSource::Lower if at >= frame.limit => match what {
                    Seek::Data => stop,
                    Seek::Hole => at,
                },
                RunSource::Lower => {
                    let next = in_lower.from(at, || {
                        self.lower
                            .seek(at, what)
                            .map_err(|errno| PartialError::Lower { offset: at, errno })
                    })?;
                    match what {
                        Seek::Data if next >= frame.limit => stop,
                        Seek::Hole => next.min(frame.limit),
                        Seek::Data => next,
                    }
                }
            };
            if found < stop {
                return Ok(Some(found));
            }
            at = stop;
        }
        Ok(match what {
            Seek::Data => None,
            Seek::Hole => Some(size),
        })
    }
}

/// Caches the result of the last seek in the lower file, which does not change. So a search through
/// many small pieces does not repeat the seek for each.
#[derive(Default)]
struct Next(Option<u64>);

impl Next {
    fn from(
        &mut self,
        at: u64,
        seek: impl FnOnce() -> Result<Option<u64>, PartialError>,
    ) -> Result<u64, PartialError> {
        match self.0 {
            Some(known) if known >= at => Ok(known),
            _ => {
                let found = seek()?.unwrap_or(u64::MAX);
                self.0 = Some(found);
                Ok(found)
            }
        }
    }
}

//! The lower file as the backing of a BCoW file.

use bcow::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use bcow::{BlockDevice, Content, Error, Status};
use rustix::io::Errno;

use super::super::Lower;
use crate::Seek;
use crate::blocks::BLOCK_BYTES;

/// A lower file in whole blocks: its content up to a limit, and zeros behind it.
pub struct LowerDevice {
    lower: Arc<dyn Lower>,
    limit: AtomicU64,
}

impl LowerDevice {
    /// A device that shows the first `limit` bytes of a lower file.
    pub fn new(lower: Arc<dyn Lower>, limit: u64) -> Self {
        LowerDevice {
            limit: AtomicU64::new(limit.min(lower.size())),
            lower,
        }
    }

    /// Reduces the limit to `limit` bytes.
    pub(super) fn cut(&self, limit: u64) {
        self.limit.fetch_min(limit, Ordering::AcqRel);
    }

    fn shown(&self, offset: u64, length: u64) -> u64 {
        let limit = self.limit.load(Ordering::Acquire);
        limit.saturating_sub(offset).min(length)
    }
}

fn failed(offset: u64) -> impl Fn(Errno) -> Error {
    move |errno| Error::Io {
        action: "read",
        offset,
        source: errno.into(),
    }
}

impl BlockDevice for LowerDevice {
    fn size(&self) -> u64 {
        // The size does not depend on the limit, because the BCoW file above records this size.
        self.lower.size().next_multiple_of(BLOCK_BYTES)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        let length = buf.len() as u64;
        if offset.saturating_add(length) > self.size() {
            return Err(Error::OutOfRange {
                offset,
                length,
                size: self.size(),
            });
        }
        let (shown, beyond) = buf.split_at_mut(self.shown(offset, length) as usize);
        beyond.fill(0);
        match shown.is_empty() {
            true => Ok(()),
            false => self.lower.read_at(offset, shown).map_err(failed(offset)),
        }
    }

    fn status(&self, offset: u64, length: u64) -> Result<Status, Error> {
        let shown = self.shown(offset, length);
        let seek = |at, what| {
            let found = self.lower.seek(at, what).map_err(failed(at))?;
            let end = offset + shown;
            Ok::<_, Error>(found.map_or(end, |at| at.min(end)) - offset)
        };
        let hole = |length| Status {
            length,
            content: Content::Hole,
            depth: 0,
        };
        if shown == 0 {
            return Ok(hole(length.max(1)));
        }
        match seek(offset, Seek::Data)? {
            0 => Ok(Status {
                length: seek(offset, Seek::Hole)?.max(1),
                content: Content::Data,
                depth: 1,
            }),
            data => Ok(hole(data)),
        }
    }
}

//! Space that is initialised ahead, for a disk that is often flushed.
//!
//! The sync of a file that has grown makes its metadata durable as well: the host commits its own
//! journal, which takes at least one more barrier of the device. So if a disk is flushed again and
//! again with little data, the background fills space behind the end of the file with zeros, and
//! makes that durable. Later writes there change no metadata.
//!
//! Nothing depends on this. A crash leaves zeros in free space, or behind the end of the file,
//! which the next opening cuts off.

use std::ops::Range;

use super::Inner;
use super::committer::{Committer, Taken};
use super::incomplete::Job;
use super::write::zeros;
use crate::Error;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, SMALL, lock};

/// Number of successive small flushes after which space is initialised.
const MANY_FLUSHES: u32 = if SMALL { 1 } else { 4 };
/// Most data in bytes of a small flush. With more, the data takes longer than the host's journal.
const SMALL_FLUSH_BYTES: u64 = 256 << 10;
/// Bytes of the log that are initialised at a time: room for some hundred small records.
const LOG_AHEAD_BYTES: u64 = if SMALL { 4 << 10 } else { 64 << 10 };

impl Inner {
    /// Records a flush of the blocks in `taken`, and lets the background initialise space if there
    /// were many small ones.
    pub(super) fn note_flush(self: &Arc<Self>, committer: &mut Committer, taken: &Taken) {
        let new: u64 = taken.used().map(|range| range.end - range.start).sum();
        committer.small_flushes = match new {
            0 => committer.small_flushes,
            1..=SMALL_FLUSH_BYTES => committer.small_flushes.saturating_add(1),
            _ => 0,
        };
        if committer.small_flushes >= MANY_FLUSHES
            && !self.ahead_queued.load(Ordering::Relaxed)
            && self.space.wants_ahead()
            && self.file.storage.prefers_written_space()
        {
            self.ahead_queued.store(true, Ordering::Relaxed);
            self.later(Job::WriteAhead);
        }
    }

    /// Initialises space for later writes.
    pub(super) fn write_ahead(&self) -> Result<(), Error> {
        // A file that was put to rest does not change until the next write.
        let wanted = lock(&self.committer).small_flushes >= MANY_FLUSHES;
        while wanted && let Some(range) = self.space.allocate_ahead() {
            let written = self
                .write_zeros_at(range.clone())
                .and_then(|()| self.barrier());
            if let Err(error) = written {
                self.space.free([range]);
                return Err(error);
            }
            self.space.add_ready(range);
        }
        self.ahead_queued.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn write_zeros_at(&self, range: Range<u64>) -> Result<(), Error> {
        zeros(range).try_for_each(|(at, bytes)| self.write_storage(at, bytes))
    }

    /// Writes zeros behind the record of `bytes` bytes at the end of the log, if that part of the
    /// log was never written. The next barrier covers them.
    pub(super) fn write_log_ahead(&self, committer: &mut Committer, bytes: u64) {
        let end = committer.tail + bytes;
        if committer.small_flushes < MANY_FLUSHES
            || end <= committer.written_log
            || !self.file.storage.prefers_written_space()
        {
            return;
        }
        let (log, log_bytes) = committer.header.log;
        let written = (end + LOG_AHEAD_BYTES).min(log_bytes);
        // After an error, the next record finds a hole there, as it would without this.
        let _ = self.write_zeros_at(log + end..log + written);
        committer.written_log = written;
    }
}

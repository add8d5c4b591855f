//! The walk over the log of a journal.

use zerocopy::FromBytes;

use super::super::ReadError;
use super::Journal;
use crate::format::{JOURNAL_MAGIC, JournalHeader};
use crate::output::BlockBuffer;

/// A block of the log that belongs to a transaction and is not content.
pub(super) struct LogBlock {
    /// The block of the journal.
    pub(super) at: u64,
    /// One of [`journal_block`].
    pub(super) kind: u32,
    pub(super) bytes: Box<BlockBuffer>,
}

/// A position in the log.
pub(super) struct Cursor<'j> {
    journal: &'j Journal<'j>,
    at: u64,
    /// The sequence number of the transaction at `at`.
    pub(super) sequence: u32,
    /// The number of blocks not yet passed: the walk over a full log ends at its start block.
    left: u64,
}

impl Cursor<'_> {
    /// The next block of the transaction. `None` if the log has no further block of it.
    pub(super) fn next(&mut self) -> Result<Option<LogBlock>, ReadError> {
        if self.left == 0 {
            return Ok(None);
        }
        let (_, bytes) = self.journal.block(self.at)?;
        let Ok((header, _)) = JournalHeader::read_from_prefix(&bytes[..]) else {
            return Ok(None);
        };
        if header.magic.get() != JOURNAL_MAGIC || header.sequence.get() != self.sequence {
            return Ok(None);
        }
        let (at, kind) = (self.at, header.block_type.get());
        self.pass();
        Ok(Some(LogBlock { at, kind, bytes }))
    }

    /// Passes blocks of content. Returns their places in the journal, fewer than `count` at the end
    /// of the log.
    pub(super) fn contents(&mut self, count: usize) -> Vec<u64> {
        let count = self.left.min(count as u64);
        let places = (0..count).map(|_| {
            let at = self.at;
            self.pass();
            at
        });
        places.collect()
    }

    /// Moves to the next block of the log. The first block follows the last one.
    fn pass(&mut self) {
        self.left -= 1;
        self.at += 1;
        if self.at == self.journal.end {
            self.at = self.journal.first;
        }
    }

    /// Continues with the next transaction.
    pub(super) fn committed(&mut self) {
        self.sequence = self.sequence.wrapping_add(1);
    }
}

impl Journal<'_> {
    /// The start of the log.
    pub(super) fn cursor(&self) -> Cursor<'_> {
        Cursor {
            journal: self,
            at: self.start,
            sequence: self.sequence,
            left: self.end - self.first,
        }
    }
}

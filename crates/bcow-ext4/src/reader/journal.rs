//! Reads the journal: finds the blocks whose newest content is in the journal and not yet in its
//! place in the file system.
//!
//! Source: the kernel's `fs/jbd2/recovery.c` of Linux 6.18. A transaction is complete if the log
//! has its commit block; the reader ignores an incomplete one. It also ignores a journaled block if
//! the same or a later transaction revokes the block. A log that the kernel refuses is an error.

mod complete;
mod cursor;
mod lists;
mod superblock;

use std::collections::HashMap;

use cursor::LogBlock;
use lists::Change;

use super::{Extents, ReadError, Reader, Structure};
use crate::InodeNumber;
use crate::checksum::Checksum;
use crate::format::{BLOCK_BYTES, JOURNAL_MAGIC, journal_block, journal_incompatible};
use crate::output::BlockBuffer;

/// The place in the journal of the newest content of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct JournaledBlock {
    /// The block of the file system that stores the content. It belongs to the journal.
    pub block: u64,
    /// Whether zeros replace the first four bytes, which are those of [`JOURNAL_MAGIC`].
    is_escaped: bool,
}

impl JournaledBlock {
    /// Restores the content of the block from `block`, the content in the journal.
    pub(super) fn restore(&self, block: &mut [u8; BLOCK_BYTES]) {
        if self.is_escaped {
            block[..4].copy_from_slice(&JOURNAL_MAGIC.to_be_bytes());
        }
    }
}

/// Finds the blocks whose newest content is in the journal, which is the inode `number`. The key of
/// the result is the block of the file system.
pub(super) fn replay(
    reader: &Reader,
    number: InodeNumber,
) -> Result<HashMap<u64, JournaledBlock>, ReadError> {
    let inode = reader.inode(number)?;
    let blocks = inode.size / BLOCK_BYTES as u64;
    let journal = Journal::open(reader, reader.extents(&inode)?, blocks)?;
    match journal {
        Some(journal) => journal.replay(),
        None => Ok(HashMap::new()),
    }
}

struct Journal<'r> {
    reader: &'r Reader,
    extents: Extents,
    /// Incompatible features.
    features: u32,
    /// Whether each commit has the checksum of the blocks of its transaction: version 1.
    has_transaction_checksums: bool,
    seed: Checksum,
    /// The first block of the log, as a block of the journal.
    first: u64,
    /// The block after the last block of the log.
    end: u64,
    /// The first block of the oldest transaction.
    start: u64,
    /// The sequence number of the oldest transaction.
    sequence: u32,
}

impl Journal<'_> {
    fn has(&self, feature: u32) -> bool {
        self.features & feature != 0
    }

    fn has_checksums(&self) -> bool {
        self.has(journal_incompatible::CHECKSUM_2) || self.has(journal_incompatible::CHECKSUM_3)
    }

    /// Reads a block of the journal. Returns its block of the file system, and its content.
    fn block(&self, block: u64) -> Result<(u64, Box<BlockBuffer>), ReadError> {
        let run = self.extents.find(block).filter(|run| run.is_written);
        let run = run.ok_or_else(|| Structure::Journal(block).damaged("it is a hole"))?;
        let at = run.physical + (block - u64::from(run.logical));
        Ok((at, self.reader.block(at)?))
    }

    fn replay(&self) -> Result<HashMap<u64, JournaledBlock>, ReadError> {
        let end = self.end_of_complete()?;
        let revoked = self.revoked_before(end)?;
        let mut replayed = HashMap::new();
        let mut cursor = self.cursor();
        while cursor.sequence != end
            && let Some(found) = cursor.next()?
        {
            match found.kind {
                journal_block::DESCRIPTOR => {
                    let changes = self.changes(&found.bytes);
                    let contents = cursor.contents(changes.len());
                    for (change, at) in changes.iter().zip(contents) {
                        let revocation = revoked.get(&change.block);
                        if revocation.is_some_and(|by| !is_before(*by, cursor.sequence)) {
                            continue;
                        }
                        let journaled = self.journaled(change, at, cursor.sequence)?;
                        replayed.insert(change.block, journaled);
                    }
                }
                journal_block::COMMIT => cursor.committed(),
                _ => {}
            }
        }
        Ok(replayed)
    }

    /// The blocks that transactions before `end` revoke, each with the last of these transactions.
    /// A hostile log can name the same blocks any number of times, so each block is kept once.
    fn revoked_before(&self, end: u32) -> Result<HashMap<u64, u32>, ReadError> {
        let mut revoked = HashMap::new();
        let mut cursor = self.cursor();
        while cursor.sequence != end
            && let Some(LogBlock { at, kind, bytes }) = cursor.next()?
        {
            match kind {
                journal_block::DESCRIPTOR => {
                    cursor.contents(self.changes(&bytes).len());
                }
                journal_block::REVOKE => {
                    let blocks = self.revoked(at, &bytes)?.into_iter();
                    revoked.extend(blocks.map(|block| (block, cursor.sequence)));
                }
                journal_block::COMMIT => cursor.committed(),
                _ => {}
            }
        }
        Ok(revoked)
    }

    /// The place of the content of a changed block, which block `at` of the journal has. Compares
    /// the content with its checksum.
    fn journaled(
        &self,
        change: &Change,
        at: u64,
        sequence: u32,
    ) -> Result<JournaledBlock, ReadError> {
        let damaged = |problem| Structure::Journal(at).damaged(problem);
        if change.block >= self.reader.blocks {
            return Err(damaged("it belongs to a block outside of the file system"));
        }
        let (block, content) = self.block(at)?;
        if self.has_checksums() {
            let found = self.seed.with(&sequence.to_be_bytes()).with(&content[..]).0;
            let is_same = if self.has(journal_incompatible::CHECKSUM_3) {
                found == change.checksum
            } else {
                found as u16 == change.checksum as u16
            };
            if !is_same {
                return Err(damaged("its checksum is wrong"));
            }
        }
        Ok(JournaledBlock {
            block,
            is_escaped: change.is_escaped,
        })
    }
}

/// Whether a sequence number is before another one. The numbers wrap around.
fn is_before(sequence: u32, other: u32) -> bool {
    (sequence.wrapping_sub(other) as i32) < 0
}

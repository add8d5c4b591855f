//! The complete transactions of a journal.

use zerocopy::{FromBytes, IntoBytes};

use super::super::{ReadError, Structure};
use super::Journal;
use super::cursor::LogBlock;
use crate::checksum::BigEndianChecksum;
use crate::format::{BLOCK_BYTES, JournalCommit, journal_block, journal_incompatible};
use crate::output::BlockBuffer;

impl Journal<'_> {
    /// The sequence number of the first transaction that is not complete: the log ends before its
    /// commit, its checksums are wrong, or it belongs to an older use of the same blocks. A log
    /// whose damage has no such cause is an error.
    pub(super) fn end_of_complete(&self) -> Result<u32, ReadError> {
        let mut cursor = self.cursor();
        // The first transaction with a wrong checksum, in a log of asynchronous commits. They do
        // not wait for the other blocks, so the log may have commits of later transactions.
        let mut end = None;
        // A block of the current transaction whose own checksum is wrong.
        let mut damaged = None;
        let mut checksum = BigEndianChecksum::NEW;
        let mut last_time = 0;
        while let Some(LogBlock { at, kind, bytes }) = cursor.next()? {
            let wrong = |at| Structure::Journal(at).damaged("its checksum is wrong");
            let is_list = matches!(kind, journal_block::DESCRIPTOR | journal_block::REVOKE);
            if is_list && !self.is_tail_right(&bytes) {
                damaged = damaged.or(Some(at));
            }
            match kind {
                journal_block::DESCRIPTOR => {
                    let contents = cursor.contents(self.changes(&bytes).len());
                    if self.has_transaction_checksums {
                        checksum = checksum.with(&bytes[..]);
                        for at in contents {
                            checksum = checksum.with(&self.block(at)?.1[..]);
                        }
                    }
                }
                journal_block::REVOKE => {}
                journal_block::COMMIT => {
                    let Ok((commit, _)) = JournalCommit::read_from_prefix(&bytes[..]) else {
                        break;
                    };
                    let is_older = commit.seconds.get() < last_time;
                    if let Some(at) = damaged {
                        if is_older {
                            break;
                        }
                        return Err(wrong(at));
                    }
                    if self.has_transaction_checksums && end.is_some() {
                        return Err(wrong(at));
                    }
                    if !self.is_commit_right(&bytes, &commit, checksum) {
                        if is_older {
                            break;
                        }
                        if !self.has(journal_incompatible::ASYNC_COMMIT) {
                            return Err(wrong(at));
                        }
                        end = Some(cursor.sequence);
                    }
                    checksum = BigEndianChecksum::NEW;
                    last_time = commit.seconds.get();
                    cursor.committed();
                }
                _ => break,
            }
        }
        Ok(end.unwrap_or(cursor.sequence))
    }

    /// Compares a commit block with its checksum: that of the blocks of its transaction, or its
    /// own.
    fn is_commit_right(
        &self,
        block: &BlockBuffer,
        commit: &JournalCommit,
        transaction: BigEndianChecksum,
    ) -> bool {
        let [stored, ..] = commit.checksums;
        if self.has_transaction_checksums {
            let form = (commit.checksum_type, commit.checksum_bytes);
            return match form {
                (0, 0) => stored.get() == 0,
                _ => form == JournalCommit::CRC32 && stored.get() == transaction.0,
            };
        }
        if !self.has_checksums() {
            return true;
        }
        let head = size_of::<JournalCommit>();
        let mut covered = commit.clone();
        covered.checksums[0] = 0.into();
        let seed = self.seed.with(covered.as_bytes());
        // If a device wrote only a part of the block, the rest of which was zeros, the commit is
        // valid nevertheless.
        let rests = [&block[head..], &[0; BLOCK_BYTES][head..]];
        rests.iter().any(|rest| seed.with(rest).0 == stored.get())
    }
}

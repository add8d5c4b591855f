//! Reads the journal: finds the blocks whose newest content is in the journal and not yet in its
//! place in the file system.
//!
//! Source: the kernel's `fs/jbd2/recovery.c` of Linux 6.18. A transaction is complete if the log
//! has its commit block; the reader ignores an incomplete one. It also ignores a journaled block if
//! the same or a later transaction revokes the block. A log that the kernel refuses is an error.

use std::collections::HashMap;

use zerocopy::{FromBytes, IntoBytes};

use super::{Extents, Place, ReadError, Reader};
use crate::InodeNumber;
use crate::checksum::{BigEndianChecksum, Checksum};
use crate::format::{
    BLOCK_BYTES, CHECKSUM_CRC32C, JOURNAL_MAGIC, JOURNAL_SUPERBLOCK, JOURNAL_SUPERBLOCK_BYTES,
    JournalCommit, JournalHeader, JournalSuperBlock, journal_block, journal_compatible,
    journal_flags, journal_incompatible,
};
use crate::output::BlockBuffer;

/// The incompatible features of a journal that this reader supports.
const KNOWN: u32 = journal_incompatible::REVOKE
    | journal_incompatible::BITS_64
    | journal_incompatible::ASYNC_COMMIT
    | journal_incompatible::CHECKSUM_2
    | journal_incompatible::CHECKSUM_3;

const HEADER: usize = size_of::<JournalHeader>();
/// The header of a revoke block: the common header, and the number of bytes in use.
const REVOKE_HEADER: usize = HEADER + 4;
/// Bytes of the checksum at the end of a descriptor block and of a revoke block.
const TAIL: usize = 4;
/// Bytes of the UUID that follows a tag of a descriptor, unless the tag has the UUID of the tag
/// before it.
const UUID: usize = 16;

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
    /// The seed of the checksums.
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

/// The change of a block in a transaction.
struct Change {
    /// The block of the file system.
    block: u64,
    /// As in [`JournaledBlock`].
    is_escaped: bool,
    /// The checksum of the content in the journal. Only the low 16 bits count without
    /// [`journal_incompatible::CHECKSUM_3`].
    checksum: u32,
}

/// A block of the log that belongs to a transaction and is not content.
struct LogBlock {
    /// The block of the journal.
    at: u64,
    /// One of [`journal_block`].
    kind: u32,
    bytes: Box<BlockBuffer>,
}

/// A position in the log.
struct Cursor<'j> {
    journal: &'j Journal<'j>,
    at: u64,
    /// The sequence number of the transaction at `at`.
    sequence: u32,
    /// The number of blocks not yet passed: the walk over a full log ends at its start block.
    left: u64,
}

impl Cursor<'_> {
    /// The next block of the transaction. `None` if the log has no further block of it.
    fn next(&mut self) -> Result<Option<LogBlock>, ReadError> {
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
    fn contents(&mut self, count: usize) -> Vec<u64> {
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
    fn committed(&mut self) {
        self.sequence = self.sequence.wrapping_add(1);
    }
}

impl<'r> Journal<'r> {
    /// Validates the superblock of the journal, a file of `blocks` blocks. `None` if the journal
    /// has nothing to replay.
    fn open(reader: &'r Reader, extents: Extents, blocks: u64) -> Result<Option<Self>, ReadError> {
        let damaged = |problem| Place::Journal(0).damaged(problem);
        // So the log has at most as many blocks as the file system.
        if extents.overlap() {
            return Err(damaged("two blocks of the journal are in the same place"));
        }
        let mut journal = Journal {
            reader,
            extents,
            features: 0,
            has_transaction_checksums: false,
            seed: Checksum(0),
            first: 0,
            end: 1,
            start: 0,
            sequence: 0,
        };
        let (_, block) = journal.block(0)?;
        let Ok((superblock, _)) = JournalSuperBlock::read_from_prefix(&block[..]) else {
            return Err(damaged("it is too short"));
        };
        if superblock.magic.get() != JOURNAL_MAGIC {
            return Err(damaged("it is not the superblock of a journal"));
        }
        if superblock.block_type.get() != JOURNAL_SUPERBLOCK {
            return Err(ReadError::Journal("a superblock of version 1"));
        }
        if superblock.start.get() == 0 {
            return Ok(None);
        }
        let features = superblock.incompatible.get();
        if features & journal_incompatible::FAST_COMMIT != 0 {
            return Err(ReadError::Journal("fast commits"));
        }
        if features & !KNOWN != 0 || superblock.read_only_compatible.get() != 0 {
            return Err(ReadError::Journal("unknown features"));
        }
        journal.features = features;
        journal.has_transaction_checksums =
            superblock.compatible.get() & journal_compatible::CHECKSUM != 0;
        let versions = [
            journal.has_transaction_checksums,
            journal.has(journal_incompatible::CHECKSUM_2),
            journal.has(journal_incompatible::CHECKSUM_3),
        ];
        if versions.into_iter().filter(|&version| version).count() > 1 {
            return Err(damaged("it has checksums of two versions"));
        }
        journal.seed = Checksum(u32::MAX).with(&superblock.uuid);
        if journal.has_checksums() {
            let mut covered = superblock.clone();
            covered.checksum = 0.into();
            let rest = &block[size_of::<JournalSuperBlock>()..JOURNAL_SUPERBLOCK_BYTES];
            let found = Checksum(u32::MAX).with(covered.as_bytes()).with(rest);
            let is_crc32c = superblock.checksum_type == CHECKSUM_CRC32C;
            if !is_crc32c || found.0 != superblock.checksum.get() {
                return Err(damaged("its checksum is wrong"));
            }
        }
        journal.first = superblock.first.get().into();
        journal.end = superblock.blocks.get().into();
        journal.start = superblock.start.get().into();
        journal.sequence = superblock.sequence.get();
        let log = journal.first..journal.end;
        let is_whole = superblock.block_bytes.get() as usize == BLOCK_BYTES
            && journal.end <= blocks
            && journal.first > 0
            && log.contains(&journal.start);
        match is_whole {
            true => Ok(Some(journal)),
            false => Err(damaged("its block size or its bounds of the log are wrong")),
        }
    }

    fn has(&self, feature: u32) -> bool {
        self.features & feature != 0
    }

    fn has_checksums(&self) -> bool {
        self.has(journal_incompatible::CHECKSUM_2) || self.has(journal_incompatible::CHECKSUM_3)
    }

    /// Reads a block of the journal. Returns its block of the file system, and its content.
    fn block(&self, block: u64) -> Result<(u64, Box<BlockBuffer>), ReadError> {
        let run = self.extents.find(block).filter(|run| run.is_written);
        let run = run.ok_or_else(|| Place::Journal(block).damaged("it is a hole"))?;
        let at = run.physical + (block - u64::from(run.logical));
        Ok((at, self.reader.block(at)?))
    }

    /// The start of the log.
    fn cursor(&self) -> Cursor<'_> {
        Cursor {
            journal: self,
            at: self.start,
            sequence: self.sequence,
            left: self.end - self.first,
        }
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

    /// The sequence number of the first transaction that is not complete: the log ends before its
    /// commit, its checksums are wrong, or it belongs to an older use of the same blocks. A log
    /// whose damage has no such cause is an error.
    fn end_of_complete(&self) -> Result<u32, ReadError> {
        let mut cursor = self.cursor();
        // The first transaction with a wrong checksum, in a log of asynchronous commits. They do
        // not wait for the other blocks, so the log may have commits of later transactions.
        let mut end = None;
        // A block of the current transaction whose own checksum is wrong.
        let mut damaged = None;
        let mut checksum = BigEndianChecksum::NEW;
        let mut last_time = 0;
        while let Some(LogBlock { at, kind, bytes }) = cursor.next()? {
            let wrong = |at| Place::Journal(at).damaged("its checksum is wrong");
            match kind {
                journal_block::DESCRIPTOR => {
                    if !self.is_tail_right(&bytes) {
                        damaged = damaged.or(Some(at));
                    }
                    let contents = cursor.contents(self.changes(&bytes).len());
                    if self.has_transaction_checksums {
                        checksum = checksum.with(&bytes[..]);
                        for at in contents {
                            checksum = checksum.with(&self.block(at)?.1[..]);
                        }
                    }
                }
                journal_block::REVOKE => {
                    if !self.is_tail_right(&bytes) {
                        damaged = damaged.or(Some(at));
                    }
                }
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
        let damaged = |problem| Place::Journal(at).damaged(problem);
        if change.block >= self.reader.blocks {
            return Err(damaged("it belongs to a block outside of the file system"));
        }
        let (block, content) = self.block(at)?;
        if self.has_checksums() {
            let found = self.seed.with(&sequence.to_be_bytes()).with(&content[..]).0;
            let is_same = match self.has(journal_incompatible::CHECKSUM_3) {
                true => found == change.checksum,
                false => found as u16 == change.checksum as u16,
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

    /// The changes that a descriptor block lists. The list ends at its last tag, or with the block.
    fn changes(&self, block: &BlockBuffer) -> Vec<Change> {
        let wide = self.has(journal_incompatible::BITS_64);
        let with_checksum = self.has(journal_incompatible::CHECKSUM_3);
        // Tags with a checksum of version 2 have two unused bytes at the end.
        let unused = match self.has(journal_incompatible::CHECKSUM_2) {
            true => 2,
            false => 0,
        };
        let length = match (with_checksum, wide) {
            (true, _) => 16,
            (_, true) => 12 + unused,
            _ => 8 + unused,
        };
        let mut found = Vec::new();
        let mut rest = &block[HEADER..self.end_of_list()];
        while let Some(tag) = rest.get(..length) {
            let word =
                |at: usize| u32::from_be_bytes([tag[at], tag[at + 1], tag[at + 2], tag[at + 3]]);
            let (flags, checksum) = match with_checksum {
                true => (word(4), word(12)),
                false => (word(4) & 0xffff, word(4) >> 16),
            };
            let high = if wide { word(8) } else { 0 };
            found.push(Change {
                block: u64::from(high) << 32 | u64::from(word(0)),
                is_escaped: flags & journal_flags::ESCAPED != 0,
                checksum,
            });
            if flags & journal_flags::LAST != 0 {
                break;
            }
            let uuid = match flags & journal_flags::SAME_UUID {
                0 => UUID,
                _ => 0,
            };
            rest = rest.get(length + uuid..).unwrap_or_default();
        }
        found
    }

    /// The blocks that a revoke block lists.
    fn revoked(&self, at: u64, block: &BlockBuffer) -> Result<Vec<u64>, ReadError> {
        let word = |at: usize| {
            u32::from_be_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
        };
        let used = (word(HEADER) as usize).max(REVOKE_HEADER);
        let list = block[..self.end_of_list()].get(REVOKE_HEADER..used);
        let list =
            list.ok_or_else(|| Place::Journal(at).damaged("its list of blocks is damaged"))?;
        let found = match self.has(journal_incompatible::BITS_64) {
            true => {
                let (numbers, _) = list.as_chunks::<8>();
                numbers
                    .iter()
                    .map(|bytes| u64::from_be_bytes(*bytes))
                    .collect()
            }
            false => {
                let (numbers, _) = list.as_chunks::<4>();
                let numbers = numbers.iter();
                numbers
                    .map(|bytes| u32::from_be_bytes(*bytes).into())
                    .collect()
            }
        };
        Ok(found)
    }

    /// The end of the list in a descriptor block or in a revoke block.
    fn end_of_list(&self) -> usize {
        match self.has_checksums() {
            true => BLOCK_BYTES - TAIL,
            false => BLOCK_BYTES,
        }
    }

    /// Compares a descriptor block or a revoke block with the checksum at its end.
    fn is_tail_right(&self, block: &BlockBuffer) -> bool {
        let (covered, tail) = block.split_at(BLOCK_BYTES - TAIL);
        let found = self.seed.with(covered).with(&[0; TAIL]).0;
        !self.has_checksums() || found.to_be_bytes() == tail
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

/// Whether a sequence number is before another one. The numbers wrap around.
fn is_before(sequence: u32, other: u32) -> bool {
    (sequence.wrapping_sub(other) as i32) < 0
}

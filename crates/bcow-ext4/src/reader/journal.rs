//! Reads the journal: finds the blocks whose newest content is in the journal and not yet in its
//! place in the file system.
//!
//! Source: the kernel's `fs/jbd2/recovery.c`. A transaction is complete if the log has its commit
//! block; the reader ignores an incomplete one. It also ignores a journaled block if the same or a
//! later transaction revokes the block.

use std::collections::{HashMap, HashSet};

use zerocopy::{FromBytes, IntoBytes};

use super::{Extents, Place, ReadError, Reader};
use crate::InodeNumber;
use crate::checksum::Checksum;
use crate::format::{
    BLOCK_BYTES, JOURNAL_MAGIC, JOURNAL_SUPERBLOCK, JOURNAL_SUPERBLOCK_BYTES, JournalHeader,
    JournalSuperBlock, journal_block, journal_flags, journal_incompatible,
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
/// The offset of the checksum in a commit block.
const COMMIT_CHECKSUM: usize = 16;
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
    let journal = Journal::open(reader, reader.extents(&inode)?)?;
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

/// The last change of a block in a transaction.
struct Change {
    /// The block of the journal that has the new content.
    journal_block: u64,
    /// The sequence number of the transaction.
    sequence: u32,
    /// As in [`JournaledBlock`].
    is_escaped: bool,
    /// The checksum of the content in the journal. Only the low 16 bits count without
    /// [`journal_incompatible::CHECKSUM_3`].
    checksum: u32,
}

/// Changes and revocations, by the block of the file system. A hostile log can name the same blocks
/// any number of times, so each block is kept once.
#[derive(Default)]
struct Changes {
    /// The newest change of each block.
    changed: HashMap<u64, Change>,
    /// Blocks whose content in the same and in earlier transactions is not valid.
    revoked: HashSet<u64>,
}

impl Changes {
    /// Adds a later transaction.
    fn add(&mut self, transaction: Changes) {
        self.changed.extend(transaction.changed);
        for block in transaction.revoked {
            self.changed.remove(&block);
        }
    }
}

impl<'r> Journal<'r> {
    /// Validates the superblock of the journal. `None` if the journal has nothing to replay.
    fn open(reader: &'r Reader, extents: Extents) -> Result<Option<Self>, ReadError> {
        let damaged = |problem| Place::Journal(0).damaged(problem);
        // So the log has at most as many blocks as the file system.
        if extents.overlap() {
            return Err(damaged("two blocks of the journal are in the same place"));
        }
        let mut journal = Journal {
            reader,
            extents,
            features: 0,
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
        if features & !KNOWN != 0 {
            return Err(ReadError::Journal("unknown features"));
        }
        journal.features = features;
        journal.seed = Checksum(u32::MAX).with(&superblock.uuid);
        if journal.has_checksums() {
            let mut covered = superblock.clone();
            covered.checksum = 0.into();
            let rest = &block[size_of::<JournalSuperBlock>()..JOURNAL_SUPERBLOCK_BYTES];
            let found = Checksum(u32::MAX).with(covered.as_bytes()).with(rest);
            if found.0 != superblock.checksum.get() {
                return Err(damaged("its checksum is wrong"));
            }
        }
        journal.first = superblock.first.get().into();
        journal.end = superblock.blocks.get().into();
        journal.start = superblock.start.get().into();
        journal.sequence = superblock.sequence.get();
        let log = journal.first..journal.end;
        let is_whole = superblock.block_bytes.get() as usize == BLOCK_BYTES
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

    /// The block of the log after `block`. The first block follows the last one.
    fn next_in_log(&self, block: u64) -> u64 {
        match block + 1 {
            next if next < self.end => next,
            _ => self.first,
        }
    }

    fn replay(&self) -> Result<HashMap<u64, JournaledBlock>, ReadError> {
        let changed = self.transactions()?.changed;
        let places = changed.into_iter().map(|(block, change)| {
            let journaled = self.journaled(&change)?;
            Ok((block, journaled))
        });
        places.collect()
    }

    /// The place of the content of a changed block. Compares the content with its checksum.
    fn journaled(&self, change: &Change) -> Result<JournaledBlock, ReadError> {
        let (block, content) = self.block(change.journal_block)?;
        if self.has_checksums() {
            let found = self
                .seed
                .with(&change.sequence.to_be_bytes())
                .with(&content[..])
                .0;
            let is_same = match self.has(journal_incompatible::CHECKSUM_3) {
                true => found == change.checksum,
                false => found as u16 == change.checksum as u16,
            };
            if !is_same {
                return Err(Place::Journal(change.journal_block).damaged("its checksum is wrong"));
            }
        }
        Ok(JournaledBlock {
            block,
            is_escaped: change.is_escaped,
        })
    }

    /// The changes of all complete transactions.
    fn transactions(&self) -> Result<Changes, ReadError> {
        let mut complete = Changes::default();
        let mut open = Changes::default();
        let mut sequence = self.sequence;
        let mut at = self.start;
        // The number of blocks not yet read: the walk over a full log ends at its start block.
        let mut left = self.end - self.first;
        while left > 0 {
            let (_, block) = self.block(at)?;
            let Ok((header, _)) = JournalHeader::read_from_prefix(&block[..]) else {
                break;
            };
            if header.magic.get() != JOURNAL_MAGIC || header.sequence.get() != sequence {
                break;
            }
            let mut used = 1;
            match header.block_type.get() {
                journal_block::DESCRIPTOR => {
                    self.check_tail(at, &block)?;
                    let mut content = at;
                    let changes = self.changes(at, &block)?;
                    used += changes.len() as u64;
                    for (block, is_escaped, checksum) in changes {
                        content = self.next_in_log(content);
                        let change = Change {
                            journal_block: content,
                            sequence,
                            is_escaped,
                            checksum,
                        };
                        open.changed.insert(block, change);
                    }
                }
                journal_block::REVOKE => {
                    self.check_tail(at, &block)?;
                    open.revoked.extend(self.revoked(at, &block)?);
                }
                journal_block::COMMIT => {
                    self.check_commit(at, &block)?;
                    let blocks = open.changed.keys().chain(&open.revoked);
                    if blocks.max().is_some_and(|last| *last >= self.reader.blocks) {
                        let problem = "its transaction names a block outside of the file system";
                        return Err(Place::Journal(at).damaged(problem));
                    }
                    complete.add(std::mem::take(&mut open));
                    sequence = sequence.wrapping_add(1);
                }
                _ => break,
            }
            if used > left {
                break;
            }
            left -= used;
            for _ in 0..used {
                at = self.next_in_log(at);
            }
        }
        Ok(complete)
    }

    /// The tags of a descriptor block. Each has the block of the file system, whether its content
    /// is escaped, and the checksum.
    fn changes(&self, at: u64, block: &BlockBuffer) -> Result<Vec<(u64, bool, u32)>, ReadError> {
        let damaged = || Place::Journal(at).damaged("its list of blocks is damaged");
        let end = match self.has_checksums() {
            true => BLOCK_BYTES - TAIL,
            false => BLOCK_BYTES,
        };
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
        let mut rest = &block[HEADER..end];
        loop {
            let tag = rest.get(..length).ok_or_else(damaged)?;
            let word =
                |at: usize| u32::from_be_bytes([tag[at], tag[at + 1], tag[at + 2], tag[at + 3]]);
            let (flags, checksum) = match with_checksum {
                true => (word(4), word(12)),
                false => (word(4) & 0xffff, word(4) >> 16),
            };
            let high = if wide { word(8) } else { 0 };
            let number = u64::from(high) << 32 | u64::from(word(0));
            found.push((number, flags & journal_flags::ESCAPED != 0, checksum));
            if flags & journal_flags::LAST != 0 {
                return Ok(found);
            }
            let uuid = match flags & journal_flags::SAME_UUID {
                0 => UUID,
                _ => 0,
            };
            rest = rest.get(length + uuid..).ok_or_else(damaged)?;
        }
    }

    /// The blocks that a revoke block lists.
    fn revoked(&self, at: u64, block: &BlockBuffer) -> Result<Vec<u64>, ReadError> {
        let damaged = || Place::Journal(at).damaged("its list of blocks is damaged");
        let word = |at: usize| {
            u32::from_be_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
        };
        let used = word(HEADER) as usize;
        let list = block.get(REVOKE_HEADER..used).ok_or_else(damaged)?;
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

    fn check_tail(&self, at: u64, block: &BlockBuffer) -> Result<(), ReadError> {
        self.check(at, block, BLOCK_BYTES - TAIL)
    }

    fn check_commit(&self, at: u64, block: &BlockBuffer) -> Result<(), ReadError> {
        self.check(at, block, COMMIT_CHECKSUM)
    }

    /// Compares a block with the checksum that it has at byte `place`.
    fn check(&self, at: u64, block: &BlockBuffer, place: usize) -> Result<(), ReadError> {
        if !self.has_checksums() {
            return Ok(());
        }
        let mut covered = *block;
        let stored = &mut covered[place..place + 4];
        let checksum = u32::from_be_bytes([stored[0], stored[1], stored[2], stored[3]]);
        stored.fill(0);
        match self.seed.with(&covered).0 == checksum {
            true => Ok(()),
            false => Err(Place::Journal(at).damaged("its checksum is wrong")),
        }
    }
}

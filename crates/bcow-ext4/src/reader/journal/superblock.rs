//! The superblock of a journal.

use zerocopy::{FromBytes, IntoBytes};

use super::super::{Extents, ReadError, Reader, Structure};
use super::Journal;
use crate::checksum::Checksum;
use crate::format::{
    BLOCK_BYTES, CHECKSUM_CRC32C, JOURNAL_MAGIC, JOURNAL_SUPERBLOCK, JOURNAL_SUPERBLOCK_BYTES,
    JournalSuperBlock, journal_compatible, journal_incompatible,
};

/// The incompatible features of a journal that this reader supports.
const KNOWN: u32 = journal_incompatible::REVOKE
    | journal_incompatible::BITS_64
    | journal_incompatible::ASYNC_COMMIT
    | journal_incompatible::CHECKSUM_2
    | journal_incompatible::CHECKSUM_3;

impl<'r> Journal<'r> {
    /// Validates the superblock of the journal, a file of `blocks` blocks. `None` if the journal
    /// has nothing to replay.
    pub(super) fn open(
        reader: &'r Reader,
        extents: Extents,
        blocks: u64,
    ) -> Result<Option<Self>, ReadError> {
        let damaged = |problem| Structure::Journal(0).damaged(problem);
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
        if is_whole {
            Ok(Some(journal))
        } else {
            Err(damaged("its block size or its bounds of the log are wrong"))
        }
    }
}

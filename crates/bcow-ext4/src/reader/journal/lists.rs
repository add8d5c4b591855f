//! The blocks of a journal that list other blocks: descriptor blocks and revoke blocks.

use super::super::{ReadError, Structure};
use super::Journal;
use crate::format::{BLOCK_BYTES, JournalHeader, journal_flags, journal_incompatible};
use crate::output::BlockBuffer;

const HEADER: usize = size_of::<JournalHeader>();
/// The header of a revoke block: the common header, and the number of bytes in use.
const REVOKE_HEADER: usize = HEADER + 4;
/// Bytes of the checksum at the end of a descriptor block and of a revoke block.
const TAIL: usize = 4;
/// Bytes of the UUID that follows a tag of a descriptor, unless the tag has the UUID of the tag
/// before it.
const UUID: usize = 16;

/// The change of a block in a transaction.
pub(super) struct Change {
    /// The block of the file system.
    pub(super) block: u64,
    /// As in [`super::JournaledBlock`].
    pub(super) is_escaped: bool,
    /// The checksum of the content in the journal. Only the low 16 bits count without
    /// [`journal_incompatible::CHECKSUM_3`].
    pub(super) checksum: u32,
}

impl Journal<'_> {
    /// The changes that a descriptor block lists. The list ends at its last tag, or with the block.
    pub(super) fn changes(&self, block: &BlockBuffer) -> Vec<Change> {
        let wide = self.has(journal_incompatible::BITS_64);
        let with_checksum = self.has(journal_incompatible::CHECKSUM_3);
        // Tags with a checksum of version 2 have two unused bytes at the end.
        let unused = if self.has(journal_incompatible::CHECKSUM_2) { 2 } else { 0 };
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
            let (flags, checksum) = if with_checksum {
                (word(4), word(12))
            } else {
                (word(4) & 0xffff, word(4) >> 16)
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
    pub(super) fn revoked(&self, at: u64, block: &BlockBuffer) -> Result<Vec<u64>, ReadError> {
        let word = |at: usize| {
            u32::from_be_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
        };
        let used = (word(HEADER) as usize).max(REVOKE_HEADER);
        let list = block[..self.end_of_list()].get(REVOKE_HEADER..used);
        let list =
            list.ok_or_else(|| Structure::Journal(at).damaged("its list of blocks is damaged"))?;
        let found = if self.has(journal_incompatible::BITS_64) {
            let (numbers, _) = list.as_chunks::<8>();
            numbers
                .iter()
                .map(|bytes| u64::from_be_bytes(*bytes))
                .collect()
        } else {
            let (numbers, _) = list.as_chunks::<4>();
            let numbers = numbers.iter();
            numbers
                .map(|bytes| u32::from_be_bytes(*bytes).into())
                .collect()
        };
        Ok(found)
    }

    /// The end of the list in a descriptor block or in a revoke block.
    fn end_of_list(&self) -> usize {
        if self.has_checksums() { BLOCK_BYTES - TAIL } else { BLOCK_BYTES }
    }

    /// Compares a descriptor block or a revoke block with the checksum at its end.
    pub(super) fn is_tail_right(&self, block: &BlockBuffer) -> bool {
        let (covered, tail) = block.split_at(BLOCK_BYTES - TAIL);
        let found = self.seed.with(covered).with(&[0; TAIL]).0;
        !self.has_checksums() || found.to_be_bytes() == tail
    }
}

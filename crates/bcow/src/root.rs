//! A root table in memory; absent pieces take no memory.
//!
//! A new disk of 1 TB has 262,144 regions and a root table of 4 MiB. Most of the cost of its
//! opening is to read that table, so it is read in small pieces, and absent ones are dropped.

use std::ops::{Index, Range};

use bcow_format::{
    BackingEntry, Crc32c, ENTRY_BYTES, Entry, FormatError, Header, SectionKind, check_window,
    decode_root, encode_entry,
};

use crate::Error;
use crate::checked::CheckedFile;

/// Number of entries in a piece.
const PIECE: usize = 256;
/// Length in bytes of a run of zeros for which a look at the file is worthwhile.
const LEAST_HOLE: usize = 32 << 10;
/// Number of pieces per read.
const READ_PIECES: usize = 64;

static ABSENT: Entry = Entry::Absent;
static ABSENT_PIECE: [u8; PIECE * ENTRY_BYTES] = [0; PIECE * ENTRY_BYTES];

/// One entry for each region.
#[derive(Debug, Clone)]
pub(crate) struct Root {
    len: usize,
    /// `None` if all entries of a piece are absent. The last piece may have spare entries.
    pieces: Vec<Option<Box<[Entry]>>>,
}

impl Root {
    /// A table of absent entries.
    pub(crate) fn absent(len: usize) -> Self {
        Root {
            len,
            pieces: vec![None; len.div_ceil(PIECE)],
        }
    }

    /// Reads and validates the root table that `header` names.
    pub(crate) fn read(file: &CheckedFile, header: &Header) -> Result<Self, Error> {
        let len = header.root.bytes as usize / ENTRY_BYTES;
        let mut root = Root::absent(len);
        let mut crc = Crc32c::new();
        let mut wrong = None;
        let mut bytes = vec![0; (READ_PIECES * PIECE).min(len) * ENTRY_BYTES];
        let mut first = 0;
        while first < len {
            let take = (READ_PIECES * PIECE).min(len - first);
            let bytes = &mut bytes[..take * ENTRY_BYTES];
            file.read_at(header.root.offset + (first * ENTRY_BYTES) as u64, bytes)?;
            crc.update(bytes);
            for (index, raw) in (first / PIECE..).zip(bytes.chunks(PIECE * ENTRY_BYTES)) {
                // A checksum error takes precedence, because it may be the cause of the others.
                if wrong.is_some() || *raw == ABSENT_PIECE[..raw.len()] {
                    continue;
                }
                match decode_root(raw, (index * PIECE) as u64, header) {
                    Ok(mut entries) => {
                        entries.resize(PIECE, Entry::Absent);
                        root.pieces[index] = Some(entries.into());
                    }
                    Err(error) => wrong = Some(error),
                }
            }
            first += take;
        }
        // The checksum of an empty section is 0 (spec section 3).
        let found = if len == 0 { 0 } else { crc.finish() };
        header.root.check(SectionKind::Root, found)?;
        match wrong {
            Some(error) => Err(error.into()),
            None => Ok(root),
        }
    }

    /// Number of regions.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Changes the entry of a region.
    pub(crate) fn set(&mut self, region: usize, entry: Entry) {
        let piece = &mut self.pieces[region / PIECE];
        if piece.is_none() && entry == Entry::Absent {
            return;
        }
        let piece = piece.get_or_insert_with(|| vec![Entry::Absent; PIECE].into());
        piece[region % PIECE] = entry;
    }

    /// Drops regions at the end, or adds absent ones.
    pub(crate) fn resize(&mut self, len: usize) {
        // Dropped entries must not reappear after growth.
        for region in len..self.len.min(len.next_multiple_of(PIECE)) {
            self.set(region, Entry::Absent);
        }
        self.len = len;
        self.pieces.resize(len.div_ceil(PIECE), None);
    }

    /// The regions that are not absent, with their entries, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, Entry)> + '_ {
        let pieces = (0u64..).step_by(PIECE).zip(&self.pieces);
        pieces
            .filter_map(|(first, piece)| Some((first, piece.as_ref()?)))
            .flat_map(|(first, piece)| (first..).zip(piece.iter().copied()))
            .filter(|(_, entry)| *entry != Entry::Absent)
    }

    /// Parts of the encoded table of absent entries, which are zeros. Short ones are left out.
    pub(crate) fn absent_parts(&self) -> impl Iterator<Item = Range<usize>> {
        const PIECE_BYTES: usize = PIECE * ENTRY_BYTES;
        let runs = self.pieces.chunk_by(|a, b| a.is_none() == b.is_none());
        let parts = runs.scan(0, |at, run| {
            let start = *at;
            *at += run.len() * PIECE_BYTES;
            Some((run[0].is_none(), start..*at))
        });
        let bytes = self.len * ENTRY_BYTES;
        parts
            .filter(|(is_absent, part)| *is_absent && part.len() >= LEAST_HOLE)
            .map(move |(_, part)| part.start..part.end.min(bytes))
    }

    /// The encoded table.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.len * ENTRY_BYTES);
        for piece in &self.pieces {
            match piece {
                Some(entries) => bytes.extend(entries.iter().flat_map(encode_entry)),
                None => bytes.extend_from_slice(&ABSENT_PIECE),
            }
        }
        bytes.truncate(self.len * ENTRY_BYTES);
        bytes
    }
}

impl Index<usize> for Root {
    type Output = Entry;

    fn index(&self, region: usize) -> &Entry {
        assert!(region < self.len, "region {region} of {}", self.len);
        match &self.pieces[region / PIECE] {
            Some(piece) => &piece[region % PIECE],
            None => &ABSENT,
        }
    }
}

/// Checks that every window and fragment in the root table lies inside its backing.
pub(crate) fn check_windows(root: &Root, backings: &[BackingEntry]) -> Result<(), FormatError> {
    let backing_bytes = |index: u32| {
        let backing = backings.get(index as usize);
        backing.map_or(0, |entry| entry.size)
    };
    root.iter()
        .try_for_each(|(region, entry)| check_window(&entry, region, backing_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_not_absent_takes_memory() {
        let mut root = Root::absent(1000);
        root.set(700, Entry::Zero);
        root.set(10, Entry::Absent);
        assert_eq!(root[700], Entry::Zero);
        assert_eq!(root[699], Entry::Absent);
        assert_eq!(root.iter().collect::<Vec<_>>(), [(700, Entry::Zero)]);
        assert_eq!(root.pieces.iter().flatten().count(), 1);
        assert_eq!(root.encode().len(), 16000);
        assert_eq!(root.encode()[700 * 16], 1);
    }

    #[test]
    fn what_was_cut_off_does_not_come_back() {
        let mut root = Root::absent(600);
        root.set(550, Entry::Zero);
        root.set(520, Entry::Zero);
        root.resize(530);
        root.resize(700);
        assert_eq!(root[550], Entry::Absent);
        assert_eq!(root[520], Entry::Zero);
        assert_eq!(root.len(), 700);
    }
}

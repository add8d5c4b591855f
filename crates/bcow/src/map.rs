//! Mappings of the address space, as `bcow map` prints them.

use std::ops::Range;

use bcow_format::{Entry, Stored};

use crate::piece::Piece;

/// A range of the address space with one entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First byte in the address space.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Where the content is.
    pub mapping: Mapping,
}

impl Extent {
    /// The extent of a piece. With `absent_shows_backing`, an absent one shows backing 0.
    pub(crate) fn of(piece: &Piece, absent_shows_backing: bool) -> Self {
        let shown = |by, (index, range): (u32, Range<u64>)| Mapping::Backing {
            by,
            index,
            offset: range.start,
            bytes: range.end - range.start,
        };
        let (start, entry) = (piece.start, piece.entry);
        let mapping = match entry {
            Entry::Absent if absent_shows_backing => {
                shown(ShownBy::Absent, (0, start..start + piece.length))
            }
            // A piece never holds a table entry; as a hole, it would show no data.
            Entry::Absent | Entry::Table(_) => Mapping::Hole,
            Entry::Zero => Mapping::Zero,
            Entry::Raw(stored) => Mapping::Raw { stored },
            Entry::Zstd(stored) => Mapping::Compressed { stored },
            Entry::Open(stored) => Mapping::Open { stored },
            Entry::Window { .. } => shown(ShownBy::Window, entry.shown().unwrap_or_default()),
            Entry::Fragment { .. } => shown(ShownBy::Fragment, entry.shown().unwrap_or_default()),
        };
        Extent {
            offset: start,
            length: piece.length,
            mapping,
        }
    }
}

/// Where the content of a range is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mapping {
    /// Stored without compression.
    Raw {
        /// Place, length and checksum.
        stored: Stored,
    },
    /// Stored as a zstd frame.
    Compressed {
        /// Place, length and checksum.
        stored: Stored,
    },
    /// Stored without compression; writers change it in place.
    Open {
        /// Place and length; there is no checksum.
        stored: Stored,
    },
    /// Zeros by an explicit entry.
    Zero,
    /// Never written; reads as zeros.
    Hole,
    /// The content of a backing.
    Backing {
        /// The kind of entry that shows it.
        by: ShownBy,
        /// Index in the backing table.
        index: u32,
        /// First byte in the address space of the backing; a fragment begins at any byte.
        offset: u64,
        /// Bytes that the backing shows; the rest of the extent reads as zeros.
        bytes: u64,
    },
}

/// The kind of entry that shows a backing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShownBy {
    /// An absent entry of a disk with a backing.
    Absent,
    /// A window.
    Window,
    /// A fragment.
    Fragment,
}

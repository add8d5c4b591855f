//! Where content is: what `bcow map` shows.

use bcow_format::Stored;

/// A piece of the address space that one entry describes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First byte in the address space.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Where it is.
    pub mapping: Mapping,
}

/// Where a piece of the address space is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mapping {
    /// Stored as it is.
    Raw {
        /// Where, how long, and its checksum.
        stored: Stored,
    },
    /// Stored as a zstd frame.
    Compressed {
        /// Where, how long, and its checksum.
        stored: Stored,
    },
    /// Stored as it is, and changed in place by the file's writer.
    Open {
        /// Where and how long; it has no checksum.
        stored: Stored,
    },
    /// Zeros, and said so.
    Zero,
    /// Nothing was ever there; reads as zeros.
    Hole,
    /// A backing's bytes.
    Backing {
        /// Index in the backing table.
        index: u32,
        /// First byte in the backing's address space.
        offset: u64,
        /// Bytes shown; what is left of the extent reads as zeros.
        bytes: u64,
    },
}

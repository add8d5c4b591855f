//! Mappings of the address space, as `bcow map` prints them.

use bcow_format::Stored;

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

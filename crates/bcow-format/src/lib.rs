//! The BCoW file format, version 1: decodes bytes to validated structures, and encodes them.
//!
//! The specification is `spec/bcow-v1.md`; the modules cite its sections. This crate does no I/O
//! and no decompression. A caller reads bytes and passes them to a `decode` function, which returns
//! a structure that satisfies every rule of the specification, or a [`FormatError`] with the error
//! code of the specification.
//!
//! The path of a file through this crate: [`choose_header`] selects the newest intact header and
//! validates it. The header has the positions of the backing table ([`decode_backings`]), the root
//! table ([`decode_root`]), the free list ([`decode_free`]), the record log ([`Record::decode`])
//! and the Merkle tree ([`MerkleShape`]). A root entry is a block, a window onto a backing, or the
//! position of a sub-block table ([`decode_table`]).
//!
//! ```
//! use bcow_format::{BackingEntry, BackingName, FormatError, choose_header, encode_backings};
//!
//! assert_eq!(choose_header(&[0; 1024]), Err(FormatError::NotBcow));
//! assert_eq!(FormatError::NotBcow.code(), "not-bcow");
//!
//! let backing = BackingEntry { name: BackingName::Digest([7; 32]), size: 4096 };
//! assert_eq!(encode_backings(&[backing])?.len(), bcow_format::BACKING_ENTRY_BYTES);
//! # Ok::<(), FormatError>(())
//! ```

#![warn(missing_docs)]

mod address;
mod backing;
mod checksum;
mod entry;
mod error;
mod features;
mod free;
mod header;
mod merkle;
mod record;
mod sizes;
mod table;

pub use address::{BlockShift, Lba, Uba};
pub use backing::{
    BackingEntry, BackingName, decode_backings, encode_backings, is_plain_name, is_plain_url,
};
#[cfg(feature = "testing")]
pub use checksum::ignore_checksums;
pub use checksum::{Crc32c, crc32c, crc32c_matches, from_hex, hex};
pub use entry::{Entry, EntryContext, EntryProblem, Stored, decode_entry, encode_entry};
pub use error::{FormatError, SectionKind};
pub use features::compatible;
pub use features::{Features, incompatible, read_only_compatible};
pub use free::{FreeRange, decode_free, encode_free};
pub use header::{Header, MerkleTree, Section, State, Use, choose_header};
pub use merkle::{HASH_BYTES, MerkleShape};
pub use record::{
    LogMapping, MAPPING_BYTES, RECORD_ALIGN_BYTES, RECORD_HEADER_BYTES, Record, RecordPrefix,
    encode_record, record_bytes,
};
pub use sizes::{
    BACKING_ENTRY_BYTES, ENTRY_BYTES, HEADER_AREA_BYTES, MAX_ADDRESS, MAX_BACKING_BYTES,
    MAX_BACKINGS, MAX_FREE_BYTES, MAX_LOG_BYTES, MAX_METADATA_BYTES, MAX_ROOT_ENTRIES,
    SECTOR_BYTES, SLOT_BYTES,
};
pub use table::{
    SubBlockTable, TABLE_HEADER_BYTES, check_fragments, check_window, decode_root, decode_table,
    encode_root, encode_table,
};

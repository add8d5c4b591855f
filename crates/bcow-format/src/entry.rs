//! Entries of root and sub-block tables (spec section 5).

use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::error::require;
use crate::sizes::{ENTRY_BYTES, MAX_ADDRESS, SECTOR_BYTES};
use crate::{Header, Section, Uba, incompatible};

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct RawEntry {
    kind: u8,
    reserved: u8,
    address: [u8; 6],
    length: U32,
    check: U32,
}
const _: () = assert!(size_of::<RawEntry>() == ENTRY_BYTES);

/// The decoded entry of a region or block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Entry {
    /// Reads from backing 0 if the file has the feature `backing`, and as zeros otherwise.
    Absent,
    /// Reads as zeros.
    Zero,
    /// Stored without compression.
    Raw(Stored),
    /// Stored as one zstd frame.
    Zstd(Stored),
    /// Stored without compression, and overwritten in place by the writer of the file. It has no
    /// checksum (`crc` is 0).
    Open(Stored),
    /// A sub-block table (root only).
    Table(Stored),
    /// A window into a backing (root only).
    Window {
        /// Offset in the address space of the backing, in bytes.
        address: u64,
        /// Length of the window in sectors of 4096 bytes. The rest of the region reads as zeros.
        sectors: u32,
        /// Index in the backing table.
        backing: u32,
    },
    /// Bytes of a backing, and zeros behind them.
    Fragment {
        /// Offset in the address space of the backing, in bytes.
        address: u64,
        /// Number of bytes, at least 1. The rest of the block reads as zeros.
        bytes: u32,
        /// Index in the backing table.
        backing: u32,
    },
}

/// A range of the file and its checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stored {
    /// Offset in the file.
    pub at: Uba,
    /// Length in bytes.
    pub bytes: u32,
    /// CRC32C of the range; 0 for [`Entry::Open`].
    pub crc: u32,
}

impl Section {
    /// The range of the section, for an entry.
    pub fn stored(&self) -> Stored {
        Stored {
            at: Uba(self.offset),
            bytes: self.bytes,
            crc: self.crc,
        }
    }
}

impl Entry {
    /// The stored range of the entry, if it has one.
    pub fn stored(&self) -> Option<Stored> {
        match *self {
            Entry::Raw(stored)
            | Entry::Zstd(stored)
            | Entry::Open(stored)
            | Entry::Table(stored) => Some(stored),
            Entry::Absent | Entry::Zero | Entry::Window { .. } | Entry::Fragment { .. } => None,
        }
    }

    /// The part of a backing that a window or fragment shows: the index of the backing, and a range
    /// of bytes in its address space. `None` for other entries, also for [`Entry::Absent`].
    pub fn shown(&self) -> Option<(u32, std::ops::Range<u64>)> {
        let (backing, address, bytes) = match *self {
            Entry::Window {
                address,
                sectors,
                backing,
            } => (backing, address, u64::from(sectors) * SECTOR_BYTES),
            Entry::Fragment {
                address,
                bytes,
                backing,
            } => (backing, address, bytes.into()),
            _ => return None,
        };
        Some((backing, address..address + bytes))
    }
}

impl Stored {
    /// Offset of the first byte after the range.
    pub fn end(&self) -> u64 {
        self.at.0 + u64::from(self.bytes)
    }
}

/// The values on which the rules for an entry depend.
#[derive(Debug, Clone, Copy)]
pub struct EntryContext<'a> {
    /// The file's header.
    pub header: &'a Header,
    /// The stored range of the entry must end at or before this byte of the file. The value is the
    /// length of the file in the header, or in the record that contains the entry.
    pub file_bytes: u64,
    /// Length of the region or block in bytes.
    pub length: u64,
    /// Offset of the region or block in the address space, in bytes.
    pub logical: u64,
    /// Whether the entry is for a whole region: an entry of the root table, or of a record that
    /// replaces one.
    pub root: bool,
}

/// Why an entry is invalid. The caller knows the position of the entry, and converts the problem to
/// a [`crate::FormatError`] with an error code (spec section 12).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EntryProblem {
    /// The code is `root-entry` in the root table, `table-entry` in a sub-block table.
    Entry(String),
    /// The part of a backing that a window or fragment shows is invalid. The code is `window-range`
    /// in the root table, `table-entry` in a sub-block table.
    Window(String),
}

/// Decodes and validates the entry of a region or block. [`crate::check_window`] and
/// [`crate::check_fragments`] compare the entry with the sizes of backings.
pub fn decode_entry(
    bytes: &[u8; ENTRY_BYTES],
    context: &EntryContext<'_>,
) -> Result<Entry, EntryProblem> {
    let raw: RawEntry = zerocopy::transmute!(*bytes);
    require(raw.reserved == 0, "reserved byte is not zero")?;
    let mut address = [0; 8];
    address[..6].copy_from_slice(&raw.address);
    let address = u64::from_le_bytes(address);
    let (length, check) = (raw.length.get(), raw.check.get());
    let has = |bit| context.header.features.has_incompatible(bit);
    let (is_plain, whole) = (has(incompatible::PLAIN), context.length);
    let stored = Stored {
        at: Uba(address),
        bytes: length,
        crc: check,
    };
    match raw.kind {
        0 | 1 => {
            let problem = "absent or zero, but address, length or check is not zero";
            require(address == 0 && length == 0 && check == 0, problem)?;
            Ok(if raw.kind == 0 { Entry::Absent } else { Entry::Zero })
        }
        2 => {
            check_block_length(context)?;
            let problem = format_args!("raw block of length {whole} stored with length {length}");
            require(u64::from(length) == whole, problem)?;
            check_place(&stored, context)?;
            let start = context.logical;
            require(
                !is_plain || address == start,
                format_args!(
                    "plain file, but the block of byte {start} is stored at byte {address}"
                ),
            )?;
            Ok(Entry::Raw(stored))
        }
        3 => {
            check_block_length(context)?;
            let problem = "zstd block without the feature `zstd`";
            require(has(incompatible::ZSTD), problem)?;
            require(!is_plain, "zstd block in a plain file")?;
            let problem =
                format_args!("zstd frame of length {length} for a block of length {whole}");
            require(length > 0 && u64::from(length) < whole, problem)?;
            check_place(&stored, context)?;
            Ok(Entry::Zstd(stored))
        }
        4 if context.root => {
            let problem = "sub-block table at an address that is not a multiple of 16";
            require(address.is_multiple_of(16), problem)?;
            require(address >= 4096, "sub-block table inside the header")?;
            check_place(&stored, context)?;
            Ok(Entry::Table(stored))
        }
        5 if context.root => {
            let problem = "window without the feature `windows`";
            require(has(incompatible::WINDOWS), problem)?;
            let problem = "window at a backing address that is not a multiple of 4096";
            require(address.is_multiple_of(4096), problem)?;
            require(length > 0, "window of 0 sectors")?;
            if u64::from(length) * SECTOR_BYTES > whole {
                return Err(EntryProblem::Window(format!(
                    "window of {length} sectors in a region of {whole} bytes"
                )));
            }
            check_backing("window", check, context)?;
            Ok(Entry::Window {
                address,
                sectors: length,
                backing: check,
            })
        }
        6 => {
            check_block_length(context)?;
            let problem = "open block without the feature `records`";
            require(has(incompatible::RECORDS), problem)?;
            require(!is_plain, "open block in a plain file")?;
            require(
                u64::from(length) == whole && check == 0,
                format_args!(
                    "open block of length {whole} stored with length {length}, check {check:#x}"
                ),
            )?;
            check_place(&stored, context)?;
            Ok(Entry::Open(stored))
        }
        7 => {
            let problem = "fragment without the feature `fragments`";
            require(has(incompatible::FRAGMENTS), problem)?;
            require(length > 0, "fragment of no bytes")?;
            if u64::from(length) > whole {
                return Err(EntryProblem::Window(format!(
                    "fragment of {length} bytes in a block of {whole}"
                )));
            }
            check_backing("fragment", check, context)?;
            Ok(Entry::Fragment {
                address,
                bytes: length,
                backing: check,
            })
        }
        kind => Err(EntryProblem::Entry(format!(
            "kind {kind} is not allowed here"
        ))),
    }
}

/// Encodes an entry. Panics if its address has more than 48 bits: the caller keeps addresses below
/// [`crate::MAX_ADDRESS`].
pub fn encode_entry(entry: &Entry) -> [u8; ENTRY_BYTES] {
    let (kind, address, length, check) = match *entry {
        Entry::Absent => (0, 0, 0, 0),
        Entry::Zero => (1, 0, 0, 0),
        Entry::Raw(s) => (2, s.at.0, s.bytes, s.crc),
        Entry::Zstd(s) => (3, s.at.0, s.bytes, s.crc),
        Entry::Table(s) => (4, s.at.0, s.bytes, s.crc),
        Entry::Open(s) => (6, s.at.0, s.bytes, s.crc),
        Entry::Window {
            address,
            sectors,
            backing,
        } => (5, address, sectors, backing),
        Entry::Fragment {
            address,
            bytes,
            backing,
        } => (7, address, bytes, backing),
    };
    // Also in release builds: the entry would refer to other data.
    assert!(address < MAX_ADDRESS, "an address of more than 48 bits");
    let mut low = [0; 6];
    low.copy_from_slice(&address.to_le_bytes()[..6]);
    let raw = RawEntry {
        kind,
        reserved: 0,
        address: low,
        length: U32::new(length),
        check: U32::new(check),
    };
    zerocopy::transmute!(raw)
}

impl From<String> for EntryProblem {
    fn from(problem: String) -> Self {
        EntryProblem::Entry(problem)
    }
}

/// Checks that the backing of a window or fragment exists.
fn check_backing(what: &str, backing: u32, context: &EntryContext<'_>) -> Result<(), EntryProblem> {
    let count = context.header.backing_count;
    if backing < count {
        Ok(())
    } else {
        Err(EntryProblem::Window(format!(
            "{what} onto backing {backing}, but the file has {count} backings"
        )))
    }
}

/// Checks that the entry is not for a block of more than 16 MiB: a root entry can make the region a
/// block only if `region_shift` is at most 24 (spec section 6).
fn check_block_length(context: &EntryContext<'_>) -> Result<(), String> {
    let problem = "a block as large as a region of more than 16 MiB";
    require(!context.root || context.header.region_shift <= 24, problem)
}

fn check_place(stored: &Stored, context: &EntryContext<'_>) -> Result<(), String> {
    let has = |bit| context.header.features.has_incompatible(bit);
    let (at, end, file_bytes) = (stored.at.0, stored.end(), context.file_bytes);
    require(
        !has(incompatible::RECORDS) || at.is_multiple_of(4096),
        format_args!(
            "stored at byte {at}, which is not a multiple of 4096, in a file with a record log"
        ),
    )?;
    let problem = format_args!("stored at byte {at}, inside the header");
    require(at >= 4096 || at == 0 && has(incompatible::PLAIN), problem)?;
    let problem = format_args!("stored at bytes {at}..{end}, but the file has {file_bytes}");
    require(end <= file_bytes, problem)
}

#[cfg(test)]
mod tests {
    use super::{Entry, Stored, encode_entry};
    use crate::Uba;

    #[test]
    #[should_panic(expected = "48 bits")]
    fn an_address_is_never_cut() {
        encode_entry(&Entry::Raw(Stored {
            at: Uba(1 << 48 | 4096),
            bytes: 4096,
            crc: 0,
        }));
    }
}

//! Root table and sub-block tables (spec sections 6 and 7).

use std::ops::Range;

use zerocopy::byteorder::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::entry::EntryProblem;
use crate::error::require;
use crate::{
    BlockShift, ENTRY_BYTES, Entry, EntryContext, FormatError, Header, Stored, crc32c,
    crc32c_matches, decode_entry, encode_entry,
};

/// Size of the header of a sub-block table in bytes. The entries follow it.
pub const TABLE_HEADER_BYTES: usize = 16;

const TABLE_MAGIC: [u8; 4] = *b"BCST";

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawTableHeader {
    magic: [u8; 4],
    block_shift: u8,
    reserved: [u8; 3],
    region: U64,
}
const _: () = assert!(size_of::<RawTableHeader>() == TABLE_HEADER_BYTES);

/// The sub-block table of a region.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubBlockTable {
    /// Block size of the region.
    pub block_shift: BlockShift,
    /// One entry per block.
    pub entries: Box<[Entry]>,
}

/// Decodes and validates entries of the root table, from region `first` on. The caller checks the
/// checksum.
pub fn decode_root(bytes: &[u8], first: u64, header: &Header) -> Result<Vec<Entry>, FormatError> {
    let mut entries = Vec::with_capacity(bytes.len() / ENTRY_BYTES);
    for (region, raw) in (first..).zip(bytes.as_chunks::<ENTRY_BYTES>().0) {
        let context = EntryContext {
            header,
            file_bytes: header.file_bytes,
            length: header.region_length(region),
            logical: region << header.region_shift,
            root: true,
        };
        entries.push(
            decode_entry(raw, &context).map_err(|problem| match problem {
                EntryProblem::Entry(problem) => FormatError::RootEntry { region, problem },
                EntryProblem::Window(problem) => FormatError::WindowRange { region, problem },
            })?,
        );
    }
    Ok(entries)
}

/// Encodes a root table.
pub fn encode_root(entries: &[Entry]) -> Vec<u8> {
    entries.iter().flat_map(encode_entry).collect()
}

/// Decodes and validates the sub-block table to which the root entry of `region` refers with
/// `stored`.
pub fn decode_table(
    bytes: &[u8],
    stored: &Stored,
    region: u64,
    header: &Header,
) -> Result<SubBlockTable, FormatError> {
    let found = crc32c(bytes);
    if !crc32c_matches(stored.crc, found) {
        return Err(FormatError::TableChecksum {
            region,
            expected: stored.crc,
            found,
        });
    }
    let wrong = |problem: String| FormatError::TableHeader { region, problem };
    let Ok((raw, rest)) = RawTableHeader::ref_from_prefix(bytes) else {
        return Err(wrong(format!("its length {} is too short", bytes.len())));
    };
    require(raw.magic == TABLE_MAGIC, "no magic").map_err(wrong)?;
    require(raw.reserved == [0; 3], "reserved bytes are not zero").map_err(wrong)?;
    let block_shift = BlockShift::new(raw.block_shift)
        .filter(|shift| shift.get() <= header.region_shift)
        .ok_or_else(|| wrong(format!("block_shift {}", raw.block_shift)))?;
    let problem = format_args!("it belongs to region {}", raw.region);
    require(raw.region.get() == region, problem).map_err(wrong)?;
    let region_length = header.region_length(region);
    let count = region_length.div_ceil(u64::from(block_shift.bytes()));
    let problem = format_args!("length {} of the entries, block count {count}", rest.len());
    require(rest.len() as u64 == count * ENTRY_BYTES as u64, problem).map_err(wrong)?;
    let mut entries = Vec::with_capacity(count as usize);
    for (index, raw) in (0..).zip(rest.as_chunks::<ENTRY_BYTES>().0) {
        let start = index << block_shift.get();
        let context = EntryContext {
            header,
            file_bytes: header.file_bytes,
            length: (region_length - start).min(block_shift.bytes().into()),
            logical: (region << header.region_shift) + start,
            root: false,
        };
        entries.push(decode_entry(raw, &context).map_err(|problem| {
            let (EntryProblem::Entry(problem) | EntryProblem::Window(problem)) = problem;
            FormatError::TableEntry {
                region,
                index,
                problem,
            }
        })?);
    }
    Ok(SubBlockTable {
        block_shift,
        entries: entries.into(),
    })
}

/// Checks that the fragments of the sub-block table of `region` lie inside their backings (spec
/// section 8). `backing_bytes` returns the size of the backing with an index, which was checked
/// with the entry.
pub fn check_fragments(
    table: &SubBlockTable,
    region: u64,
    backing_bytes: impl Fn(u32) -> u64,
) -> Result<(), FormatError> {
    for (index, entry) in (0..).zip(&table.entries) {
        check_shown(entry, &backing_bytes).map_err(|problem| FormatError::TableEntry {
            region,
            index,
            problem,
        })?;
    }
    Ok(())
}

/// Checks that a window or fragment in the root table lies inside its backing (spec section 8), as
/// [`check_fragments`] does.
pub fn check_window(
    entry: &Entry,
    region: u64,
    backing_bytes: impl Fn(u32) -> u64,
) -> Result<(), FormatError> {
    check_shown(entry, backing_bytes)
        .map_err(|problem| FormatError::WindowRange { region, problem })
}

fn check_shown(entry: &Entry, backing_bytes: impl Fn(u32) -> u64) -> Result<(), String> {
    let Some((backing, range)) = entry.shown() else {
        return Ok(());
    };
    let what = match entry {
        Entry::Fragment { .. } => "fragment",
        _ => "window",
    };
    let (size, Range { start, end }) = (backing_bytes(backing), range);
    require(
        end <= size,
        format_args!("{what} onto bytes {start}..{end} of backing {backing}, which has {size}"),
    )
}

/// Encodes a sub-block table.
pub fn encode_table(region: u64, table: &SubBlockTable) -> Vec<u8> {
    let header = RawTableHeader {
        magic: TABLE_MAGIC,
        block_shift: table.block_shift.get(),
        reserved: [0; 3],
        region: U64::new(region),
    };
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend(table.entries.iter().flat_map(encode_entry));
    bytes
}

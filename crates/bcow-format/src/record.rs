//! Commit records of a writable file (spec section 10).

use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::entry::EntryProblem;
use crate::error::require;
use crate::{
    Crc32c, Entry, EntryContext, FormatError, Header, Lba, SECTOR_BYTES, crc32c, crc32c_matches,
    decode_entry, encode_entry,
};

/// Size of a record's header in bytes. The mappings follow it.
pub const RECORD_HEADER_BYTES: usize = 48;
/// The length of a record, and so its place in the log, is a multiple of this.
pub const RECORD_ALIGN_BYTES: usize = 16;
/// Size of a mapping in bytes.
pub const MAPPING_BYTES: usize = 24;

const MAGIC: [u8; 4] = *b"BCRC";

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
struct RawRecord {
    magic: [u8; 4],
    crc: U32,
    generation: U64,
    sequence: U64,
    bytes: U32,
    count: U32,
    size: U64,
    file_bytes: U64,
}
const _: () = assert!(size_of::<RawRecord>() == RECORD_HEADER_BYTES);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawMapping {
    sector: [u8; 6],
    shift: u8,
    reserved: u8,
    entry: [u8; 16],
}
const _: () = assert!(size_of::<RawMapping>() == MAPPING_BYTES);

/// A record of the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Sequence number among the records of the header's generation, from 1.
    pub sequence: u64,
    /// Length of the file in bytes, with everything to which the record refers.
    pub file_bytes: u64,
    /// The mappings in order.
    pub mappings: Vec<LogMapping>,
}

/// A mapping of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogMapping {
    /// Offset of the mapped range in the address space.
    pub at: Lba,
    /// log2 of the length of the range in bytes (the range is shorter at the end of a region).
    pub shift: u8,
    /// The new entry of the range: never a table or a window.
    pub entry: Entry,
}

/// The start of a record. It is not reliable before the whole record is decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordPrefix {
    /// Sequence number among the records of the header's generation, from 1.
    pub sequence: u64,
    /// Length of the record in bytes; any value.
    pub bytes: u32,
}

impl RecordPrefix {
    /// Returns `None` if `bytes` does not start with the header of a record of this generation.
    pub fn read(bytes: &[u8], generation: u64) -> Option<Self> {
        let (raw, _) = RawRecord::ref_from_prefix(bytes).ok()?;
        let expected = raw.magic == MAGIC && raw.generation.get() == generation;
        expected.then(|| RecordPrefix {
            sequence: raw.sequence.get(),
            bytes: raw.bytes.get(),
        })
    }
}

/// Length in bytes of a record with `count` mappings.
pub fn record_bytes(count: usize) -> usize {
    (RECORD_HEADER_BYTES + count * MAPPING_BYTES).next_multiple_of(RECORD_ALIGN_BYTES)
}

impl Record {
    /// Decodes the record in `bytes`, whose prefix was read before. Returns `None` if the checksum
    /// shows that the record was not written completely. `least_file_bytes` is the file length of
    /// the preceding record or of the header.
    pub fn decode(
        bytes: &[u8],
        header: &Header,
        least_file_bytes: u64,
    ) -> Result<Option<Record>, FormatError> {
        let Ok((raw, mappings)) = RawRecord::ref_from_prefix(bytes) else {
            return Ok(None);
        };
        let mut crc = Crc32c::new();
        crc.update(&bytes[..4]);
        crc.update(&[0; 4]);
        crc.update(&bytes[8..]);
        if !crc32c_matches(raw.crc.get(), crc.finish()) {
            return Ok(None);
        }
        let sequence = raw.sequence.get();
        let wrong = |problem: String| FormatError::Record { sequence, problem };
        let (count, file_bytes) = (raw.count.get() as usize, raw.file_bytes.get());
        let (length, size) = (bytes.len(), raw.size.get());
        let problem = format_args!("mapping count {count} in a record of length {length}");
        require(length == record_bytes(count), problem).map_err(wrong)?;
        let problem = format_args!("size {size}, the header says {}", header.size);
        require(size == header.size, problem).map_err(wrong)?;
        let is_valid = (least_file_bytes..=crate::MAX_ADDRESS).contains(&file_bytes)
            && file_bytes.is_multiple_of(SECTOR_BYTES);
        let problem = format_args!("file_bytes {file_bytes}, before it was {least_file_bytes}");
        require(is_valid, problem).map_err(wrong)?;
        let (mappings, padding) = mappings.split_at(count * MAPPING_BYTES);
        let is_zero = padding.iter().all(|byte| *byte == 0);
        require(is_zero, "padding is not zero").map_err(wrong)?;
        let (mappings, _) = mappings.as_chunks();
        let mappings = mappings
            .iter()
            .enumerate()
            .map(|(index, raw)| {
                decode_mapping(raw, header, file_bytes)
                    .map_err(|problem| wrong(format!("mapping {index}: {problem}")))
            })
            .collect::<Result<Vec<_>, _>>()?;
        check_apart(&mappings).map_err(wrong)?;
        Ok(Some(Record {
            sequence,
            file_bytes,
            mappings,
        }))
    }
}

/// Checks that the stored ranges of a record do not overlap. This limits the bytes that a check of
/// its blocks reads to the length of the file.
fn check_apart(mappings: &[LogMapping]) -> Result<(), String> {
    let mut stored: Vec<_> = mappings
        .iter()
        .filter_map(|mapping| mapping.entry.stored())
        .collect();
    stored.sort_unstable_by_key(|stored| stored.at);
    match stored.windows(2).find(|pair| pair[1].at.0 < pair[0].end()) {
        Some(pair) => Err(format!(
            "two of its stored ranges overlap at byte {} of the file",
            pair[1].at
        )),
        None => Ok(()),
    }
}

fn decode_mapping(
    bytes: &[u8; MAPPING_BYTES],
    header: &Header,
    file_bytes: u64,
) -> Result<LogMapping, String> {
    let raw: &RawMapping = zerocopy::transmute_ref!(bytes);
    require(raw.reserved == 0, "reserved byte is not zero")?;
    let mut sector = [0; 8];
    sector[..6].copy_from_slice(&raw.sector);
    let at = u64::from_le_bytes(sector)
        .checked_mul(SECTOR_BYTES)
        .filter(|&at| at < header.size)
        .ok_or("beyond the end of the address space")?;
    let shift = raw.shift;
    let is_valid = (12..=header.region_shift).contains(&shift) && at.is_multiple_of(1 << shift);
    require(is_valid, format_args!("shift {shift} at byte {at}"))?;
    let region = at >> header.region_shift;
    let left = header.region_length(region) - (at - (region << header.region_shift));
    let context = EntryContext {
        header,
        file_bytes,
        length: left.min(1 << shift),
        logical: at,
        root: shift == header.region_shift,
    };
    let entry = decode_entry(&raw.entry, &context).map_err(|problem| match problem {
        EntryProblem::Entry(problem) | EntryProblem::Window(problem) => problem,
    })?;
    match entry {
        Entry::Table(_) | Entry::Window { .. } => return Err("a table or window".into()),
        Entry::Raw(_) | Entry::Zstd(_) | Entry::Open(_) if shift > 24 => {
            return Err(format!("a block of 2^{shift} bytes"));
        }
        _ => {}
    }
    Ok(LogMapping {
        at: Lba(at),
        shift,
        entry,
    })
}

/// Encodes a record of the log of `header`.
pub fn encode_record(record: &Record, header: &Header) -> Vec<u8> {
    let length = record_bytes(record.mappings.len());
    let raw = RawRecord {
        magic: MAGIC,
        crc: U32::new(0),
        generation: U64::new(header.generation),
        sequence: U64::new(record.sequence),
        bytes: U32::new(length as u32),
        count: U32::new(record.mappings.len() as u32),
        size: U64::new(header.size),
        file_bytes: U64::new(record.file_bytes),
    };
    let mut bytes = Vec::with_capacity(length);
    bytes.extend_from_slice(raw.as_bytes());
    for mapping in &record.mappings {
        debug_assert!(mapping.at.0.is_multiple_of(1 << mapping.shift));
        bytes.extend_from_slice(&(mapping.at.0 / SECTOR_BYTES).to_le_bytes()[..6]);
        bytes.extend_from_slice(&[mapping.shift, 0]);
        bytes.extend_from_slice(&encode_entry(&mapping.entry));
    }
    bytes.resize(length, 0);
    let crc = crc32c(&bytes);
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    bytes
}

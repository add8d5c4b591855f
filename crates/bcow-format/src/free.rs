//! The free list of a writable file (spec section 10).

use zerocopy::byteorder::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::{FormatError, Header, SECTOR_BYTES, crc32c, crc32c_matches};

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawRange {
    start: U64,
    bytes: U64,
}
const _: () = assert!(size_of::<RawRange>() == 16);

/// An unused range of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FreeRange {
    /// Offset in the file in bytes, a multiple of 4096.
    pub start: u64,
    /// Length in bytes, a multiple of 4096.
    pub bytes: u64,
}

/// Decodes and validates the free list. `bytes` has the length `header.free.bytes`.
pub fn decode_free(bytes: &[u8], header: &Header) -> Result<Vec<FreeRange>, FormatError> {
    let found = crc32c(bytes);
    if !crc32c_matches(header.free.crc, found) {
        return Err(FormatError::FreeList(format!(
            "checksum is {found:#010x}, the header says {:#010x}",
            header.free.crc
        )));
    }
    let mut ranges = Vec::with_capacity(bytes.len() / size_of::<RawRange>());
    // A range must start after the end of the one before, and the first one after the first sector.
    let mut last_end = SECTOR_BYTES - 1;
    let (raw_ranges, _) = bytes.as_chunks::<{ size_of::<RawRange>() }>();
    for raw in raw_ranges {
        let raw: &RawRange = zerocopy::transmute_ref!(raw);
        let (start, bytes) = (raw.start.get(), raw.bytes.get());
        let end = start.checked_add(bytes).filter(|&end| {
            start > last_end
                && bytes > 0
                && start.is_multiple_of(SECTOR_BYTES)
                && bytes.is_multiple_of(SECTOR_BYTES)
                && end <= header.file_bytes
        });
        last_end = end.ok_or_else(|| {
            FormatError::FreeList(format!("entry {} is {start}+{bytes}", ranges.len()))
        })?;
        ranges.push(FreeRange { start, bytes });
    }
    Ok(ranges)
}

/// Encodes a free list.
pub fn encode_free(ranges: &[FreeRange]) -> Vec<u8> {
    let raw = |range: &FreeRange| RawRange {
        start: U64::new(range.start),
        bytes: U64::new(range.bytes),
    };
    ranges
        .iter()
        .flat_map(|range| raw(range).as_bytes().to_vec())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Section, State, Use};

    #[test]
    fn what_is_encoded_is_decoded() {
        let ranges = [(4096, 8192), (16384, 4096), (1 << 30, 1 << 20)];
        let ranges = ranges.map(|(start, bytes)| FreeRange { start, bytes });
        let bytes = encode_free(&ranges);
        let mut header = Header {
            file_bytes: (1 << 30) + (1 << 20),
            free: Section::of(4096, &bytes),
            ..Header::new(Use::Disk, State::Writable, 22, 0)
        };
        assert_eq!(decode_free(&bytes, &header).unwrap(), ranges);
        header.file_bytes -= 4096;
        assert_eq!(
            decode_free(&bytes, &header).unwrap_err().code(),
            "free-list"
        );
    }
}

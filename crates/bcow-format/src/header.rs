//! Header slots (spec section 3).

use std::fmt::Display;

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::sizes::{
    BACKING_ENTRY_BYTES, ENTRY_BYTES, HEADER_AREA_BYTES, MAX_ADDRESS, MAX_BACKING_BYTES,
    MAX_BACKINGS, MAX_FREE_BYTES, MAX_LOG_BYTES, MAX_METADATA_BYTES, MAX_ROOT_ENTRIES,
    SECTOR_BYTES, SLOT_BYTES,
};
use crate::{
    Features, FormatError, MerkleShape, SectionKind, crc32c, crc32c_matches, incompatible,
    read_only_compatible,
};

const MAGIC: [u8; 8] = *b"BCoW\r\n\x1a\n";
const VERSION: u16 = 1;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
struct RawSection {
    offset: U64,
    bytes: U32,
    crc: U32,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 8],
    version: U16,
    slot_bytes: U16,
    slot_crc: U32,
    generation: U64,
    incompatible: U64,
    read_only_compatible: U64,
    compatible: U64,
    purpose: u8,
    state: u8,
    region_shift: u8,
    merkle_chunk_shift: u8,
    reserved_1: U32,
    size: U64,
    file_bytes: U64,
    /// Its length is the number of entries.
    root: RawSection,
    metadata: RawSection,
    backings: RawSection,
    backing_count: U32,
    reserved_2: U32,
    merkle_offset: U64,
    merkle_bytes: U64,
    merkle_root: [u8; 32],
    log_offset: U64,
    log_bytes: U64,
    free: RawSection,
    reserved_3: [u8; 304],
}
const _: () = {
    assert!(size_of::<RawHeader>() == SLOT_BYTES);
    assert!(std::mem::offset_of!(RawHeader, size) == 56);
    assert!(std::mem::offset_of!(RawHeader, root) == 72);
    assert!(std::mem::offset_of!(RawHeader, merkle_root) == 144);
    assert!(std::mem::offset_of!(RawHeader, log_bytes) == 184);
    assert!(std::mem::offset_of!(RawHeader, free) == 192);
};

/// The purpose of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// A sealed file system image.
    Image,
    /// A block device.
    Disk,
    /// A file of an image that was modified in part. Only earlier versions wrote it.
    Partial,
}

/// Whether a file is writable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// The file may change.
    Writable,
    /// The file must not change.
    Sealed,
}

/// A range of the file to which the header refers with an offset and a checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Section {
    /// Offset in the file in bytes; 0 if the section is empty.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// CRC32C of the section; 0 if it is empty.
    pub crc: u32,
}

impl Section {
    /// The section with these bytes at this offset in the file; they are not empty.
    pub fn of(offset: u64, bytes: &[u8]) -> Self {
        Section {
            offset,
            bytes: bytes.len() as u32,
            crc: crc32c(bytes),
        }
    }

    /// Fails if `found`, the CRC32C of the bytes, is not the one of the section.
    pub fn check(&self, section: SectionKind, found: u32) -> Result<(), FormatError> {
        let expected = self.crc;
        if crc32c_matches(expected, found) {
            return Ok(());
        }
        Err(FormatError::SectionChecksum {
            section,
            expected,
            found,
        })
    }
}

/// Position and root hash of the Merkle tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MerkleTree {
    /// log2 of the chunk size, 12 to 20.
    pub chunk_shift: u8,
    /// Offset of the tree in the file, in bytes. The tree covers all bytes before it.
    pub offset: u64,
    /// The root hash.
    pub root: [u8; 32],
}

impl MerkleTree {
    /// The positions of the levels.
    pub fn shape(&self) -> MerkleShape {
        MerkleShape::new(self.offset, self.chunk_shift)
    }
}

/// A validated header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// Increases with each header that is written.
    pub generation: u64,
    /// Feature masks.
    pub features: Features,
    /// The purpose of the file.
    pub purpose: Use,
    /// Whether the file is writable.
    pub state: State,
    /// log2 of the region size, 12 to 30.
    pub region_shift: u8,
    /// Size of the address space in bytes.
    pub size: u64,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// The root table.
    pub root: Section,
    /// The metadata (JSON).
    pub metadata: Section,
    /// The backing table and its names.
    pub backings: Section,
    /// Number of entries in the backing table.
    pub backing_count: u32,
    /// The Merkle tree, if the file has one.
    pub merkle: Option<MerkleTree>,
    /// The record log: offset and length in bytes. Both are 0 if the file has none.
    pub log: (u64, u64),
    /// The free list of a writable file.
    pub free: Section,
}

/// Selects the newest intact slot and validates its header. `area` is the first
/// [`HEADER_AREA_BYTES`] of a file, or the whole file if it is shorter.
///
/// [`Header::check_file_length`] compares the header with the actual length of the file.
pub fn choose_header(area: &[u8]) -> Result<Header, FormatError> {
    let mut has_magic = false;
    let mut other_version = None;
    let mut newest: Option<RawHeader> = None;
    for slot in area.chunks(SLOT_BYTES).take(2) {
        if !slot.starts_with(&MAGIC) {
            continue;
        }
        has_magic = true;
        let Ok(raw) = RawHeader::read_from_bytes(slot) else {
            continue;
        };
        let intact = usize::from(raw.slot_bytes.get()) == SLOT_BYTES
            && crc32c_matches(raw.slot_crc.get(), slot_crc(&raw));
        if raw.version.get() != VERSION {
            if intact {
                return Err(FormatError::Version(raw.version.get()));
            }
            other_version.get_or_insert(raw.version.get());
            continue;
        }
        let newer = newest
            .as_ref()
            .is_none_or(|best| raw.generation.get() > best.generation.get());
        if intact && newer {
            newest = Some(raw);
        }
    }
    match newest {
        Some(raw) => decode(&raw),
        None if has_magic => Err(match other_version {
            Some(version) => FormatError::Version(version),
            None => FormatError::HeaderChecksum,
        }),
        None => Err(FormatError::NotBcow),
    }
}

fn slot_crc(raw: &RawHeader) -> u32 {
    let mut raw = raw.clone();
    raw.slot_crc = U32::new(0);
    crc32c(raw.as_bytes())
}

fn decode(raw: &RawHeader) -> Result<Header, FormatError> {
    let features = Features {
        incompatible: raw.incompatible.get(),
        read_only_compatible: raw.read_only_compatible.get(),
        compatible: raw.compatible.get(),
    };
    features.check_readable()?;

    require(raw.generation.get() > 0, "generation", "0")?;
    let purpose = match raw.purpose {
        1 => Use::Image,
        2 => Use::Disk,
        3 => Use::Partial,
        other => return Err(field("use", other)),
    };
    let state = match raw.state {
        0 => State::Writable,
        1 => State::Sealed,
        other => return Err(field("state", other)),
    };
    let may_be_writable = purpose != Use::Image || state == State::Sealed;
    require(may_be_writable, "state", "an image is not sealed")?;
    let region_shift = raw.region_shift;
    let is_valid = (12..=30).contains(&region_shift);
    require(is_valid, "region_shift", region_shift)?;
    let reserved = (raw.reserved_1.get(), raw.reserved_2.get(), raw.reserved_3);
    require(reserved == (0, 0, [0; 304]), "reserved", "not zero")?;
    let size = raw.size.get();
    let is_valid = size.is_multiple_of(SECTOR_BYTES) && size <= MAX_ADDRESS;
    require(is_valid, "size", size)?;
    let file_bytes = raw.file_bytes.get();
    let is_valid = (SECTOR_BYTES..=MAX_ADDRESS).contains(&file_bytes);
    require(is_valid, "file_bytes", file_bytes)?;
    let has = |bit| features.has_incompatible(bit);
    let logged = has(incompatible::RECORDS);
    require(
        !logged || file_bytes.is_multiple_of(SECTOR_BYTES),
        "file_bytes",
        format_args!("{file_bytes}, not a multiple of 4096, in a file with a record log"),
    )?;
    let root_entries = u64::from(raw.root.bytes.get());
    require(
        root_entries == size.div_ceil(1 << region_shift) && root_entries <= MAX_ROOT_ENTRIES,
        "root_entries",
        format_args!("{root_entries} for {size} bytes in regions of 2^{region_shift}"),
    )?;
    // In a file with a record log, no two structures share a sector (spec section 10, "Places").
    let section = |name, section: Section, align, max_bytes| {
        let align = if logged { SECTOR_BYTES } else { align };
        check_section(name, &section, align, max_bytes, file_bytes).map(|()| section)
    };
    let root = Section {
        bytes: (root_entries * ENTRY_BYTES as u64) as u32,
        ..Section::from(&raw.root)
    };
    let root = section("root_offset", root, 16, u32::MAX)?;
    let metadata = (&raw.metadata).into();
    let metadata = section("metadata_offset", metadata, 1, MAX_METADATA_BYTES)?;
    let backings = (&raw.backings).into();
    let backings = section("backing_offset", backings, 16, MAX_BACKING_BYTES)?;
    let backing_count = raw.backing_count.get();
    require(
        backing_count <= MAX_BACKINGS
            && u64::from(backing_count) * BACKING_ENTRY_BYTES as u64 <= backings.bytes.into()
            && (backing_count > 0 || backings.bytes == 0),
        "backing_count",
        format_args!("{backing_count} in {} bytes", backings.bytes),
    )?;
    let needs_backing = incompatible::BACKING | incompatible::WINDOWS | incompatible::FRAGMENTS;
    require(
        backing_count > 0 || !has(needs_backing),
        "backing_count",
        "0, but the features say there is a backing",
    )?;
    let (plain, fragments) = (has(incompatible::PLAIN), has(incompatible::FRAGMENTS));
    let apart = [
        (
            plain && has(incompatible::BACKING),
            "plain, but with a backing below",
        ),
        (plain && logged, "plain, but with a record log"),
        (
            fragments && (plain || logged),
            "fragments in a file that is plain or has a record log",
        ),
    ];
    for (are_both, problem) in apart {
        require(!are_both, "incompatible", problem)?;
    }
    let merkle = decode_merkle(raw, state, &features, file_bytes)?;
    let log = (raw.log_offset.get(), raw.log_bytes.get());
    check_log(log, state, logged, file_bytes)?;
    let free = section("free_offset", (&raw.free).into(), 16, MAX_FREE_BYTES)?;
    let is_valid = free.bytes.is_multiple_of(16);
    require(is_valid, "free_bytes", free.bytes)?;
    let may_be_free = free.bytes == 0 || state == State::Writable;
    require(may_be_free, "free_bytes", "a free list in a sealed file")?;
    Ok(Header {
        generation: raw.generation.get(),
        features,
        file_bytes,
        root,
        metadata,
        backings,
        backing_count,
        merkle,
        log,
        free,
        ..Header::new(purpose, state, region_shift, size)
    })
}

fn decode_merkle(
    raw: &RawHeader,
    state: State,
    features: &Features,
    file_bytes: u64,
) -> Result<Option<MerkleTree>, FormatError> {
    let chunk_shift = raw.merkle_chunk_shift;
    let (offset, bytes) = (raw.merkle_offset.get(), raw.merkle_bytes.get());
    let flagged = features.read_only_compatible & read_only_compatible::MERKLE != 0;
    require(
        flagged == (chunk_shift != 0),
        "merkle_chunk_shift",
        format_args!("{chunk_shift}, and the feature `merkle` says otherwise"),
    )?;
    if chunk_shift == 0 {
        let is_empty = offset == 0 && bytes == 0 && raw.merkle_root == [0; 32];
        require(is_empty, "merkle_offset", "a tree without a chunk size")?;
        return Ok(None);
    }
    let is_valid = (12..=20).contains(&chunk_shift);
    require(is_valid, "merkle_chunk_shift", chunk_shift)?;
    require(raw.merkle_root != [0; 32], "merkle_root", "0")?;
    let sealed = state == State::Sealed;
    require(sealed, "merkle_offset", "a Merkle tree in a writable file")?;
    require(
        offset >= SECTOR_BYTES && offset.checked_add(bytes) == Some(file_bytes),
        "merkle_offset",
        format_args!("{offset}+{bytes} does not end at file_bytes {file_bytes}"),
    )?;
    let expected = MerkleShape::new(offset, chunk_shift).total_bytes();
    require(
        bytes == expected,
        "merkle_bytes",
        format_args!("{bytes}, the tree over {offset} bytes has {expected}"),
    )?;
    Ok(Some(MerkleTree {
        chunk_shift,
        offset,
        root: raw.merkle_root,
    }))
}

fn check_log(
    (offset, bytes): (u64, u64),
    state: State,
    logged: bool,
    file_bytes: u64,
) -> Result<(), FormatError> {
    require(
        logged == (bytes != 0),
        "log_bytes",
        format_args!("{bytes}, and the feature `records` says otherwise"),
    )?;
    if bytes == 0 {
        let problem = format_args!("{offset}, but there is no log");
        return require(offset == 0, "log_offset", problem);
    }
    let writable = state == State::Writable;
    require(writable, "log_bytes", "a record log in a sealed file")?;
    let is_valid = bytes.is_multiple_of(SECTOR_BYTES) && bytes <= MAX_LOG_BYTES;
    require(is_valid, "log_bytes", bytes)?;
    check_place("log_offset", offset, bytes, SECTOR_BYTES, file_bytes)
}

fn check_section(
    name: &'static str,
    section: &Section,
    align: u64,
    max_bytes: u32,
    file_bytes: u64,
) -> Result<(), FormatError> {
    let Section { offset, bytes, crc } = *section;
    if bytes == 0 {
        let problem = format_args!("{offset} and checksum {crc:#x} of an empty section");
        return require(offset == 0 && crc == 0, name, problem);
    }
    require(bytes <= max_bytes, name, format_args!("{bytes} bytes"))?;
    check_place(name, offset, bytes.into(), align, file_bytes)
}

/// Checks that a part of the file is aligned, and lies behind the header and inside the file.
fn check_place(
    name: &'static str,
    offset: u64,
    bytes: u64,
    align: u64,
    file_bytes: u64,
) -> Result<(), FormatError> {
    let end = offset.checked_add(bytes);
    require(
        offset >= SECTOR_BYTES
            && offset.is_multiple_of(align)
            && end.is_some_and(|end| end <= file_bytes),
        name,
        format_args!("{offset}+{bytes} in a file of {file_bytes}"),
    )
}

fn require(holds: bool, name: &'static str, problem: impl Display) -> Result<(), FormatError> {
    if holds { Ok(()) } else { Err(field(name, problem)) }
}

fn field(field: &'static str, problem: impl Display) -> FormatError {
    FormatError::HeaderField {
        field,
        problem: problem.to_string(),
    }
}

impl From<&RawSection> for Section {
    fn from(raw: &RawSection) -> Self {
        Section {
            offset: raw.offset.get(),
            bytes: raw.bytes.get(),
            crc: raw.crc.get(),
        }
    }
}

impl From<Section> for RawSection {
    fn from(section: Section) -> Self {
        RawSection {
            offset: U64::new(section.offset),
            bytes: U32::new(section.bytes),
            crc: U32::new(section.crc),
        }
    }
}

impl Header {
    /// A header of the first generation, of a file without features and content.
    pub fn new(purpose: Use, state: State, region_shift: u8, size: u64) -> Self {
        Header {
            generation: 1,
            features: Features::default(),
            purpose,
            state,
            region_shift,
            size,
            file_bytes: 0,
            root: Section::default(),
            metadata: Section::default(),
            backings: Section::default(),
            backing_count: 0,
            merkle: None,
            log: (0, 0),
            free: Section::default(),
        }
    }

    /// Returns an error if the file, with `found` bytes, is shorter than the header says.
    pub fn check_file_length(&self, found: u64) -> Result<(), FormatError> {
        if found < self.file_bytes {
            return Err(FormatError::Truncated {
                expected: self.file_bytes,
                found,
            });
        }
        Ok(())
    }

    /// Length of a region in bytes. The last region may be shorter; a region beyond the end has
    /// length 0.
    pub fn region_length(&self, region: u64) -> u64 {
        let start = region << self.region_shift;
        self.size.saturating_sub(start).min(1 << self.region_shift)
    }

    /// Encodes a slot with this header.
    pub fn encode(&self) -> [u8; SLOT_BYTES] {
        let mut raw = self.to_raw();
        raw.slot_crc = U32::new(slot_crc(&raw));
        zerocopy::transmute!(raw)
    }

    /// The first 1024 bytes that the Merkle tree covers, in their canonical form (spec section 9).
    pub fn canonical(&self) -> [u8; HEADER_AREA_BYTES] {
        let mut raw = self.to_raw();
        raw.generation = U64::new(0);
        raw.merkle_root = [0; 32];
        let mut area = [0; HEADER_AREA_BYTES];
        area[..SLOT_BYTES].copy_from_slice(raw.as_bytes());
        area
    }

    fn to_raw(&self) -> RawHeader {
        let (merkle_offset, merkle_bytes, merkle_root, merkle_chunk_shift) = match &self.merkle {
            Some(tree) => (
                tree.offset,
                tree.shape().total_bytes(),
                tree.root,
                tree.chunk_shift,
            ),
            None => (0, 0, [0; 32], 0),
        };
        RawHeader {
            magic: MAGIC,
            version: U16::new(VERSION),
            slot_bytes: U16::new(SLOT_BYTES as u16),
            slot_crc: U32::new(0),
            generation: U64::new(self.generation),
            incompatible: U64::new(self.features.incompatible),
            read_only_compatible: U64::new(self.features.read_only_compatible),
            compatible: U64::new(self.features.compatible),
            purpose: match self.purpose {
                Use::Image => 1,
                Use::Disk => 2,
                Use::Partial => 3,
            },
            state: match self.state {
                State::Writable => 0,
                State::Sealed => 1,
            },
            region_shift: self.region_shift,
            merkle_chunk_shift,
            reserved_1: U32::new(0),
            size: U64::new(self.size),
            file_bytes: U64::new(self.file_bytes),
            root: RawSection {
                bytes: U32::new(self.root.bytes / ENTRY_BYTES as u32),
                ..self.root.into()
            },
            metadata: self.metadata.into(),
            backings: self.backings.into(),
            backing_count: U32::new(self.backing_count),
            reserved_2: U32::new(0),
            merkle_offset: U64::new(merkle_offset),
            merkle_bytes: U64::new(merkle_bytes),
            merkle_root,
            log_offset: U64::new(self.log.0),
            log_bytes: U64::new(self.log.1),
            free: self.free.into(),
            reserved_3: [0; 304],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        Header {
            file_bytes: 8192,
            root: Section {
                offset: 4096,
                bytes: 48,
                crc: 7,
            },
            ..Header::new(Use::Image, State::Sealed, 22, 9 << 20)
        }
    }

    fn area(a: &[u8], b: &[u8]) -> [u8; HEADER_AREA_BYTES] {
        let mut area = [0; HEADER_AREA_BYTES];
        area[..a.len()].copy_from_slice(a);
        area[SLOT_BYTES..SLOT_BYTES + b.len()].copy_from_slice(b);
        area
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        let header = header();
        assert_eq!(choose_header(&area(&header.encode(), &[])), Ok(header));
    }

    #[test]
    fn newest_intact_slot_wins() {
        let old = header();
        let new = Header {
            generation: 2,
            size: 10 << 20,
            ..header()
        };
        let mut damaged = new.encode();
        damaged[60] ^= 1;
        assert_eq!(
            choose_header(&area(&old.encode(), &new.encode())),
            Ok(new.clone())
        );
        assert_eq!(choose_header(&area(&new.encode(), &old.encode())), Ok(new));
        assert_eq!(choose_header(&area(&old.encode(), &damaged)), Ok(old));
        assert_eq!(
            choose_header(&area(&damaged, &damaged)),
            Err(FormatError::HeaderChecksum)
        );
    }

    #[test]
    fn regions_end_with_the_address_space() {
        let header = header();
        assert_eq!(header.region_length(1), 4 << 20);
        assert_eq!(header.region_length(2), 1 << 20);
        assert_eq!(header.region_length(3), 0);
    }
}

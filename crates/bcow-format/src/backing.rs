//! The backing table (spec section 8).

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::sizes::{BACKING_ENTRY_BYTES, MAX_ADDRESS};
use crate::{FormatError, Header, SECTOR_BYTES, SectionKind, Use, crc32c, crc32c_matches};

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawBacking {
    kind: u8,
    reserved: u8,
    name_bytes: U16,
    name_offset: U32,
    size: U64,
    reserved_2: [u8; 16],
    digest: [u8; 32],
}
const _: () = assert!(size_of::<RawBacking>() == BACKING_ENTRY_BYTES);

/// A read-only backing of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingEntry {
    /// How a reader finds the backing.
    pub name: BackingName,
    /// Size of its address space in bytes.
    pub size: u64,
}

/// The name of a backing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackingName {
    /// SHA-256 of the whole backing file.
    Digest([u8; 32]),
    /// A file name without directories. A reader looks for it only in the directories that the user
    /// allows.
    FileName {
        /// The file name.
        name: String,
        /// The identity of the backing (spec section 8), if the file records it.
        identity: Option<[u8; 32]>,
    },
}

impl std::fmt::Display for BackingName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BackingName::Digest(digest) => {
                f.write_str("sha256:")?;
                digest.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
            }
            BackingName::FileName { name, .. } => f.write_str(name),
        }
    }
}

/// Decodes and validates the backing table. `bytes` has the length `header.backings.bytes`.
pub fn decode_backings(bytes: &[u8], header: &Header) -> Result<Vec<BackingEntry>, FormatError> {
    let found = crc32c(bytes);
    if !crc32c_matches(header.backings.crc, found) {
        return Err(FormatError::SectionChecksum {
            section: SectionKind::Backing,
            expected: header.backings.crc,
            found,
        });
    }
    (0..header.backing_count)
        .map(|index| {
            decode_one(bytes, header, index)
                .map_err(|problem| FormatError::BackingEntry { index, problem })
        })
        .collect()
}

fn decode_one(bytes: &[u8], header: &Header, index: u32) -> Result<BackingEntry, String> {
    let start = index as usize * BACKING_ENTRY_BYTES;
    let entries_end = header.backing_count as usize * BACKING_ENTRY_BYTES;
    let raw = bytes
        .get(start..start + BACKING_ENTRY_BYTES)
        .and_then(|bytes| RawBacking::ref_from_bytes(bytes).ok())
        .ok_or("outside the table")?;
    if raw.reserved != 0 || raw.reserved_2 != [0; 16] {
        return Err("reserved bytes are not zero".into());
    }
    let size = raw.size.get();
    if !size.is_multiple_of(SECTOR_BYTES) || size > MAX_ADDRESS {
        return Err(format!("size {size}"));
    }
    let (name_bytes, name_offset) = (
        raw.name_bytes.get() as usize,
        raw.name_offset.get() as usize,
    );
    let name = match raw.kind {
        1 if name_bytes == 0 && name_offset == 0 => BackingName::Digest(raw.digest),
        1 => return Err("a digest that also has a name".into()),
        2 => {
            if header.purpose == Use::Image {
                return Err("an image names a backing by file name".into());
            }
            let name = name_offset
                .checked_add(name_bytes)
                .filter(|_| name_offset >= entries_end)
                .and_then(|end| bytes.get(name_offset..end))
                .ok_or("its name lies outside the names")?;
            let name = std::str::from_utf8(name).map_err(|_| "its name is not UTF-8")?;
            if !is_plain_name(name) {
                return Err("its name is not a plain file name".into());
            }
            BackingName::FileName {
                name: name.to_owned(),
                identity: (raw.digest != [0; 32]).then_some(raw.digest),
            }
        }
        kind => return Err(format!("kind {kind}")),
    };
    Ok(BackingEntry { name, size })
}

/// Whether `name` is a valid file name without directories, of 1 to 255 bytes.
pub fn is_plain_name(name: &str) -> bool {
    (1..=255).contains(&name.len()) && !name.contains(['/', '\0']) && name != "." && name != ".."
}

/// Encodes a backing table.
pub fn encode_backings(backings: &[BackingEntry]) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut names = Vec::new();
    let names_start = backings.len() * BACKING_ENTRY_BYTES;
    for backing in backings {
        let (kind, digest, name) = match &backing.name {
            BackingName::Digest(digest) => (1, *digest, ""),
            BackingName::FileName { name, identity } => {
                (2, identity.unwrap_or_default(), name.as_str())
            }
        };
        let raw = RawBacking {
            kind,
            reserved: 0,
            name_bytes: U16::new(name.len() as u16),
            name_offset: U32::new(if kind == 1 {
                0
            } else {
                (names_start + names.len()) as u32
            }),
            size: U64::new(backing.size),
            reserved_2: [0; 16],
            digest,
        };
        bytes.extend_from_slice(raw.as_bytes());
        names.extend_from_slice(name.as_bytes());
    }
    bytes.extend_from_slice(&names);
    bytes
}

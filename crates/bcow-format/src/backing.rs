//! The backing table (spec section 8).

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::checksum::hex;
use crate::error::require;
use crate::sizes::{BACKING_ENTRY_BYTES, MAX_ADDRESS, MAX_BACKING_BYTES, MAX_URL_BYTES};
use crate::{FormatError, Header, SECTOR_BYTES, SectionKind, Use, crc32c, incompatible};

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawBacking {
    kind: u8,
    reserved: u8,
    name_bytes: U16,
    name_offset: U32,
    size: U64,
    layout: U32,
    reserved_2: [u8; 12],
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
    /// The URL of a sealed file on another machine. A reader asks only servers that the user
    /// allows. Disks only.
    Url {
        /// The URL, as [`is_plain_url`] accepts it.
        url: String,
        /// The root of the file's Merkle tree.
        merkle_root: [u8; 32],
    },
    /// The view of an image, which a reader makes itself (spec section 8). Disks only.
    View {
        /// Version of the layout of the view.
        layout: u32,
        /// Identity of the view.
        identity: [u8; 32],
        /// The image, by digest, by file name or by URL.
        image: Box<BackingEntry>,
    },
}

impl std::fmt::Display for BackingName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            BackingName::Digest(digest) => write!(f, "sha256:{}", hex(digest)),
            BackingName::FileName { name, .. } => f.write_str(name),
            BackingName::Url { url, .. } => f.write_str(url),
            BackingName::View { image, .. } => write!(f, "the ext4 view of {}", image.name),
        }
    }
}

impl BackingEntry {
    /// The incompatible features of a file whose absent ranges show this backing.
    pub fn features(&self) -> u64 {
        match &self.name {
            BackingName::View { image, .. } => incompatible::VIEWS | image.features(),
            BackingName::Url { .. } => incompatible::BACKING | incompatible::URLS,
            BackingName::Digest(_) | BackingName::FileName { .. } => incompatible::BACKING,
        }
    }
}

/// Decodes and validates the backing table. `bytes` has the length `header.backings.bytes`.
pub fn decode_backings(bytes: &[u8], header: &Header) -> Result<Vec<BackingEntry>, FormatError> {
    let section = &header.backings;
    section.check(SectionKind::Backing, crc32c(bytes))?;
    (0..header.backing_count)
        .map(|index| {
            decode_one(bytes, header, header.backing_count, index)
                .map_err(|problem| FormatError::BackingEntry { index, problem })
        })
        .collect()
}

/// Decodes an entry of a table of `count` entries.
fn decode_one(
    bytes: &[u8],
    header: &Header,
    count: u32,
    index: u32,
) -> Result<BackingEntry, String> {
    let start = index as usize * BACKING_ENTRY_BYTES;
    let entries_end = count as usize * BACKING_ENTRY_BYTES;
    let raw = bytes
        .get(start..start + BACKING_ENTRY_BYTES)
        .and_then(|bytes| RawBacking::ref_from_bytes(bytes).ok())
        .ok_or("outside the table")?;
    let layout = raw.layout.get();
    let reserved = (raw.reserved, raw.reserved_2);
    require(reserved == (0, [0; 12]), "reserved bytes are not zero")?;
    let problem = "a layout, in an entry that is not a view";
    require(raw.kind == 3 || layout == 0, problem)?;
    let size = raw.size.get();
    require(
        size.is_multiple_of(SECTOR_BYTES) && size <= MAX_ADDRESS,
        format_args!("its size {size} is not a multiple of {SECTOR_BYTES}, or is too large"),
    )?;
    let name_bytes = raw.name_bytes.get() as usize;
    let name_offset = raw.name_offset.get() as usize;
    let has = |bit| header.features.has_incompatible(bit);
    let is_disk = header.purpose == Use::Disk;
    let name_at = || {
        name_offset
            .checked_add(name_bytes)
            .filter(|_| name_offset >= entries_end)
            .and_then(|end| bytes.get(name_offset..end))
            .ok_or("its name lies outside the names")
    };
    let name = match raw.kind {
        1 if name_bytes == 0 && name_offset == 0 => BackingName::Digest(raw.digest),
        1 => return Err("a digest that also has a name".into()),
        2 => {
            let problem = "an image names a backing by file name";
            require(header.purpose != Use::Image, problem)?;
            let name = std::str::from_utf8(name_at()?).map_err(|_| "its name is not UTF-8")?;
            require(is_plain_name(name), "its name is not a plain file name")?;
            BackingName::FileName {
                name: name.to_owned(),
                identity: (raw.digest != [0; 32]).then_some(raw.digest),
            }
        }
        3 => {
            require(is_disk, "a view, in a file that is not a disk")?;
            let problem = "a view without the feature `views`";
            require(has(incompatible::VIEWS), problem)?;
            let problem = "a view without layout or identity";
            require(layout != 0 && raw.digest != [0; 32], problem)?;
            let image = name_at()?;
            require(image.first() != Some(&raw.kind), "a view of a view")?;
            let image = decode_one(image, header, 1, 0)?;
            BackingName::View {
                layout,
                identity: raw.digest,
                image: Box::new(image),
            }
        }
        4 => {
            require(is_disk, "a URL, in a file that is not a disk")?;
            require(has(incompatible::URLS), "a URL without the feature `urls`")?;
            let problem = "a URL without the root of a Merkle tree";
            require(raw.digest != [0; 32], problem)?;
            let url = std::str::from_utf8(name_at()?).map_err(|_| "its URL is not UTF-8")?;
            require(is_plain_url(url), "its URL is not of the allowed form")?;
            BackingName::Url {
                url: url.to_owned(),
                merkle_root: raw.digest,
            }
        }
        kind => return Err(format!("unknown kind {kind}")),
    };
    Ok(BackingEntry { name, size })
}

/// Whether `name` is a valid file name without directories, of 1 to 255 bytes.
pub fn is_plain_name(name: &str) -> bool {
    (1..=255).contains(&name.len()) && !name.contains(['/', '\0']) && name != "." && name != ".."
}

/// Whether `url` may name a backing (spec section 8): it has a known scheme, and no part that could
/// be a secret (user, password, query). A URL with the scheme `s3` has no such parts: all bytes
/// behind the scheme belong to the bucket and the key.
pub fn is_plain_url(url: &str) -> bool {
    let is_text = url.len() <= MAX_URL_BYTES && !url.chars().any(|c| c < ' ' || c == '\x7f');
    let Some((scheme, rest)) = url.split_once("://").filter(|_| is_text) else {
        return false;
    };
    let server = rest.split('/').next().unwrap_or_default();
    match scheme {
        "s3" => !rest.is_empty(),
        "https" | "http" | "docker" => {
            !server.is_empty() && !server.contains('@') && !rest.contains(['?', '#'])
        }
        _ => false,
    }
}

/// Encodes a backing table. Fails if a name, or the table, is longer than the format allows.
pub fn encode_backings(backings: &[BackingEntry]) -> Result<Vec<u8>, FormatError> {
    let mut bytes = Vec::new();
    let mut names = Vec::new();
    let names_start = backings.len() * BACKING_ENTRY_BYTES;
    for (index, backing) in (0..).zip(backings) {
        let refused = |problem| FormatError::BackingEntry { index, problem };
        let (kind, layout, digest, name) = match &backing.name {
            BackingName::Digest(digest) => (1, 0, *digest, Vec::new()),
            BackingName::FileName { name, identity } => (
                2,
                0,
                identity.unwrap_or_default(),
                name.clone().into_bytes(),
            ),
            BackingName::Url { url, merkle_root } => (4, 0, *merkle_root, url.clone().into_bytes()),
            BackingName::View {
                layout,
                identity,
                image,
            } => (
                3,
                *layout,
                *identity,
                encode_backings(std::slice::from_ref(image))?,
            ),
        };
        let name_offset = names_start + names.len();
        let name_bytes = u16::try_from(name.len()).ok();
        let name_bytes = name_bytes
            .filter(|_| name_offset + name.len() <= MAX_BACKING_BYTES as usize)
            .ok_or_else(|| refused(format!("a name of {} bytes, which is too long", name.len())))?;
        let raw = RawBacking {
            kind,
            reserved: 0,
            name_bytes: U16::new(name_bytes),
            name_offset: U32::new(if kind == 1 { 0 } else { name_offset as u32 }),
            size: U64::new(backing.size),
            layout: U32::new(layout),
            reserved_2: [0; 12],
            digest,
        };
        bytes.extend_from_slice(raw.as_bytes());
        names.extend_from_slice(&name);
    }
    bytes.extend_from_slice(&names);
    Ok(bytes)
}

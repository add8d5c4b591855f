//! Extended attributes: in the inode first, and what does not fit there in one block.

use zerocopy::IntoBytes;

use crate::format::{BLOCK_BYTES, INODE_BYTES, RawInode, XATTR_MAGIC, XattrEntry, XattrHeader};
use crate::node::{InodeNumber, Xattr};
use crate::output::{BlockBuffer, Output};
use crate::{Ext4Error, InodeProblem, acl};

/// Bytes behind an inode's fields.
pub(crate) const IN_INODE_BYTES: usize = INODE_BYTES - size_of::<RawInode>();

/// Prefixes of names, and the numbers that ext4 stores in their place.
pub(crate) const PREFIXES: [(&[u8], u8); 5] = [
    (b"user.", 1),
    (ACCESS, ACCESS_INDEX),
    (DEFAULT, DEFAULT_INDEX),
    (b"trusted.", 4),
    (b"security.", 6),
];

const ACCESS: &[u8] = b"system.posix_acl_access";
pub(crate) const ACCESS_INDEX: u8 = 2;
const DEFAULT: &[u8] = b"system.posix_acl_default";
pub(crate) const DEFAULT_INDEX: u8 = 3;

/// Bytes of an entry without its name, and of the end of the entries.
const ENTRY: usize = size_of::<XattrEntry>();
const END: usize = 4;

/// Where the attributes of an inode are stored.
pub(crate) struct Stored {
    /// The bytes behind the inode's fields.
    pub in_inode: [u8; IN_INODE_BYTES],
    /// The block of the attributes that do not fit there.
    pub block: Option<u64>,
}

/// An attribute in ext4's form.
struct Attribute<'a> {
    index: u8,
    /// The name without its prefix.
    rest: &'a [u8],
    value: Vec<u8>,
}

impl Attribute<'_> {
    fn entry_bytes(&self) -> usize {
        ENTRY + self.rest.len().next_multiple_of(4)
    }

    fn bytes(&self) -> usize {
        self.entry_bytes() + self.value.len().next_multiple_of(4)
    }

    /// The hash of the name and the value. Some versions of Linux take the bytes of the name as
    /// unsigned here; all accept the hash of signed bytes.
    fn hash(&self) -> u32 {
        let name = self.rest.iter().fold(0u32, |hash, &byte| {
            hash.rotate_left(5) ^ i32::from(byte as i8) as u32
        });
        self.value.chunks(4).fold(name, |hash, piece| {
            let mut word = [0; 4];
            word[..piece.len()].copy_from_slice(piece);
            hash.rotate_left(16) ^ u32::from_le_bytes(word)
        })
    }
}

/// Stores the attributes of an inode.
pub(crate) fn store(
    number: InodeNumber,
    xattrs: &[Xattr<'_>],
    output: &mut Output<'_>,
) -> Result<Stored, Ext4Error> {
    let attributes = sorted(xattrs).map_err(|problem| number.refused(problem))?;
    let mut stored = Stored {
        in_inode: [0; IN_INODE_BYTES],
        block: None,
    };
    let mut room = IN_INODE_BYTES - XATTR_MAGIC.as_bytes().len() - END;
    let (inside, outside): (Vec<_>, Vec<_>) = attributes.into_iter().partition(|attribute| {
        let fits = attribute.bytes() <= room;
        if fits {
            room -= attribute.bytes();
        }
        fits
    });
    if !inside.is_empty() {
        let (magic, area) = stored.in_inode.split_at_mut(XATTR_MAGIC.as_bytes().len());
        magic.copy_from_slice(&XATTR_MAGIC.to_le_bytes());
        place(&inside, area, 0);
    }
    if !outside.is_empty() {
        let bytes: usize = outside.iter().map(Attribute::bytes).sum();
        if size_of::<XattrHeader>() + bytes + END > BLOCK_BYTES {
            return Err(number.refused(InodeProblem::XattrSpace));
        }
        let block = output.allocate()?;
        let buffer = block_of(&outside, block, output);
        output.write(block, &buffer)?;
        stored.block = Some(block);
    }
    Ok(stored)
}

fn sorted<'a>(xattrs: &[Xattr<'a>]) -> Result<Vec<Attribute<'a>>, InodeProblem> {
    let mut attributes = xattrs
        .iter()
        .map(attribute)
        .collect::<Result<Vec<_>, _>>()?;
    attributes.sort_by(|a, b| {
        let key = |x: &Attribute<'a>| (x.index, x.rest.len(), x.rest);
        key(a).cmp(&key(b))
    });
    let twice = attributes
        .windows(2)
        .find(|pair| (pair[0].index, pair[0].rest) == (pair[1].index, pair[1].rest));
    match twice {
        Some(pair) => Err(InodeProblem::XattrTwice(pair[0].rest.to_vec())),
        None => Ok(attributes),
    }
}

fn attribute<'a>(xattr: &Xattr<'a>) -> Result<Attribute<'a>, InodeProblem> {
    let refuse = || InodeProblem::XattrName(xattr.name.to_vec());
    let (rest, index) = PREFIXES
        .iter()
        .find_map(|&(prefix, index)| Some((xattr.name.strip_prefix(prefix)?, index)))
        .ok_or_else(refuse)?;
    let is_acl = matches!(index, ACCESS_INDEX | DEFAULT_INDEX);
    let is_allowed = is_acl == rest.is_empty() && rest.len() <= 255 && !rest.contains(&0);
    if !is_allowed {
        return Err(refuse());
    }
    let value = if is_acl {
        acl::to_disk(xattr.value).ok_or_else(|| InodeProblem::Acl(xattr.name.to_vec()))?
    } else if xattr.value.len() > BLOCK_BYTES {
        return Err(InodeProblem::XattrSpace);
    } else {
        xattr.value.to_vec()
    };
    Ok(Attribute { index, rest, value })
}

fn block_of(attributes: &[Attribute<'_>], block: u64, output: &Output<'_>) -> BlockBuffer {
    let mut buffer = [0; BLOCK_BYTES];
    let head_bytes = size_of::<XattrHeader>();
    place(attributes, &mut buffer[head_bytes..], head_bytes);
    let hash = attributes.iter().fold(0u32, |hash, attribute| {
        hash.rotate_left(16) ^ attribute.hash()
    });
    let mut header = XattrHeader {
        magic: XATTR_MAGIC.into(),
        references: 1.into(),
        blocks: 1.into(),
        hash: hash.into(),
        checksum: 0.into(),
        reserved: [0.into(); 3],
    };
    buffer[..head_bytes].copy_from_slice(header.as_bytes());
    let checksum = output.seed.with(&block.to_le_bytes()).with(&buffer);
    header.checksum = checksum.0.into();
    buffer[..head_bytes].copy_from_slice(header.as_bytes());
    buffer
}

/// Places entries at the start of `area` and values at its end. Offsets of values count from
/// `base` bytes in front of the area.
fn place(attributes: &[Attribute<'_>], area: &mut [u8], base: usize) {
    let mut at = 0;
    let mut end = area.len();
    for attribute in attributes {
        let value = &attribute.value;
        end -= value.len().next_multiple_of(4);
        let offset = if value.is_empty() { 0 } else { base + end };
        let entry = XattrEntry {
            name_bytes: attribute.rest.len() as u8,
            name_index: attribute.index,
            value_offset: (offset as u16).into(),
            value_inode: 0.into(),
            value_bytes: (value.len() as u32).into(),
            hash: attribute.hash().into(),
        };
        area[at..at + ENTRY].copy_from_slice(entry.as_bytes());
        area[at + ENTRY..][..attribute.rest.len()].copy_from_slice(attribute.rest);
        area[end..][..value.len()].copy_from_slice(value);
        at += attribute.entry_bytes();
    }
}

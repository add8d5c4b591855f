//! Extended attributes, from the inode, from a block, and from inodes of their own.

use std::collections::BTreeMap;

use zerocopy::FromBytes;

use super::{Inode, ReadError, Reader, Structure};
use crate::acl;
use crate::format::{BLOCK_BYTES, XATTR_MAGIC, XattrEntry, XattrHeader};
use crate::node::{FileKind, InodeNumber};
use crate::xattr::{ACCESS_INDEX, DEFAULT_INDEX, PREFIXES};

const ENTRY: usize = size_of::<XattrEntry>();
const HEADER: usize = size_of::<XattrHeader>();
/// The offset of the checksum in the header.
const CHECKSUM_AT: usize = 16;
/// The longest value: that of system calls.
const MAX_VALUE: usize = 65_536;
/// Prefixes that the kernel shows, and that the writer has no use for.
const OTHER_PREFIXES: [(&[u8], u8); 2] = [(b"system.", 7), (b"gnu.", 10)];

impl Reader {
    /// Reads the extended attributes of an inode, by full name. ACLs have the form of system calls.
    pub fn xattrs(&self, inode: &Inode) -> Result<BTreeMap<Vec<u8>, Vec<u8>>, ReadError> {
        let mut found = BTreeMap::new();
        if let Some((magic, area)) = inode.behind.split_first_chunk::<4>()
            && u32::from_le_bytes(*magic) == XATTR_MAGIC
        {
            self.area(inode, area, area, &mut found)?;
        }
        if inode.xattr_block != 0 {
            let block = self.block(inode.xattr_block)?;
            let damaged = |problem| Structure::Inode(inode.number).damaged(problem);
            let Ok((header, area)) = XattrHeader::read_from_prefix(&block[..]) else {
                return Err(damaged("its attributes are too short"));
            };
            if header.magic.get() != XATTR_MAGIC || header.blocks.get() != 1 {
                return Err(damaged("its attributes have no header"));
            }
            if let Some(seed) = self.seed {
                let mut covered = block.clone();
                covered[CHECKSUM_AT..][..4].fill(0);
                let seed = seed.with(&inode.xattr_block.to_le_bytes());
                if seed.with(&covered[..]).0 != header.checksum.get() {
                    return Err(damaged("the checksum of its attributes is wrong"));
                }
            }
            debug_assert_eq!(area.len(), BLOCK_BYTES - HEADER);
            self.area(inode, area, &block[..], &mut found)?;
        }
        Ok(found)
    }

    /// Reads the entries in `area`. Offsets of values count from the start of `base`.
    fn area(
        &self,
        inode: &Inode,
        area: &[u8],
        base: &[u8],
        found: &mut BTreeMap<Vec<u8>, Vec<u8>>,
    ) -> Result<(), ReadError> {
        let damaged = |problem| Structure::Inode(inode.number).damaged(problem);
        let mut rest = area;
        // Four zeros are the end.
        while rest.iter().take(4).any(|&byte| byte != 0) {
            let Ok((entry, behind)) = XattrEntry::read_from_prefix(rest) else {
                return Err(damaged("an attribute is too short"));
            };
            let name_bytes = usize::from(entry.name_bytes);
            let length = ENTRY + name_bytes.next_multiple_of(4);
            if length > rest.len() {
                return Err(damaged("the name of an attribute is too long"));
            }
            let index = entry.name_index;
            let name = full_name(index, &behind[..name_bytes])
                .ok_or_else(|| damaged("an attribute has an unknown prefix"))?;
            let bytes = entry.value_bytes.get() as usize;
            let value = match entry.value_inode.get() {
                0 => {
                    let start = usize::from(entry.value_offset.get());
                    let value = base.get(start..start.saturating_add(bytes));
                    value
                        .ok_or_else(|| damaged("the value of an attribute is out of range"))?
                        .to_vec()
                }
                number => self.value(InodeNumber(number), bytes)?,
            };
            let value = match index {
                ACCESS_INDEX | DEFAULT_INDEX => {
                    acl::from_disk(&value).ok_or_else(|| damaged("an ACL is damaged"))?
                }
                _ => value,
            };
            found.insert(name, value);
            rest = &rest[length..];
        }
        Ok(())
    }

    /// Reads a value that has an inode of its own.
    fn value(&self, number: InodeNumber, bytes: usize) -> Result<Vec<u8>, ReadError> {
        let inode = self.inode(number)?;
        let is_value =
            inode.kind == FileKind::Regular && bytes <= MAX_VALUE && inode.size == bytes as u64;
        if !is_value {
            return Err(Structure::Inode(number).damaged("it is not the value of an attribute"));
        }
        let mut value = vec![0; bytes];
        self.read(&self.extents(&inode)?, 0, &mut value)?;
        Ok(value)
    }
}

fn full_name(index: u8, rest: &[u8]) -> Option<Vec<u8>> {
    let mut all = PREFIXES.iter().chain(&OTHER_PREFIXES);
    let (prefix, _) = all.find(|(_, known)| *known == index)?;
    Some([prefix, rest].concat())
}

//! Extended attributes: selects the shared ones, computes the size per inode, and writes the bytes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use zerocopy::IntoBytes;

use super::WriteError;
use crate::format::{XattrEntry, XattrHeader, split_xattr_name, xattr_entry_bytes};
use crate::tree::{NodeId, Tree, Xattrs};

/// EROFS, or the kernel, cannot store an extended attribute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum XattrProblem {
    /// EROFS has no number for the name's prefix, or no name follows the prefix.
    #[error(
        "EROFS has no such name prefix (only user., trusted., security., lustre. and the POSIX \
         ACLs)"
    )]
    Prefix,
    /// The name is longer than Linux allows.
    #[error("the name has {0} bytes, more than 255")]
    NameLength(usize),
    /// The name contains a NUL.
    #[error("there is a NUL in the name")]
    NameNul,
    /// The value is longer than the format allows.
    #[error("the value has {0} bytes, more than 65535")]
    ValueLength(usize),
    /// All attributes of the file together exceed the limit.
    #[error("with it, the file's attributes take {0} bytes, more than 262148")]
    Total(u64),
}

/// Limit on the bytes of an inode's xattrs: the count of 4-byte units has 16 bits.
const MAX_IBODY_BYTES: u64 = 12 + 4 * (u16::MAX as u64 - 1);

/// Limit on shared ids per inode: the count has 8 bits.
const MAX_SHARED: usize = u8::MAX as usize;

/// A name and a value.
type Pair<'t> = (&'t [u8], &'t [u8]);

/// All xattrs of a tree.
pub(super) struct XattrTable<'t> {
    /// Shared pairs and their offset in the shared area, in units of 4 bytes, in the order of the
    /// area.
    shared: BTreeMap<Pair<'t>, u32>,
    /// Bytes of the shared area, a multiple of 4.
    pub(super) shared_bytes: u64,
    /// Bytes beside the inode, by the address of the set: inodes share sets, and the lookup is per
    /// inode.
    sizes: HashMap<*const BTreeMap<Vec<u8>, Vec<u8>>, u32>,
}

impl<'t> XattrTable<'t> {
    pub(super) fn new(tree: &'t Tree) -> Result<Self, WriteError> {
        // Count the uses of each set, then the uses of each pair.
        let mut sets: HashMap<_, (NodeId, &'t Xattrs, u64)> = HashMap::new();
        for id in tree.ids() {
            if let Some(set) = &tree.node(id).attributes.xattrs {
                sets.entry(Arc::as_ptr(set)).or_insert((id, set, 0)).2 += 1;
            }
        }
        let mut pairs: HashMap<Pair<'t>, u64> = HashMap::new();
        // Report the first invalid attribute in the tree's order, which does not depend on the
        // map's order.
        let mut bad: Option<(NodeId, &'t [u8], XattrProblem)> = None;
        for &(id, set, uses) in sets.values() {
            for (name, value) in set.iter() {
                if let Err(problem) = check(name, value) {
                    if bad.is_none_or(|(known, ..)| id < known) {
                        bad = Some((id, name, problem));
                    }
                    break;
                }
                *pairs.entry((name, value)).or_default() += uses;
            }
        }
        if let Some((id, name, problem)) = bad {
            return Err(error(tree, id, name, problem));
        }

        let mut table = XattrTable {
            shared: BTreeMap::new(),
            shared_bytes: 0,
            sizes: HashMap::new(),
        };
        let worth = pairs.into_iter().filter(|&((name, value), uses)| {
            let bytes = entry_bytes(name, value);
            uses > 1 && uses * bytes > bytes + 4 * uses
        });
        table.shared = worth.map(|(pair, _)| (pair, 0)).collect();
        for (&(name, value), place) in &mut table.shared {
            // 2^34 bytes of distinct values would exceed the memory that holds them.
            *place = u32::try_from(table.shared_bytes / 4).unwrap_or(u32::MAX);
            table.shared_bytes += entry_bytes(name, value);
        }

        for (pointer, (id, set, _)) in sets {
            match table.ibody_bytes(set) {
                Ok(bytes) => {
                    table.sizes.insert(pointer, bytes);
                }
                Err((name, total)) if bad.is_none_or(|(known, ..)| id < known) => {
                    bad = Some((id, name, XattrProblem::Total(total)));
                }
                Err(_) => {}
            }
        }
        match bad {
            Some((id, name, problem)) => Err(error(tree, id, name, problem)),
            None => Ok(table),
        }
    }

    /// Bytes of a node's xattrs beside its inode, a multiple of 4.
    pub(super) fn bytes(&self, set: Option<&Xattrs>) -> u32 {
        set.map_or(0, |set| {
            self.sizes.get(&Arc::as_ptr(set)).copied().unwrap_or(0)
        })
    }

    /// Appends a node's xattrs.
    pub(super) fn write(&self, set: Option<&Xattrs>, out: &mut Vec<u8>) {
        let Some(set) = set.filter(|set| !set.is_empty()) else {
            return;
        };
        let (shared, inline) = self.split(set);
        let header = XattrHeader {
            name_filter: 0.into(),
            // At most MAX_SHARED.
            shared_count: shared.len() as u8,
            reserved: [0; 7],
        };
        out.extend_from_slice(header.as_bytes());
        for id in shared {
            out.extend_from_slice(&id.to_le_bytes());
        }
        for (name, value) in inline {
            write_entry(name, value, out);
        }
    }

    /// Calls `each` with the bytes of the shared area, entry by entry.
    pub(super) fn shared_entries<E>(
        &self,
        mut each: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut entry = Vec::new();
        for (name, value) in self.shared.keys() {
            entry.clear();
            write_entry(name, value, &mut entry);
            each(&entry)?;
        }
        Ok(())
    }

    fn split<'s>(&self, set: &'s Xattrs) -> (Vec<u32>, Vec<Pair<'s>>) {
        let mut shared = Vec::new();
        let mut inline = Vec::new();
        for (name, value) in set.iter() {
            match self.shared.get(&(&name[..], &value[..])) {
                Some(&id) if shared.len() < MAX_SHARED => shared.push(id),
                _ => inline.push((&name[..], &value[..])),
            }
        }
        (shared, inline)
    }

    /// The size beside the inode; or the name at which it exceeds the limit, and the total.
    fn ibody_bytes(&self, set: &'t Xattrs) -> Result<u32, (&'t [u8], u64)> {
        if set.is_empty() {
            return Ok(0);
        }
        let (shared, inline) = self.split(set);
        let mut bytes = size_of::<XattrHeader>() as u64 + 4 * shared.len() as u64;
        for (name, value) in inline {
            bytes += entry_bytes(name, value);
            if bytes > MAX_IBODY_BYTES {
                return Err((name, bytes));
            }
        }
        Ok(bytes as u32)
    }
}

fn error(tree: &Tree, id: NodeId, name: &[u8], problem: XattrProblem) -> WriteError {
    WriteError::Xattr {
        path: tree.path(id),
        name: name.to_vec(),
        problem,
    }
}

/// Checks that EROFS can store this attribute.
fn check(name: &[u8], value: &[u8]) -> Result<(), XattrProblem> {
    if name.len() > 255 {
        return Err(XattrProblem::NameLength(name.len()));
    }
    if name.contains(&0) {
        return Err(XattrProblem::NameNul);
    }
    if value.len() > usize::from(u16::MAX) {
        return Err(XattrProblem::ValueLength(value.len()));
    }
    match split_xattr_name(name) {
        Some(_) => Ok(()),
        None => Err(XattrProblem::Prefix),
    }
}

/// Bytes of an entry whose name was checked.
fn entry_bytes(name: &[u8], value: &[u8]) -> u64 {
    let rest = split_xattr_name(name).map_or(name, |(_, rest)| rest);
    xattr_entry_bytes(rest.len(), value.len()) as u64
}

fn write_entry(name: &[u8], value: &[u8], out: &mut Vec<u8>) {
    let (index, rest) = split_xattr_name(name).unwrap_or((0, name));
    let entry = XattrEntry {
        // Both lengths were checked when the table was built.
        name_bytes: rest.len() as u8,
        name_index: index,
        value_bytes: (value.len() as u16).into(),
    };
    let start = out.len();
    out.extend_from_slice(entry.as_bytes());
    out.extend_from_slice(rest);
    out.extend_from_slice(value);
    out.resize(start + xattr_entry_bytes(rest.len(), value.len()), 0);
}

//! Finds the names of an inode, which the inode itself does not record.

use std::collections::HashSet;
use std::ops::ControlFlow;

use super::walk::MAX_DEPTH;
use super::{FileType, Filesystem, Nid};

/// Blocks without a further name that an index reads at most, apart from the first one of each
/// directory. The size of a damaged directory can be 2^63, without a byte of content.
const MAX_FRUITLESS: usize = 1 << 16;

/// An index of the names of a tree, or of its readable part, for paths in messages.
///
/// The constructor reads all directories. It skips damaged blocks and directories that occur twice,
/// and ends early if it has read tens of thousands of blocks in vain.
#[derive(Debug)]
pub struct PathIndex {
    root: Nid,
    /// Sorted by child.
    entries: Vec<NamedChild>,
    /// The names of all entries, concatenated.
    names: Vec<u8>,
}

#[derive(Debug, Clone, Copy)]
struct NamedChild {
    child: Nid,
    parent: Nid,
    name_start: u32,
    name_bytes: u8,
}

impl PathIndex {
    /// Reads the names of `fs`, at most `most` of them.
    pub fn new(fs: &Filesystem, most: usize) -> Self {
        let mut index = PathIndex {
            root: fs.root(),
            entries: Vec::new(),
            names: Vec::new(),
        };
        let mut seen = HashSet::from([fs.root()]);
        let mut directories = vec![fs.root()];
        let mut fruitless = 0;
        'all: while let Some(parent) = directories.pop() {
            let Ok(inode) = fs.inode(parent) else {
                continue;
            };
            if inode.kind != FileType::Directory {
                continue;
            }
            let block_bytes = u64::from(fs.superblock().block_bytes);
            for block in 0..inode.size.div_ceil(block_bytes) {
                let mut is_full = false;
                let known = index.entries.len();
                // A damaged block hides only its own names.
                let _ = fs.read_dir(&inode, block * block_bytes, &mut |entry| {
                    let next = if entry.next_cookie < (block + 1) * block_bytes {
                        ControlFlow::Continue(())
                    } else {
                        ControlFlow::Break(())
                    };
                    if entry.name == b"." || entry.name == b".." {
                        return next;
                    }
                    let is_directory = entry.kind == FileType::Directory;
                    // A directory has one parent; a second one could form a cycle.
                    if is_directory && !seen.insert(entry.nid) {
                        return next;
                    }
                    is_full =
                        index.entries.len() >= most || !index.push(parent, entry.nid, entry.name);
                    if is_full {
                        return ControlFlow::Break(());
                    }
                    if is_directory {
                        directories.push(entry.nid);
                    }
                    next
                });
                // The first block of an empty directory has no name either.
                fruitless += usize::from(block > 0 && index.entries.len() == known);
                if is_full || fruitless > MAX_FRUITLESS {
                    break 'all;
                }
            }
        }
        index.entries.sort_by_key(|entry| entry.child);
        index
    }

    /// Absolute paths of an inode, at most `most`; empty if the inode is unknown.
    pub fn paths(&self, nid: Nid, most: usize) -> Vec<Vec<u8>> {
        if nid == self.root {
            return vec![b"/".to_vec()];
        }
        self.entries_of(nid)
            .iter()
            .take(most)
            .filter_map(|entry| self.path(entry))
            .collect()
    }

    /// Returns `false` if there is no space for the entry.
    fn push(&mut self, parent: Nid, child: Nid, name: &[u8]) -> bool {
        let (Ok(name_start), Ok(name_bytes)) =
            (u32::try_from(self.names.len()), u8::try_from(name.len()))
        else {
            return false;
        };
        self.names.extend_from_slice(name);
        self.entries.push(NamedChild {
            child,
            parent,
            name_start,
            name_bytes,
        });
        true
    }

    fn entries_of(&self, nid: Nid) -> &[NamedChild] {
        let start = self.entries.partition_point(|entry| entry.child < nid);
        let rest = &self.entries[start..];
        &rest[..rest.partition_point(|entry| entry.child == nid)]
    }

    fn path(&self, entry: &NamedChild) -> Option<Vec<u8>> {
        let mut way = vec![*entry];
        while let Some(last) = way.last().filter(|last| last.parent != self.root) {
            if way.len() == MAX_DEPTH {
                return None;
            }
            way.push(*self.entries_of(last.parent).first()?);
        }
        let mut path = Vec::new();
        for entry in way.iter().rev() {
            let start = entry.name_start as usize;
            path.push(b'/');
            path.extend_from_slice(&self.names[start..start + usize::from(entry.name_bytes)]);
        }
        Some(path)
    }
}

//! Directory blocks: the entries, then the names, sorted by bytes across all blocks.

use std::collections::btree_map;
use std::iter::Peekable;

use zerocopy::IntoBytes;

use crate::format::{BLOCK_BYTES, Dirent};
use crate::reader::FileType;
use crate::tree::{Directory, NodeId, NodeKind};

/// A directory's entries in byte order, including `.` and `..` at their sorted positions (`!` and
/// `-` sort before them).
pub(super) struct Entries<'t> {
    dots: &'static [&'static [u8]],
    own: NodeId,
    parent: NodeId,
    children: Peekable<btree_map::Iter<'t, Box<[u8]>, NodeId>>,
}

impl<'t> Entries<'t> {
    pub(super) fn new(directory: &'t Directory, own: NodeId, parent: NodeId) -> Self {
        Entries {
            dots: &[b".", b".."],
            own,
            parent,
            children: directory.children.iter().peekable(),
        }
    }
}

impl<'t> Iterator for Entries<'t> {
    type Item = (&'t [u8], NodeId);

    fn next(&mut self) -> Option<Self::Item> {
        let Some((&dot, rest)) = self.dots.split_first() else {
            return self.children.next().map(|(name, &id)| (&name[..], id));
        };
        if let Some((name, id)) = self.children.next_if(|(name, _)| name[..] < *dot) {
            return Some((name, *id));
        }
        self.dots = rest;
        let id = if rest.is_empty() { self.parent } else { self.own };
        Some((dot, id))
    }
}

/// Computes the block boundaries from the lengths of the names, in order.
#[derive(Default)]
pub(super) struct Packer {
    full_blocks: u64,
    used: usize,
}

impl Packer {
    /// Adds an entry; returns true if it starts a new block because the current one is full.
    pub(super) fn push(&mut self, name_bytes: usize) -> bool {
        let bytes = size_of::<Dirent>() + name_bytes;
        let new_block = self.used + bytes > BLOCK_BYTES;
        if new_block {
            self.full_blocks += 1;
            self.used = 0;
        }
        self.used += bytes;
        new_block
    }

    /// Size of the directory so far, in bytes. Only the last block may be partly filled.
    pub(super) fn bytes(&self) -> u64 {
        self.full_blocks * BLOCK_BYTES as u64 + self.used as u64
    }
}

/// Size of a directory in bytes.
pub(super) fn directory_bytes(directory: &Directory) -> u64 {
    let mut packer = Packer::default();
    for (name, _) in Entries::new(directory, NodeId(0), NodeId(0)) {
        packer.push(name.len());
    }
    packer.bytes()
}

/// An entry to be written.
pub(super) struct DirEntry<'t> {
    pub name: &'t [u8],
    pub nid: u64,
    pub file_type: u8,
}

/// Appends a block's entries and names to `out`, without padding.
pub(super) fn write_block(entries: &[DirEntry<'_>], out: &mut Vec<u8>) {
    let mut name_offset = size_of::<Dirent>() * entries.len();
    for entry in entries {
        let dirent = Dirent {
            nid: entry.nid.into(),
            // Within a block, so below 4096.
            name_offset: (name_offset as u16).into(),
            file_type: entry.file_type,
            reserved: 0,
        };
        out.extend_from_slice(dirent.as_bytes());
        name_offset += entry.name.len();
    }
    for entry in entries {
        out.extend_from_slice(entry.name);
    }
}

/// The type of an inode; a tree to be written has no nodes without one.
pub(super) fn file_type(kind: &NodeKind) -> Option<FileType> {
    Some(match kind {
        NodeKind::Directory(_) => FileType::Directory,
        NodeKind::Regular(_) => FileType::Regular,
        NodeKind::Symlink(_) => FileType::Symlink,
        NodeKind::CharDevice(_) => FileType::CharDevice,
        NodeKind::BlockDevice(_) => FileType::BlockDevice,
        NodeKind::Fifo => FileType::Fifo,
        NodeKind::Socket => FileType::Socket,
        NodeKind::Whiteout | NodeKind::LowerLink(_) => return None,
    })
}

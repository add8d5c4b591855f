//! The location of every inode and directory block.

use super::dirs::directory_bytes;
use super::space::Space;
use super::xattrs::XattrTable;
use super::{WriteError, WriteOptions};
use crate::format::{BLOCK_BYTES, CompactInode, ExtendedInode, SLOT_BYTES, XattrHeader, layout};
use crate::tree::{Blocks, NodeId, NodeKind, Timestamp, Tree};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// The location and form of an inode.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed {
    /// Slot in the metadata area; 0, which no inode has, until the inode is placed.
    pub nid: u32,
    /// Link count; for a directory, 2 plus the number of subdirectories.
    pub nlink: u32,
    /// For a directory, the index into [`Layout::directories`]. For a symbolic link whose target is
    /// not inline, the block of the target, counted from the start of the metadata.
    pub extra: u32,
    /// Whether the inode has the 64-byte form.
    pub extended: bool,
    /// One of the data layouts in [`layout`].
    pub layout: u8,
}

impl Placed {
    fn inode_bytes(&self) -> u64 {
        let compact = size_of::<CompactInode>() as u64;
        if self.extended { size_of::<ExtendedInode>() as u64 } else { compact }
    }
}

/// Additional fields of a directory.
#[derive(Debug, Clone, Copy)]
pub(super) struct PlacedDirectory {
    pub parent: NodeId,
    /// Size in bytes.
    pub bytes: u64,
    /// First block that is not inline, counted from the start of the metadata.
    pub first_block: u32,
}

/// An item to write. Items are sorted by their location.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Item {
    /// The location, in slots from the start of the metadata.
    pub slot: u32,
    /// The node of the item.
    pub node: NodeId,
    /// Whether the item is the blocks of this directory or link; otherwise it is the inode.
    pub blocks: bool,
}

/// The plan of the metadata area.
pub(super) struct Layout {
    placed: Vec<Placed>,
    directories: Vec<PlacedDirectory>,
    pub(super) items: Vec<Item>,
    pub(super) build_time: Timestamp,
    pub(super) has_chunks: bool,
    pub(super) blocks: u64,
}

impl Layout {
    pub(super) fn new(
        tree: &Tree,
        options: &WriteOptions,
        xattrs: &XattrTable<'_>,
    ) -> Result<Layout, WriteError> {
        let (placed, directories) = count_links(tree);
        let mut builder = Builder {
            tree,
            xattrs,
            inline_max: options.inline_max,
            space: Space::new(options.metadata_start)?,
            layout: Layout {
                placed,
                directories,
                items: Vec::with_capacity(tree.len()),
                build_time: commonest_time(tree),
                has_chunks: false,
                blocks: 0,
            },
        };
        builder.walk()?;
        let mut layout = builder.layout;
        layout.blocks = builder.space.used_blocks();
        // The items are nearly sorted: only those that filled a gap are out of order.
        layout.items.sort_unstable();
        layout.pad_for_fsck();
        Ok(layout)
    }

    /// fsck.erofs (1.5) reads an xattr header behind every inode, even if the inode has no xattrs,
    /// and reports corruption if that header lies beyond the end of the image. In that case this
    /// adds a block.
    fn pad_for_fsck(&mut self) {
        let end = self.blocks * BLOCK;
        let ends_with_inode = self.items.last().is_some_and(|item| {
            let placed = self.placed[item.node.index()];
            let behind = u64::from(item.slot) * SLOT_BYTES as u64 + placed.inode_bytes();
            !item.blocks && behind + size_of::<XattrHeader>() as u64 > end
        });
        self.blocks += u64::from(ends_with_inode);
    }

    pub(super) fn placed(&self, id: NodeId) -> Placed {
        self.placed[id.index()]
    }

    /// Additional fields of the directory `id`.
    pub(super) fn directory(&self, id: NodeId) -> PlacedDirectory {
        self.directories[self.placed[id.index()].extra as usize]
    }
}

struct Builder<'a, 't> {
    tree: &'a Tree,
    xattrs: &'a XattrTable<'t>,
    inline_max: u16,
    space: Space,
    layout: Layout,
}

impl Builder<'_, '_> {
    /// Depth first: the blocks of a directory, then the inodes of its children.
    fn walk(&mut self) -> Result<(), WriteError> {
        self.place(Tree::ROOT)?;
        let mut pending = vec![Tree::ROOT];
        while let Some(dir) = pending.pop() {
            let NodeKind::Directory(directory) = &self.tree.node(dir).kind else {
                continue;
            };
            self.place_directory_blocks(dir)?;
            let first = pending.len();
            for &child in directory.children.values() {
                // A child that is placed already is another name of its inode.
                if self.layout.placed(child).nid == 0 {
                    self.place(child)?;
                    if matches!(self.tree.node(child).kind, NodeKind::Directory(_)) {
                        pending.push(child);
                    }
                }
            }
            // The stack returns the last one first.
            pending[first..].reverse();
        }
        Ok(())
    }

    fn place_directory_blocks(&mut self, dir: NodeId) -> Result<(), WriteError> {
        let bytes = self.layout.directory(dir).bytes;
        let blocks = match u16::from(self.layout.placed(dir).layout) {
            layout::INLINE => bytes / BLOCK,
            _ => bytes.div_ceil(BLOCK),
        };
        if blocks > 0 {
            let first_block = self.place_blocks(dir, blocks)?;
            let index = self.layout.placed(dir).extra as usize;
            self.layout.directories[index].first_block = first_block;
        }
        Ok(())
    }

    fn place_blocks(&mut self, node: NodeId, blocks: u64) -> Result<u32, WriteError> {
        let (block, slot) = self.space.blocks(blocks)?;
        self.layout.items.push(Item {
            slot,
            node,
            blocks: true,
        });
        Ok(block)
    }

    fn place(&mut self, id: NodeId) -> Result<(), WriteError> {
        let node = self.tree.node(id);
        let attributes = &node.attributes;
        let mut placed = self.layout.placed(id);
        let size = match &node.kind {
            NodeKind::Directory(_) => self.layout.directory(id).bytes,
            NodeKind::Regular(content) => content.size,
            NodeKind::Symlink(target) => target.len() as u64,
            _ => 0,
        };
        placed.extended = attributes.mtime != self.layout.build_time
            || attributes.uid > u16::MAX.into()
            || attributes.gid > u16::MAX.into()
            || placed.nlink > u16::MAX.into()
            || size > u32::MAX.into();
        let inode_bytes = placed.inode_bytes();
        let mut head = inode_bytes + u64::from(self.xattrs.bytes(attributes.xattrs.as_ref()));
        let mut tail = 0;
        let mut form = layout::PLAIN;
        match &node.kind {
            NodeKind::Directory(_) | NodeKind::Symlink(_) => {
                // The target is in the same block as its inode, because older kernels refuse other
                // inline targets.
                let rest = size % BLOCK;
                if rest > 0 && head + rest <= BLOCK {
                    form = layout::INLINE;
                    tail = rest;
                } else if matches!(node.kind, NodeKind::Symlink(_)) {
                    placed.extra = self.place_blocks(id, 1)?;
                }
            }
            NodeKind::Regular(content) => match (&content.blocks, content.tail) {
                (Blocks::Chunked { chunk_shift, .. }, _) if size > 0 => {
                    form = layout::CHUNKED;
                    self.layout.has_chunks = true;
                    head += 4 * size.div_ceil(BLOCK << chunk_shift);
                }
                (_, Some(stored)) => {
                    if stored.length > self.inline_max {
                        return Err(WriteError::Tail {
                            path: self.tree.path(id),
                            length: stored.length,
                            inline_max: self.inline_max,
                        });
                    }
                    form = layout::INLINE;
                    tail = stored.length.into();
                }
                _ => {}
            },
            _ => {}
        }
        placed.layout = form as u8;
        placed.nid = self.space.inode(head, inode_bytes, tail)?;
        self.layout.placed[id.index()] = placed;
        self.layout.items.push(Item {
            slot: placed.nid,
            node: id,
            blocks: false,
        });
        Ok(())
    }
}

/// Computes link counts, directory sizes and parents.
fn count_links(tree: &Tree) -> (Vec<Placed>, Vec<PlacedDirectory>) {
    let none = Placed {
        nid: 0,
        nlink: 0,
        extra: 0,
        extended: false,
        layout: 0,
    };
    let mut placed = vec![none; tree.len()];
    placed[Tree::ROOT.index()].nlink = 2;
    let mut directories = vec![PlacedDirectory {
        parent: Tree::ROOT,
        bytes: 0,
        first_block: 0,
    }];
    for id in tree.ids() {
        let NodeKind::Directory(directory) = &tree.node(id).kind else {
            continue;
        };
        // In a valid tree, parents have smaller numbers, so each directory has its index when it is
        // visited.
        let index = placed[id.index()].extra as usize;
        directories[index].bytes = directory_bytes(directory);
        for &child in directory.children.values() {
            if matches!(tree.node(child).kind, NodeKind::Directory(_)) {
                placed[child.index()].nlink = 2;
                placed[child.index()].extra = directories.len() as u32;
                directories.push(PlacedDirectory {
                    parent: id,
                    ..directories[0]
                });
                placed[id.index()].nlink += 1;
            } else {
                placed[child.index()].nlink += 1;
            }
        }
    }
    (placed, directories)
}

/// The most frequent modification time, the earliest of equally frequent ones. Inodes with this
/// time can be compact.
fn commonest_time(tree: &Tree) -> Timestamp {
    let mut times: Vec<Timestamp> = tree
        .ids()
        .map(|id| tree.node(id).attributes.mtime)
        .collect();
    times.sort_unstable();
    let mut best = (0, Timestamp::default());
    for run in times.chunk_by(|a, b| a == b) {
        if run.len() > best.0 {
            best = (run.len(), run[0]);
        }
    }
    best.1
}

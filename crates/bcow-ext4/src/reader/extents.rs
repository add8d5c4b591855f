//! Extent trees: the blocks of a file.

use zerocopy::FromBytes;

use super::{Inode, ReadError, Reader, Structure};
use crate::checksum::Checksum;
use crate::format::{BLOCK_BYTES, EXTENT_MAGIC, ExtentHeader, ExtentIndex, ExtentLeaf};
use crate::node::FileKind;

/// Bytes of an entry, and of the head of a node.
const ENTRY: usize = size_of::<ExtentLeaf>();
/// The greatest depth: five levels address more than all blocks of a file.
const MAX_DEPTH: u16 = 5;
/// Longer extents are allocated, but not written; the excess is their length.
const WRITTEN_BLOCKS: u16 = 32_768;

/// A run of blocks of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MappedExtent {
    /// First block in the file.
    pub logical: u32,
    /// First block in the file system.
    pub physical: u64,
    /// Number of blocks.
    pub blocks: u32,
    /// Whether the blocks have content. Otherwise they read as zeros.
    pub is_written: bool,
}

impl MappedExtent {
    /// The block of the file behind the last one.
    pub fn end(&self) -> u64 {
        u64::from(self.logical) + u64::from(self.blocks)
    }
}

/// The blocks of an inode.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Extents {
    /// The runs of content, in ascending order.
    pub content: Vec<MappedExtent>,
    /// The blocks of the tree, without the root in the inode.
    pub nodes: Vec<u64>,
}

impl Extents {
    /// The run with this block of the file.
    pub fn find(&self, logical: u64) -> Option<&MappedExtent> {
        let at = self.content.partition_point(|run| run.end() <= logical);
        let found = self.content.get(at)?;
        (u64::from(found.logical) <= logical).then_some(found)
    }

    /// Whether two blocks of the file are the same block of the file system.
    pub(super) fn overlap(&self) -> bool {
        let places = self.content.iter().map(|run| (run.physical, run.blocks));
        let mut places: Vec<(u64, u32)> = places.collect();
        places.sort_unstable();
        places
            .windows(2)
            .any(|pair| pair[0].0 + u64::from(pair[0].1) > pair[1].0)
    }
}

impl Reader {
    /// Reads the places of the content of an inode. They are in ascending order of the file's
    /// blocks, which keeps a damaged tree from being read again and again.
    pub fn extents(&self, inode: &Inode) -> Result<Extents, ReadError> {
        if !inode.has_extents() {
            let is_empty = inode.block.iter().all(|&byte| byte == 0);
            let has_content = match inode.kind {
                FileKind::Regular | FileKind::Directory => !is_empty,
                FileKind::Symlink => inode.short_target().is_none(),
                _ => false,
            };
            return if !has_content {
                Ok(Extents::default())
            } else {
                Err(ReadError::Unsupported {
                    inode: inode.number,
                    what: "content without an extent tree",
                })
            };
        }
        let mut walk = Walk {
            reader: self,
            inode,
            seed: self.seed_of(inode.number, inode.generation),
            from: 0,
            found: Extents::default(),
        };
        walk.node(&inode.block, None, u64::from(u32::MAX))?;
        Ok(walk.found)
    }
}

struct Walk<'r> {
    reader: &'r Reader,
    inode: &'r Inode,
    seed: Option<Checksum>,
    /// The first block of the file that may come next.
    from: u64,
    found: Extents,
}

impl Walk<'_> {
    /// Reads a node, whose entries are below block `end` of the file. `depth` is that of a node
    /// that is not the root.
    fn node(&mut self, bytes: &[u8], depth: Option<u16>, end: u64) -> Result<(), ReadError> {
        let number = self.inode.number;
        let damaged = move |problem| Structure::Inode(number).damaged(problem);
        let Ok((head, entries)) = ExtentHeader::read_from_prefix(bytes) else {
            return Err(damaged("a node of its extent tree is too short"));
        };
        let (entries, _) = entries.as_chunks::<ENTRY>();
        let count = usize::from(head.entries.get());
        let level = head.depth.get();
        let is_node = head.magic.get() == EXTENT_MAGIC
            && count <= usize::from(head.max.get())
            && count <= entries.len()
            // A node without entries would not lead onwards.
            && depth.map_or(level <= MAX_DEPTH, |depth| level == depth && count > 0);
        if !is_node {
            return Err(damaged("a node of its extent tree is damaged"));
        }
        if depth.is_some() {
            self.check(bytes, usize::from(head.max.get()))?;
        }
        let entries = &entries[..count];
        for (n, entry) in entries.iter().enumerate() {
            let Some(below) = level.checked_sub(1) else {
                self.leaf(entry, end)?;
                continue;
            };
            let next = entries
                .get(n + 1)
                .map(index)
                .map_or(end, |(logical, _)| logical.into());
            let (_, block) = index(entry);
            self.found.nodes.push(block);
            let node = self.reader.block(block)?;
            self.node(&node[..], Some(below), next.min(end))?;
        }
        Ok(())
    }

    fn leaf(&mut self, entry: &[u8; ENTRY], end: u64) -> Result<(), ReadError> {
        let leaf: ExtentLeaf = zerocopy::transmute!(*entry);
        let stored = leaf.blocks.get();
        let is_written = stored <= WRITTEN_BLOCKS;
        let blocks = if is_written { stored } else { stored - WRITTEN_BLOCKS };
        let run = MappedExtent {
            logical: leaf.logical.get(),
            physical: u64::from(leaf.physical_high.get()) << 32
                | u64::from(leaf.physical_low.get()),
            blocks: blocks.into(),
            is_written,
        };
        let is_inside = run.physical + u64::from(run.blocks) <= self.reader.blocks;
        let is_next = blocks > 0 && u64::from(run.logical) >= self.from && run.end() <= end;
        if !is_inside || !is_next {
            let number = self.inode.number;
            return Err(
                Structure::Inode(number).damaged("its extents are out of order or of range")
            );
        }
        self.from = run.end();
        self.found.content.push(run);
        Ok(())
    }

    fn check(&self, bytes: &[u8], max: usize) -> Result<(), ReadError> {
        let Some(seed) = self.seed else {
            return Ok(());
        };
        let tail = (1 + max) * ENTRY;
        let stored = bytes.get(tail..tail + 4);
        let stored = stored.filter(|_| bytes.len() == BLOCK_BYTES);
        match stored.map(|stored| stored == seed.with(&bytes[..tail]).0.to_le_bytes()) {
            Some(true) => Ok(()),
            _ => Err(Structure::Inode(self.inode.number)
                .damaged("the checksum of a node of its extent tree is wrong")),
        }
    }
}

/// The first block of the file below an entry of an inner node, and the node below it.
fn index(entry: &[u8; ENTRY]) -> (u32, u64) {
    let index: ExtentIndex = zerocopy::transmute!(*entry);
    let node = u64::from(index.node_high.get()) << 32 | u64::from(index.node_low.get());
    (index.logical.get(), node)
}

//! Writes a plan: item by item in the order of their locations, with zeros between them.

use zerocopy::IntoBytes;

use super::dirs::{DirEntry, Entries, Packer, file_type, write_block};
use super::layout::{Item, Placed};
use super::{EmitError, Plan};
use crate::format::{
    self, BLOCK_BYTES, CompactInode, ExtendedInode, NULL_BLOCK, SLOT_BYTES, UNKNOWN_TYPE, layout,
};
use crate::reader::FileType;
use crate::tree::{Blocks, Content, NodeId, NodeKind, TailSource};

/// Approximate size of the pieces passed to the output.
const BUFFER_BYTES: usize = 128 << 10;

/// Writes the items of a plan.
pub(super) struct Emitter<'a, 't, E> {
    plan: &'a Plan<'t>,
    tails: &'a dyn TailSource,
    out: &'a mut dyn FnMut(&[u8]) -> Result<(), E>,
    buffer: Vec<u8>,
    /// Bytes passed to the output before those in the buffer.
    flushed: u64,
}

impl<'a, 't, E> Emitter<'a, 't, E> {
    pub(super) fn new(
        plan: &'a Plan<'t>,
        tails: &'a dyn TailSource,
        out: &'a mut dyn FnMut(&[u8]) -> Result<(), E>,
    ) -> Self {
        Emitter {
            plan,
            tails,
            out,
            buffer: Vec::with_capacity(BUFFER_BYTES + BLOCK_BYTES),
            flushed: 0,
        }
    }

    pub(super) fn run(mut self) -> Result<(), EmitError<E>> {
        let plan = self.plan;
        for item in &plan.layout.items {
            self.zeros_to(u64::from(item.slot) * SLOT_BYTES as u64)?;
            match (item.blocks, &plan.tree.node(item.node).kind) {
                (false, _) => self.inode(item)?,
                (true, NodeKind::Symlink(target)) => self.put(target)?,
                (true, _) => self.directory_blocks(item.node)?,
            }
        }
        self.zeros_to(plan.layout.blocks * BLOCK_BYTES as u64)?;
        plan.xattrs.shared_entries(|entry| self.put(entry))?;
        self.zeros_to(plan.metadata_bytes())?;
        self.flush()
    }

    fn inode(&mut self, item: &Item) -> Result<(), EmitError<E>> {
        let plan = self.plan;
        let node = plan.tree.node(item.node);
        let placed = plan.layout.placed(item.node);
        self.inode_header(item.node, placed);
        plan.xattrs
            .write(node.attributes.xattrs.as_ref(), &mut self.buffer);
        let inline = u16::from(placed.layout) == layout::INLINE;
        match &node.kind {
            NodeKind::Regular(content) => match (&content.blocks, content.tail) {
                (Blocks::Chunked { .. }, _) => self.chunk_table(content)?,
                (_, Some(tail)) => {
                    let start = self.buffer.len();
                    self.buffer.resize(start + usize::from(tail.length), 0);
                    self.tails
                        .read_tail(tail.offset, &mut self.buffer[start..])
                        .map_err(EmitError::Tail)?;
                }
                _ => {}
            },
            NodeKind::Symlink(target) if inline => self.buffer.extend_from_slice(target),
            NodeKind::Directory(_) if inline => self.directory_tail(item.node),
            _ => {}
        }
        self.flush_if_full()
    }

    fn inode_header(&mut self, id: NodeId, placed: Placed) {
        let plan = self.plan;
        let node = plan.tree.node(id);
        let attributes = &node.attributes;
        let inline = u16::from(placed.layout) == layout::INLINE;
        // Unused block addresses are zero, so that the output is deterministic.
        let first_block =
            |used: bool, block: u32| if used { plan.metadata_block + block } else { 0 };
        let (size, union) = match &node.kind {
            NodeKind::Directory(_) => {
                let placed = plan.layout.directory(id);
                let used = !inline || placed.bytes >= BLOCK_BYTES as u64;
                (placed.bytes, first_block(used, placed.first_block))
            }
            NodeKind::Regular(content) => {
                let tail = content.tail.map_or(0, |tail| tail.length.into());
                let union = match &content.blocks {
                    Blocks::Flat { start } if content.size > tail => plan.place(*start),
                    Blocks::Chunked { chunk_shift, .. } if content.size > 0 => {
                        (*chunk_shift).into()
                    }
                    // No content is stored.
                    _ => 0,
                };
                (content.size, union)
            }
            NodeKind::Symlink(target) => {
                let block = first_block(!inline, placed.extra);
                (target.len() as u64, block)
            }
            NodeKind::CharDevice(device) | NodeKind::BlockDevice(device) => {
                (0, format::encode_device(device.major, device.minor))
            }
            NodeKind::Fifo | NodeKind::Socket | NodeKind::Whiteout | NodeKind::LowerLink(_) => {
                (0, 0)
            }
        };
        let xattr_bytes = plan.xattrs.bytes(attributes.xattrs.as_ref());
        let xattr_count = match xattr_bytes {
            0 => 0,
            // At most 65535 units, see MAX_IBODY_BYTES.
            bytes => ((bytes - 12) / 4 + 1) as u16,
        };
        let form = u16::from(placed.layout) << 1;
        let kind = file_type(&node.kind).map_or(0, FileType::mode_bits);
        let mode = kind as u16 | attributes.permissions;
        // Node ids plus one: unique, and not 0. Only 32-bit stat uses this number.
        let ino = id.0.wrapping_add(1);
        if placed.extended {
            let inode = ExtendedInode {
                format: (form | 1).into(),
                xattr_count: xattr_count.into(),
                mode: mode.into(),
                reserved: 0.into(),
                size: size.into(),
                union: union.into(),
                ino: ino.into(),
                uid: attributes.uid.into(),
                gid: attributes.gid.into(),
                mtime: (attributes.mtime.seconds as u64).into(),
                mtime_nanoseconds: attributes.mtime.nanoseconds.into(),
                nlink: placed.nlink.into(),
                reserved2: [0; 16],
            };
            self.buffer.extend_from_slice(inode.as_bytes());
        } else {
            // The layout selects the compact form only if all of these values fit.
            let inode = CompactInode {
                format: form.into(),
                xattr_count: xattr_count.into(),
                mode: mode.into(),
                nlink: (placed.nlink as u16).into(),
                size: (size as u32).into(),
                mtime_delta: 0.into(),
                union: union.into(),
                ino: ino.into(),
                uid: (attributes.uid as u16).into(),
                gid: (attributes.gid as u16).into(),
                reserved: 0.into(),
            };
            self.buffer.extend_from_slice(inode.as_bytes());
        }
    }

    /// Writes one block address per chunk, holes included.
    fn chunk_table(&mut self, content: &Content) -> Result<(), EmitError<E>> {
        let Blocks::Chunked { chunk_shift, runs } = &content.blocks else {
            return Ok(());
        };
        let chunks = content.size.div_ceil((BLOCK_BYTES as u64) << chunk_shift);
        let mut runs = runs.iter().peekable();
        for chunk in 0..chunks {
            while runs.next_if(|run| run.first + run.count <= chunk).is_some() {}
            let block = match runs.peek() {
                // In a valid tree, runs end below 2^32 blocks.
                Some(run) if run.first <= chunk => {
                    self.plan.place(run.start) + ((chunk - run.first) << chunk_shift) as u32
                }
                _ => NULL_BLOCK,
            };
            self.buffer.extend_from_slice(&block.to_le_bytes());
            self.flush_if_full()?;
        }
        Ok(())
    }

    /// Writes all blocks that are not inline, the last one padded.
    fn directory_blocks(&mut self, id: NodeId) -> Result<(), EmitError<E>> {
        let inline = u16::from(self.plan.layout.placed(id).layout) == layout::INLINE;
        self.each_directory_block(id, |this, entries, is_last| {
            if is_last && inline {
                return Ok(());
            }
            let start = this.buffer.len();
            write_block(entries, &mut this.buffer);
            this.buffer.resize(start + BLOCK_BYTES, 0);
            this.flush_if_full()
        })
    }

    /// Writes the last block without padding.
    fn directory_tail(&mut self, id: NodeId) {
        // This call does not flush, so it cannot fail.
        let _ = self.each_directory_block(id, |this, entries, is_last| {
            if is_last {
                write_block(entries, &mut this.buffer);
            }
            Ok(())
        });
    }

    fn each_directory_block(
        &mut self,
        id: NodeId,
        mut each: impl FnMut(&mut Self, &[DirEntry<'_>], bool) -> Result<(), EmitError<E>>,
    ) -> Result<(), EmitError<E>> {
        let plan = self.plan;
        let NodeKind::Directory(directory) = &plan.tree.node(id).kind else {
            return Ok(());
        };
        let parent = plan.layout.directory(id).parent;
        let mut packer = Packer::default();
        let mut block: Vec<DirEntry<'_>> = Vec::new();
        for (name, child) in Entries::new(directory, id, parent) {
            if packer.push(name.len()) {
                each(self, &block, false)?;
                block.clear();
            }
            block.push(DirEntry {
                name,
                nid: plan.layout.placed(child).nid.into(),
                file_type: file_type(&plan.tree.node(child).kind)
                    .map_or(UNKNOWN_TYPE, |kind| kind as u8),
            });
        }
        each(self, &block, true)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), EmitError<E>> {
        self.buffer.extend_from_slice(bytes);
        self.flush_if_full()
    }

    /// Appends zeros up to a position of the metadata area.
    fn zeros_to(&mut self, position: u64) -> Result<(), EmitError<E>> {
        let at = self.flushed + self.buffer.len() as u64;
        assert!(at <= position, "items overlap: {at} > {position}");
        // Gaps are shorter than a block.
        self.buffer
            .resize(self.buffer.len() + (position - at) as usize, 0);
        self.flush_if_full()
    }

    fn flush_if_full(&mut self) -> Result<(), EmitError<E>> {
        if self.buffer.len() < BUFFER_BYTES {
            return Ok(());
        }
        self.flush()
    }

    fn flush(&mut self) -> Result<(), EmitError<E>> {
        (self.out)(&self.buffer).map_err(EmitError::Output)?;
        self.flushed += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }
}

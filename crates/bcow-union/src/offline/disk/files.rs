//! Files of the disk: their types, and the sources of their bytes.

use std::sync::Arc;

use bcow_erofs::reader::Inode as LowerInode;
use bcow_erofs::tree::{DeviceNumber, Node, NodeId, NodeKind};
use bcow_ext4::{Extents, FileKind, Inode, InodeNumber, MappedExtent};

use super::Reader;
use crate::blocks::BLOCK_BYTES;
use crate::offline::body::{Body, Own, Piece, Source};
use crate::offline::error::Problem;

impl Reader<'_> {
    /// The node of a file; `None` if the file is the inode of the image with this number, without a
    /// change.
    pub(super) fn file(&mut self, number: InodeNumber) -> Result<Option<NodeId>, Problem> {
        if let Some(node) = self.files.get(&number) {
            return Ok(*node);
        }
        let below = self.origins.inode(number)?;
        let is_unchanged = below.is_some() && !self.disk.changed().contains(&number);
        let node = match is_unchanged {
            true => None,
            false => self.changed(number, below)?,
        };
        self.files.insert(number, node);
        Ok(node)
    }

    /// The node of an unchanged file of the image, under a new name.
    pub(super) fn copy(&mut self, number: InodeNumber) -> Result<NodeId, Problem> {
        if let Some(node) = self.copies.get(&number) {
            return Ok(*node);
        }
        let below = self
            .origins
            .inode(number)?
            .ok_or(Problem::NoLower { kind: "file" })?;
        let node = self.builder.lower_file(&below)?;
        self.copies.insert(number, node);
        Ok(node)
    }

    fn changed(
        &mut self,
        number: InodeNumber,
        below: Option<LowerInode>,
    ) -> Result<Option<NodeId>, Problem> {
        let inode = self.disk.disk().inode(number)?;
        let attributes = self.attributes(&inode)?;
        let has_attributes = match &below {
            Some(below) => self.builder.lower_attributes(below)? == attributes,
            None => false,
        };
        let nothing = DeviceNumber { major: 0, minor: 0 };
        let device = inode.device.map_or(nothing, |device| DeviceNumber {
            major: device.major,
            minor: device.minor,
        });
        let kind = match inode.kind {
            FileKind::Regular => {
                let (body, is_lower) = self.body(&inode, below.as_ref())?;
                if has_attributes && is_lower {
                    return Ok(None);
                }
                NodeKind::Regular(self.builder.content(body)?)
            }
            FileKind::Symlink => NodeKind::Symlink(self.disk.disk().read_link(&inode)?.into()),
            FileKind::CharDevice => NodeKind::CharDevice(device),
            FileKind::BlockDevice => NodeKind::BlockDevice(device),
            FileKind::Fifo => NodeKind::Fifo,
            FileKind::Socket => NodeKind::Socket,
            FileKind::Directory => return Err(Problem::DirectoryTwice(number.get())),
        };
        if has_attributes
            && let Some(below) = &below
            && kind_of(&kind) == Some(below.kind)
            && self.builder.lower_special(below)? == kind
        {
            return Ok(None);
        }
        Ok(Some(self.builder.add(Node { attributes, kind })?))
    }

    /// The content of a regular file, and whether it is that of the image's file.
    fn body(&self, inode: &Inode, below: Option<&LowerInode>) -> Result<(Body, bool), Problem> {
        let extents = self.disk.disk().extents(inode)?;
        let view = self.disk.view();
        let in_view = match below {
            Some(_) => Some(view.inode(inode.number).map_err(Problem::View)?),
            None => None,
        };
        let in_view = in_view.filter(|inode| inode.kind == FileKind::Regular);
        let before = match &in_view {
            Some(inode) => view.extents(inode).map_err(Problem::View)?,
            None => Extents::default(),
        };
        let lower = below.filter(|_| in_view.is_some()).copied();
        let mut pieces = Pieces {
            all: Vec::new(),
            at: 0,
            size: inode.size,
            lower_size: lower.map_or(0, |lower| lower.size),
            lower_blocks: 0,
        };
        for run in extents.content.iter().filter(|run| run.is_written) {
            self.take_run(run, &before, &mut pieces);
        }
        pieces.push(inode.size, Source::Hole);
        let limit = inode.size.div_ceil(BLOCK_BYTES);
        let blocks_before: u64 = before
            .content
            .iter()
            .map(|run| run.end().min(limit).saturating_sub(run.logical.into()))
            .sum();
        let has_own = pieces.all.iter().any(|piece| piece.source == Source::Own);
        let is_lower = !has_own
            && pieces.lower_blocks == blocks_before
            && lower.is_some_and(|lower| lower.size == inode.size);
        let body = Body {
            size: inode.size,
            own: has_own.then(|| Own::Disk(Arc::new(extents))),
            lower,
            pieces: pieces.all,
        };
        Ok((body, is_lower))
    }

    /// Adds the pieces of a run of blocks. `before` are the blocks of the file in the view: where
    /// the file still has such a block and the disk did not change it, the content is the image's.
    fn take_run(&self, run: &MappedExtent, before: &Extents, pieces: &mut Pieces) {
        let mut at = u64::from(run.logical);
        pieces.push(at * BLOCK_BYTES, Source::Hole);
        while at < run.end() {
            let physical = run.physical + (at - u64::from(run.logical));
            let index = before.content.partition_point(|known| known.end() <= at);
            let known = before.content.get(index);
            let first = known.map_or(u64::MAX, |known| known.logical.into());
            if first > at {
                at = run.end().min(first);
                pieces.push(at * BLOCK_BYTES, Source::Own);
                continue;
            }
            let (place, end) = known.map_or((0, run.end()), |known| {
                (known.physical + (at - first), known.end().min(run.end()))
            });
            if place == physical {
                for differing in self.disk.differing(physical..physical + (end - at)) {
                    let [start, end] =
                        [differing.start, differing.end].map(|block| at + (block - physical));
                    pieces.push_lower(start);
                    pieces.push(end * BLOCK_BYTES, Source::Own);
                }
                pieces.push_lower(end);
            } else {
                pieces.push(end * BLOCK_BYTES, Source::Own);
            }
            at = end;
        }
    }
}

/// Pieces of a file, in order.
struct Pieces {
    all: Vec<Piece>,
    /// The end of the last one.
    at: u64,
    /// The size of the file, and of the image's file.
    size: u64,
    lower_size: u64,
    /// Blocks that are the image's.
    lower_blocks: u64,
}

impl Pieces {
    /// Adds the bytes up to `end`.
    fn push(&mut self, end: u64, source: Source) {
        let end = end.min(self.size);
        if end <= self.at {
            return;
        }
        self.at = end;
        match self.all.last_mut() {
            Some(last) if last.source == source => last.end = end,
            _ => self.all.push(Piece { end, source }),
        }
    }

    /// Adds blocks of the image's file up to block `end`. Behind its end, they are zeros.
    fn push_lower(&mut self, end: u64) {
        let limit = self.size.div_ceil(BLOCK_BYTES);
        let first = self.at / BLOCK_BYTES;
        self.lower_blocks += end.min(limit).saturating_sub(first);
        let end = end * BLOCK_BYTES;
        self.push(end.min(self.lower_size), Source::Lower);
        self.push(end, Source::Hole);
    }
}

fn kind_of(kind: &NodeKind) -> Option<bcow_erofs::reader::FileType> {
    use bcow_erofs::reader::FileType;
    Some(match kind {
        NodeKind::Symlink(_) => FileType::Symlink,
        NodeKind::CharDevice(_) => FileType::CharDevice,
        NodeKind::BlockDevice(_) => FileType::BlockDevice,
        NodeKind::Fifo => FileType::Fifo,
        NodeKind::Socket => FileType::Socket,
        _ => return None,
    })
}

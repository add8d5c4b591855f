//! Reads the files of a disk that are not directories: their types, and the sources of their bytes.

use std::sync::Arc;

use bcow_erofs::reader::{FileType, Inode as LowerInode};
use bcow_erofs::tree::{DeviceNumber, Node, NodeId, NodeKind};
use bcow_ext4::{Extents, FileKind, Inode, InodeNumber, MappedExtent};

use super::Reader;
use crate::blocks::BLOCK_BYTES;
use crate::offline::body::{Body, Own, Piece, PieceSource};
use crate::offline::error::Problem;

impl Reader<'_> {
    /// The node of a file; `None` if the file is an inode of the image and has not changed.
    pub(super) fn file(&mut self, number: InodeNumber) -> Result<Option<NodeId>, Problem> {
        if let Some(node) = self.files.get(&number) {
            return Ok(*node);
        }
        let below = self.origins.inode(number)?;
        let is_unchanged = below.is_some() && !self.disk.changed().contains(&number);
        let node = if is_unchanged { None } else { self.changed_file(number, below)? };
        self.files.insert(number, node);
        Ok(node)
    }

    /// The node of an unchanged file of the image that has a new name.
    pub(super) fn renamed_file(&mut self, number: InodeNumber) -> Result<NodeId, Problem> {
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

    /// The node of a file of which the disk stores blocks; `None` if attributes and content are
    /// nevertheless those of `below`, the image's file.
    fn changed_file(
        &mut self,
        number: InodeNumber,
        below: Option<LowerInode>,
    ) -> Result<Option<NodeId>, Problem> {
        let inode = self.disk.disk().inode(number)?;
        let attributes = self.attributes(&inode)?;
        let has_lower_attributes = match &below {
            Some(below) => self.builder.lower_attributes(below)? == attributes,
            None => false,
        };
        let device = inode.device.map(|device| DeviceNumber {
            major: device.major,
            minor: device.minor,
        });
        let device = device.unwrap_or_default();
        let kind = match inode.kind {
            FileKind::Regular => {
                let (body, is_lower) = self.body(&inode, below.as_ref())?;
                if has_lower_attributes && is_lower {
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
        // The image's file can have another type.
        if has_lower_attributes
            && let Some(below) = &below
            && !matches!(below.kind, FileType::Regular | FileType::Directory)
            && self.builder.lower_special(below)? == kind
        {
            return Ok(None);
        }
        Ok(Some(self.builder.add(Node { attributes, kind })?))
    }

    /// The content of a regular file, and whether it is the content of `below`, the image's file.
    fn body(&self, inode: &Inode, below: Option<&LowerInode>) -> Result<(Body, bool), Problem> {
        let extents = self.disk.disk().extents(inode)?;
        let view = self.disk.view();
        let in_view = match below {
            Some(_) => Some(view.inode(inode.number).map_err(Problem::View)?),
            None => None,
        };
        let in_view = in_view.filter(|inode| inode.kind == FileKind::Regular);
        let view_extents = match &in_view {
            Some(inode) => view.extents(inode).map_err(Problem::View)?,
            None => Extents::default(),
        };
        let lower = below.filter(|_| in_view.is_some()).copied();
        let mut pieces = Pieces {
            all: Vec::new(),
            size: inode.size,
            lower_size: lower.map_or(0, |lower| lower.size),
            lower_block_count: 0,
        };
        for run in extents.content.iter().filter(|run| run.is_written) {
            self.take_run(run, &view_extents, &mut pieces);
        }
        pieces.push(inode.size, PieceSource::Hole);
        let limit = inode.size.div_ceil(BLOCK_BYTES);
        let view_block_count: u64 = view_extents
            .content
            .iter()
            .map(|run| run.end().min(limit).saturating_sub(run.logical.into()))
            .sum();
        let has_own = pieces
            .all
            .iter()
            .any(|piece| piece.source == PieceSource::Own);
        let is_lower = !has_own
            && pieces.lower_block_count == view_block_count
            && lower.is_some_and(|lower| lower.size == inode.size);
        let body = Body {
            size: inode.size,
            own: has_own.then(|| Own::Disk(Arc::new(extents))),
            lower,
            pieces: pieces.all,
        };
        Ok((body, is_lower))
    }

    /// Adds the pieces of a run of blocks. `view_extents` are the blocks of the file in the view. A
    /// block has the content of the image's file if the view has the same block at the same offset
    /// of the file, and the disk does not store another content for it.
    fn take_run(&self, run: &MappedExtent, view_extents: &Extents, pieces: &mut Pieces) {
        let mut at = u64::from(run.logical);
        pieces.push(at * BLOCK_BYTES, PieceSource::Hole);
        while at < run.end() {
            let physical = run.physical + (at - u64::from(run.logical));
            let index = view_extents
                .content
                .partition_point(|extent| extent.end() <= at);
            let run_in_view = view_extents.content.get(index);
            let first = run_in_view.map_or(u64::MAX, |extent| extent.logical.into());
            if first > at {
                at = run.end().min(first);
                pieces.push(at * BLOCK_BYTES, PieceSource::Own);
                continue;
            }
            let (physical_in_view, end) = run_in_view.map_or((0, run.end()), |extent| {
                (extent.physical + (at - first), extent.end().min(run.end()))
            });
            if physical_in_view == physical {
                for differing in self.disk.differing(physical..physical + (end - at)) {
                    let [start, end] =
                        [differing.start, differing.end].map(|block| at + (block - physical));
                    pieces.push_lower(start);
                    pieces.push(end * BLOCK_BYTES, PieceSource::Own);
                }
                pieces.push_lower(end);
            } else {
                pieces.push(end * BLOCK_BYTES, PieceSource::Own);
            }
            at = end;
        }
    }
}

/// The pieces of a file, in order.
struct Pieces {
    all: Vec<Piece>,
    /// The size of the file in bytes.
    size: u64,
    /// The size of the image's file in bytes.
    lower_size: u64,
    /// The number of blocks with the content of the image's file.
    lower_block_count: u64,
}

impl Pieces {
    /// Adds the bytes up to `end`, from `source`.
    fn push(&mut self, end: u64, source: PieceSource) {
        Piece::push(&mut self.all, end.min(self.size), source);
    }

    /// Adds blocks of the image's file up to block `end`. Bytes behind the end of that file are
    /// zeros.
    fn push_lower(&mut self, end: u64) {
        let limit = self.size.div_ceil(BLOCK_BYTES);
        let first = self.all.last().map_or(0, |last| last.end) / BLOCK_BYTES;
        self.lower_block_count += end.min(limit).saturating_sub(first);
        let end = end * BLOCK_BYTES;
        self.push(end.min(self.lower_size), PieceSource::Lower);
        self.push(end, PieceSource::Hole);
    }
}

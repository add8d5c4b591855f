//! The content of regular files: where the bytes are, and how a write moves them.
//!
//! A file is *lower* until its first write. Then a small file is copied whole and becomes *plain*;
//! a larger file becomes a *partial file*. A partial file becomes plain (it is promoted) once all
//! its blocks are in the upper.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use bcow_erofs::reader::FileType;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::lookup::Access;
use super::lower::ImageFile;
use super::nodes::{Content, Node, NodeState};
use super::plain::{plain_file, read_into, set_plain};
use super::types::{Allocate, Attributes, Privileges, SetTime};
use super::{UnionFs, host};
use crate::Seek;
use crate::node::NodeId;
use crate::partial::KeepSize;
use crate::upper::{Attribute, Mark, Metacopy};

/// Largest file size in Linux's interfaces, in bytes.
const SIZE_MAX: u64 = i64::MAX as u64;

/// Bytes that `copy_range` reads at a time.
const PIECE: usize = 1 << 20;

/// Upper bound of the bytes that one `copy_range` request copies.
const COPY_MAX: u64 = 64 << 20;

impl UnionFs {
    /// Passes up to `length` bytes at `offset`, fewer at the end of the file, as one slice to
    /// `reply`.
    ///
    /// A range that is contiguous in the image's block cache is lent from there, without a copy.
    /// Other ranges are assembled in `scratch`.
    pub fn read<R>(
        &self,
        id: NodeId,
        offset: u64,
        length: u32,
        scratch: &mut Vec<u8>,
        reply: impl FnOnce(&[u8]) -> R,
    ) -> Result<R, Errno> {
        let node = self.regular(id)?;
        let state = self.known_content(&node)?;
        scratch.clear();
        match &state.content {
            Content::Plain => {
                let file = plain_file(&state)?;
                read_into(scratch, length, |buf| file.read_at(buf, offset))?;
            }
            Content::Partial(partial) => {
                let length = partial.size().saturating_sub(offset).min(length.into());
                scratch.resize(length as usize, 0);
                let read = partial
                    .read_at(offset, scratch)
                    .map_err(|error| self.content_failed(&node, error))?;
                scratch.truncate(read);
            }
            Content::Lower | Content::Unknown => {
                let inode = self.image.inode(node.lower.ok_or(Errno::STALE)?)?;
                // The image is immutable: reading it needs no lock.
                drop(state);
                return self.image.lend(&inode, offset, length, scratch, reply);
            }
        }
        Ok(reply(scratch))
    }

    /// Writes `data` at `offset` and gives the number of bytes written. That is less than the
    /// length of `data` only if space ran out or the host failed.
    pub fn write(
        &self,
        id: NodeId,
        offset: u64,
        data: &[u8],
        privileges: Privileges,
    ) -> Result<u32, Errno> {
        if privileges == Privileges::KeepAll {
            return self
                .preserving_capabilities(id, || self.write(id, offset, data, Privileges::Keep));
        }
        let node = self.regular(id)?;
        check_end(offset, data.len() as u64)?;
        let written = loop {
            let state = self.known_content(&node)?;
            match &state.content {
                Content::Plain => break self.write_plain(&node, &state, offset, data)?,
                Content::Partial(partial) => {
                    let written = partial
                        .write_at(offset, data)
                        .map_err(|error| self.content_failed(&node, error))?;
                    if partial.is_complete() {
                        self.background.request_promotion(&node);
                    }
                    break written;
                }
                Content::Lower | Content::Unknown => {
                    drop(state);
                    self.make_writable(&node)?;
                }
            }
        };
        if privileges == Privileges::Drop {
            self.drop_privileges(&node)?;
        }
        Ok(written as u32)
    }

    /// Changes a file's content for a kernel that keeps modification times itself (`writeback`).
    ///
    /// Such a kernel sends the time with the pages of the file in any order, and does not send it
    /// again if the file had it already: the clock of these times has a tick of some milliseconds.
    /// So a change of the content must not change the time that the kernel last sent or received.
    pub fn with_kernel_time<T>(
        &self,
        id: NodeId,
        change: impl FnOnce(&Self) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let done = change(self)?;
        let node = self.regular(id)?;
        let time = node.kernel_time.lock();
        if let Some(time) = *time {
            self.set_times(&node, None, Some(SetTime::At(time)))?;
        }
        Ok(done)
    }

    /// Records the modification time of a new file that a kernel with `writeback` receives. The
    /// kernel does not keep the times of other nodes.
    pub fn set_kernel_time(&self, attributes: &Attributes) {
        if let Ok(node) = self.regular(attributes.node) {
            *node.kernel_time.lock() = Some(attributes.mtime);
        }
    }

    /// Changes the size. Bytes beyond the new size are discarded: they read as zeros if the file
    /// grows again.
    pub(super) fn set_size(&self, node: &Arc<Node>, size: u64) -> Result<(), Errno> {
        require_regular(node)?;
        if size > SIZE_MAX {
            return Err(Errno::FBIG);
        }
        loop {
            let state = self.known_content(node)?;
            match &state.content {
                Content::Plain => return self.resize_plain(&state, size),
                Content::Partial(partial) if size > 0 => {
                    let before = partial.size();
                    partial
                        .set_size(size)
                        .map_err(|error| self.content_failed(node, error))?;
                    if size == before {
                        // POSIX counts this as a change, so the times change even if the host's
                        // file did not.
                        drop(state);
                        self.set_times(node, None, Some(SetTime::Now))?;
                    }
                    return Ok(());
                }
                Content::Lower | Content::Unknown if size > 0 => {
                    drop(state);
                    self.make_writable(node)?;
                }
                Content::Partial(_) | Content::Lower | Content::Unknown => {
                    drop(state);
                    self.ensure_upper(node)?;
                    self.empty(node)?;
                }
            }
        }
    }

    /// Makes an empty plain file of a file that is not plain yet. It needs no bytes of the image.
    fn empty(&self, node: &Node) -> Result<(), Errno> {
        let mut state = node.write_state();
        self.open_upper_locked(node, &mut state, Access::Data)?;
        let file = plain_file(&state)?;
        match &state.content {
            Content::Plain => return Ok(()),
            Content::Partial(partial) => {
                let is_plain = partial
                    .set_size(0)
                    .and_then(|()| partial.promote())
                    .map_err(|error| self.content_failed(node, error))?;
                if !is_plain {
                    return Ok(());
                }
                self.open_partials.remove(partial.id());
            }
            Content::Lower | Content::Unknown => {
                self.resize_plain(&state, 0)?;
                // All marks: if the host failed while a partial file was made, marks of that
                // partial file can be left.
                for mark in [Mark::Metacopy, Mark::Partial, Mark::Redirect] {
                    mark.clear(Attribute::Open(file.as_fd()), self.upper.namespace())?;
                }
                node.marks_changed();
            }
        }
        set_plain(&mut state);
        self.measure(&*file);
        Ok(())
    }

    /// Reserves space, makes a hole or makes zeros. Does not change set-id bits.
    pub fn allocate(
        &self,
        id: NodeId,
        offset: u64,
        length: u64,
        how: Allocate,
    ) -> Result<(), Errno> {
        let node = self.regular(id)?;
        if length == 0 {
            return Err(Errno::INVAL);
        }
        check_end(offset, length)?;
        loop {
            let state = self.known_content(&node)?;
            match &state.content {
                Content::Plain => {
                    return self.allocate_plain(&node, &state, offset, length, how);
                }
                Content::Partial(partial) => {
                    match how {
                        Allocate::Extend => partial.allocate(offset, length, KeepSize::Grow),
                        Allocate::KeepSize => partial.allocate(offset, length, KeepSize::Keep),
                        Allocate::PunchHole | Allocate::ZeroKeep => {
                            partial.zero(offset, length, KeepSize::Keep)
                        }
                        Allocate::ZeroExtend => partial.zero(offset, length, KeepSize::Grow),
                    }
                    .map_err(|error| self.content_failed(&node, error))?;
                    drop(state);
                    // POSIX counts this as a change, so the times change even if no block did.
                    return self.set_times(&node, None, Some(SetTime::Now));
                }
                Content::Lower | Content::Unknown => {
                    drop(state);
                    self.make_writable(&node)?;
                }
            }
        }
    }

    /// Offset of the next data or hole at or after `offset`; `ENXIO` if the file ends before.
    pub fn seek(&self, id: NodeId, offset: u64, seek: Seek) -> Result<u64, Errno> {
        let node = self.regular(id)?;
        let state = self.known_content(&node)?;
        let found = match &state.content {
            Content::Plain => {
                let file = plain_file(&state)?;
                let from = match seek {
                    Seek::Data => rustix::fs::SeekFrom::Data(offset),
                    Seek::Hole => rustix::fs::SeekFrom::Hole(offset),
                };
                return rustix::fs::seek(&*file, from);
            }
            Content::Partial(partial) => {
                if offset >= partial.size() {
                    return Err(Errno::NXIO);
                }
                partial
                    .seek(offset, seek)
                    .map_err(|error| self.content_failed(&node, error))?
            }
            Content::Lower | Content::Unknown => {
                let inode = self.image.inode(node.lower.ok_or(Errno::STALE)?)?;
                if offset >= inode.size {
                    return Err(Errno::NXIO);
                }
                self.image.seek(&inode, offset, seek)?
            }
        };
        found.ok_or(Errno::NXIO)
    }

    /// Copies bytes between two files, or within one file. Overlapping ranges give `EINVAL`. Does
    /// not change set-id bits. Gives the number of bytes copied, which is less than `length` at the
    /// end of the source, beyond the limit of one request, or if a write fails after the first
    /// piece.
    pub fn copy_range(
        &self,
        from: NodeId,
        from_offset: u64,
        to: NodeId,
        to_offset: u64,
        length: u64,
    ) -> Result<u64, Errno> {
        self.regular(from)?;
        self.regular(to)?;
        check_end(to_offset, length)?;
        let length = length.min(COPY_MAX);
        if from == to
            && from_offset < to_offset.saturating_add(length)
            && to_offset < from_offset.saturating_add(length)
        {
            return Err(Errno::INVAL);
        }
        let mut scratch = Vec::new();
        let mut bytes = Vec::new();
        let mut copied = 0;
        while copied < length {
            let piece = (length - copied).min(PIECE as u64) as u32;
            bytes.clear();
            self.read(from, from_offset + copied, piece, &mut scratch, |read| {
                bytes.extend_from_slice(read);
            })?;
            if bytes.is_empty() {
                break;
            }
            match self.write(to, to_offset + copied, &bytes, Privileges::Keep) {
                Ok(written) => {
                    copied += u64::from(written);
                    if (written as usize) < bytes.len() {
                        break;
                    }
                }
                // Earlier pieces count. The next request meets the error again.
                Err(_) if copied > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(copied)
    }

    /// The node with this id, which must be a regular file.
    fn regular(&self, id: NodeId) -> Result<Arc<Node>, Errno> {
        let node = self.node(id)?;
        require_regular(&node)?;
        Ok(node)
    }

    /// The node's state, once the location of its bytes is known, and with the file open if the
    /// bytes are in the upper. For a file that exists only in the image, the content may still be
    /// unknown.
    pub(super) fn known_content<'n>(
        &self,
        node: &'n Node,
    ) -> Result<parking_lot::RwLockReadGuard<'n, NodeState>, Errno> {
        loop {
            let state = node.read_state();
            let known = match (&state.content, &state.upper) {
                (_, None) => true,
                (Content::Unknown, Some(_)) => false,
                (Content::Plain, Some(upper)) => upper.file.is_some() && upper.is_fully_open,
                (Content::Lower | Content::Partial(_), Some(_)) => true,
            };
            if known {
                return Ok(state);
            }
            drop(state);
            self.limit_descriptors();
            self.open_content(node, &mut node.write_state())?;
        }
    }

    /// Finds the location of the bytes of a file in the upper.
    pub(super) fn open_content(&self, node: &Node, state: &mut NodeState) -> Result<(), Errno> {
        let file = self.open_upper_locked(node, state, Access::Data)?;
        if !matches!(state.content, Content::Unknown) {
            return Ok(());
        }
        let mut marks = self.read_marks(&file)?;
        let is_open = |id| self.open_partials.get(id).is_some();
        if marks.partial.is_some_and(|mark| !is_open(mark.id)) {
            // An open partial file may have written a last change to its mark before it was closed
            // after the first read. From here on only this node can open the partial file.
            marks = self.read_marks(&file)?;
        }
        if let Some(mark) = marks.partial {
            let partial = match self.open_partials.get(mark.id) {
                Some(partial) => partial,
                None => {
                    let (file, below) = (own_descriptor(&file)?, self.below(node)?);
                    let opened = self.partials.open(mark, file, below);
                    opened
                        .and_then(|partial| self.restore_opened(&partial).map(|()| partial))
                        .map_err(|error| self.content_failed(node, error))?
                }
            };
            self.open_partials
                .add(mark.id, &partial, self.table.weak(node.id));
            state.content = Content::Partial(partial);
        } else if marks.metacopy != Metacopy::None {
            // A file whose source is missing must fail, and not read as zeros.
            node.lower.ok_or(Errno::IO)?;
            state.content = Content::Lower;
        } else {
            set_plain(state);
        }
        Ok(())
    }

    pub(super) fn below(&self, node: &Node) -> Result<Arc<ImageFile>, Errno> {
        let inode = self.image.inode(node.lower.ok_or(Errno::IO)?)?;
        Ok(Arc::new(ImageFile::new(Arc::clone(&self.image), inode)))
    }
}

/// Opens a descriptor of the partial file's own. The host reports a write-back error once to each
/// open file, and another user of a shared descriptor could take the report.
pub(super) fn own_descriptor(file: &File) -> Result<File, Errno> {
    host::reopen(file, OFlags::RDWR)
}

fn require_regular(node: &Node) -> Result<(), Errno> {
    match node.kind {
        FileType::Regular => Ok(()),
        FileType::Directory => Err(Errno::ISDIR),
        _ => Err(Errno::INVAL),
    }
}

fn check_end(offset: u64, length: u64) -> Result<(), Errno> {
    match offset.checked_add(length) {
        Some(end) if end <= SIZE_MAX => Ok(()),
        _ => Err(Errno::FBIG),
    }
}

//! Bytes of regular files: where they are, and what a write makes of that.
//!
//! A file is *lower* until its first write. Then a small one is copied whole and is *plain*; a larger one becomes a *sketch*,
//! and plain again (promoted) when all its blocks are there.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bcow_erofs::reader::{FileType, Inode};
use bcow_erofs::tree::Timestamp;
use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;

use super::lookup::Access;
use super::lower::ImageFile;
use super::nodes::{Content, Node, State};
use super::types::{Allocate, Privileges, SetTime};
use super::{UnionFs, host};
use crate::Seek;
use crate::node::NodeId;
use crate::options::SyncPolicy;
use crate::sketch::{BLOCK_BYTES, KeepSize, SketchKind};
use crate::upper::{Attribute, Mark, Metacopy};

/// Largest file that Linux's interfaces can say.
const SIZE_MAX: u64 = i64::MAX as u64;

/// How much is copied at a time.
const PIECE: usize = 1 << 20;

/// Most that the marks of a sketch take beside those that its file has.
const MARKS_ROOM: u64 = BLOCK_BYTES;

/// Longest copy that one request makes.
const COPY_MAX: u64 = 64 << 20;

impl UnionFs {
    /// Hands `length` bytes at `offset`, or as many as there are, in one piece to `reply`.
    ///
    /// Bytes that lie in one piece in the image's cache are lent from there; others are put together in `scratch`.
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
            Content::Sketch(sketch) => {
                let length = sketch.size().saturating_sub(offset).min(length.into());
                scratch.resize(length as usize, 0);
                let read = sketch
                    .read_at(offset, scratch)
                    .map_err(|error| self.sketch_failed(&node, &error))?;
                scratch.truncate(read);
            }
            Content::Lower | Content::Unknown => {
                let inode = self.image.inode(node.lower.ok_or(Errno::STALE)?)?;
                // The image cannot change: nothing needs to be locked while it is read.
                drop(state);
                return self.image.lend(&inode, offset, length, scratch, reply);
            }
        }
        Ok(reply(scratch))
    }

    /// Writes at `offset`; gives the bytes written, fewer only where space ends.
    pub fn write(
        &self,
        id: NodeId,
        offset: u64,
        data: &[u8],
        privileges: Privileges,
    ) -> Result<u32, Errno> {
        if privileges == Privileges::KeepAll {
            return self
                .keeping_capabilities(id, || self.write(id, offset, data, Privileges::Keep));
        }
        let node = self.regular(id)?;
        check_end(offset, data.len() as u64)?;
        let written = loop {
            let state = self.known_content(&node)?;
            match &state.content {
                Content::Plain => break self.write_plain(&node, &state, offset, data)?,
                Content::Sketch(sketch) => {
                    let written = sketch
                        .write_at(offset, data)
                        .map_err(|error| self.sketch_failed(&node, &error))?;
                    // Of a packed one it takes a look at all its tables, which the background does now and then.
                    if sketch.kind() == SketchKind::Sparse
                        && matches!(sketch.is_complete(), Ok(true))
                    {
                        self.background.look_at(&node);
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

    /// Changes the size. What is cut off is gone: it reads as zeros when the file grows again.
    pub(super) fn set_size(&self, node: &Arc<Node>, size: u64) -> Result<(), Errno> {
        match node.kind {
            FileType::Regular => {}
            FileType::Directory => return Err(Errno::ISDIR),
            _ => return Err(Errno::INVAL),
        }
        if size > SIZE_MAX {
            return Err(Errno::FBIG);
        }
        loop {
            let state = self.known_content(node)?;
            match &state.content {
                Content::Plain => {
                    let file = plain_file(&state)?;
                    return self.resize_plain(node, &file, size);
                }
                // A packed one becomes a plain file in the background only.
                Content::Sketch(sketch) if size > 0 || sketch.kind() == SketchKind::Packed => {
                    let before = sketch.size();
                    sketch
                        .set_size(size)
                        .map_err(|error| self.sketch_failed(node, &error))?;
                    if size == before || sketch.kind() == SketchKind::Packed {
                        // It counts as a change, also where the host's file is as before.
                        drop(state);
                        self.set_times(node, None, Some(SetTime::Now))?;
                    }
                    return Ok(());
                }
                Content::Sketch(_) => {
                    drop(state);
                    self.empty(node)?;
                }
                Content::Lower | Content::Unknown => {
                    drop(state);
                    self.resize_lower(node, size)?;
                }
            }
        }
    }

    /// Makes of a lower file what can have this size.
    fn resize_lower(&self, node: &Arc<Node>, size: u64) -> Result<(), Errno> {
        self.ensure_upper(node)?;
        match size {
            0 => self.empty(node),
            _ => self.make_writable(node),
        }
    }

    /// Makes an empty plain file of what is not plain yet: nothing of the image is needed.
    fn empty(&self, node: &Node) -> Result<(), Errno> {
        let mut state = node.write_state();
        self.open_upper_locked(node, &mut state, Access::Data)?;
        let file = plain_file(&state)?;
        match &state.content {
            Content::Plain => return Ok(()),
            Content::Sketch(sketch) => {
                let is_plain = sketch
                    .set_size(0)
                    .and_then(|()| sketch.promote())
                    .map_err(|error| self.sketch_failed(node, &error))?;
                if !is_plain {
                    return Ok(());
                }
                self.open_sketches.remove(sketch.id());
            }
            Content::Lower | Content::Unknown => {
                self.resize_plain(node, &file, 0)?;
                // A sketch that could not be made may have left the others, if the host failed then.
                for mark in [Mark::Metacopy, Mark::Sketch, Mark::Redirect] {
                    mark.clear(Attribute::Open(file.as_fd()), self.upper.namespace())?;
                }
                node.marks_changed();
            }
        }
        is_now_plain(&mut state);
        self.settle(&*file);
        Ok(())
    }

    /// Reserves space, or makes holes or zeros. Set-id bits stay as they are.
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
                    let file = plain_file(&state)?;
                    self.allocate_plain(&node, &file, offset, length, how)?;
                    break;
                }
                Content::Sketch(sketch) => {
                    match how {
                        Allocate::Extend => sketch.allocate(offset, length, KeepSize::Grow),
                        Allocate::KeepSize => sketch.allocate(offset, length, KeepSize::Keep),
                        Allocate::PunchHole | Allocate::ZeroKeep => {
                            sketch.zero(offset, length, KeepSize::Keep)
                        }
                        Allocate::ZeroExtend => sketch.zero(offset, length, KeepSize::Grow),
                    }
                    .map_err(|error| self.sketch_failed(&node, &error))?;
                    drop(state);
                    // It counts as a change, also where nothing had to be done.
                    self.set_times(&node, None, Some(SetTime::Now))?;
                    break;
                }
                Content::Lower | Content::Unknown => {
                    drop(state);
                    self.make_writable(&node)?;
                }
            }
        }
        Ok(())
    }

    /// The next data or hole at or behind `offset`.
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
            Content::Sketch(sketch) => {
                if offset >= sketch.size() {
                    return Err(Errno::NXIO);
                }
                sketch
                    .seek(offset, seek)
                    .map_err(|error| self.sketch_failed(&node, &error))?
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

    /// Copies bytes from one file to another, or inside one; set-id bits stay as they are. Gives how many, fewer than asked for where it is at the end or has
    /// done enough for one request.
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
                // What was copied before counts; the next request meets the error again.
                Err(_) if copied > 0 => break,
                Err(errno) => return Err(errno),
            }
        }
        Ok(copied)
    }

    /// The regular file with this id.
    fn regular(&self, id: NodeId) -> Result<Arc<Node>, Errno> {
        let node = self.node(id)?;
        match node.kind {
            FileType::Regular => Ok(node),
            FileType::Directory => Err(Errno::ISDIR),
            _ => Err(Errno::INVAL),
        }
    }

    /// The node's state, once it is known where its bytes are, and open if they are in the upper. Of a file that is only in the
    /// image, the content may still be unknown.
    pub(super) fn known_content<'n>(
        &self,
        node: &'n Node,
    ) -> Result<std::sync::RwLockReadGuard<'n, State>, Errno> {
        loop {
            let state = node.read_state();
            let known = match (&state.content, &state.upper) {
                (_, None) => true,
                (Content::Unknown, Some(_)) => false,
                (Content::Plain, Some(upper)) => upper.file.is_some() && upper.for_data,
                (Content::Lower | Content::Sketch(_), Some(_)) => true,
            };
            if known {
                return Ok(state);
            }
            drop(state);
            self.spare_descriptors();
            self.open_content(node, &mut node.write_state())?;
        }
    }

    /// Finds out where the bytes of a file are that is in the upper.
    fn open_content(&self, node: &Node, state: &mut State) -> Result<(), Errno> {
        let file = self.open_upper_locked(node, state, Access::Data)?;
        if !matches!(state.content, Content::Unknown) {
            return Ok(());
        }
        let mut marks = self.read_marks(&file)?;
        let is_open = |id| self.open_sketches.get(id).is_some();
        if marks.sketch.is_some_and(|mark| !is_open(mark.id)) {
            // One that was open until now may have changed its mark at last. From here on only this node opens it.
            marks = self.read_marks(&file)?;
        }
        if let Some(mark) = marks.sketch {
            let sketch = match self.open_sketches.get(mark.id) {
                Some(sketch) => sketch,
                None => self
                    .sketches
                    .open(mark, self.own_descriptor(&file)?, self.below(node)?)
                    .map_err(|error| self.sketch_failed(node, &error))?,
            };
            self.open_sketches
                .add(mark.id, &sketch, self.table.weak(node.id));
            state.content = Content::Sketch(sketch);
        } else if marks.metacopy != Metacopy::None {
            // What cannot be found must not read as zeros.
            node.lower.ok_or(Errno::IO)?;
            state.content = Content::Lower;
        } else {
            is_now_plain(state);
        }
        Ok(())
    }

    /// Makes a plain file or a sketch of a file that is about to be written to.
    fn make_writable(&self, node: &Arc<Node>) -> Result<(), Errno> {
        self.ensure_upper(node)?;
        self.spare_descriptors();
        let mut state = node.write_state();
        self.open_content(node, &mut state)?;
        if !matches!(state.content, Content::Lower) {
            return Ok(());
        }
        let inode = self.image.inode(node.lower.ok_or(Errno::STALE)?)?;
        let file = plain_file(&state)?;
        if inode.size <= self.options.small_bytes {
            return self.copy_whole(node, &mut state, &inode, &file);
        }
        if let Some(upper) = &mut state.upper
            && !upper.has_origin
        {
            // A sketch is found again by nothing else.
            self.set_origin(&file, inode.nid)?;
            upper.has_origin = true;
        }
        // Of a sparse one, the map comes with the first flush, which must not fail for want of room.
        let (map_bytes, maps) = match self.sketch_kind {
            SketchKind::Sparse => (BLOCK_BYTES, 1),
            SketchKind::Packed => (0, 0),
        };
        let mut room = self.room(MARKS_ROOM + map_bytes, maps)?;
        let made = self.sketches.create(
            self.sketch_kind,
            self.own_descriptor(&file)?,
            self.below(node)?,
        );
        self.settle_in(&*file, &mut room);
        let sketch = made.map_err(|error| self.sketch_failed(node, &error))?;
        if maps > 0 && self.account.is_limited() {
            self.account.map_takes(sketch.id(), map_bytes, &mut room);
        }
        // Of one without a name, copied up after that was taken away, nothing is to be found again.
        if rustix::fs::fstat(&*file)?.st_nlink == 0 {
            sketch
                .discard()
                .map_err(|error| self.sketch_failed(node, &error))?;
        } else {
            self.open_sketches
                .add(sketch.id(), &sketch, Arc::downgrade(node));
        }
        state.content = Content::Sketch(sketch);
        if let Some(upper) = &mut state.upper {
            upper.is_sketch = true;
        }
        Ok(())
    }

    /// Copies the bytes of a small file. As long as they are not durable, its mark says that they are the image's, which is what
    /// a crash leaves; so nobody has to wait for the disk here.
    fn copy_whole(
        &self,
        node: &Arc<Node>,
        state: &mut State,
        inode: &Inode,
        file: &Arc<File>,
    ) -> Result<(), Errno> {
        // Copying is no change; the write that follows sets its own time.
        let (atime, mtime) = host::times(&rustix::fs::fstat(&**file)?);
        let keep_times = || host::set_times(file, at(atime), at(mtime));
        let copied = self
            .make_hollow(node, file, inode.size)
            .and_then(|()| self.copy_bytes(node, inode, file))
            .and_then(|()| keep_times());
        if let Err(errno) = copied {
            // Give the space back; the mark still says that the bytes are below.
            let _ = self.make_hollow(node, file, inode.size);
            let _ = keep_times();
            return Err(errno);
        }
        self.copied_whole.fetch_add(1, Ordering::Relaxed);
        is_now_plain(state);
        let most = match self.options.sync {
            // Nobody finds it after a crash.
            _ if node.is_removed.load(Ordering::Acquire) => return Ok(()),
            SyncPolicy::Strict => 1,
            SyncPolicy::Batch(most) => most,
            SyncPolicy::Volatile => {
                let cleared = self.set_metacopy(file, Metacopy::None);
                self.settle(&**file);
                return cleared;
            }
        };
        if let Some(upper) = &mut state.upper {
            upper.in_batch = true;
        }
        self.add_to_batch(node, most);
        Ok(())
    }

    /// Takes away what the host's file of a copy of metadata has, as bytes of a copy that a crash undid, and gives it the size of
    /// what it is a copy of.
    fn make_hollow(&self, node: &Node, file: &File, size: u64) -> Result<(), Errno> {
        let stored = self.stored(node);
        stored
            .look(file)
            .map_err(|error| self.sketch_failed(node, &error))?;
        let stat = rustix::fs::fstat(file)?;
        if stat.st_blocks > 0 || u64::try_from(stat.st_size) != Ok(size) {
            rustix::fs::ftruncate(file, 0)?;
            rustix::fs::ftruncate(file, size)?;
        }
        stored.truncated(0);
        Ok(())
    }

    fn copy_bytes(&self, node: &Node, inode: &Inode, file: &File) -> Result<(), Errno> {
        self.stored(node)
            .reserve_all(file, 0..inode.size)
            .map_err(|error| self.sketch_failed(node, &error))?;
        let mut at = 0;
        let mut failed = None;
        self.image.read_with(inode, 0, inode.size, &mut |piece| {
            if failed.is_none() {
                failed = file.write_all_at(piece, at).err();
            }
            at += piece.len() as u64;
        })?;
        match failed {
            Some(error) => Err(errno_of(&error)),
            None => Ok(()),
        }
    }

    fn below(&self, node: &Node) -> Result<Arc<ImageFile>, Errno> {
        let inode = self.image.inode(node.lower.ok_or(Errno::IO)?)?;
        Ok(Arc::new(ImageFile::new(Arc::clone(&self.image), inode)))
    }

    /// A sketch's own: what the host could not write is told to each open file once, and must not be told to another instead.
    fn own_descriptor(&self, file: &File) -> Result<File, Errno> {
        host::reopen(file, OFlags::RDWR)
    }

    fn write_plain(
        &self,
        node: &Node,
        state: &State,
        offset: u64,
        data: &[u8],
    ) -> Result<usize, Errno> {
        let file = plain_file(state)?;
        let failed = |error| self.sketch_failed(node, &error);
        let stored = self.stored(node);
        let end = offset + data.len() as u64;
        let reserved = stored.reserve(&*file, offset..end).map_err(failed)?;
        let data = &data[..(reserved.end - offset) as usize];
        let mut written = 0;
        let mut result = Ok(());
        while written < data.len() {
            match file.write_at(&data[written..], offset + written as u64) {
                Ok(0) => break,
                Ok(count) => written += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    result = Err(errno_of(&error));
                    break;
                }
            }
        }
        if written < data.len() {
            let kept = if written > 0 {
                offset + written as u64
            } else {
                0
            };
            stored.undo(reserved, kept);
        }
        match (written, result) {
            (0, Err(errno)) => Err(errno),
            (written, _) => Ok(written),
        }
    }

    fn resize_plain(&self, node: &Node, file: &File, size: u64) -> Result<(), Errno> {
        let stored = self.stored(node);
        stored
            .look(file)
            .map_err(|error| self.sketch_failed(node, &error))?;
        rustix::fs::ftruncate(file, size)?;
        stored.truncated(size);
        Ok(())
    }

    fn allocate_plain(
        &self,
        node: &Node,
        file: &File,
        offset: u64,
        length: u64,
        how: Allocate,
    ) -> Result<(), Errno> {
        let flags = match how {
            Allocate::Extend => FallocateFlags::empty(),
            Allocate::KeepSize => FallocateFlags::KEEP_SIZE,
            Allocate::PunchHole => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            Allocate::ZeroExtend => FallocateFlags::ZERO_RANGE,
            Allocate::ZeroKeep => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
        };
        let failed = |error| self.sketch_failed(node, &error);
        let stored = self.stored(node);
        let range = offset..offset + length;
        if how == Allocate::PunchHole {
            stored.look(file).map_err(failed)?;
            rustix::fs::fallocate(file, flags, offset, length)?;
            stored.punched(range);
            return Ok(());
        }
        let reserved = stored.reserve_all(file, range).map_err(failed)?;
        rustix::fs::fallocate(file, flags, offset, length).inspect_err(|_| {
            stored.undo(reserved, 0);
        })?;
        stored.look_again(file).map_err(failed)
    }
}

/// The descriptor of a file that is plain, or about to be.
pub(super) fn plain_file(state: &State) -> Result<Arc<File>, Errno> {
    state
        .upper
        .as_ref()
        .filter(|upper| upper.for_data)
        .and_then(|upper| upper.file.clone())
        .ok_or(Errno::STALE)
}

/// Says that all bytes are in the upper's file.
pub(super) fn is_now_plain(state: &mut State) {
    state.content = Content::Plain;
    if let Some(upper) = &mut state.upper {
        upper.is_partial = false;
        upper.is_sketch = false;
        upper.packed_size = None;
    }
}

/// Reads until `length` bytes are there or the end is.
fn read_into(
    scratch: &mut Vec<u8>,
    length: u32,
    read: impl Fn(&mut [u8]) -> std::io::Result<usize>,
) -> Result<(), Errno> {
    scratch.resize(length as usize, 0);
    loop {
        match read(scratch) {
            // Regular files give all there is.
            Ok(count) => {
                scratch.truncate(count);
                return Ok(());
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(errno_of(&error)),
        }
    }
}

fn check_end(offset: u64, length: u64) -> Result<(), Errno> {
    match offset.checked_add(length) {
        Some(end) if end <= SIZE_MAX => Ok(()),
        _ => Err(Errno::FBIG),
    }
}

fn at(time: Timestamp) -> Option<SetTime> {
    Some(SetTime::At(time))
}

/// The host's own errno.
pub(super) fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

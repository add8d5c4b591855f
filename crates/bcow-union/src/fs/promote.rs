//! Promotion: a complete sketch becomes a plain file.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use rustix::fs::Stat;
use rustix::io::Errno;

use super::copy_up::preserve_times;
use super::lookup::Access;
use super::nodes::{Node, Place, State};
use super::types::SetTime;
use super::{UnionFs, host};
use crate::blocks::BLOCK_BYTES;
use crate::options::SyncPolicy;
use crate::sketch::{Durability, Sketch, SketchKind};
use crate::upper::{Attribute, Mark, XattrMode};

/// Result of a promotion.
pub(super) enum Promoted {
    /// The sketch still needs the image, or cannot be promoted now.
    No,
    /// The host file of the sketch is now the plain file.
    InPlace,
    /// This file replaced the sketch; with its inode number on the host.
    Replaced(File, u64),
}

impl UnionFs {
    /// Makes a plain file of a complete sketch. The caller holds the lock of the node's state.
    pub(super) fn promote(
        &self,
        node: &Node,
        state: &State,
        sketch: &dyn Sketch,
    ) -> Result<Promoted, Errno> {
        let failed = |error| self.content_failed(node, error);
        if !sketch.is_complete().map_err(failed)? {
            return Ok(Promoted::No);
        }
        sketch.settle().map_err(failed)?;
        match sketch.kind() {
            SketchKind::Sparse => {
                let promote = || self.sketches.promote(sketch).map_err(failed);
                let upper = state.upper.as_ref();
                match upper.and_then(|upper| Some((upper, upper.file.as_ref()?))) {
                    Some((upper, file)) => {
                        upper.take_hidden_change(sketch)?;
                        upper.hiding_change(file, promote)?;
                        self.recount_overhead(&**file);
                    }
                    None => drop(promote()?),
                }
                Ok(Promoted::InPlace)
            }
            SketchKind::Packed => self.promote_packed(node, state, sketch),
        }
    }

    /// Promotes a packed sketch: a new plain file replaces it.
    fn promote_packed(
        &self,
        node: &Node,
        state: &State,
        sketch: &dyn Sketch,
    ) -> Result<Promoted, Errno> {
        let Place::At { parent, name } = node.place() else {
            return Ok(Promoted::No);
        };
        let Some(upper) = &state.upper else {
            return Ok(Promoted::No);
        };
        let Some(old) = &upper.file else {
            return Ok(Promoted::No);
        };
        // Another thread has the file in hand. It may be about to change its attributes or to add a
        // name, and that change would be lost.
        if Arc::strong_count(old) > 1 {
            return Ok(Promoted::No);
        }
        let stat = rustix::fs::fstat(&**old)?;
        if stat.st_nlink != 1 || upper.indexed {
            // All names would have to change in one step.
            return Ok(Promoted::No);
        }
        // The lock of the directory's names comes before that of a node's state. Out of order it is
        // only tried.
        let Some(_names) = parent.try_lock_names() else {
            return Ok(Promoted::No);
        };
        if !node.is_at(&parent, &name) {
            return Ok(Promoted::No);
        }
        // Both files exist for a moment.
        let room = match self.account.limit() {
            Some(_) => sketch.size().next_multiple_of(BLOCK_BYTES),
            None => 0,
        };
        if self.account.charge(room).is_err() {
            return Ok(Promoted::No);
        }
        let promoted = self.write_out(node, &parent, &name, old, &stat, sketch);
        self.account.release(room);
        promoted
    }

    /// Writes the plain file of a packed sketch, and replaces the old file, `name` in `parent`.
    fn write_out(
        &self,
        node: &Node,
        parent: &Node,
        name: &[u8],
        old: &File,
        stat: &Stat,
        sketch: &dyn Sketch,
    ) -> Result<Promoted, Errno> {
        let (temporary, file) = self.upper.temporary_file(0o600)?;
        let stored = sketch
            .copy_out(&file)
            .map_err(|error| self.content_failed(node, error))?;
        let (atime, mtime) = host::times(stat);
        // The owner first: a change of owner removes capabilities.
        host::set_owner(&file, Some(stat.st_uid), Some(stat.st_gid))?;
        host::set_mode(&file, (stat.st_mode & 0o7777) as u16)?;
        self.copy_stored_attributes(old, &file)?;
        host::set_times(&file, Some(SetTime::At(atime)), Some(SetTime::At(mtime)))?;
        if self.options.sync != SyncPolicy::Volatile {
            rustix::fs::fsync(&file)?;
        }
        let directory = self.open_upper(parent, Access::Directory)?;
        let mark = self.read_marks(old)?.sketch;
        preserve_times(parent, &directory, || {
            temporary
                .place(directory.as_fd(), name)
                .map_err(|(_, errno)| errno)
        })?;
        parent.names_have_changed();
        node.name_is_new
            .store(true, std::sync::atomic::Ordering::Release);
        let host_inode = rustix::fs::fstat(&file)?.st_ino;
        if self.account.is_limited() {
            // The old file had only this name, so its inode is gone.
            self.count_new(&file, &mut self.account.unreserved());
            self.account.release_inode(stat.st_ino);
        }
        if let Some(mark) = mark {
            self.sketches
                .replaced(&mark, stored)
                .map_err(|error| self.content_failed(node, error))?;
        }
        Ok(Promoted::Replaced(file, host_inode))
    }

    /// Copies all attributes in their stored form, except the marks of a sketch.
    pub(super) fn copy_stored_attributes(&self, from: &File, to: &File) -> Result<(), Errno> {
        let (from, to) = (Attribute::Path(from.as_fd()), Attribute::Path(to.as_fd()));
        let namespace = self.upper.namespace();
        for name in from.list()?.split(|&byte| byte == 0) {
            let is_mark_of_sketch = [Mark::Sketch, Mark::Metacopy, Mark::Redirect]
                .into_iter()
                .any(|mark| mark.name(namespace) == name);
            if name.is_empty() || is_mark_of_sketch {
                continue;
            }
            if let Some(value) = from.get(name)? {
                to.set(name, &value, XattrMode::Any)?;
            }
        }
        Ok(())
    }

    /// Durability of flushes that no program requested.
    pub(super) fn durability(&self) -> Durability {
        match self.options.sync {
            SyncPolicy::Volatile => Durability::Volatile,
            SyncPolicy::Strict | SyncPolicy::Batch(_) => Durability::Durable,
        }
    }
}

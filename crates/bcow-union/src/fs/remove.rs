//! Removal of names.

use std::fs::File;
use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bcow_erofs::reader::FileType;
use rustix::fs::AtFlags;
use rustix::io::Errno;

use super::lookup::Access;
use super::nodes::{HostPlace, Node};
use super::{UnionFs, host};
use crate::ledger::Flags;
use crate::node::NodeId;

impl UnionFs {
    /// Removes a name of anything except a directory; `EISDIR` for those.
    pub fn unlink(&self, parent: NodeId, name: &[u8]) -> Result<(), Errno> {
        self.unlink_numbered(0, parent, name).map(drop)
    }

    /// The same for the request with this number. Gives the node that had the name.
    pub(super) fn unlink_numbered(
        &self,
        number: u64,
        parent: NodeId,
        name: &[u8],
    ) -> Result<NodeId, Errno> {
        let parent = self.node(parent)?;
        let node = self.find_existing(&parent, name)?;
        if node.is_directory() {
            return Err(Errno::ISDIR);
        }
        // If the inode has several names in the image, the link count of the others must drop.
        if self.has_names_below(&node)? {
            match self.ensure_upper(&node) {
                // Without space for the copy-up the name is removed anyway, as in overlayfs. The
                // other names still show the old link count.
                Err(Errno::NOSPC | Errno::DQUOT) => {}
                other => other?,
            }
        }
        self.prepare_parent(&parent, name)?;
        let _names = parent.names.lock();
        let node = self.find_existing(&parent, name)?;
        let object = self.open_for_removal(&node)?;
        let is_below = self.lookup_lower(&parent, name)?.is_some();
        let directory = self.upper_directory(&parent)?.ok_or(Errno::STALE)?;
        let is_above = host::stat_at(&*directory, name)?
            .map(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode));
        match (is_above, is_below) {
            (None, true) => {
                // The host's link count does not change.
                let recount = self.begin_removal(number, &node)?;
                let hidden = self.upper.place_whiteout(directory.as_fd(), name, None);
                self.end_recount(recount, i64::from(hidden.is_ok()));
                self.measure(&*directory);
                hidden?;
            }
            (above, true) => {
                let _names = self.lock_names(&node)?;
                self.upper.place_whiteout(directory.as_fd(), name, above)?;
            }
            (Some(_), false) => {
                let _names = self.lock_names(&node)?;
                rustix::fs::unlinkat(&*directory, name, AtFlags::empty())?;
                self.measure(&*directory);
            }
            (None, false) => return Err(Errno::NOENT),
        }
        parent.names_changed.change();
        self.name_removed(&parent, name, &node, object);
        Ok(node.id)
    }

    /// Removes an empty directory; `ENOTEMPTY` if it shows a name.
    pub fn remove_directory(&self, parent: NodeId, name: &[u8]) -> Result<(), Errno> {
        match name {
            b"." => return Err(Errno::INVAL),
            b".." => return Err(Errno::NOTEMPTY),
            _ => {}
        }
        let parent = self.node(parent)?;
        let node = self.find_existing(&parent, name)?;
        if !node.is_directory() {
            return Err(Errno::NOTDIR);
        }
        self.prepare_parent(&parent, name)?;
        let _names = parent.names.lock();
        let node = self.find_existing(&parent, name)?;
        let _inside = node.names.try_lock().ok_or(Errno::BUSY)?;
        if !self.is_empty(&node)? {
            return Err(Errno::NOTEMPTY);
        }
        let object = self.open_for_removal(&node)?;
        let directory = self.open_upper(&parent, Access::Directory)?;
        let is_below = self.lookup_lower(&parent, name)?.is_some();
        let is_above = node.read_state().upper.is_some();
        match (is_above, is_below) {
            (false, _) => {
                let hidden = self.upper.place_whiteout(directory.as_fd(), name, None);
                self.measure(&*directory);
                hidden?;
            }
            (true, true) => {
                let kind = rustix::fs::FileType::Directory;
                let whiteout = self.upper.temporary_whiteout()?;
                let removed = whiteout.exchange(directory.as_fd(), name, kind)?;
                self.keep_directory(&node, removed);
            }
            (true, false) => {
                let removed = self.upper.move_to_work(
                    directory.as_fd(),
                    name,
                    rustix::fs::FileType::Directory,
                )?;
                self.keep_directory(&node, removed);
                self.measure(&*directory);
            }
        }
        parent.names_changed.change();
        self.name_removed(&parent, name, &node, object);
        Ok(())
    }

    /// Makes sure that the parent is in the upper; `EPERM` for the name of the upper's own
    /// directory.
    fn prepare_parent(&self, parent: &Arc<Node>, name: &[u8]) -> Result<(), Errno> {
        if self.is_reserved(parent, name) {
            return Err(Errno::PERM);
        }
        self.ensure_directory(parent).map(drop)
    }

    /// Whether the directory shows no name. The caller holds the lock of its names.
    pub(super) fn is_empty(&self, node: &Node) -> Result<bool, Errno> {
        let mut names = 0_usize;
        self.each_name(node, &mut |_, _| {
            names += 1;
            ControlFlow::Break(())
        })?;
        Ok(names == 0)
    }

    /// Whether a node has several names in the image, so that the removal of one must be recorded.
    pub(super) fn has_names_below(&self, node: &Node) -> Result<bool, Errno> {
        if !self.can_be_marked(node.kind) || self.names_below(node)? <= 1 {
            return Ok(false);
        }
        Ok(match node.lower {
            Some(nid) => !self.would_be_whiteout(&self.image.inode(nid)?),
            None => true,
        })
    }

    pub(super) fn names_below(&self, node: &Node) -> Result<u32, Errno> {
        match node.lower {
            Some(nid) if !node.is_directory() => Ok(self.image.inode(nid)?.nlink),
            _ => Ok(1),
        }
    }

    /// Called before a name is removed: opens the object, because a program may still use it.
    pub(super) fn open_for_removal(&self, node: &Node) -> Result<RemovedObject, Errno> {
        if node.read_state().upper.is_none() {
            return Ok(RemovedObject { file: None });
        }
        let file = self.open_upper(node, Access::Path)?;
        let indexed = node.read_state().is_indexed();
        if !indexed && !node.is_directory() {
            let _state = node.write_state();
            self.keep_orphan(node, &file);
        }
        Ok(RemovedObject { file: Some(file) })
    }

    /// Called after `name` in `parent` was removed from a node. Failures are logged and leave
    /// garbage in the upper; the name stays removed.
    pub(super) fn name_removed(
        &self,
        parent: &Node,
        name: &[u8],
        node: &Node,
        object: RemovedObject,
    ) {
        if node.is_at(parent, name) {
            node.set_place(HostPlace::Nowhere);
        }
        let Some(file) = object.file.filter(|_| !node.is_directory()) else {
            self.release_on_drop(node);
            // A node that exists only in the image has one name. With several it would have been
            // copied up, if it can have marks.
            if self.names_below(node).is_ok_and(|names| names <= 1) {
                self.set_removed(node);
            }
            return;
        };
        if let Err(errno) = self.update_removed_name(node, &file) {
            self.host_failed(name, "removed, but its link count or map is stale", errno);
        }
    }

    pub(super) fn set_removed(&self, node: &Node) {
        if !node.is_removed.swap(true, Ordering::AcqRel) {
            self.pending_frees.removed();
            node.set_flags(Flags::REMOVED, true);
        }
    }

    /// Handles the loss of a name: finds out whether it was the node's last.
    fn update_removed_name(&self, node: &Node, file: &File) -> Result<(), Errno> {
        let state = node.read_state();
        let is_last = if state.is_indexed() {
            self.count_names(node.lower, file)? <= 0
        } else {
            Self::links_in_tree(node, rustix::fs::fstat(file)?.st_nlink) == 0
        };
        drop(state);
        if !is_last {
            return Ok(());
        }
        self.release_on_drop(node);
        self.set_removed(node);
        // Another process that takes over the mount needs both: see [`super::orphans`].
        if self.ledger.is_none() {
            let is_regular = node.kind == FileType::Regular;
            let is_partial = is_regular && node.read_state().is_partial();
            self.remove_remains(node, is_partial.then_some(file))?;
        }
        Ok(())
    }

    /// Removes the index entry of a node without a name, and then the map of `partial`, its partial
    /// file. The bytes of the file stay while a program has it open. An entry without its map would
    /// be damaged; a map without a file is removed later.
    pub(super) fn remove_remains(&self, node: &Node, partial: Option<&File>) -> Result<(), Errno> {
        if partial.is_some() {
            // A program may still read the partial file, so it is opened before its map is removed.
            // A damaged partial file is removed without that.
            let _ = self.known_content(node).map(drop);
        }
        let indexed = node.read_state().is_indexed();
        if indexed
            && let Some(nid) = node.lower
            && !self.remove_index_entry(nid)
        {
            return Ok(());
        }
        let Some(file) = partial else { return Ok(()) };
        let Some(mark) = self.read_marks(file)?.partial else {
            return Ok(());
        };
        self.open_partials.remove(mark.id);
        self.forget_unrestored(mark.id);
        self.partials
            .remove(&mark)
            .map_err(|error| self.content_failed(node, error))
    }
}

/// An object of the upper, held open while its name is removed.
pub(super) struct RemovedObject {
    file: Option<Arc<File>>,
}

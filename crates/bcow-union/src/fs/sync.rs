//! Durability: fsync, syncfs, the batch of whole copies, and the end of use of the upper.
//!
//! After an fsync of a file, its bytes, its attributes and its name are durable. If the file was
//! copied up or created since its last fsync, the sync includes the changed directories above it.
//! (A program that wrote to an existing file of the image does not know that the copy-up made a new
//! directory entry.)

use std::sync::Arc;
use std::sync::atomic::Ordering;

use bcow_erofs::reader::FileType;
use rustix::io::Errno;

use super::UnionFs;
use super::lookup::Access;
use super::nodes::{Content, HostPlace, Node};
use super::types::SyncScope;
use crate::ledger::Flags;
use crate::node::NodeId;
use crate::options::SyncPolicy;
use crate::partial::Durability;
use crate::upper::{Metacopy, is_removed};

impl UnionFs {
    /// Durability of flushes that no program requested.
    pub(super) fn durability(&self) -> Durability {
        match self.options.sync {
            SyncPolicy::Volatile => Durability::Volatile,
            SyncPolicy::Strict | SyncPolicy::Batch(_) => Durability::Durable,
        }
    }

    /// Makes a file, or the names of a directory, durable, as fsync or fdatasync: all completed
    /// writes are on the disk when this returns. Does nothing for [`SyncPolicy::Volatile`].
    pub fn sync(&self, id: NodeId, what: SyncScope) -> Result<(), Errno> {
        let node = self.node(id)?;
        if self.options.sync == SyncPolicy::Volatile {
            return Ok(());
        }
        if node.is_directory() {
            self.sync_directory(&node)
        } else {
            self.sync_node(&node, what)
        }
    }

    fn sync_node(&self, node: &Arc<Node>, what: SyncScope) -> Result<(), Errno> {
        if node.read_state().upper.is_none() {
            return Ok(());
        }
        self.finish_batch_of(node)?;
        let syncing = node.name_sync.lock();
        // Cleared before the sync: a concurrent change of the name sets it again.
        let name_is_new = node.name_is_new.swap(false, Ordering::AcqRel);
        // If the name is not new, concurrent syncs of the node need not wait for each other.
        let _syncing = name_is_new.then_some(syncing);
        let synced = self
            .sync_content(node, what, name_is_new)
            .and_then(|()| if name_is_new { self.sync_names_above(node) } else { Ok(()) });
        if synced.is_err() && name_is_new {
            node.name_is_new.store(true, Ordering::Release);
        }
        synced
    }

    fn sync_content(&self, node: &Node, what: SyncScope, name_is_new: bool) -> Result<(), Errno> {
        {
            let state = node.read_state();
            if let Content::Partial(partial) = &state.content {
                partial
                    .flush(Durability::Durable)
                    .map_err(|error| self.content_failed(node, error))?;
                if what == SyncScope::Data && !name_is_new {
                    return Ok(());
                }
            }
        }
        if node.kind != FileType::Regular {
            // Other types have no content, and an `O_PATH` descriptor cannot be synced. The sync of
            // their directory suffices.
            return Ok(());
        }
        let file = self.open_upper(node, Access::Data)?;
        match what {
            SyncScope::Data if !name_is_new => rustix::fs::fdatasync(&*file)?,
            _ => rustix::fs::fsync(&*file)?,
        }
        // The host stores some metadata of a file only when it writes back the data.
        self.measure(&*file);
        Ok(())
    }

    fn sync_directory(&self, node: &Node) -> Result<(), Errno> {
        let Some(directory) = self.upper_directory(node)? else {
            return Ok(());
        };
        let _syncing = node.name_sync.lock();
        let changed = node.names_changed.unsynced();
        let name_is_new = node.name_is_new.swap(false, Ordering::AcqRel);
        let synced = rustix::fs::fsync(&*directory).and_then(|()| {
            if let Some(upto) = changed {
                node.names_changed.synced(upto);
            }
            if name_is_new { self.sync_names_above(node) } else { Ok(()) }
        });
        if synced.is_err() {
            node.name_is_new.store(true, Ordering::Release);
        }
        synced
    }

    /// Makes the changed names durable on the path from the node up to the root.
    fn sync_names_above(&self, node: &Node) -> Result<(), Errno> {
        let mut place = node.place();
        let indexed = node.read_state().is_indexed();
        if indexed {
            rustix::fs::fsync(self.upper.index())?;
        }
        while let HostPlace::At { parent, .. } = place {
            if let Some(upto) = parent.names_changed.unsynced() {
                if let Some(directory) = self.upper_directory(&parent)? {
                    rustix::fs::fsync(&*directory)?;
                }
                parent.names_changed.synced(upto);
            }
            place = parent.place();
        }
        Ok(())
    }

    /// Makes all completed requests durable, as syncfs. With [`SyncPolicy::Volatile`], data is only
    /// passed to the host's kernel.
    pub fn sync_all(&self) -> Result<(), Errno> {
        let batch = self.finish_batch();
        let restored = self.restore_all_kept();
        let partials = self.flush_partials(self.durability()).and(restored);
        let host = match self.options.sync {
            SyncPolicy::Volatile => Ok(()),
            SyncPolicy::Strict | SyncPolicy::Batch(_) => rustix::fs::syncfs(self.upper.root()),
        };
        batch.and(partials).and(host)
    }

    /// Adds a file that was copied whole to the batch. A batch of `most` files is synced in the
    /// background.
    pub(super) fn add_to_batch(&self, node: &Arc<Node>, most: u32) {
        let is_full = {
            let mut batch = self.batch.lock();
            batch.push(Arc::clone(node));
            batch.len() >= most as usize
        };
        if is_full {
            self.background.request_batch_sync();
        }
    }

    /// Makes all files of the batch durable and clears their metacopy marks. Several files need
    /// only one `syncfs` of the host's file system.
    pub(super) fn finish_batch(&self) -> Result<(), Errno> {
        let batch = std::mem::take(&mut *self.batch.lock());
        // If `syncfs` fails, each file is synced by itself, so that the error names the affected
        // file.
        let are_durable = batch.len() > 1 && rustix::fs::syncfs(&self.batch_host).is_ok();
        let mut result = Ok(());
        for node in batch {
            let finished =
                if are_durable { self.unmark(&node) } else { self.finish_batch_of(&node) };
            match finished {
                Ok(()) => {
                    // The kernel may have forgotten the file meanwhile.
                    if !self.table.is_held(node.id) {
                        self.drop_orphan(&node);
                    }
                    self.table.drop_node(node);
                }
                // The file stays for the next batch; the other files are not delayed.
                Err(errno) => {
                    result = result.and(Err(errno));
                    self.batch.lock().push(node);
                }
            }
        }
        result
    }

    /// Removes a file without a name from the batch: it need not become durable, and its space can
    /// be freed.
    pub(super) fn leave_batch(&self, node: &Node) {
        let state = node.read_state();
        if state.is_in_batch() {
            self.batch.lock().retain(|other| other.id != node.id);
        }
    }

    /// Makes one file of the batch durable by itself.
    fn finish_batch_of(&self, node: &Arc<Node>) -> Result<(), Errno> {
        if !node.read_state().is_in_batch() {
            return Ok(());
        }
        let file = self.open_upper(node, Access::Data)?;
        rustix::fs::fdatasync(&*file).inspect_err(|&errno| {
            let _ = node.sync_failed.set(errno);
            node.set_flags(Flags::SYNC_FAILED, true);
        })?;
        self.unmark(node)
    }

    /// Clears the metacopy mark of a file whose bytes are durable.
    fn unmark(&self, node: &Node) -> Result<(), Errno> {
        let mut state = node.write_state();
        if !state.is_in_batch() {
            return Ok(());
        }
        // After a write-back error the host may have dropped the data, and a later sync would not
        // report that.
        if let Some(&errno) = node.sync_failed.get() {
            return Err(errno);
        }
        let file = self.open_upper_locked(node, &mut state, Access::Path)?;
        if let Some(upper) = &mut state.upper {
            upper.hiding_change(&file, || self.set_metacopy(&file, Metacopy::None))?;
            upper.in_batch = false;
        }
        self.measure(&*file);
        node.set_flags(Flags::IN_BATCH, false);
        node.marks_changed();
        Ok(())
    }

    /// Prepares the end of this process, so that another one takes over the mount: makes everything
    /// durable, and records all partial files. Returns false if the union was closed before. From
    /// now on, a close waits for the end of the process. The caller makes sure that no request is
    /// in progress or begins.
    pub fn prepare_takeover(&self) -> Result<bool, Errno> {
        let closed = self.closed.lock();
        if closed.is_some() {
            return Ok(false);
        }
        self.background.stop();
        let synced = self.sync_all();
        self.confirm_partials();
        // If the mount ends, the process could exit before it has reported that.
        std::mem::forget(closed);
        synced.map(|()| true)
    }

    /// Ends the use of the upper: makes everything durable, and removes the temporaries that the
    /// next open would have to remove. The process may exit afterwards without dropping the union.
    /// The caller makes sure that no request is in progress. Concurrent and later calls wait and
    /// get the outcome of the first call.
    pub fn close(&self) -> Result<(), Errno> {
        // Held until the outcome is known: a second caller must not exit the process before that.
        let mut closed = self.closed.lock();
        if let Some(outcome) = *closed {
            return outcome;
        }
        self.background.stop();
        let synced = self.sync_all();
        self.confirm_partials();
        self.table.for_each(&mut |node| self.drop_orphan(node));
        self.upper.remove_spare_whiteouts();
        if synced.is_ok() && self.options.sync == SyncPolicy::Volatile {
            // A clean unmount: the host's kernel has all data, and writes it to the disk later.
            let _ = self.upper.forget_volatile();
        }
        *closed = Some(synced);
        synced
    }

    /// Whether the directory of the upper has no name on the host any more.
    pub fn is_removed(&self) -> bool {
        is_removed(self.upper.root())
    }
}

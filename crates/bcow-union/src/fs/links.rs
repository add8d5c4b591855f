//! The number of names of a file that has several names in the image.
//!
//! Names that exist only in the image are not in the host's link count. So a mark on the host's
//! file records the number, in one of overlayfs's two forms:
//!
//! - [`NlinkDelta::Upper`] is relative to the host's link count. It stays right while names are
//!   added and removed in the upper.
//! - [`NlinkDelta::Lower`] is relative to the image's link count. It is right for any link count of
//!   the host.
//!
//! Some steps change the host's count but not the number of names, or the reverse. During such a
//! step the mark has the second form. A crash during the step leaves the right number, or one too
//! high if the step removes a name. The number is never too low: a file with the number 0 would be
//! discarded.
//!
//! The lock of the node's state is held from the first change of the mark to the second. A thread
//! that holds the lock and finds a mark of the second form knows that a crash or a failure left
//! that mark. The lock is also held while the host's count and the number of names change together:
//! otherwise another thread could have read one of them before and write the mark after.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bcow_erofs::reader::Nid;
use parking_lot::RwLockWriteGuard;
use rustix::io::Errno;

use super::UnionFs;
use super::lookup::Access;
use super::nodes::{Node, NodeState};
use crate::ledger::BegunChange;
use crate::node::NodeId;
use crate::upper::{Mark, NlinkDelta};

/// A change of names that a process before had begun, and that the kernel will ask for again.
#[derive(Debug)]
pub(super) struct Begun {
    /// The node that had the first name, or of which a name is removed.
    pub(super) node: u64,
    /// The place of the record in the ledger.
    place: u64,
    /// Whether the mark of the node has the first form again, with the number from before the
    /// removal. Changed with the lock of the node's state held.
    is_restored: AtomicBool,
}

impl Begun {
    /// A change that is recorded at this place of the ledger.
    pub(super) fn at(place: u64, change: BegunChange) -> Self {
        Begun {
            node: change.node,
            place,
            is_restored: AtomicBool::new(change.is_restored),
        }
    }
}

/// A change of links or names in progress. It holds the lock of the node's state.
pub(super) struct Recount<'n> {
    _state: RwLockWriteGuard<'n, NodeState>,
    pub(super) file: Arc<File>,
    /// Number of names before the change.
    names: i64,
    /// The record of the change in the ledger.
    begun: Option<u64>,
}

impl UnionFs {
    /// Number of names of an indexed file that was copied up from the image's inode `lower`.
    pub(super) fn count_names(&self, lower: Option<Nid>, file: &File) -> Result<i64, Errno> {
        let links = || links_of(file);
        match (self.read_marks(file)?.nlink, lower) {
            (Some(NlinkDelta::Upper(delta)), _) => Ok(links()? + i64::from(delta)),
            (Some(NlinkDelta::Lower(delta)), Some(nid)) => {
                Ok(i64::from(self.image.inode(nid)?.nlink) + i64::from(delta))
            }
            (Some(NlinkDelta::Lower(_)) | None, _) => links(),
        }
    }

    /// Records the number of names relative to the host's link count.
    pub(super) fn set_names_upper(&self, file: &File, names: i64) -> Result<(), Errno> {
        self.set_nlink(file, names - links_of(file)?, NlinkDelta::Upper)
    }

    /// Records the number of names relative to the image's link count.
    pub(super) fn set_names_lower(&self, lower: Nid, file: &File, names: i64) -> Result<(), Errno> {
        let below = i64::from(self.image.inode(lower)?.nlink);
        self.set_nlink(file, names - below, NlinkDelta::Lower)
    }

    fn set_nlink(&self, file: &File, delta: i64, of: fn(i32) -> NlinkDelta) -> Result<(), Errno> {
        let delta = i32::try_from(delta).map_err(|_| Errno::MLINK)?;
        self.set_mark(file, Mark::Nlink, of(delta).encode().as_bytes())
    }

    /// Brings the mark back to the first form if a crash or a failure left the second. After that,
    /// the host's count and the number of names can change together.
    pub(super) fn restore_nlink_mark(&self, node: &Node) -> Result<(), Errno> {
        if !node.read_state().is_indexed() {
            return Ok(());
        }
        self.restore_nlink_mark_locked(node, &mut node.write_state())
    }

    /// Locks the number of names of a node, whose mark gets the first form. Until the drop of the
    /// result, the host's count and the number of names can change together. `None` if the host's
    /// count is the number of names. The lock is that of the node's state.
    pub(super) fn lock_names<'n>(
        &self,
        node: &'n Node,
    ) -> Result<Option<RwLockWriteGuard<'n, NodeState>>, Errno> {
        if !node.read_state().is_indexed() {
            return Ok(None);
        }
        let mut state = node.write_state();
        self.restore_nlink_mark_locked(node, &mut state)?;
        Ok(Some(state))
    }

    /// As [`UnionFs::restore_nlink_mark`]; the caller holds the lock of the node's state.
    pub(super) fn restore_nlink_mark_locked(
        &self,
        node: &Node,
        state: &mut NodeState,
    ) -> Result<(), Errno> {
        if !state.is_indexed() {
            return Ok(());
        }
        let file = self.open_upper_locked(node, state, Access::Path)?;
        if !matches!(self.read_marks(&file)?.nlink, Some(NlinkDelta::Lower(_)))
            || node.lower.is_none()
        {
            return Ok(());
        }
        let names = self.count_names(node.lower, &file)?;
        self.may_be_too_high(node);
        let set = self.set_names_upper(&file, names);
        self.measure(&*file);
        set
    }

    /// Records that the number of names of a node is one too high if a removal was executed that a
    /// process before had begun. The request for it comes again: see [`UnionFs::finish_removal`].
    fn may_be_too_high(&self, node: &Node) {
        let Some(ledger) = &self.ledger else { return };
        for begun in self.begun.values().filter(|begun| begun.node == node.id.0) {
            if !begun.is_restored.swap(true, Ordering::Relaxed) {
                ledger.set_restored(begun.place, begun.node, true);
            }
        }
    }

    /// Begins a step that changes the host's count but not the number of names, or the reverse.
    /// `None` if the host's count is the node's number of names.
    pub(super) fn begin_recount<'n>(&self, node: &'n Node) -> Result<Option<Recount<'n>>, Errno> {
        let mut state = node.write_state();
        let Some(lower) = node.lower.filter(|_| state.is_indexed()) else {
            return Ok(None);
        };
        self.restore_nlink_mark_locked(node, &mut state)?;
        let file = self.open_upper_locked(node, &mut state, Access::Path)?;
        let names = self.count_names(Some(lower), &file)?;
        self.set_names_lower(lower, &file, names)?;
        Ok(Some(Recount {
            _state: state,
            file,
            names,
            begun: None,
        }))
    }

    /// As [`UnionFs::begin_recount`], for the request with this number, which removes a name. If
    /// the process ends during the step, [`UnionFs::finish_removal`] completes it.
    pub(super) fn begin_removal<'n>(
        &self,
        number: u64,
        node: &'n Node,
    ) -> Result<Option<Recount<'n>>, Errno> {
        let recount = self.begin_recount(node)?;
        Ok(recount.map(|recount| Recount {
            begun: self
                .ledger
                .as_ref()
                .map(|ledger| ledger.begin_change(number, node.id.0)),
            ..recount
        }))
    }

    /// Corrects the number of names of a file, one of which the request with this number has
    /// removed in a process that ended in the middle of the step. Meanwhile another request can
    /// have brought the mark back to the first form, with a number that is one too high.
    pub(super) fn finish_removal(&self, number: u64) -> Result<(), Errno> {
        let Some(begun) = self.begun.get(&number) else {
            return Ok(());
        };
        // Unknown if it had only this name.
        let Ok(node) = self.node(NodeId(begun.node)) else {
            return Ok(());
        };
        let mut state = node.write_state();
        let Some(lower) = node.lower.filter(|_| state.is_indexed()) else {
            return Ok(());
        };
        let file = self.open_upper_locked(&node, &mut state, Access::Path)?;
        let was_restored = begun.is_restored.swap(false, Ordering::Relaxed);
        if was_restored && let Some(ledger) = &self.ledger {
            // Before the number: it may be too high if the process ends now, but never too low.
            ledger.set_restored(begun.place, begun.node, false);
        }
        if was_restored || matches!(self.read_marks(&file)?.nlink, Some(NlinkDelta::Lower(_))) {
            let names = self.count_names(Some(lower), &file)? - 1;
            self.set_names_upper(&file, names)?;
            self.measure(&*file);
        }
        Ok(())
    }

    /// The request with this number, which a process before had begun, was not executed, and is
    /// about to be.
    pub(super) fn begin_again(&self, number: u64) {
        if let (Some(begun), Some(ledger)) = (self.begun.get(&number), &self.ledger) {
            begun.is_restored.store(false, Ordering::Relaxed);
            ledger.end_change(begun.place);
        }
    }

    /// Ends the step, done or failed: the file has `lost` names fewer than before.
    pub(super) fn end_recount(&self, recount: Option<Recount<'_>>, lost: i64) {
        let Some(recount) = recount else { return };
        if let Err(errno) = self.set_names_upper(&recount.file, recount.names - lost) {
            // The present mark is too high by `lost` at most. The next change of the number writes
            // it again.
            self.host_failed(b"", "cannot write the nlink mark", errno);
        }
        self.measure(&*recount.file);
        if let (Some(begun), Some(ledger)) = (recount.begun, &self.ledger) {
            ledger.end_change(begun);
        }
    }
}

fn links_of(file: &File) -> Result<i64, Errno> {
    Ok(i64::try_from(rustix::fs::fstat(file)?.st_nlink).unwrap_or(i64::MAX))
}

//! The table of open partial files.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::nodes::{Content, Node};
use crate::partial::Partial;

/// The table of open partial files, by id. It references a partial file also after the kernel
/// forgot the node. Otherwise three things would be lost: unflushed data, data that could not be
/// made durable, and the record of a failed barrier.
#[derive(Debug, Default)]
pub(super) struct OpenPartials {
    /// Held to find, add or remove a partial file, and to close an unused one.
    open: Mutex<HashMap<u64, OpenPartial>>,
}

/// A partial file, and the node whose content it is. The reference to the node is dead if the
/// kernel forgot the node.
pub(super) type OpenPartial = (Arc<Partial>, Weak<Node>);

impl OpenPartials {
    pub(super) fn get(&self, id: u64) -> Option<Arc<Partial>> {
        self.open
            .lock()
            .get(&id)
            .map(|(partial, _)| Arc::clone(partial))
    }

    pub(super) fn add(&self, id: u64, partial: &Arc<Partial>, node: Weak<Node>) {
        self.open.lock().insert(id, (Arc::clone(partial), node));
    }

    pub(super) fn remove(&self, id: u64) {
        let removed = self.open.lock().remove(&id);
        drop(removed);
    }

    /// Iterates over the partial files that are open now. The iterator references only the current
    /// partial file, so other threads can close the others.
    pub(super) fn all(&self) -> impl Iterator<Item = OpenPartial> + '_ {
        let ids: Vec<u64> = self.open.lock().keys().copied().collect();
        ids.into_iter()
            .filter_map(|id| self.open.lock().get(&id).cloned())
    }

    /// Closes a partial file if only the table and the caller reference it, and all its data is
    /// recorded.
    pub(super) fn drop_unused(&self, partial: Arc<Partial>) {
        if !is_idle(&partial) {
            return;
        }
        confirm(&partial);
        let mut open = self.open.lock();
        // While this thread holds the lock, no other thread can get the partial file from the
        // table. Without the lock, another thread could write to the partial file now, or find no
        // entry in the table and open the partial file a second time.
        if is_idle(&partial) {
            open.remove(&partial.id());
        }
        drop(partial);
    }

    /// Closes the partial file of a node if only the table and the node reference it, and all its
    /// data is recorded. Sets `content` to unknown then. The caller holds the lock of the node's
    /// state. Returns whether the partial file was closed.
    pub(super) fn close(&self, content: &mut Content) -> bool {
        let Content::Partial(partial) = content else {
            return false;
        };
        if !is_idle(partial) {
            return false;
        }
        confirm(partial);
        let mut open = self.open.lock();
        let is_idle = is_idle(partial) && open.contains_key(&partial.id());
        if is_idle {
            open.remove(&partial.id());
            *content = Content::Unknown;
        }
        is_idle
    }
}

/// Whether only the table and one user reference a partial file, and all its data is recorded.
fn is_idle(partial: &Arc<Partial>) -> bool {
    Arc::strong_count(partial) == 2 && partial.is_recorded()
}

/// Confirms a partial file that is about to be closed. The caller does not hold the lock of the
/// table, because this can wait for the host's disk.
fn confirm(partial: &Partial) {
    // A failure loses no data, but a later open may not detect a loss.
    if let Err(error) = partial.confirm() {
        tracing::warn!("cannot confirm the content of a partial file: {error}");
    }
}

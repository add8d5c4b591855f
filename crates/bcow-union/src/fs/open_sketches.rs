//! The table of open sketches.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::nodes::{Content, Node};
use crate::sketch::Sketch;

/// The table of open sketches, by id. It references a sketch also after the kernel forgot the node.
/// Otherwise three things would be lost: unflushed data, data that could not be made durable, and
/// the record of a failed barrier.
#[derive(Debug, Default)]
pub(super) struct OpenSketches {
    /// Held to find, add or remove a sketch, and to close an unused one.
    open: Mutex<HashMap<u64, OpenSketch>>,
}

/// A sketch, and the node whose content it is. The reference to the node is dead if the kernel
/// forgot the node.
pub(super) type OpenSketch = (Arc<Sketch>, Weak<Node>);

impl OpenSketches {
    pub(super) fn get(&self, id: u64) -> Option<Arc<Sketch>> {
        self.open
            .lock()
            .get(&id)
            .map(|(sketch, _)| Arc::clone(sketch))
    }

    pub(super) fn add(&self, id: u64, sketch: &Arc<Sketch>, node: Weak<Node>) {
        self.open.lock().insert(id, (Arc::clone(sketch), node));
    }

    pub(super) fn remove(&self, id: u64) {
        let removed = self.open.lock().remove(&id);
        drop(removed);
    }

    /// Iterates over the sketches that are open now. The iterator references only the current
    /// sketch, so other threads can close the others.
    pub(super) fn all(&self) -> impl Iterator<Item = OpenSketch> + '_ {
        let ids: Vec<u64> = self.open.lock().keys().copied().collect();
        ids.into_iter()
            .filter_map(|id| self.open.lock().get(&id).cloned())
    }

    /// Closes a sketch if only the table and the caller reference it, and all its data is recorded.
    pub(super) fn drop_unused(&self, sketch: Arc<Sketch>) {
        if !is_idle(&sketch) {
            return;
        }
        confirm(&sketch);
        let mut open = self.open.lock();
        // While this thread holds the lock, no other thread can get the sketch from the table.
        // Without the lock, another thread could write to the sketch now, or find no entry in the
        // table and open the sketch a second time.
        if is_idle(&sketch) {
            open.remove(&sketch.id());
        }
        drop(sketch);
    }

    /// Closes the sketch of a node if only the table and the node reference it, and all its data is
    /// recorded. Sets `content` to unknown then. The caller holds the lock of the node's state.
    /// Returns whether the sketch was closed.
    pub(super) fn close(&self, content: &mut Content) -> bool {
        let Content::Sketch(sketch) = content else {
            return false;
        };
        if !is_idle(sketch) {
            return false;
        }
        confirm(sketch);
        let mut open = self.open.lock();
        let is_idle = is_idle(sketch) && open.contains_key(&sketch.id());
        if is_idle {
            open.remove(&sketch.id());
            *content = Content::Unknown;
        }
        is_idle
    }
}

/// Whether only the table and one user reference a sketch, and all its data is recorded.
fn is_idle(sketch: &Arc<Sketch>) -> bool {
    Arc::strong_count(sketch) == 2 && sketch.is_recorded()
}

/// Confirms a sketch that is about to be closed. The caller does not hold the lock of the table,
/// because this can wait for the host's disk.
fn confirm(sketch: &Sketch) {
    // A failure loses no data, but a later open may not detect a loss.
    if let Err(error) = sketch.confirm() {
        tracing::warn!("cannot confirm the content of a sketch: {error}");
    }
}

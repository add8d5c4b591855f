//! Changes of partial files that a process has taken over and cannot restore yet, because it cannot
//! open the file. No program may see the file without them: each open of the file tries again.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use rustix::io::Errno;

use super::UnionFs;
use super::nodes::{Content, Node};
use crate::partial::{Partial, PartialError};

/// The changes, by the number of the partial file.
#[derive(Debug, Default)]
pub(super) struct Unrestored(HashMap<u64, Changes>);

#[derive(Debug)]
struct Changes {
    /// Stays in the ledger as long as it is here; `None` if its place is not known, or if the file
    /// may be plain or removed now.
    node: Option<Arc<Node>>,
    /// The written bytes that no flush has recorded.
    written: Vec<Range<u64>>,
}

impl UnionFs {
    /// Restores the changes of the partial file `id`, or keeps them until the file can be opened.
    pub(super) fn restore_or_keep(
        &self,
        id: u64,
        node: Option<&Arc<Node>>,
        written: Vec<Range<u64>>,
    ) -> Result<(), Errno> {
        let changes = Changes {
            node: node.cloned(),
            written,
        };
        self.unrestored.lock().0.insert(id, changes);
        self.restore_kept(id, node)
    }

    /// Tries again to restore all changes that are kept. Gives the first error.
    pub(super) fn restore_all_kept(&self) -> Result<(), Errno> {
        let kept: Vec<_> = {
            let unrestored = self.unrestored.lock();
            let kept = unrestored.0.iter();
            kept.map(|(&id, changes)| (id, changes.node.clone()))
                .collect()
        };
        let mut result = Ok(());
        for (id, node) in kept {
            result = result.and(self.restore_kept(id, node.as_ref()));
            if let Some(node) = node.and_then(|node| self.keep_unrecorded(node)) {
                self.table.drop_node(node);
            }
        }
        result
    }

    fn restore_kept(&self, id: u64, node: Option<&Arc<Node>>) -> Result<(), Errno> {
        let Some(node) = node else { return Ok(()) };
        if let Content::Partial(partial) = &self.known_content(node)?.content {
            let restored = self.restore_opened(partial);
            restored.map_err(|error| self.content_failed(node, error))?;
        }
        // Nothing is left of it if the file is not partial any more.
        self.forget_unrestored(id);
        Ok(())
    }

    /// Records the changes that are kept in the ledger, for the next process. Each pass removes the
    /// records from before it.
    pub(super) fn record_kept(&self) {
        let Some(ledger) = &self.ledger else { return };
        for (id, changes) in &self.unrestored.lock().0 {
            for bytes in &changes.written {
                ledger.written(*id, bytes.clone());
            }
        }
    }

    /// Restores the changes of a partial file that is open, if there are any. The caller holds the
    /// lock of the state of the file's node, and so the node.
    pub(super) fn restore_opened(&self, partial: &Partial) -> Result<(), PartialError> {
        let mut unrestored = self.unrestored.lock();
        if let Some(changes) = unrestored.0.get(&partial.id()) {
            partial.restore(&changes.written)?;
            unrestored.0.remove(&partial.id());
        }
        Ok(())
    }

    /// The partial file is removed or plain.
    pub(super) fn forget_unrestored(&self, id: u64) {
        let removed = self.unrestored.lock().0.remove(&id);
        drop(removed);
    }
}

//! Names for files without a name.
//!
//! A program can use a file after it has removed the file's last name. The host keeps such a file
//! only as long as a process has it open. If another process may take over the mount, the file gets
//! a name in the work directory before it loses its last name in the tree, and the name is removed
//! when the kernel forgets the node. A file with an entry in the index keeps the entry instead. The
//! next writer that takes nothing over removes both.

use std::fs::File;
use std::sync::atomic::Ordering;

use rustix::fs::{AtFlags, FileType};
use rustix::io::Errno;

use super::lookup::Access;
use super::nodes::Node;
use super::{UnionFs, host};
use crate::node::NodeId;
use crate::upper::Temporary;

/// The start of the names, which no temporary has.
pub(super) const PREFIX: &str = "orphan-";

/// The name of a node's file in the work directory.
pub(super) fn orphan_name(id: NodeId) -> String {
    format!("{PREFIX}{:016x}", id.0)
}

impl UnionFs {
    /// Gives the file of a node that may lose its last name a name in the work directory, if
    /// another process may take over the mount. If the host cannot, for example because it has no
    /// space, that process will not find the file.
    ///
    /// The caller holds the lock of the node's state: a thread that reads the link count must know
    /// whether this name is one of the links.
    pub(super) fn keep_orphan(&self, node: &Node, file: &File) {
        if self.ledger.is_none() || node.has_orphan.load(Ordering::Acquire) {
            return;
        }
        let name = orphan_name(node.id);
        let link = || host::link(file, self.upper.work(), name.as_bytes());
        let linked = match link() {
            // Of an earlier file with this inode number.
            Err(Errno::EXIST) => {
                let _ = rustix::fs::unlinkat(self.upper.work(), &*name, AtFlags::empty());
                link()
            }
            other => other,
        };
        match linked {
            Ok(()) => {
                node.has_orphan.store(true, Ordering::Release);
                self.measure(self.upper.work());
            }
            Err(errno) => tracing::debug!("cannot keep the removed file {name}: {errno}"),
        }
    }

    /// As [`UnionFs::keep_orphan`], for a directory that has lost its name and is a temporary now.
    /// It may contain whiteouts, which are removed with it.
    pub(super) fn keep_directory(&self, node: &Node, removed: Temporary<'_>) {
        if self.ledger.is_none() {
            return;
        }
        let name = orphan_name(node.id);
        match removed.place(self.upper.work(), name.as_bytes()) {
            Ok(()) => node.has_orphan.store(true, Ordering::Release),
            Err(errno) => tracing::debug!("cannot keep the directory {name}: {errno}"),
        }
    }

    /// The kernel forgot a node: removes what [`UnionFs::keep_orphan`] and the removal of its last
    /// name left.
    pub(super) fn drop_orphan(&self, node: &Node) {
        if self.ledger.is_none() {
            return;
        }
        if node.is_removed.load(Ordering::Acquire) {
            let is_partial = node.read_state().is_partial();
            let partial = is_partial.then(|| self.open_upper(node, Access::Path));
            let removed = partial
                .transpose()
                .and_then(|file| self.remove_remains(node, file.as_deref()));
            if let Err(errno) = removed {
                self.host_failed(b"", "the map of a removed file stays", errno);
            }
        }
        if !node.has_orphan.load(Ordering::Acquire) {
            return;
        }
        let _state = node.write_state();
        if node.has_orphan.swap(false, Ordering::AcqRel) {
            let name = orphan_name(node.id);
            // A name that cannot be removed is removed when the directory is emptied.
            if node.is_directory() {
                drop(self.upper.temporary_at(name, FileType::Directory))
            } else {
                let _ = rustix::fs::unlinkat(self.upper.work(), &*name, AtFlags::empty());
            }
        }
    }

    /// The links of a node's file on the host, without the name in the work directory.
    pub(super) fn links_in_tree(node: &Node, links: u64) -> u64 {
        links.saturating_sub(u64::from(node.has_orphan.load(Ordering::Acquire)))
    }
}

//! Files that the kernel reads, and may write, instead of sending requests.
//!
//! The adapter registers such a file with the kernel, as the *backing* of a node, and the kernel
//! gives it a number. A node can have two: a file with the content of the image, for the
//! descriptors of unchanged files ([`super::sharing`]), and its file in the upper, if that has all
//! its content. This module has the numbers, also for a process that takes the mount over.
//!
//! The kernel requires that all descriptors of one of its inodes are of the same kind: they have
//! the same backing, or send requests. So a file of the upper becomes a backing at an open while no
//! other descriptor is open. From then on all descriptors have it, until the kernel forgets the
//! node.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use bcow_erofs::reader::FileType;
use parking_lot::Mutex;
use rustix::io::Errno;

use super::UnionFs;
use super::nodes::{Content, Node};
use super::plain::plain_file;
use super::types::Attributes;
use crate::ledger::{BackingEntry, BackingKind, BackingRecord};
use crate::node::NodeId;
use crate::options::SyncPolicy;

/// Set-user-ID and set-group-ID.
const SET_ID: u16 = 0o6000;

/// The number of descriptors of a node that this process took over: unknown, so more than the
/// kernel closes.
pub(super) const UNKNOWN_OPENS: u64 = 1 << 32;

/// Most backings with content of the image that no descriptor uses. The kernel keeps an open file
/// for each, which it cannot release when memory is short.
const MOST_UNUSED: usize = 1 << 15;

/// The backings of nodes that the kernel holds.
///
/// A lock is held while the kernel makes a file a backing, which waits for nothing, and acquired
/// before those of the table and of the ledger.
#[derive(Debug, Default)]
pub(super) struct Backings {
    of_image: Mutex<NodeBackings>,
    of_upper: Mutex<NodeBackings>,
    /// Those of nodes that the kernel has forgotten, which the adapter does not know.
    left_over: Mutex<Vec<u32>>,
    /// Why the kernel takes no file of the upper, once it has refused one.
    refused: OnceLock<String>,
    /// Whether the kernel uses files of the upper at all.
    is_used: AtomicBool,
}

#[derive(Debug, Default)]
struct NodeBackings {
    all: HashMap<NodeId, Backing>,
    /// Those that no descriptor uses, by the order in which the last one was closed.
    unused: BTreeMap<u64, NodeId>,
    /// The place of the next one in this order.
    next: u64,
}

#[derive(Debug)]
struct Backing {
    /// The number that the kernel gave.
    number: u32,
    /// The descriptors that use it; only counted for the content of the image.
    opens: u64,
    /// The place in [`NodeBackings::unused`].
    unused: Option<u64>,
    /// Dropped before the kernel may give the number to another file.
    _entry: Option<BackingEntry>,
}

impl Backings {
    fn of(&self, kind: BackingKind) -> &Mutex<NodeBackings> {
        match kind {
            BackingKind::Image => &self.of_image,
            BackingKind::Upper => &self.of_upper,
        }
    }
}

impl NodeBackings {
    fn number(&self, id: NodeId) -> Option<u32> {
        self.all.get(&id).map(|backing| backing.number)
    }

    /// Counts a descriptor.
    fn open(&mut self, id: NodeId) -> Option<u32> {
        let backing = self.all.get_mut(&id)?;
        backing.opens += 1;
        if let Some(place) = backing.unused.take() {
            self.unused.remove(&place);
        }
        Some(backing.number)
    }

    /// Counts a descriptor less. Gives the number of a backing that is not kept any more.
    fn close(&mut self, id: NodeId) -> Option<u32> {
        let backing = self.all.get_mut(&id)?;
        backing.opens = backing.opens.saturating_sub(1);
        if backing.opens > 0 || backing.unused.is_some() {
            return None;
        }
        backing.unused = Some(self.next);
        self.unused.insert(self.next, id);
        self.next += 1;
        if self.unused.len() <= MOST_UNUSED {
            return None;
        }
        let oldest = *self.unused.first_key_value()?.1;
        self.remove(oldest)
    }

    fn remove(&mut self, id: NodeId) -> Option<u32> {
        let backing = self.all.remove(&id)?;
        if let Some(place) = backing.unused {
            self.unused.remove(&place);
        }
        Some(backing.number)
    }
}

impl UnionFs {
    /// Opens the content of the image for a program. Gives the number of the backing, if there is
    /// one; [`UnionFs::image_closed`] tells the end.
    pub fn open_image(&self, id: NodeId) -> Option<u32> {
        self.backings.of_image.lock().open(id)
    }

    /// As [`UnionFs::open_image`]; `make` makes a missing backing, without waiting.
    pub fn open_image_with(
        &self,
        id: NodeId,
        make: impl FnOnce() -> io::Result<u32>,
    ) -> io::Result<u32> {
        let mut backings = self.backings.of_image.lock();
        if let Some(number) = backings.open(id) {
            return Ok(number);
        }
        let number = make()?;
        let backing = self.recorded(id, BackingKind::Image, number, 1);
        backings.all.insert(id, backing);
        Ok(number)
    }

    /// A descriptor of the content of the image was closed. Gives the number of a backing that the
    /// caller closes: that of a file that was not used for longest, if there are many.
    pub fn image_closed(&self, id: NodeId) -> Option<u32> {
        self.backings.of_image.lock().close(id)
    }

    /// Opens a file for a program. Gives the number of its backing if the kernel shall use the file
    /// of the upper; `make` makes a missing one. Otherwise the descriptor sends requests, and
    /// [`UnionFs::closed`] tells its end.
    pub fn open_file(
        &self,
        id: NodeId,
        make: impl FnOnce(&File) -> io::Result<u32>,
    ) -> Result<Option<u32>, Errno> {
        if let Some(number) = self.upper_backing(id) {
            return Ok(Some(number));
        }
        let node = self.node(id)?;
        // Before the lock: this can wait for the host.
        let whole = self.whole_file(&node);
        let mut backings = self.backings.of_upper.lock();
        if let Some(number) = backings.number(id) {
            return Ok(Some(number));
        }
        if let Some(file) = whole
            && node.open_by_requests.load(Ordering::Acquire) == 0
        {
            match make(&file) {
                Ok(number) => {
                    let backing = self.recorded(id, BackingKind::Upper, number, 0);
                    backings.all.insert(id, backing);
                    return Ok(Some(number));
                }
                Err(error) => {
                    tracing::debug!("the kernel does not use the file of node {}: {error}", id.0);
                    // Of the file system or of the process, so it will refuse the next one too.
                    let is_general = [Errno::LOOP, Errno::PERM, Errno::BADF, Errno::OPNOTSUPP]
                        .iter()
                        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()));
                    if is_general {
                        let reason = format!("the kernel refuses the files of the upper: {error}");
                        let _ = self.backings.refused.set(reason);
                    }
                }
            }
        }
        node.open_by_requests.fetch_add(1, Ordering::AcqRel);
        Ok(None)
    }

    /// A descriptor that sent requests was closed.
    pub fn closed(&self, id: NodeId) {
        if let Some(node) = self.table.get(id) {
            let less = |count: u64| count.checked_sub(1);
            let _ = node
                .open_by_requests
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, less);
        }
    }

    /// The number of the node's file in the upper, if all descriptors have it as their backing.
    pub fn upper_backing(&self, id: NodeId) -> Option<u32> {
        self.backings.of_upper.lock().number(id)
    }

    /// Why the kernel uses no files of the upper itself; `None` if it may.
    pub fn why_not_passed(&self) -> Option<&str> {
        if self.account.is_limited() {
            // Only this process counts what is written.
            return Some("the upper has a limit");
        }
        self.backings.refused.get().map(String::as_str)
    }

    /// The kernel will use files of the upper itself that have all their content, so the background
    /// thread completes partial files that are used often.
    pub fn pass_whole_files(&self) {
        self.backings.is_used.store(true, Ordering::Relaxed);
    }

    /// Whether the kernel uses such files.
    pub(super) fn passes_whole_files(&self) -> bool {
        self.backings.is_used.load(Ordering::Relaxed) && self.why_not_passed().is_none()
    }

    /// The file of the upper that has all content of a node; `None` if there is no such file, or if
    /// the kernel may not use it itself.
    fn whole_file(&self, node: &Node) -> Option<Arc<File>> {
        if node.kind != FileType::Regular || self.why_not_passed().is_some() {
            return None;
        }
        // An fsync that makes the name durable may fail yet.
        let _no_fsync = node.name_sync.try_lock()?;
        {
            let state = node.read_state();
            let upper = state.upper.as_ref()?;
            // The metacopy mark of a file in the batch is cleared later, which must not hide a
            // change of its times by a program. The host must not make content durable before it is
            // durable that the content is not in the image.
            let is_marked = node.lower.is_some() && node.name_is_new.load(Ordering::Acquire);
            let is_volatile = self.options.sync == SyncPolicy::Volatile;
            if upper.needs_image || upper.in_batch || is_marked && !is_volatile {
                return None;
            }
        }
        // The kernel does not say which writer must lose the bits.
        let is_set_id = |found: Attributes| found.permissions & SET_ID != 0;
        if node.may_be_privileged.load(Ordering::Acquire)
            && self.attributes_of(node).is_ok_and(is_set_id)
        {
            return None;
        }
        // A read or write meets an error again.
        let state = self.known_content(node).ok()?;
        match &state.content {
            Content::Plain => plain_file(&state).ok(),
            _ => None,
        }
    }

    /// Records that a program can map the file and write to the map, which sends no request.
    pub fn open_for_mapping(&self, id: NodeId) {
        if let Some(node) = self.table.get(id) {
            node.may_be_mapped.store(true, Ordering::Release);
        }
    }

    /// Whether a program may write to the file by a map that sends no request.
    pub fn may_be_mapped(&self, id: NodeId) -> bool {
        let node = self.table.get(id);
        node.is_some_and(|node| node.may_be_mapped.load(Ordering::Acquire))
    }

    fn recorded(&self, id: NodeId, kind: BackingKind, number: u32, opens: u64) -> Backing {
        let node = id.0;
        let record = BackingRecord { node, kind, number };
        let ledger = self.ledger.as_ref();
        Backing {
            number,
            opens,
            unused: None,
            _entry: ledger.map(|ledger| BackingEntry::new(ledger, record)),
        }
    }

    /// After the kernel has released references to a node: the numbers of the node's backings, if
    /// the kernel holds the node no more. The caller closes the backings.
    pub fn forgotten_backings(&self, id: NodeId) -> Vec<u32> {
        let forgotten = [BackingKind::Image, BackingKind::Upper].into_iter();
        let numbers = forgotten.filter_map(|kind| {
            let mut backings = self.backings.of(kind).lock();
            // A lookup is counted before the open that follows it. So an open finds the backing
            // here only if the node is held.
            if self.table.is_held(id) {
                return None;
            }
            backings.remove(id)
        });
        numbers.collect()
    }

    /// As [`UnionFs::forget`], for references that the kernel does not get.
    pub(super) fn take_back(&self, id: NodeId, count: u64) {
        self.forget_and(id, count, || {
            let forgotten = self.forgotten_backings(id);
            self.backings.left_over.lock().extend(forgotten);
        });
    }

    /// The backings of nodes that the kernel has forgotten during a listing, or before this process
    /// took the mount over. The caller closes them.
    pub fn left_over_backings(&self) -> Vec<u32> {
        std::mem::take(&mut *self.backings.left_over.lock())
    }

    /// Takes over the backings of the process before.
    pub(super) fn restore_backings(&self, inherited: Vec<BackingRecord>) {
        for BackingRecord { node, kind, number } in inherited {
            let id = NodeId(node);
            if self.table.is_held(id) {
                let backing = self.recorded(id, kind, number, UNKNOWN_OPENS);
                self.backings.of(kind).lock().all.insert(id, backing);
                if kind == BackingKind::Upper {
                    self.open_for_mapping(id);
                }
            } else {
                self.backings.left_over.lock().push(number);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_unused_backings_the_oldest_are_closed() {
        let mut backings = NodeBackings::default();
        let most = MOST_UNUSED as u64;
        let opened = |backings: &mut NodeBackings, id: u64| {
            let backing = Backing {
                number: id as u32,
                opens: 1,
                unused: None,
                _entry: None,
            };
            backings.all.insert(NodeId(id), backing);
        };
        for id in 0..most + 2 {
            opened(&mut backings, id);
        }
        // Two descriptors.
        assert_eq!(backings.open(NodeId(0)), Some(0));
        for id in 0..=most {
            assert_eq!(backings.close(NodeId(id)), None);
        }
        // Used again, so 2 is the oldest then.
        assert_eq!(backings.open(NodeId(1)), Some(1));
        assert_eq!(backings.close(NodeId(1)), None);
        assert_eq!(backings.close(NodeId(most + 1)), Some(2));
        assert_eq!(backings.open(NodeId(2)), None);
        assert_eq!(backings.close(NodeId(0)), Some(3));
        assert_eq!(backings.remove(NodeId(4)), Some(4));
        assert_eq!(backings.unused.len(), MOST_UNUSED - 1);
        assert_eq!(backings.all.len(), MOST_UNUSED - 1);
    }
}

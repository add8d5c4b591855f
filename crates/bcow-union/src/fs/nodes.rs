//! The nodes: one [`Node`] for each inode that the kernel holds.
//!
//! Locks of a node, in the order in which they are acquired:
//!
//! 0. `capabilities` (regular files): held to set or remove the attribute, and during a write that
//!    preserves it. A thread holds it for one node at a time, and acquires it before any other lock
//!    of that node. (Exception: a change of owner, because the kernel has removed the attribute by
//!    then.)
//! 1. `names` (directories): held while names of the directory change in the upper. A rename holds
//!    two, and acquires that with the lower node id first. The lock of a directory that is removed
//!    is only tried, without waiting.
//!    `kernel_time` (regular files): held to set the time of modification, and to set it again
//!    after the kernel wrote back a page. No thread holds both.
//! 2. `state`: the source of the node's attributes and content. Held shared during I/O, and
//!    exclusively to copy up, to open, and to promote. A thread holds it for one node at a time,
//!    and may also hold that of one directory above, shared, to read its descriptor.
//! 3. `times` (directories): held while the host's directory has a temporary time, and to read or
//!    set its times.
//! 4. `place`, and the shards of the table: held for a few instructions; no other lock is acquired
//!    inside, but those of the node's record in the ledger.
//!
//! An fsync that makes a new name durable holds `name_sync` of that node, and acquires the `state`
//! locks of other nodes inside.
//!
//! The data paths of two files share nothing here but the table, in which each request looks up its
//! node once.

use std::collections::HashMap;
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use bcow_erofs::reader::{FileType, Nid};
use bcow_erofs::tree::Timestamp;
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use rustix::io::Errno;

use super::upper_entry::UpperObject;
use crate::account::Account;
use crate::host::HiddenChange;
use crate::ledger::{Flags, Ledger, LedgerEntry, NodeRecord};
use crate::node::NodeId;
use crate::partial::Partial;
use crate::upper::{Metacopy, Redirect, TimesMark};

/// Location of a node on the host.
#[derive(Debug, Clone)]
pub(super) enum HostPlace {
    /// The root of the tree.
    Root,
    /// Under this name; one of its names if it has several.
    At { parent: Arc<Node>, name: Box<[u8]> },
    /// The node lost its known name. Its file in the upper stays open.
    Nowhere,
}

impl HostPlace {
    pub(super) fn at(parent: &Arc<Node>, name: &[u8]) -> Self {
        HostPlace::At {
            parent: Arc::clone(parent),
            name: name.into(),
        }
    }
}

/// A file, directory, link or device that the kernel holds.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) id: NodeId,
    pub(super) kind: FileType,
    /// The inode of the image that the node is, or was before copy-up. For a directory: the
    /// directory of the image that it is merged with.
    pub(super) lower: Option<Nid>,
    place: RwLock<HostPlace>,
    /// Tried without waiting, outside the lock order, for a directory that is removed: the kernel
    /// permits no change in it meanwhile.
    pub(super) names: Mutex<()>,
    state: RwLock<NodeState>,
    pub(super) times: Mutex<()>,
    /// The modification time that the kernel has sent last, or has received for a new file. Only a
    /// kernel with `writeback` keeps these times itself; see [`UnionFs::with_kernel_time`].
    ///
    /// [`UnionFs::with_kernel_time`]: super::UnionFs::with_kernel_time
    pub(super) kernel_time: Mutex<Option<Timestamp>>,
    /// Changes of this directory's names in the upper.
    pub(super) names_changed: Pending,
    /// Held by the thread that makes a new name of this node durable. Other threads that sync the
    /// node wait for it.
    pub(super) name_sync: Mutex<()>,
    /// Whether an fsync of this node must also make its name and marks durable. Set when the node
    /// is copied up, created or renamed, and when a mark is cleared.
    pub(super) name_is_new: AtomicBool,
    /// Whether the file may have set-id bits or capabilities, which a write removes. `false` is
    /// certain.
    pub(super) may_be_privileged: AtomicBool,
    /// Whether the file may have capabilities. [`Capabilities::None`] is certain.
    pub(super) capabilities: Mutex<Capabilities>,
    /// Whether this directory may have a default ACL. `false` is certain.
    pub(super) may_have_default_acl: AtomicBool,
    /// Whether the node lost its last name.
    pub(super) is_removed: AtomicBool,
    /// The write-back error of a file that was copied up whole. The host reports it only once. The
    /// file is never marked as durable after that.
    pub(super) sync_failed: OnceLock<Errno>,
    /// Whether the node is in the queue of the background thread.
    pub(super) is_queued: AtomicBool,
    /// Whether a program has opened the file for writing, in a mount that shares files.
    pub(super) was_opened_for_writing: AtomicBool,
    /// The number of open descriptors that send requests, in a mount that shares files.
    pub(super) open_by_requests: AtomicU64,
    /// Whether a program may write to the file by a map that sends no request.
    pub(super) may_be_mapped: AtomicBool,
    /// Whether the file is large enough in the image to be shared, once that was looked up.
    pub(super) is_large: OnceLock<bool>,
    /// Cached target of this symbolic link, so that the host's access time of the link does not
    /// change with each read.
    pub(super) target: OnceLock<Box<[u8]>>,
    /// The record in the ledger, from the time when the kernel or another recorded node first holds
    /// this one.
    entry: OnceLock<LedgerEntry>,
    /// Whether the work directory has a name of the file: see [`super::orphans`].
    pub(super) has_orphan: AtomicBool,
    /// Set once the node lost its last name: the account to which the drop of this node gives back
    /// the space of its inode.
    release_on_drop: OnceLock<Arc<Account>>,
}

/// Knowledge about a file's capabilities.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Capabilities {
    /// The file may have some.
    #[default]
    Unknown,
    /// The file is new or a read found none, and none were set since.
    None,
}

/// The source of a node's attributes and content.
#[derive(Debug, Default)]
pub(super) struct NodeState {
    /// The node's object in the upper; `None` while the node exists only in the image.
    pub(super) upper: Option<Upper>,
    pub(super) content: Content,
}

/// A node's object in the upper.
#[derive(Debug)]
pub(super) struct Upper {
    /// The open object: with `O_PATH`; or a regular file for reading and writing; or a directory
    /// for reading. `None` after the descriptor was closed to save descriptors; the node's place is
    /// used to open it again.
    pub(super) file: Option<Arc<File>>,
    /// Whether `file` is open for more than `O_PATH`: a regular file for reading and writing, or a
    /// directory for listing.
    pub(super) is_fully_open: bool,
    /// Inode number on the host.
    pub(super) host_inode: u64,
    /// Path in the image of the inode that it came from, without the leading slash, if the node is
    /// at another path now.
    pub(super) redirect: Option<Box<[u8]>>,
    /// Whether a mark names its inode of the image. Objects that overlayfs copied up have no origin
    /// mark that this union can read.
    pub(super) has_origin: bool,
    /// Whether it has an entry in the index, because its inode has several names in the image.
    pub(super) indexed: bool,
    /// Whether its marks, when last read, said that some of its bytes are in the image.
    pub(super) needs_image: bool,
    /// Whether its marks, when last read, said that it is a partial file.
    pub(super) is_partial: bool,
    /// Whether its content waits in the batch of files that become durable together. Until then it
    /// is marked as a copy of metadata.
    pub(super) in_batch: bool,
    /// The mark with the times that the host's file does not have, if it has this mark. Held to set
    /// the times.
    pub(super) times_mark: Mutex<Option<TimesMark>>,
    /// The last change of the host's file that was no change of the file. It is hidden until the
    /// kernel forgets the node.
    pub(super) hidden_change: Mutex<Option<HiddenChange>>,
}

/// Location of a regular file's bytes.
#[derive(Debug, Default)]
pub(super) enum Content {
    /// Not examined yet.
    #[default]
    Unknown,
    /// In the image.
    Lower,
    /// In the upper's file.
    Plain,
    /// In both: a partial file.
    Partial(Arc<Partial>),
}

impl Upper {
    /// An object that this union just made, complete.
    pub(super) fn made(file: File, host_inode: u64, is_fully_open: bool) -> Self {
        Upper {
            file: Some(Arc::new(file)),
            is_fully_open,
            host_inode,
            redirect: None,
            has_origin: true,
            indexed: false,
            needs_image: false,
            is_partial: false,
            in_batch: false,
            times_mark: Mutex::default(),
            hidden_change: Mutex::default(),
        }
    }

    pub(super) fn new(found: UpperObject) -> Self {
        Upper {
            redirect: match found.marks.redirect {
                Some(Redirect::Path(path)) => Some(path.into_boxed_slice()),
                _ => None,
            },
            has_origin: found.marks.origin.is_some(),
            // Only objects in the index have a count of names that differs from the host's link
            // count.
            indexed: found.marks.nlink.is_some(),
            needs_image: found.marks.metacopy != Metacopy::None || found.marks.partial.is_some(),
            is_partial: found.marks.partial.is_some(),
            times_mark: Mutex::new(found.marks.times),
            ..Upper::made(found.file, found.stat.st_ino, false)
        }
    }
}

impl Drop for Node {
    /// Gives back the space that a node without a name takes. Then drops the parents that only this
    /// node held, one after the other: recursion could overflow the stack on a deep path.
    fn drop(&mut self) {
        self.release();
        let take = |place: &mut RwLock<HostPlace>| {
            let place = place.get_mut();
            std::mem::replace(place, HostPlace::Nowhere)
        };
        let mut place = take(&mut self.place);
        while let HostPlace::At { parent, .. } = place {
            match Arc::into_inner(parent) {
                Some(mut parent) => place = take(&mut parent.place),
                None => return,
            }
        }
    }
}

impl NodeState {
    /// Whether the node has an entry in the index.
    pub(super) fn is_indexed(&self) -> bool {
        self.upper.as_ref().is_some_and(|upper| upper.indexed)
    }

    /// Whether the node is a partial file, as far as that is known.
    pub(super) fn is_partial(&self) -> bool {
        matches!(self.content, Content::Partial(_))
            || self.upper.as_ref().is_some_and(|upper| upper.is_partial)
    }

    /// Whether the content waits in the batch.
    pub(super) fn is_in_batch(&self) -> bool {
        self.upper.as_ref().is_some_and(|upper| upper.in_batch)
    }

    pub(super) fn of(upper: Option<Upper>) -> Self {
        NodeState {
            upper,
            content: Content::Unknown,
        }
    }
}

impl Node {
    pub(super) fn new(id: NodeId, kind: FileType, lower: Option<Nid>, place: HostPlace) -> Self {
        Node {
            id,
            kind,
            lower,
            place: RwLock::new(place),
            names: Mutex::new(()),
            state: RwLock::default(),
            times: Mutex::default(),
            kernel_time: Mutex::default(),
            names_changed: Pending::default(),
            name_sync: Mutex::default(),
            name_is_new: AtomicBool::new(false),
            may_be_privileged: AtomicBool::new(true),
            capabilities: Mutex::default(),
            may_have_default_acl: AtomicBool::new(true),
            is_removed: AtomicBool::new(false),
            sync_failed: OnceLock::new(),
            is_queued: AtomicBool::new(false),
            was_opened_for_writing: AtomicBool::new(false),
            open_by_requests: AtomicU64::new(0),
            may_be_mapped: AtomicBool::new(false),
            is_large: OnceLock::new(),
            target: OnceLock::new(),
            entry: OnceLock::new(),
            has_orphan: AtomicBool::new(false),
            release_on_drop: OnceLock::new(),
        }
    }

    /// The node's record in the ledger.
    pub(super) fn entry(&self) -> Option<&LedgerEntry> {
        self.entry.get()
    }

    /// Records the node, and first the directories above it, from the top.
    pub(super) fn enter(&self, ledger: &Arc<Ledger>) {
        if self.entry.get().is_some() {
            return;
        }
        let mut above = Vec::new();
        let mut place = self.place();
        while let HostPlace::At { parent, .. } = place {
            if parent.entry.get().is_some() {
                break;
            }
            place = parent.place();
            above.push(parent);
        }
        while let Some(parent) = above.pop() {
            parent.enter_itself(ledger);
        }
        self.enter_itself(ledger);
    }

    fn enter_itself(&self, ledger: &Arc<Ledger>) {
        if self.id == NodeId::ROOT {
            return;
        }
        let entry = self.entry.get_or_init(|| {
            let upper = self.state.try_read().and_then(|state| {
                let upper = state.upper.as_ref()?;
                Some((upper.host_inode, upper.in_batch))
            });
            let (host_inode, in_batch) = upper.unwrap_or_default();
            let flag = |flag, is_set| if is_set { flag } else { Flags::NONE };
            let is_removed = self.is_removed.load(Ordering::Acquire);
            let is_opened = self.was_opened_for_writing.load(Ordering::Acquire);
            let flags = flag(Flags::IN_BATCH, in_batch)
                | flag(Flags::REMOVED, is_removed)
                | flag(Flags::SYNC_FAILED, self.sync_failed.get().is_some())
                | flag(Flags::OPENED_FOR_WRITING, is_opened);
            let (parent, name) = recorded(&self.place.read());
            let record = NodeRecord {
                id: self.id.0,
                lower: self.lower.map(|nid| nid.0),
                references: 0,
                parent,
                host_inode,
                kind: (self.kind.mode_bits() >> 12) as u8,
                flags,
                name,
                is_place: false,
            };
            LedgerEntry::new(ledger, record)
        });
        // The node may have moved before the record could be found.
        let place = self.place.read();
        let (parent, name) = recorded(&place);
        entry.set_place(parent, &name);
    }

    /// The node lost its last name: when its file in the upper is closed, the host frees the inode,
    /// which `account` counts.
    pub(super) fn release_on_drop(&self, account: &Arc<Account>) {
        let _ = self.release_on_drop.set(Arc::clone(account));
    }

    /// Gives back to the account what the host frees when this node is dropped. It may be called
    /// more than once.
    pub(super) fn release(&self) {
        let Some(account) = self.release_on_drop.get() else {
            return;
        };
        let state = self.read_state();
        if let Some(upper) = &state.upper
            && let Some(file) = &upper.file
            // The inode may still have a name, if a damaged count of names said otherwise.
            && rustix::fs::fstat(&**file).is_ok_and(|stat| stat.st_nlink == 0)
        {
            // Before the file is closed: afterwards the host may reuse the inode number.
            account.forget(upper.host_inode);
        }
    }

    pub(super) fn place(&self) -> HostPlace {
        self.place.read().clone()
    }

    pub(super) fn set_place(&self, place: HostPlace) {
        if let (Some(entry), HostPlace::At { parent, .. }) = (self.entry.get(), &place) {
            parent.enter(entry.ledger());
        }
        let old = {
            let mut here = self.place.write();
            let old = std::mem::replace(&mut *here, place);
            if let Some(entry) = self.entry.get() {
                let (parent, name) = recorded(&here);
                entry.set_place(parent, &name);
            }
            old
        };
        // Dropped outside the lock: the parent may hold the last reference to its own parent, and
        // so on.
        drop(old);
    }

    /// Sets or clears flags of the node's record in the ledger.
    pub(super) fn set_flags(&self, flags: Flags, are_set: bool) {
        if let Some(entry) = self.entry.get() {
            entry.set_flags(flags, are_set);
        }
    }

    /// Whether the node's known place is `name` in `parent`.
    pub(super) fn is_at(&self, parent: &Node, name: &[u8]) -> bool {
        matches!(
            &*self.place.read(),
            HostPlace::At { parent: p, name: n } if p.id == parent.id && **n == *name
        )
    }

    pub(super) fn read_state(&self) -> RwLockReadGuard<'_, NodeState> {
        self.state.read()
    }

    pub(super) fn write_state(&self) -> RwLockWriteGuard<'_, NodeState> {
        self.state.write()
    }

    /// As [`Node::write_state`], but does not wait.
    pub(super) fn try_write_state(&self) -> Option<RwLockWriteGuard<'_, NodeState>> {
        self.state.try_write()
    }

    pub(super) fn is_directory(&self) -> bool {
        self.kind == FileType::Directory
    }

    /// Whether the node is a directory that can have entries of the image. The host's directory
    /// changes when such entries are copied up, although no program changes the directory.
    pub(super) fn is_merged(&self) -> bool {
        self.is_directory() && self.lower.is_some()
    }

    /// A mark was cleared, and fdatasync does not make that durable: the next sync must be an
    /// fsync, as for a new name.
    pub(super) fn marks_changed(&self) {
        self.name_is_new.store(true, Ordering::Release);
    }
}

/// A place in the form of the ledger.
fn recorded(place: &HostPlace) -> (u64, Box<[u8]>) {
    match place {
        HostPlace::Root | HostPlace::Nowhere => (0, Box::default()),
        HostPlace::At { parent, name } => (parent.id.0, name.clone()),
    }
}

/// Counts changes and the durable ones among them. A change is durable only when a sync that began
/// after the change has ended. Until then each thread that needs the change durable does a sync of
/// its own.
#[derive(Debug, Default)]
pub(super) struct Pending {
    made: AtomicU64,
    durable: AtomicU64,
}

impl Pending {
    pub(super) fn change(&self) {
        self.made.fetch_add(1, Ordering::AcqRel);
    }

    /// Called before a sync; `None` if there is nothing to sync. After the sync, the value is
    /// passed to [`Pending::synced`].
    pub(super) fn unsynced(&self) -> Option<u64> {
        let made = self.made.load(Ordering::Acquire);
        (self.durable.load(Ordering::Acquire) < made).then_some(made)
    }

    /// Marks the changes up to `upto` as durable.
    pub(super) fn synced(&self, upto: u64) {
        self.durable.fetch_max(upto, Ordering::AcqRel);
    }
}

/// Number of shards of the table, so that lookups seldom wait for each other.
const SHARDS: usize = 64;

/// All nodes, by id.
#[derive(Debug)]
pub(super) struct NodeTable {
    shards: Vec<Mutex<HashMap<NodeId, Slot>>>,
    /// Has a record of each node that the kernel holds.
    ledger: Option<Arc<Ledger>>,
}

#[derive(Debug)]
struct Slot {
    node: Weak<Node>,
    /// Strong reference, held while the kernel has references.
    held: Option<Arc<Node>>,
    references: u64,
}

impl Slot {
    fn of(node: &Arc<Node>) -> Self {
        Slot {
            node: Arc::downgrade(node),
            held: None,
            references: 0,
        }
    }
}

impl NodeTable {
    pub(super) fn new(ledger: Option<Arc<Ledger>>) -> Self {
        NodeTable {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            ledger,
        }
    }

    /// The node with this id, if the kernel or another node holds it.
    pub(super) fn get(&self, id: NodeId) -> Option<Arc<Node>> {
        self.shard(id).get(&id).and_then(|slot| slot.node.upgrade())
    }

    /// A weak reference to the node.
    pub(super) fn weak(&self, id: NodeId) -> Weak<Node> {
        self.shard(id)
            .get(&id)
            .map_or_else(Weak::new, |slot| Weak::clone(&slot.node))
    }

    /// The node with this id. `make` makes a missing one. The node lives as long as a strong
    /// reference to it exists.
    pub(super) fn get_or_insert(&self, id: NodeId, make: impl FnOnce() -> Node) -> Arc<Node> {
        let mut shard = self.shard(id);
        if let Some(node) = shard.get(&id).and_then(|slot| slot.node.upgrade()) {
            return node;
        }
        let node = Arc::new(make());
        shard.insert(id, Slot::of(&node));
        node
    }

    /// Counts `count` references of the kernel.
    pub(super) fn hold(&self, node: &Arc<Node>, count: u64) {
        if let Some(ledger) = &self.ledger {
            node.enter(ledger);
        }
        let mut shard = self.shard(node.id);
        let slot = shard.entry(node.id).or_insert_with(|| Slot::of(node));
        slot.references = slot.references.saturating_add(count);
        if let Some(entry) = node.entry() {
            entry.set_references(slot.references);
        }
        if slot.held.is_none() {
            slot.held = Some(Arc::clone(node));
        }
    }

    /// Whether the kernel has references to the node with this id.
    pub(super) fn is_held(&self, id: NodeId) -> bool {
        let shard = self.shard(id);
        shard.get(&id).is_some_and(|slot| slot.references > 0)
    }

    /// Releases `count` references of the kernel; gives the node if they were the last.
    pub(super) fn release(&self, id: NodeId, count: u64) -> Option<Arc<Node>> {
        let mut shard = self.shard(id);
        let slot = shard.get_mut(&id)?;
        slot.references = slot.references.saturating_sub(count);
        if let Some(entry) = slot.held.as_ref().and_then(|node| node.entry()) {
            entry.set_references(slot.references);
        }
        match slot.references {
            0 => slot.held.take(),
            _ => None,
        }
    }

    /// Drops a node that the kernel released, and then each parent that only the dropped node held.
    pub(super) fn drop_node(&self, node: Arc<Node>) {
        let mut next = Some(node);
        while let Some(node) = next.take() {
            let id = node.id;
            let mut shard = self.shard(id);
            if shard.get(&id).is_none_or(|slot| slot.references > 0) {
                return;
            }
            // With the shard locked, no thread can upgrade a weak reference and so get a second
            // node of the same file.
            match Arc::try_unwrap(node) {
                Ok(node) => {
                    shard.remove(&id);
                    drop(shard);
                    if let HostPlace::At { parent, .. } = node.place() {
                        drop(node);
                        next = Some(parent);
                    }
                }
                Err(node) => {
                    // Another thread may have released it meanwhile: this drop may be the last,
                    // also for its parents.
                    drop(shard);
                    drop(node);
                }
            }
        }
    }

    /// Calls `each` for every node, one shard at a time, outside the shard's lock.
    pub(super) fn for_each(&self, each: &mut dyn FnMut(&Arc<Node>)) {
        for shard in &self.shards {
            let nodes: Vec<Arc<Node>> = shard
                .lock()
                .values()
                .filter_map(|slot| slot.node.upgrade())
                .collect();
            nodes.iter().for_each(&mut *each);
        }
    }

    /// Removes the ids of dropped nodes.
    pub(super) fn purge(&self) {
        for shard in &self.shards {
            shard.lock().retain(|_, slot| slot.node.strong_count() > 0);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.lock().len()).sum()
    }

    fn shard(&self, id: NodeId) -> MutexGuard<'_, HashMap<NodeId, Slot>> {
        // Nids are multiples of a few slots; the upper bits of the product depend on all bits of
        // the id.
        let index = (id.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize % SHARDS;
        self.shards[index].lock()
    }
}

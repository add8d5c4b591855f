//! What the kernel knows of: one [`Node`] for each inode that it holds.
//!
//! Locks of a node, and the order in which they are taken:
//!
//! 0. `capabilities` (regular files): held while the attribute is set or removed, and during a write that leaves it. Of one node at a
//!    time, and nothing else of it is locked before. (Not when a file is given away: the kernel has removed it by then.)
//! 1. `names` (directories): held while names of the directory change in the upper. Of two (a rename), the one with the lower
//!    node id first; that of a directory which is removed, without waiting.
//! 2. `state`: where the node's attributes and content come from. Held shared during I/O, exclusively to copy up, to open
//!    and to promote. Of one node at a time, and shared of one directory above it for a look at its descriptor.
//! 3. `times` (directories): held while the directory of the host has a time that it shall not keep, and to look at its times
//!    or set them.
//! 4. `place`, and the shards of the table: held for a few instructions, and nothing else is locked inside.
//!
//! An fsync that makes a new name durable holds `name_sync` of that node, and takes the states of others inside.
//!
//! Nothing here is shared between two files' data paths but the table, which I/O asks once per request for a reference.

use std::collections::HashMap;
use std::fs::File;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{
    Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
    TryLockError, Weak,
};

use bcow_erofs::reader::{FileType, Nid};
use rustix::io::Errno;

use super::lookup::Found;
use crate::account::{Account, StoredBlocks};
use crate::node::NodeId;
use crate::sketch::Sketch;
use crate::upper::{Metacopy, Redirect, SketchKind};

/// Where a node is found on the host.
#[derive(Debug, Clone)]
pub(super) enum Place {
    /// The root of the tree.
    Root,
    /// Under this name; one of its names, if it has several.
    At { parent: Arc<Node>, name: Box<[u8]> },
    /// It lost the name that was known. What it is in the upper is held open.
    Nowhere,
}

/// A file, directory, link or device that the kernel holds.
#[derive(Debug)]
pub(super) struct Node {
    pub(super) id: NodeId,
    pub(super) kind: FileType,
    /// What it is, or was before it was copied up, in the image. Of a directory, the one it is merged with.
    pub(super) lower: Option<Nid>,
    place: RwLock<Place>,
    names: Mutex<()>,
    state: RwLock<State>,
    times: Mutex<()>,
    /// Changes of this directory's names in the upper.
    pub(super) names_changed: Pending,
    name_sync: Mutex<()>,
    /// Whether an fsync of this node must see that its name and marks are durable too: it was copied up or created since.
    pub(super) name_is_new: AtomicBool,
    /// Whether it may have set-id bits or capabilities, which a write takes away. False is certain.
    pub(super) may_be_privileged: AtomicBool,
    /// Whether it may have capabilities. None is certain.
    capabilities: Mutex<Capabilities>,
    /// Whether this directory may have a default ACL. False is certain.
    pub(super) may_have_default_acl: AtomicBool,
    /// Whether it lost its last name.
    pub(super) is_removed: AtomicBool,
    /// Why what was copied whole is never said to be durable: the host could not write it, which it says only once.
    pub(super) sync_failed: OnceLock<Errno>,
    /// Whether it waits in the background's queue.
    pub(super) is_waiting: AtomicBool,
    /// What it stores, if it is a plain file; looked at first when something is to be written.
    pub(super) stored: OnceLock<StoredBlocks>,
    /// Where this symbolic link points, once that is known: the host would note each look at its own.
    pub(super) target: OnceLock<Box<[u8]>>,
    /// The account to which it gives back, when this is dropped, what it takes beside its data: it lost its last name.
    departs_from: OnceLock<Arc<Account>>,
}

/// What is known of a file's capabilities.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Capabilities {
    /// There may be some.
    #[default]
    Unknown,
    /// There were none when they were looked for, and none were set since.
    None,
}

/// Where attributes and content come from.
#[derive(Debug, Default)]
pub(super) struct State {
    /// What it is in the upper; `None` as long as it is only in the image.
    pub(super) upper: Option<Upper>,
    pub(super) content: Content,
}

/// What a node is in the upper.
#[derive(Debug)]
pub(super) struct Upper {
    /// It, open: with `O_PATH`, or of regular files for reading and writing, or of directories for reading.
    /// `None` if the descriptor was given back; it is opened again by its place.
    pub(super) file: Option<Arc<File>>,
    /// Whether bytes can be read and written through `file`.
    pub(super) for_data: bool,
    /// Its inode number on the host.
    pub(super) host_inode: u64,
    /// Path of what it was in the image, without the leading slash, if it is elsewhere now.
    pub(super) redirect: Option<Box<[u8]>>,
    /// Whether a mark says which inode of the image it came from. What overlayfs copied up has none that we read.
    pub(super) has_origin: bool,
    /// Whether it has an entry in the index, because it has several names in the image.
    pub(super) indexed: bool,
    /// Whether its marks say that bytes are in the image, as far as this was looked at.
    pub(super) is_partial: bool,
    /// Whether its marks say that it is a sketch, as far as this was looked at.
    pub(super) is_sketch: bool,
    /// Size that the mark of a packed sketch said when it was looked at.
    pub(super) packed_size: Option<u64>,
    /// Whether its content shall be made durable together with that of others, and is marked as a copy of metadata until then.
    pub(super) in_batch: bool,
}

/// Where a regular file's bytes are.
#[derive(Debug, Default)]
pub(super) enum Content {
    /// Not looked at yet.
    #[default]
    Unknown,
    /// In the image.
    Lower,
    /// In the upper's file.
    Plain,
    /// In both.
    Sketch(Arc<dyn Sketch>),
}

impl Upper {
    pub(super) fn new(found: Found) -> Self {
        Upper {
            host_inode: found.stat.st_ino,
            file: Some(Arc::new(found.file)),
            for_data: false,
            redirect: match found.marks.redirect {
                Some(Redirect::Path(path)) => Some(path.into_boxed_slice()),
                _ => None,
            },
            has_origin: found.marks.origin.is_some(),
            // Only what is in the index says how many names there are beyond the host's.
            indexed: found.marks.nlink.is_some(),
            is_partial: found.marks.metacopy != Metacopy::None || found.marks.sketch.is_some(),
            packed_size: found
                .marks
                .sketch
                .filter(|mark| mark.kind == SketchKind::Packed)
                .map(|mark| mark.size),
            is_sketch: found.marks.sketch.is_some(),
            in_batch: false,
        }
    }
}

impl Drop for Node {
    /// Lets go of the directories above that only this node held, one after the other: a path can be longer than a stack is deep.
    /// Before that, of what it takes if it lost its name.
    fn drop(&mut self) {
        self.depart();
        let take = |place: &mut RwLock<Place>| {
            let place = place.get_mut().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(place, Place::Nowhere)
        };
        let mut place = take(&mut self.place);
        while let Place::At { parent, .. } = place {
            match Arc::into_inner(parent) {
                Some(mut parent) => place = take(&mut parent.place),
                None => return,
            }
        }
    }
}

impl State {
    pub(super) fn of(upper: Option<Upper>) -> Self {
        State {
            upper,
            content: Content::Unknown,
        }
    }
}

impl Node {
    pub(super) fn new(id: NodeId, kind: FileType, lower: Option<Nid>, place: Place) -> Self {
        Node {
            id,
            kind,
            lower,
            place: RwLock::new(place),
            names: Mutex::new(()),
            state: RwLock::default(),
            times: Mutex::default(),
            names_changed: Pending::default(),
            name_sync: Mutex::default(),
            name_is_new: AtomicBool::new(false),
            may_be_privileged: AtomicBool::new(true),
            capabilities: Mutex::default(),
            may_have_default_acl: AtomicBool::new(true),
            is_removed: AtomicBool::new(false),
            sync_failed: OnceLock::new(),
            is_waiting: AtomicBool::new(false),
            stored: OnceLock::new(),
            target: OnceLock::new(),
            departs_from: OnceLock::new(),
        }
    }

    /// It lost its last name: once it is closed, the host frees what it is in the upper, which this account counts.
    pub(super) fn departs_from(&self, account: &Arc<Account>) {
        let _ = self.departs_from.set(Arc::clone(account));
    }

    /// Gives back to the account what the host frees when this is dropped.
    fn depart(&mut self) {
        let Some(account) = self.departs_from.get() else {
            return;
        };
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(upper) = &state.upper
            && let Some(file) = &upper.file
            // A damaged count of names must not make it lose what is still there.
            && rustix::fs::fstat(&**file).is_ok_and(|stat| stat.st_nlink == 0)
        {
            // Before it is closed: its number may be another's then.
            account.inode_gone(upper.host_inode);
        }
    }

    pub(super) fn place(&self) -> Place {
        self.place
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    pub(super) fn set_place(&self, place: Place) {
        let old = std::mem::replace(
            &mut *self.place.write().unwrap_or_else(PoisonError::into_inner),
            place,
        );
        // Outside the lock: a parent may be the last to hold its own parent, and so on up.
        drop(old);
    }

    /// Whether `name` of `parent` is the name it is known by.
    pub(super) fn is_at(&self, parent: &Node, name: &[u8]) -> bool {
        matches!(
            &*self.place.read().unwrap_or_else(PoisonError::into_inner),
            Place::At { parent: p, name: n } if p.id == parent.id && **n == *name
        )
    }

    pub(super) fn read_state(&self) -> RwLockReadGuard<'_, State> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn write_state(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Node::write_state`], without waiting.
    pub(super) fn try_write_state(&self) -> Option<RwLockWriteGuard<'_, State>> {
        match self.state.try_write() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    pub(super) fn is_directory(&self) -> bool {
        self.kind == FileType::Directory
    }

    pub(super) fn lock_names(&self) -> MutexGuard<'_, ()> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock_times(&self) -> MutexGuard<'_, ()> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn lock_capabilities(&self) -> MutexGuard<'_, Capabilities> {
        self.capabilities
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// As [`Node::lock_names`] out of order: without waiting. The kernel lets nobody change a directory that it removes.
    pub(super) fn try_lock_names(&self) -> Option<MutexGuard<'_, ()>> {
        match self.names.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// A mark went whose going an fdatasync does not make durable: the next one has to be an fsync, as for a new name.
    pub(super) fn marks_changed(&self) {
        self.name_is_new.store(true, Ordering::Release);
    }

    pub(super) fn names_have_changed(&self) {
        self.names_changed.change();
    }

    /// Held by who makes a new name of this node durable, so that others who sync it wait for that.
    pub(super) fn lock_name_sync(&self) -> MutexGuard<'_, ()> {
        self.name_sync
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Changes, and which of them are durable. They count as such only once a sync that began after them has ended: until then whoever
/// needs them durable syncs too.
#[derive(Debug, Default)]
pub(super) struct Pending {
    made: AtomicU64,
    durable: AtomicU64,
}

impl Pending {
    fn change(&self) {
        self.made.fetch_add(1, Ordering::AcqRel);
    }

    /// To be called before a sync, and what it gives with [`Pending::synced`] after it; `None` if there is nothing to sync.
    pub(super) fn unsynced(&self) -> Option<u64> {
        let made = self.made.load(Ordering::Acquire);
        (self.durable.load(Ordering::Acquire) < made).then_some(made)
    }

    /// The changes up to there are durable.
    pub(super) fn synced(&self, upto: u64) {
        self.durable.fetch_max(upto, Ordering::AcqRel);
    }
}

/// How many parts the table has, so that lookups seldom wait for each other.
const SHARDS: usize = 64;

/// All nodes, by id.
#[derive(Debug)]
pub(super) struct NodeTable {
    shards: Vec<Mutex<HashMap<NodeId, Slot>>>,
}

#[derive(Debug)]
struct Slot {
    node: Weak<Node>,
    /// Held while the kernel has references.
    held: Option<Arc<Node>>,
    references: u64,
}

impl NodeTable {
    pub(super) fn new() -> Self {
        NodeTable {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
        }
    }

    /// The node, if the kernel or another node holds it.
    pub(super) fn get(&self, id: NodeId) -> Option<Arc<Node>> {
        self.shard(id).get(&id).and_then(|slot| slot.node.upgrade())
    }

    /// A reference to the node that does not keep it.
    pub(super) fn weak(&self, id: NodeId) -> Weak<Node> {
        self.shard(id)
            .get(&id)
            .map_or_else(Weak::new, |slot| Weak::clone(&slot.node))
    }

    /// The node; made by `make` if there is none. It lives as long as somebody holds it.
    pub(super) fn get_or_insert(&self, id: NodeId, make: impl FnOnce() -> Node) -> Arc<Node> {
        let mut shard = self.shard(id);
        if let Some(node) = shard.get(&id).and_then(|slot| slot.node.upgrade()) {
            return node;
        }
        let node = Arc::new(make());
        shard.insert(
            id,
            Slot {
                node: Arc::downgrade(&node),
                held: None,
                references: 0,
            },
        );
        node
    }

    /// Counts a reference of the kernel's.
    pub(super) fn hold(&self, node: &Arc<Node>) {
        let mut shard = self.shard(node.id);
        let slot = shard.entry(node.id).or_insert_with(|| Slot {
            node: Arc::downgrade(node),
            held: None,
            references: 0,
        });
        slot.references = slot.references.saturating_add(1);
        if slot.held.is_none() {
            slot.held = Some(Arc::clone(node));
        }
    }

    /// Takes away references of the kernel's; gives the node if those were the last.
    pub(super) fn release(&self, id: NodeId, count: u64) -> Option<Arc<Node>> {
        let mut shard = self.shard(id);
        let slot = shard.get_mut(&id)?;
        slot.references = slot.references.saturating_sub(count);
        match slot.references {
            0 => slot.held.take(),
            _ => None,
        }
    }

    /// Drops a node that the kernel let go of, and what only it held: its parent, and so on.
    pub(super) fn let_go(&self, node: Arc<Node>) {
        let mut next = Some(node);
        while let Some(node) = next.take() {
            let id = node.id;
            let mut shard = self.shard(id);
            if shard.get(&id).is_none_or(|slot| slot.references > 0) {
                return;
            }
            // From here on nobody gets hold of it by a weak reference either, beside a second node of the same file.
            match Arc::try_unwrap(node) {
                Ok(node) => {
                    shard.remove(&id);
                    drop(shard);
                    if let Place::At { parent, .. } = node.place() {
                        drop(node);
                        next = Some(parent);
                    }
                }
                Err(node) => {
                    // It may go now, and with it those above.
                    drop(shard);
                    drop(node);
                }
            }
        }
    }

    /// Calls `each` for every node, a shard at a time, outside its lock.
    pub(super) fn for_each(&self, each: &mut dyn FnMut(&Arc<Node>)) {
        for shard in &self.shards {
            let nodes: Vec<Arc<Node>> = shard
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .values()
                .filter_map(|slot| slot.node.upgrade())
                .collect();
            nodes.iter().for_each(&mut *each);
        }
    }

    /// Forgets the ids of nodes that nobody holds.
    pub(super) fn purge(&self) {
        for shard in &self.shards {
            shard
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .retain(|_, slot| slot.node.strong_count() > 0);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.shards
            .iter()
            .map(|shard| shard.lock().unwrap_or_else(PoisonError::into_inner).len())
            .sum()
    }

    fn shard(&self, id: NodeId) -> MutexGuard<'_, HashMap<NodeId, Slot>> {
        // Nids are multiples of a few slots; the product's upper bits depend on all of them.
        let index = (id.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize % SHARDS;
        self.shards[index]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

//! Takes over the nodes that the kernel holds from a process that has ended.
//!
//! The ledger has the places that each node had or was about to get; the upper says which one is
//! right. A file without a place is in the work directory (see [`super::orphans`]), in the index,
//! or in the image only. All this happens before the first request.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bcow_erofs::reader::{FileType, Nid};
use rustix::fs::AtFlags;
use rustix::io::Errno;

use super::backings::UNKNOWN_OPENS;
use super::links::Begun;
use super::lookup::{UPPER_ONLY, index_name};
use super::nodes::{HostPlace, Node, NodeState, Upper};
use super::orphans::{self, orphan_name};
use super::plain::set_plain;
use super::upper_entry::{UpperEntry, UpperObject};
use super::{UnionFs, host};
use crate::errors::ErrorKind;
use crate::ledger::{BegunChange, Flags, Inherited, NodeRecord};
use crate::node::NodeId;
use crate::upper::list;

/// The records of a node.
#[derive(Debug, Default)]
struct Saved {
    node: Option<NodeRecord>,
    /// The directories and names that the node can have. Those of a change in progress come last.
    places: Vec<(NodeId, Box<[u8]>)>,
}

/// The nodes while they are being restored.
struct Restoring<'a> {
    union: &'a UnionFs,
    saved: HashMap<NodeId, Saved>,
    nodes: HashMap<NodeId, Arc<Node>>,
    /// Names in the work directory of files without a place.
    orphans: HashSet<Vec<u8>>,
    /// Names in the index.
    indexed: HashSet<Vec<u8>>,
    /// Nodes of partial files, by the number of the partial file.
    partials: HashMap<u64, Arc<Node>>,
    /// Nodes whose place is damaged or unreadable. The kernel gets an error for them: what they
    /// show is not known.
    unknown: HashSet<NodeId>,
}

/// Where a node was found.
struct RestoredNode {
    place: HostPlace,
    object: Option<UpperObject>,
    is_orphan: bool,
}

impl UnionFs {
    /// Restores the nodes and the unrecorded changes of partial files. The file system serves no
    /// request yet.
    pub(super) fn restore(self: &mut Arc<Self>, inherited: Inherited) -> Result<(), Errno> {
        self.restore_begun(inherited.begun)?;
        let orphans = list(self.upper.work())?.into_iter();
        let orphans = orphans.filter(|name| name.starts_with(orphans::PREFIX.as_bytes()));
        let mut restoring = Restoring {
            union: self,
            saved: HashMap::new(),
            nodes: HashMap::from([(NodeId::ROOT, Arc::clone(&self.root))]),
            orphans: orphans.collect(),
            indexed: list(self.upper.index())?.into_iter().collect(),
            partials: HashMap::new(),
            unknown: HashSet::new(),
        };
        restoring.group(inherited.nodes);
        let ids: Vec<NodeId> = restoring.saved.keys().copied().collect();
        for id in ids {
            restoring.restore_with_parents(id)?;
        }
        for (partial, written) in inherited.written {
            restoring.restore_partial(partial, written);
        }
        self.record_kept();
        let Restoring {
            nodes,
            orphans,
            partials,
            ..
        } = restoring;
        drop(partials);
        for name in orphans {
            // Of nodes that the kernel has forgotten.
            let removed = rustix::fs::unlinkat(self.upper.work(), &*name, AtFlags::empty());
            if let (Err(Errno::ISDIR | Errno::PERM), Ok(name)) = (removed, String::from_utf8(name))
            {
                drop(
                    self.upper
                        .temporary_at(name, rustix::fs::FileType::Directory),
                );
            }
        }
        for (id, node) in nodes {
            if id == NodeId::ROOT {
                continue;
            }
            // The process before may have ended while it dropped the node.
            if !self.table.is_held(id) {
                self.drop_forgotten(node);
            } else if let Some(node) = self.keep_unrecorded(node) {
                self.table.drop_node(node);
            }
        }
        self.restore_backings(inherited.backings);
        // The process restores its other unions next, and each may open as many as a single one.
        self.close_idle_descriptors(false);
        Ok(())
    }

    /// Before the first lookup of a node, which may restore the number of its names.
    fn restore_begun(self: &mut Arc<Self>, begun: BTreeMap<u64, BegunChange>) -> Result<(), Errno> {
        // No thread runs yet that could have a reference.
        let union = Arc::get_mut(self).ok_or(Errno::BUSY)?;
        if let Some(ledger) = &union.ledger {
            // The next process may get the same requests. The latest numbers come last, and stay.
            let begun = begun.into_iter().map(|(number, change)| {
                let place = ledger.begin_change(number, change.node);
                ledger.set_restored(place, change.node, change.is_restored);
                (number, Begun::at(place, change))
            });
            union.begun = begun.collect();
        }
        Ok(())
    }
}

impl Restoring<'_> {
    fn group(&mut self, records: Vec<NodeRecord>) {
        for record in records {
            let saved = self.saved.entry(NodeId(record.id)).or_default();
            if record.parent != 0 {
                let at = if record.is_place { saved.places.len() } else { 0 };
                let parent = NodeId(record.parent);
                let place = (parent, record.name.clone());
                saved.places.insert(at, place);
            }
            if !record.is_place {
                match &mut saved.node {
                    Some(node) => node.references = node.references.max(record.references),
                    none => *none = Some(record),
                }
            }
        }
        // A place without a node is of a node that was dropped meanwhile.
        self.saved.retain(|_, saved| saved.node.is_some());
    }

    /// Restores a node, and first the directories that it can be in. A loop, because a path can be
    /// deep.
    fn restore_with_parents(&mut self, id: NodeId) -> Result<(), Errno> {
        let mut path = vec![id];
        let mut begun = HashSet::new();
        while let Some(&id) = path.last() {
            if self.nodes.contains_key(&id) {
                path.pop();
                continue;
            }
            if begun.insert(id)
                && let Some(saved) = self.saved.get(&id)
            {
                let parents = saved.places.iter().map(|(parent, _)| *parent);
                let missing = parents.filter(|parent| !self.nodes.contains_key(parent));
                // A directory that is on the path already is not its own parent: the place is
                // outdated.
                let missing: Vec<NodeId> = missing.filter(|id| !begun.contains(id)).collect();
                if !missing.is_empty() {
                    path.extend(missing);
                    continue;
                }
            }
            path.pop();
            if let Some(saved) = self.saved.remove(&id) {
                match self.restore_node(id, saved) {
                    Err(errno) if is_shortage(errno) => return Err(errno),
                    Err(_) => drop(self.unknown.insert(id)),
                    Ok(()) => {}
                }
            }
        }
        Ok(())
    }

    /// Fails if the place of the node cannot be read.
    fn restore_node(&mut self, id: NodeId, saved: Saved) -> Result<(), Errno> {
        let Some(record) = saved.node else {
            return Ok(());
        };
        let union = self.union;
        let kind = host::kind_of(u32::from(record.kind) << 12);
        let lower = record.lower.map(Nid);
        let RestoredNode {
            place,
            object,
            is_orphan,
        } = self.find(id, &record, kind, lower, &saved.places)?;
        if object.is_none() && lower.is_none() {
            // The kernel has forgotten the node, or the host had no space to keep it. The host can
            // give the number of its inode to another file.
            return Ok(());
        }
        let partial = object.as_ref().and_then(|object| object.marks.partial);
        let links = object.as_ref().map(|object| object.stat.st_nlink);
        let has_place = matches!(place, HostPlace::At { .. });
        let node = Node::new(id, kind, lower, place);
        node.has_orphan.store(is_orphan, Ordering::Release);
        if let Some(object) = object {
            let mut state = NodeState::of(Some(Upper::new(object)));
            let needs_image = state.upper.as_ref().is_some_and(|upper| upper.needs_image);
            if record.flags.contains(Flags::IN_BATCH) && needs_image && partial.is_none() {
                set_plain(&mut state);
                if let Some(upper) = &mut state.upper {
                    upper.in_batch = true;
                }
            }
            *node.write_state() = state;
            node.name_is_new.store(true, Ordering::Release);
            union.descriptors.fetch_add(1, Ordering::Relaxed);
        }
        if kind == FileType::Directory {
            node.names_changed.change();
        }
        if record.flags.contains(Flags::SYNC_FAILED) {
            let _ = node.sync_failed.set(Errno::IO);
        }
        // Only a count that begins with no descriptor can be right.
        node.open_by_requests
            .store(UNKNOWN_OPENS, Ordering::Release);
        let was_opened = record.flags.contains(Flags::OPENED_FOR_WRITING);
        node.was_opened_for_writing
            .store(was_opened, Ordering::Release);
        let node = union.table.get_or_insert(id, || node);
        let is_removed =
            record.flags.contains(Flags::REMOVED) || !has_place && self.has_no_name(&node, links);
        if is_removed {
            union.set_removed(&node);
            if node.read_state().upper.is_some() {
                union.release_on_drop(&node);
            }
        }
        match record.references {
            0 => {
                if let Some(ledger) = &union.ledger {
                    node.enter(ledger);
                }
            }
            references => union.table.hold(&node, references),
        }
        // The open may not have come yet.
        if was_opened && !is_removed {
            union.await_open(Arc::clone(&node));
        }
        if node.read_state().is_in_batch() {
            union.batch.lock().push(Arc::clone(&node));
        }
        if let Some(mark) = partial {
            self.partials.insert(mark.id, Arc::clone(&node));
        }
        self.nodes.insert(id, node);
        union.limit_descriptors();
        Ok(())
    }

    /// Finds the object of a node in the upper.
    fn find(
        &mut self,
        id: NodeId,
        record: &NodeRecord,
        kind: FileType,
        lower: Option<Nid>,
        places: &[(NodeId, Box<[u8]>)],
    ) -> Result<RestoredNode, Errno> {
        let is_orphan = self.orphans.remove(orphan_name(id).as_bytes());
        let mut failed = None;
        for (parent, name) in places {
            if self.unknown.contains(parent) {
                failed = Some(Errno::IO);
            }
            let Some(parent) = self.nodes.get(parent).cloned() else {
                continue;
            };
            let object = match self.at(&parent, name, id, record, lower) {
                Ok(None) => continue,
                Ok(Some(object)) => object,
                Err(errno) if is_shortage(errno) => return Err(errno),
                Err(errno) => {
                    failed = Some(errno);
                    continue;
                }
            };
            let object = match object {
                None if kind != FileType::Directory => self.in_index(lower)?,
                other => other,
            };
            return Ok(RestoredNode {
                place: HostPlace::at(&parent, name),
                object,
                is_orphan,
            });
        }
        if let (Some(errno), false) = (failed, is_orphan) {
            return Err(errno);
        }
        let orphan = if is_orphan {
            self.in_directory(self.union.upper.work(), orphan_name(id).as_bytes())?
        } else {
            None
        };
        let object = match orphan {
            None => self.in_index(lower)?,
            orphan => orphan,
        };
        Ok(RestoredNode {
            place: HostPlace::Nowhere,
            object,
            is_orphan,
        })
    }

    /// Whether the node is at `name` in `parent`: its object in the upper, or `Some(None)` if only
    /// the image has it.
    fn at(
        &self,
        parent: &Arc<Node>,
        name: &[u8],
        id: NodeId,
        record: &NodeRecord,
        lower: Option<Nid>,
    ) -> Result<Option<Option<UpperObject>>, Errno> {
        let union = self.union;
        if !parent.is_directory() {
            return Ok(None);
        }
        let Some(directory) = union.upper_directory(parent)? else {
            // Every change of a name brings its directory into the upper.
            return Ok(lower.is_some().then_some(None));
        };
        match union.lookup_upper(&directory, name)? {
            UpperEntry::Whiteout => Ok(None),
            UpperEntry::Absent => {
                let below = union.lookup_lower(parent, name)?;
                Ok((lower.is_some() && below == lower).then_some(None))
            }
            UpperEntry::Object(found) => {
                let inode = found.stat.st_ino;
                let by_marks = union.lower_of(parent, name, &found)?;
                let by_marks = by_marks.map(|nid| union.image.node(nid));
                let is_it = by_marks == Some(id)
                    || id == NodeId(UPPER_ONLY | inode)
                    || record.host_inode == inode;
                Ok(is_it.then_some(Some(*found)))
            }
        }
    }

    /// The file of an inode of the image that the index has.
    fn in_index(&self, lower: Option<Nid>) -> Result<Option<UpperObject>, Errno> {
        let Some(nid) = lower.filter(|nid| self.indexed.contains(&index_name(*nid))) else {
            return Ok(None);
        };
        let found = self.in_directory(self.union.upper.index(), &index_name(nid))?;
        match found {
            Some(found) if self.union.origin(&found)? == Some(nid) => Ok(Some(found)),
            _ => Ok(None),
        }
    }

    fn in_directory(
        &self,
        directory: BorrowedFd<'_>,
        name: &[u8],
    ) -> Result<Option<UpperObject>, Errno> {
        match self.union.lookup_upper(directory, name)? {
            UpperEntry::Object(found) => Ok(Some(*found)),
            UpperEntry::Absent | UpperEntry::Whiteout => Ok(None),
        }
    }

    /// Whether a node without a known place has no name at all.
    fn has_no_name(&self, node: &Node, links: Option<u64>) -> bool {
        let Some(links) = links else {
            // Only the image has it. An inode with several names there would have been copied up.
            return node.is_directory()
                || self.union.names_below(node).is_ok_and(|names| names <= 1);
        };
        let (file, indexed) = {
            let state = node.read_state();
            match &state.upper {
                Some(upper) => (upper.file.clone(), upper.indexed),
                None => return true,
            }
        };
        match (file, indexed) {
            (Some(file), true) => self
                .union
                .count_names(node.lower, &file)
                .is_ok_and(|names| names <= 0),
            _ => UnionFs::links_in_tree(node, links) == 0,
        }
    }

    /// Restores the written bytes of a partial file that no flush has recorded.
    fn restore_partial(&self, partial: u64, written: Vec<Range<u64>>) {
        let node = self.partials.get(&partial);
        if node.is_none() && self.unknown.is_empty() {
            // A flush has recorded them before the kernel forgot the node, or the file is plain or
            // removed now.
            return;
        }
        let restored = self.union.restore_or_keep(partial, node, written);
        if let (Some(node), Err(_)) = (node, restored) {
            let path = super::path_of(node).unwrap_or_default();
            let problem = "it has changes that are not synchronized, and cannot be opened";
            self.union.note_problem(ErrorKind::UpperIo, &path, problem);
        }
    }
}

/// Whether an error is of this process or of the machine, and says nothing of the upper.
fn is_shortage(errno: Errno) -> bool {
    matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOMEM)
}

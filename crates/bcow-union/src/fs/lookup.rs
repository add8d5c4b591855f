//! Lookup: from names to nodes.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bcow_erofs::reader::{FileType, Nid};
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::nodes::{HostPlace, Node, NodeState, Upper};
use super::types::Attributes;
use super::upper_entry::{UpperEntry, UpperObject};
use super::{UnionFs, host};
use crate::node::NodeId;
use crate::upper::beneath::is_regular;
use crate::upper::{META, Metacopy, NlinkDelta, Redirect, entry_name, is_whiteout};

/// Longest name of a directory entry, in bytes.
pub(super) const NAME_MAX: usize = 255;

/// Bit that is set in the ids of nodes that exist only in the upper; the other bits are the host's
/// inode number.
pub(super) const UPPER_ONLY: u64 = 1 << 60;

impl UnionFs {
    /// The node of `name` in `parent`; `None` if there is no such name.
    pub(super) fn find(&self, parent: &Arc<Node>, name: &[u8]) -> Result<Option<Arc<Node>>, Errno> {
        if !parent.is_directory() {
            return Err(Errno::NOTDIR);
        }
        if name.len() > NAME_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        match (name, parent.place()) {
            (b".", _) | (b"..", HostPlace::Root | HostPlace::Nowhere) => {
                return Ok(Some(Arc::clone(parent)));
            }
            (b"..", HostPlace::At { parent, .. }) => return Ok(Some(parent)),
            _ if self.is_reserved(parent, name) => return Ok(None),
            _ => {}
        }
        if let Some(directory) = self.upper_directory(parent)? {
            match self.lookup_upper(&directory, name)? {
                UpperEntry::Absent => {}
                UpperEntry::Whiteout => return Ok(None),
                UpperEntry::Object(found) => {
                    return self.node_of_upper(parent, name, *found).map(Some);
                }
            }
        }
        match self.lookup_lower(parent, name)? {
            Some(nid) => self.node_of_lower(parent, name, nid).map(Some),
            None => Ok(None),
        }
    }

    /// As [`UnionFs::find`], but `ENOENT` if there is no such name.
    pub(super) fn find_existing(
        &self,
        parent: &Arc<Node>,
        name: &[u8],
    ) -> Result<Arc<Node>, Errno> {
        self.find(parent, name)?.ok_or(Errno::NOENT)
    }

    /// Whether this is the name of the upper's own directory ([`META`]) beside the tree.
    pub(super) fn is_reserved(&self, parent: &Node, name: &[u8]) -> bool {
        parent.id == NodeId::ROOT && name == META.as_bytes()
    }

    /// Looks up `name` in a directory of the upper.
    pub(super) fn lookup_upper(
        &self,
        directory: impl AsFd,
        name: &[u8],
    ) -> Result<UpperEntry, Errno> {
        let Some(file) = host::open_path(directory, name)? else {
            return Ok(UpperEntry::Absent);
        };
        let stat = rustix::fs::fstat(&file)?;
        if is_whiteout(&stat) {
            return Ok(UpperEntry::Whiteout);
        }
        let marks = self.read_marks(&file)?;
        let kind = match &marks.owner {
            Some(owner) if self.uses_override() => owner.kind_over(&stat).map_err(|damage| {
                self.damaged(name, &damage.to_string());
                Errno::IO
            })?,
            _ => host::kind_of(stat.st_mode),
        };
        Ok(UpperEntry::Object(Box::new(UpperObject {
            file,
            stat,
            kind,
            marks,
        })))
    }

    /// Looks up `name` in the directory of the image that `parent` shows.
    pub(super) fn lookup_lower(&self, parent: &Node, name: &[u8]) -> Result<Option<Nid>, Errno> {
        match parent.lower {
            Some(directory) => self.image.lookup(directory, name),
            None => Ok(None),
        }
    }

    /// The node of an object that a lookup found in the upper.
    pub(super) fn node_of_upper(
        &self,
        parent: &Arc<Node>,
        name: &[u8],
        found: UpperObject,
    ) -> Result<Arc<Node>, Errno> {
        let lower = self.lower_of(parent, name, &found)?;
        let kind = found.kind;
        let host_inode = found.stat.st_ino;
        let upper_only = NodeId(UPPER_ONLY | host_inode);
        let mut id = lower.map_or(upper_only, |nid| self.image.node(nid));
        let place = || HostPlace::at(parent, name);
        // A mark relative to the image's link count outlives its change only after a crash or a
        // failure.
        let has_stale_nlink_mark = matches!(found.marks.nlink, Some(NlinkDelta::Lower(_)));
        let mut upper = Some(Upper::new(found));
        loop {
            let node = self.table.get_or_insert(id, || {
                let node = Node::new(id, kind, lower, place());
                *node.write_state() = NodeState::of(upper.take());
                self.descriptors.fetch_add(1, Ordering::Relaxed);
                node
            });
            // The host reused the inode number for another file. Only another program can have
            // caused that.
            if node.kind != kind {
                return Err(Errno::STALE);
            }
            let Some(ours) = &mut upper else {
                // The node was not known before, so no change of its links is in progress.
                if has_stale_nlink_mark {
                    self.restore_nlink_mark(&node)?;
                }
                return Ok(node);
            };
            // The node is known already: perhaps only from the image, or without a descriptor.
            let mut state = node.write_state();
            match &mut state.upper {
                Some(known) if known.host_inode != host_inode => {
                    if id == upper_only {
                        return Err(Errno::STALE);
                    }
                    drop(state);
                    // A tool that copied the upper can have duplicated the origin mark. The second
                    // object is another file.
                    id = upper_only;
                    continue;
                }
                Some(known) if known.file.is_none() => {
                    known.file = ours.file.take();
                    known.is_fully_open = false;
                    self.descriptors.fetch_add(1, Ordering::Relaxed);
                }
                Some(_) => {}
                None => {
                    *state = NodeState::of(upper.take());
                    self.descriptors.fetch_add(1, Ordering::Relaxed);
                    self.restore_nlink_mark_locked(&node, &mut state)?;
                }
            }
            drop(state);
            if !node.is_at(parent, name) {
                node.set_place(place());
            }
            return Ok(node);
        }
    }

    /// The node of an inode of the image. If the index has an entry for the inode, the node uses
    /// that file.
    fn node_of_lower(&self, parent: &Arc<Node>, name: &[u8], nid: Nid) -> Result<Arc<Node>, Errno> {
        let inode = self.image.inode(nid)?;
        let id = self.image.node(nid);
        let place = || HostPlace::at(parent, name);
        let node = self
            .table
            .get_or_insert(id, || Node::new(id, inode.kind, Some(nid), place()));
        if inode.kind != FileType::Directory && inode.nlink > 1 {
            self.use_index_copy(&node, nid)?;
        }
        if matches!(node.place(), HostPlace::Nowhere) {
            node.set_place(place());
        }
        Ok(node)
    }

    /// For an inode with several hard links in the image: uses its copy in the index, if the inode
    /// was copied up under another name.
    fn use_index_copy(&self, node: &Node, nid: Nid) -> Result<(), Errno> {
        if node.read_state().upper.is_some()
            || host::stat_at(self.upper.index(), &index_name(nid))?.is_none()
        {
            return Ok(());
        }
        // A copy-up in progress holds this lock. A failed copy-up removes its index entry, so the
        // entry is looked up under the lock.
        let mut state = node.write_state();
        if state.upper.is_some() {
            return Ok(());
        }
        let found = match self.lookup_upper(self.upper.index(), &index_name(nid))? {
            UpperEntry::Absent => return Ok(()),
            UpperEntry::Object(found) if self.origin(&found)? == Some(nid) => found,
            // An upper can come from an untrusted source. A file that is not a copy of this inode
            // is neither shown nor opened.
            UpperEntry::Object(_) | UpperEntry::Whiteout => {
                let path = [META.as_bytes(), b"/index/", &index_name(nid)].concat();
                self.damaged(
                    &path,
                    "index entry is not a copy of the inode that its name gives",
                );
                return Err(Errno::IO);
            }
        };
        *state = NodeState::of(Some(Upper::new(*found)));
        self.descriptors.fetch_add(1, Ordering::Relaxed);
        self.restore_nlink_mark_locked(node, &mut state)
    }

    /// The inode of the image that an object of the upper is merged with or came from.
    pub(super) fn lower_of(
        &self,
        parent: &Node,
        name: &[u8],
        found: &UpperObject,
    ) -> Result<Option<Nid>, Errno> {
        let is_directory = found.kind == FileType::Directory;
        if is_directory && found.marks.opaque {
            return Ok(None);
        }
        if let Some(nid) = self.origin(found)? {
            return Ok(Some(nid));
        }
        if !is_directory && found.marks.metacopy == Metacopy::None {
            return Ok(None);
        }
        // overlayfs or a user made the directory: it is merged by name. Or overlayfs made this copy
        // of metadata: its name or its redirect mark leads to the data.
        let lower = self.lower_by_redirect_or_name(parent, name, found)?;
        if lower.is_none() && !is_directory {
            self.damaged(name, "metacopy file without a lower file in the image");
            return Err(Errno::IO);
        }
        Ok(lower)
    }

    /// The inode of the image to which the object's redirect or name leads, if that has the same
    /// type.
    fn lower_by_redirect_or_name(
        &self,
        parent: &Node,
        name: &[u8],
        found: &UpperObject,
    ) -> Result<Option<Nid>, Errno> {
        let below = match &found.marks.redirect {
            Some(Redirect::Path(path)) => self.image.at_path(path)?,
            Some(Redirect::Sibling(sibling)) => self.lookup_lower(parent, sibling)?,
            None => self.lookup_lower(parent, name)?,
        };
        match below {
            Some(nid) if self.image.inode(nid)?.kind == found.kind => Ok(Some(nid)),
            _ => Ok(None),
        }
    }

    /// The inode that the origin mark names, if the mark is of this image and the inode has the
    /// same type.
    pub(super) fn origin(&self, found: &UpperObject) -> Result<Option<Nid>, Errno> {
        let Some(origin) = &found.marks.origin else {
            return Ok(None);
        };
        if origin.uuid != self.image.uuid() {
            return Ok(None);
        }
        let inode = self.image.inode(Nid(origin.nid))?;
        Ok((inode.kind == found.kind).then_some(inode.nid))
    }

    /// The node's directory in the upper, if there is one.
    pub(super) fn upper_directory(&self, node: &Node) -> Result<Option<Arc<File>>, Errno> {
        if node.read_state().upper.is_none() {
            return Ok(None);
        }
        self.open_upper(node, Access::Directory).map(Some)
    }

    /// The node's object in the upper, open at least as `access` says; `ESTALE` if it is not in the
    /// upper.
    pub(super) fn open_upper(&self, node: &Node, access: Access) -> Result<Arc<File>, Errno> {
        let enough = |upper: &Upper| match access {
            Access::Path => upper.file.clone(),
            Access::Data | Access::Directory => upper.file.clone().filter(|_| upper.is_fully_open),
        };
        if let Some(file) = node.read_state().upper.as_ref().and_then(enough) {
            return Ok(file);
        }
        let mut state = node.write_state();
        self.open_upper_locked(node, &mut state, access)
    }

    /// As [`UnionFs::open_upper`]; the caller holds the lock of the node's state.
    pub(super) fn open_upper_locked(
        &self,
        node: &Node,
        state: &mut NodeState,
        access: Access,
    ) -> Result<Arc<File>, Errno> {
        let upper = state.upper.as_mut().ok_or(Errno::STALE)?;
        if upper.file.is_none() {
            upper.file = Some(Arc::new(self.reopen_upper(node, upper)?));
            upper.is_fully_open = false;
            self.descriptors.fetch_add(1, Ordering::Relaxed);
        }
        let Some(file) = &upper.file else {
            return Err(Errno::STALE);
        };
        let flags = match access {
            Access::Path => return Ok(Arc::clone(file)),
            _ if upper.is_fully_open => return Ok(Arc::clone(file)),
            Access::Directory => OFlags::RDONLY | OFlags::DIRECTORY,
            // Only regular files are opened for their content. If the host has a device in the
            // place of a regular file, opening it would open the host's device, even where the
            // mount permits no devices.
            Access::Data if !is_regular(&rustix::fs::fstat(&**file)?) => {
                let name = match node.place() {
                    HostPlace::At { name, .. } => name,
                    HostPlace::Root | HostPlace::Nowhere => Box::default(),
                };
                self.damaged(
                    &name,
                    "not a regular file in the upper, although the mount shows a regular file",
                );
                return Err(Errno::IO);
            }
            Access::Data => OFlags::RDWR,
        };
        let file = Arc::new(host::reopen(file, flags)?);
        upper.file = Some(Arc::clone(&file));
        upper.is_fully_open = true;
        Ok(file)
    }

    /// Opens a node's object again after its descriptor was closed to save descriptors.
    fn reopen_upper(&self, node: &Node, upper: &Upper) -> Result<File, Errno> {
        let mut found = match (upper.indexed, node.lower) {
            (true, Some(nid)) => host::open_path(self.upper.index(), &index_name(nid))?,
            _ => None,
        };
        if found.is_none()
            && let HostPlace::At { parent, name } = node.place()
        {
            found = host::open_path(&*self.open_path_to(&parent)?, &name)?;
        }
        require_inode(found, upper.host_inode)
    }

    /// A directory of the upper, open to look up names. Directories above it without a descriptor
    /// are opened from the top and not kept: there may be more of them than descriptors. A loop,
    /// because recursion could overflow the stack on a deep path.
    fn open_path_to(&self, node: &Arc<Node>) -> Result<Arc<File>, Errno> {
        let mut closed = Vec::new();
        let mut here = Arc::clone(node);
        let mut directory = loop {
            let host_inode = match &here.read_state().upper {
                // A descriptor with `O_PATH` suffices to open names in it.
                Some(Upper {
                    file: Some(file), ..
                }) => break Arc::clone(file),
                Some(upper) => upper.host_inode,
                None => return Err(Errno::STALE),
            };
            let HostPlace::At { parent, name } = here.place() else {
                return Err(Errno::STALE);
            };
            closed.push((host_inode, name));
            here = parent;
        };
        while let Some((host_inode, name)) = closed.pop() {
            let found = host::open_path(&*directory, &name)?;
            directory = Arc::new(require_inode(found, host_inode)?);
        }
        Ok(directory)
    }

    /// Counts a reference of the kernel to a node that was just found, and gives its attributes.
    pub(super) fn hold(&self, node: &Arc<Node>) -> Result<Attributes, Errno> {
        let attributes = self.attributes_of(node)?;
        self.table.hold(node, 1);
        Ok(attributes)
    }
}

/// How an object must be open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// At least with `O_PATH`.
    Path,
    /// A regular file, for reading and writing.
    Data,
    /// A directory, to be listed, changed and synced.
    Directory,
}

/// The file, if it has this inode number on the host; `ESTALE` otherwise.
fn require_inode(found: Option<File>, host_inode: u64) -> Result<File, Errno> {
    let file = found.ok_or(Errno::STALE)?;
    if rustix::fs::fstat(&file)?.st_ino == host_inode {
        Ok(file)
    } else {
        Err(Errno::STALE)
    }
}

/// The name of the index entry for an inode of the image.
pub(super) fn index_name(nid: Nid) -> Vec<u8> {
    entry_name(nid.0).into_bytes()
}

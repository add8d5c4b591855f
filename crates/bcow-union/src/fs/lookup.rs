//! From names to nodes.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bcow_erofs::reader::{FileType, Nid};
use rustix::fs::{OFlags, Stat};
use rustix::io::Errno;

use super::nodes::{Node, Place, State, Upper};
use super::types::Attributes;
use super::{UnionFs, host};
use crate::node::NodeId;
use crate::upper::beneath::is_regular;
use crate::upper::{META, Marks, Metacopy, NlinkDelta, Redirect, is_whiteout};

/// Longest name of a directory entry.
pub(super) const NAME_MAX: usize = 255;

/// Ids of nodes that are only in the upper: this bit and the host's inode number.
pub(super) const UPPER_ONLY: u64 = 1 << 60;

/// What a name is in the upper.
pub(super) enum Above {
    /// Nothing; what the image has shows through.
    Nothing,
    /// A whiteout: there is no such name, whatever the image has.
    Whiteout,
    /// This.
    Found(Box<Found>),
}

/// Something in the upper.
pub(super) struct Found {
    /// Open with `O_PATH`.
    pub(super) file: File,
    pub(super) stat: Stat,
    pub(super) kind: FileType,
    pub(super) marks: Marks,
}

impl UnionFs {
    /// The node that `name` names in `parent`; `None` if there is no such name.
    pub(super) fn find(&self, parent: &Arc<Node>, name: &[u8]) -> Result<Option<Arc<Node>>, Errno> {
        if !parent.is_directory() {
            return Err(Errno::NOTDIR);
        }
        if name.len() > NAME_MAX {
            return Err(Errno::NAMETOOLONG);
        }
        match (name, parent.place()) {
            (b".", _) | (b"..", Place::Root | Place::Nowhere) => {
                return Ok(Some(Arc::clone(parent)));
            }
            (b"..", Place::At { parent, .. }) => return Ok(Some(parent)),
            _ if self.is_reserved(parent, name) => return Ok(None),
            _ => {}
        }
        if let Some(directory) = self.upper_directory(parent)? {
            match self.look_above(&directory, name)? {
                Above::Nothing => {}
                Above::Whiteout => return Ok(None),
                Above::Found(found) => return self.adopt(parent, name, *found).map(Some),
            }
        }
        match self.look_below(parent, name)? {
            Some(nid) => self.node_below(parent, name, nid).map(Some),
            None => Ok(None),
        }
    }

    /// As [`UnionFs::find`], for names that must be there.
    pub(super) fn find_existing(
        &self,
        parent: &Arc<Node>,
        name: &[u8],
    ) -> Result<Arc<Node>, Errno> {
        self.find(parent, name)?.ok_or(Errno::NOENT)
    }

    /// Whether this is the name of what lies beside the tree.
    pub(super) fn is_reserved(&self, parent: &Node, name: &[u8]) -> bool {
        parent.id == NodeId::ROOT && name == META.as_bytes()
    }

    /// What `name` is in a directory of the upper.
    pub(super) fn look_above(&self, directory: impl AsFd, name: &[u8]) -> Result<Above, Errno> {
        let Some(file) = host::open_path(directory, name)? else {
            return Ok(Above::Nothing);
        };
        let stat = rustix::fs::fstat(&file)?;
        if is_whiteout(&stat) {
            return Ok(Above::Whiteout);
        }
        let marks = self.read_marks(&file)?;
        let kept = match &marks.owner {
            Some(owner) if self.keeps_owners() => owner.kind_over(&stat).map_err(|damage| {
                self.damaged(name, &damage.to_string());
                Errno::IO
            })?,
            _ => None,
        };
        let kind = match kept {
            Some(kind) => kind.file_type(),
            None => host::kind_of(stat.st_mode),
        };
        Ok(Above::Found(Box::new(Found {
            file,
            stat,
            kind,
            marks,
        })))
    }

    /// What `name` is in the part of the image that `parent` shows.
    pub(super) fn look_below(&self, parent: &Node, name: &[u8]) -> Result<Option<Nid>, Errno> {
        match parent.lower {
            Some(directory) => self.image.lookup(directory, name),
            None => Ok(None),
        }
    }

    /// The node of something found in the upper.
    pub(super) fn adopt(
        &self,
        parent: &Arc<Node>,
        name: &[u8],
        found: Found,
    ) -> Result<Arc<Node>, Errno> {
        let lower = self.lower_of(parent, name, &found)?;
        let kind = found.kind;
        let host_inode = found.stat.st_ino;
        let upper_only = NodeId(UPPER_ONLY | host_inode);
        let mut id = lower.map_or(upper_only, |nid| self.image.node(nid));
        let place = || Place::At {
            parent: Arc::clone(parent),
            name: name.into(),
        };
        // A crash may have left it so: no change of links is under way on a node that nobody knew.
        let is_unsettled = matches!(found.marks.nlink, Some(NlinkDelta::Lower(_)));
        let mut upper = Some(Upper::new(found));
        loop {
            let node = self.table.get_or_insert(id, || {
                let node = Node::new(id, kind, lower, place());
                *node.write_state() = State::of(upper.take());
                self.descriptors.fetch_add(1, Ordering::Relaxed);
                node
            });
            // The host gave its number to another file, which only somebody else can have made.
            if node.kind != kind {
                return Err(Errno::STALE);
            }
            let Some(ours) = &mut upper else {
                if is_unsettled {
                    self.settle_names(&node)?;
                }
                return Ok(node);
            };
            // It is known already; perhaps only from the image, or its descriptor was given back.
            let mut state = node.write_state();
            match &state.upper {
                Some(known) if known.host_inode != host_inode => {
                    if id == upper_only {
                        return Err(Errno::STALE);
                    }
                    drop(state);
                    // Since it was looked at, another file may have taken its place, as a sketch became plain.
                    if let Some(now) = self.replaced(parent, name, host_inode)? {
                        return self.adopt(parent, name, now);
                    }
                    // A copy of the upper by another tool can have the same origin twice. The second is another file.
                    id = upper_only;
                    continue;
                }
                Some(Upper { file: Some(_), .. }) => {}
                Some(Upper { file: None, .. }) => {
                    if let Some(known) = &mut state.upper {
                        known.file = ours.file.take();
                        known.for_data = false;
                        self.descriptors.fetch_add(1, Ordering::Relaxed);
                    }
                }
                None => {
                    *state = State::of(upper.take());
                    self.descriptors.fetch_add(1, Ordering::Relaxed);
                    self.settle_names_locked(&node, &mut state)?;
                }
            }
            drop(state);
            if !node.is_at(parent, name) {
                node.set_place(place());
            }
            return Ok(node);
        }
    }

    /// What `name` is in the upper, if that is another file than the one with this inode number.
    fn replaced(&self, parent: &Node, name: &[u8], inode: u64) -> Result<Option<Found>, Errno> {
        let Some(directory) = self.upper_directory(parent)? else {
            return Ok(None);
        };
        Ok(match self.look_above(&directory, name)? {
            Above::Found(found) if found.stat.st_ino != inode => Some(*found),
            _ => None,
        })
    }

    /// The node of something in the image, as it is or as its index entry says.
    fn node_below(&self, parent: &Arc<Node>, name: &[u8], nid: Nid) -> Result<Arc<Node>, Errno> {
        let inode = self.image.inode(nid)?;
        let id = self.image.node(nid);
        let place = || Place::At {
            parent: Arc::clone(parent),
            name: name.into(),
        };
        let node = self
            .table
            .get_or_insert(id, || Node::new(id, inode.kind, Some(nid), place()));
        if inode.kind != FileType::Directory && inode.nlink > 1 {
            self.take_from_index(&node, nid)?;
        }
        if matches!(node.place(), Place::Nowhere) {
            node.set_place(place());
        }
        Ok(node)
    }

    /// Of an inode with several names in the image: sees whether it was copied up under another one.
    fn take_from_index(&self, node: &Node, nid: Nid) -> Result<(), Errno> {
        if node.read_state().upper.is_some()
            || host::stat_at(self.upper.index(), &index_name(nid))?.is_none()
        {
            return Ok(());
        }
        // An entry that is there may be of a copy-up that is under way, and gone again if that fails.
        let mut state = node.write_state();
        if state.upper.is_some() {
            return Ok(());
        }
        let found = match self.look_above(self.upper.index(), &index_name(nid))? {
            Above::Nothing => return Ok(()),
            Above::Found(found) if self.origin(&found)? == Some(nid) => found,
            // An upper may come from anywhere: what is no copy of this inode is not shown for it, much less opened.
            Above::Found(_) | Above::Whiteout => {
                let path = [META.as_bytes(), b"/index/", &index_name(nid)].concat();
                self.damaged(
                    &path,
                    "it is not the file that this inode of the image became",
                );
                return Err(Errno::IO);
            }
        };
        *state = State::of(Some(Upper::new(*found)));
        self.descriptors.fetch_add(1, Ordering::Relaxed);
        self.settle_names_locked(node, &mut state)
    }

    /// What in the image something of the upper is merged with, or came from.
    pub(super) fn lower_of(
        &self,
        parent: &Node,
        name: &[u8],
        found: &Found,
    ) -> Result<Option<Nid>, Errno> {
        let marks = &found.marks;
        if found.kind == FileType::Directory {
            if marks.opaque {
                return Ok(None);
            }
            if let Some(nid) = self.origin(found)? {
                return Ok(Some(nid));
            }
            // Made by overlayfs or by hand: merged by name.
            return self.continued(parent, name, found);
        }
        if let Some(nid) = self.origin(found)? {
            return Ok(Some(nid));
        }
        if marks.metacopy == Metacopy::None {
            return Ok(None);
        }
        // A copy of metadata that overlayfs made: its data is where its name or its mark say.
        match self.continued(parent, name, found)? {
            Some(nid) => Ok(Some(nid)),
            None => {
                self.damaged(name, "the image has no file that it is a copy of");
                Err(Errno::IO)
            }
        }
    }

    /// What in the image something of the upper continues by its redirect or its name, if that is of the same type.
    fn continued(&self, parent: &Node, name: &[u8], found: &Found) -> Result<Option<Nid>, Errno> {
        let below = match &found.marks.redirect {
            Some(Redirect::Path(path)) => self.image.at_path(path)?,
            Some(Redirect::Sibling(name)) => self.look_below(parent, name)?,
            None => self.look_below(parent, name)?,
        };
        match below {
            Some(nid) if self.image.inode(nid)?.kind == found.kind => Ok(Some(nid)),
            _ => Ok(None),
        }
    }

    /// The inode of the image that an origin mark names, if it is one of this image and of this type.
    fn origin(&self, found: &Found) -> Result<Option<Nid>, Errno> {
        let Some(origin) = &found.marks.origin else {
            return Ok(None);
        };
        if origin.uuid != self.image.uuid() {
            return Ok(None);
        }
        let inode = self.image.inode(Nid(origin.nid))?;
        Ok((inode.kind == found.kind).then_some(inode.nid))
    }

    /// The directory in the upper, if the node has one there.
    pub(super) fn upper_directory(&self, node: &Node) -> Result<Option<Arc<File>>, Errno> {
        if node.read_state().upper.is_none() {
            return Ok(None);
        }
        self.open_upper(node, Access::Directory).map(Some)
    }

    /// What the node is in the upper, open at least as `access` says. It must be there.
    pub(super) fn open_upper(&self, node: &Node, access: Access) -> Result<Arc<File>, Errno> {
        let enough = |upper: &Upper| match access {
            Access::Path => upper.file.clone(),
            Access::Data | Access::Directory => upper.file.clone().filter(|_| upper.for_data),
        };
        if let Some(file) = node.read_state().upper.as_ref().and_then(enough) {
            return Ok(file);
        }
        let mut state = node.write_state();
        self.open_upper_locked(node, &mut state, access)
    }

    /// As [`UnionFs::open_upper`], with the node's state locked.
    pub(super) fn open_upper_locked(
        &self,
        node: &Node,
        state: &mut State,
        access: Access,
    ) -> Result<Arc<File>, Errno> {
        let upper = state.upper.as_mut().ok_or(Errno::STALE)?;
        if upper.file.is_none() {
            upper.file = Some(Arc::new(self.find_again(node, upper)?));
            upper.for_data = false;
            self.descriptors.fetch_add(1, Ordering::Relaxed);
        }
        let Some(file) = &upper.file else {
            return Err(Errno::STALE);
        };
        let flags = match access {
            Access::Path => return Ok(Arc::clone(file)),
            _ if upper.for_data => return Ok(Arc::clone(file)),
            Access::Directory => OFlags::RDONLY | OFlags::DIRECTORY,
            // Nodes of other types are never opened for their content; nor is anything else that the host has in the place of
            // a regular file: a device would be the host's, whatever the mount says of devices.
            Access::Data if !is_regular(&rustix::fs::fstat(&**file)?) => {
                self.damaged(b"", "what was a regular file is none");
                return Err(Errno::IO);
            }
            Access::Data => OFlags::RDWR,
        };
        let file = Arc::new(host::reopen(file, flags)?);
        upper.file = Some(Arc::clone(&file));
        upper.for_data = true;
        Ok(file)
    }

    /// Opens something again whose descriptor was given back.
    fn find_again(&self, node: &Node, upper: &Upper) -> Result<File, Errno> {
        let mut found = match (upper.indexed, node.lower) {
            (true, Some(nid)) => host::open_path(self.upper.index(), &index_name(nid))?,
            _ => None,
        };
        if found.is_none()
            && let Place::At { parent, name } = node.place()
        {
            found = host::open_path(&*self.open_way(&parent)?, &name)?;
        }
        is_same(found, upper.host_inode)
    }

    /// A directory of the upper, open to find what is in it. Those above whose descriptors were given back are opened from the
    /// top, and not kept: there may be more of them than descriptors, and a path can be longer than a stack is deep.
    fn open_way(&self, node: &Arc<Node>) -> Result<Arc<File>, Errno> {
        let mut closed = Vec::new();
        let mut here = Arc::clone(node);
        let mut directory = loop {
            let host_inode = match &here.read_state().upper {
                // One that is open as a name only leads on too.
                Some(Upper {
                    file: Some(file), ..
                }) => break Arc::clone(file),
                Some(upper) => upper.host_inode,
                None => return Err(Errno::STALE),
            };
            let Place::At { parent, name } = here.place() else {
                return Err(Errno::STALE);
            };
            closed.push((host_inode, name));
            here = parent;
        };
        while let Some((host_inode, name)) = closed.pop() {
            let found = host::open_path(&*directory, &name)?;
            directory = Arc::new(is_same(found, host_inode)?);
        }
        Ok(directory)
    }

    /// Attributes of a node that was just found, with a reference of the kernel's counted.
    pub(super) fn hold(&self, node: &Arc<Node>) -> Result<Attributes, Errno> {
        let attributes = self.attributes_of(node)?;
        self.table.hold(node);
        self.spare_descriptors();
        Ok(attributes)
    }
}

/// How something must be open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// With `O_PATH`, or better.
    Path,
    /// A regular file, for reading and writing.
    Data,
    /// A directory, to be listed, changed and made durable.
    Directory,
}

/// Sees that what was found is this inode of the host's.
fn is_same(found: Option<File>, host_inode: u64) -> Result<File, Errno> {
    let file = found.ok_or(Errno::STALE)?;
    match rustix::fs::fstat(&file)?.st_ino == host_inode {
        true => Ok(file),
        false => Err(Errno::STALE),
    }
}

/// The name in the index of an inode of the image.
pub(super) fn index_name(nid: Nid) -> Vec<u8> {
    format!("{:016x}", nid.0).into_bytes()
}

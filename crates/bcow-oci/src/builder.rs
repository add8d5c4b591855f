//! Builds a layer's tree from its entries, in any order.
//!
//! Archives leave several cases open, and this module decides them:
//!
//! - The last entry of a name wins, except that a directory entry on a directory keeps the
//!   children.
//! - A parent that is a symlink *of this layer* is followed inside the root. A symlink of a lower
//!   layer is replaced by a directory (in the merge), as when overlayfs stacks layers that were
//!   unpacked one by one.
//! - A hardlink to a name that the layer does not have yet refers to the lower layers' file of this
//!   name. Without such a file, it refers to a later file of this layer. The merge decides.
//! - A whiteout hides entries of lower layers only, never an entry of its own layer, at any
//!   position in the archive.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bcow_erofs::tree::{Attributes, Directory, LayerTree, Node, NodeId, NodeKind, Xattrs};

use crate::error::{LimitKind, TarProblem, Unplaced, check_limit};
use crate::path::components;
use crate::warnings::Warnings;

/// Counts that all layers of a conversion share, and their limits.
#[derive(Debug)]
pub(crate) struct Budget {
    pub entries: u64,
    pub max_entries: u64,
    pub name_bytes: u64,
}

/// Limit on the memory for names, link targets and distinct attributes.
const MAX_NAME_BYTES: u64 = 512 << 20;

type Result<T> = std::result::Result<T, Unplaced>;

/// A name in a directory of the tree.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Slot {
    pub dir: NodeId,
    pub name: Box<[u8]>,
}

/// A tree that is being built.
pub(crate) struct LayerBuilder<'b> {
    tree: LayerTree,
    budget: &'b mut Budget,
    /// Parent and name of each directory except the root.
    parents: HashMap<NodeId, Slot>,
    xattrs: HashSet<Xattrs>,
    /// Places that have both a whiteout and an entry. A directory there hides the lower layers,
    /// even if a later entry put the directory in the place of another object.
    whiteouts: HashSet<Slot>,
    /// Hardlinks whose target was not in the tree at their entry.
    pending: Vec<(Slot, NodeId)>,
}

/// Limit on symlinks per path, as in Linux.
const MAX_HOPS: usize = 40;
/// Limit on the names in the symlink targets of one path. Without it, 40 links of 2000 names each
/// would be valid, and a million entries below them would take hours.
const MAX_DETOUR: usize = 1024;

impl<'b> LayerBuilder<'b> {
    pub(crate) fn new(budget: &'b mut Budget) -> Self {
        LayerBuilder {
            tree: LayerTree::new(),
            budget,
            parents: HashMap::new(),
            xattrs: HashSet::new(),
            whiteouts: HashSet::new(),
            pending: Vec::new(),
        }
    }

    pub(crate) fn tree(&self) -> &LayerTree {
        &self.tree
    }

    /// Parent and name of a directory; `None` for the root.
    pub(crate) fn parent(&self, dir: NodeId) -> Option<&Slot> {
        self.parents.get(&dir)
    }

    /// Finds the directory at the path `names`, and creates missing directories.
    pub(crate) fn enter(&mut self, names: &[&[u8]]) -> Result<NodeId> {
        // The usual case: every name is a directory.
        let mut dir = LayerTree::ROOT;
        for (i, name) in names.iter().enumerate() {
            match self.tree.child(dir, name) {
                Some(id) if matches!(self.tree.node(id).kind, NodeKind::Directory(_)) => dir = id,
                _ => return self.enter_through_links(dir, &names[i..]),
            }
        }
        Ok(dir)
    }

    fn enter_through_links(&mut self, from: NodeId, names: &[&[u8]]) -> Result<NodeId> {
        let mut dir = from;
        let mut walk = PathWalk::new(names);
        while let Some(name) = walk.todo.pop() {
            if &*name == b".." {
                dir = self.parents.get(&dir).map_or(LayerTree::ROOT, |s| s.dir);
                continue;
            }
            let existing = self.tree.child(dir, &name);
            match existing.map(|id| (id, &self.tree.node(id).kind)) {
                Some((id, NodeKind::Directory(_))) => dir = id,
                Some((_, NodeKind::Symlink(target))) => dir = walk.follow(dir, target)?,
                None => dir = self.add_directory(dir, &name, false, true)?,
                // A new directory: it inherits neither contents nor attributes from lower layers.
                Some((_, NodeKind::Whiteout)) => {
                    self.record_whiteout(&Slot {
                        dir,
                        name: name.clone(),
                    })?;
                    dir = self.add_directory(dir, &name, true, false)?
                }
                Some(_) => {
                    return Err(TarProblem::ParentNotDirectory {
                        parent: self.path_of(dir, &name),
                    }
                    .into());
                }
            }
        }
        Ok(dir)
    }

    /// Adds a directory, or sets the attributes of an existing one. `slot` is `None` for the root.
    pub(crate) fn directory(&mut self, slot: Option<&Slot>, attributes: Attributes) -> Result<()> {
        let id = match slot {
            None => LayerTree::ROOT,
            Some(slot) => {
                let existing = self.tree.child(slot.dir, &slot.name);
                match existing.map(|id| (id, &self.tree.node(id).kind)) {
                    Some((id, NodeKind::Directory(_))) => id,
                    _ => {
                        self.record_whiteout(slot)?;
                        let opaque = self.whiteouts.contains(slot);
                        self.add_directory(slot.dir, &slot.name, opaque, false)?
                    }
                }
            }
        };
        let node = self.tree.node_mut(id);
        node.attributes = attributes;
        if let NodeKind::Directory(directory) = &mut node.kind {
            directory.implicit = false;
        }
        Ok(())
    }

    /// Adds any node except a directory.
    pub(crate) fn node(&mut self, slot: &Slot, node: Node) -> Result<NodeId> {
        if let NodeKind::Symlink(target) = &node.kind {
            self.charge_names(target.len())?;
        }
        let id = self.add(node)?;
        self.charge_names(slot.name.len())?;
        self.record_whiteout(slot)?;
        self.tree.insert(slot.dir, &slot.name, id);
        Ok(id)
    }

    /// Adds a name for the file at `target`. If the target does not exist yet, the name becomes a
    /// link to a lower file with the attributes of its header, without the extended ones: an export
    /// without the lower layers has no others.
    pub(crate) fn hardlink(
        &mut self,
        slot: &Slot,
        target: &[u8],
        attributes: Attributes,
    ) -> Result<Option<NodeId>> {
        if target.is_empty() {
            return Err(TarProblem::EmptyTarget.into());
        }
        let names = components(target).map_err(|problem| match problem {
            TarProblem::ClimbsOut => TarProblem::LinkClimbsOut {
                target: target.to_vec(),
            },
            other => other,
        })?;
        self.charge_names(slot.name.len())?;
        self.record_whiteout(slot)?;
        let mut path: Box<[u8]> = names.join(&b'/').into();
        if let Some(id) = self.find(&names)? {
            match &self.tree.node(id).kind {
                NodeKind::Directory(_) => {
                    return Err(TarProblem::LinkToDirectory {
                        target: target.to_vec(),
                    }
                    .into());
                }
                NodeKind::Whiteout => {}
                // Another name of the same lower file, even if an entry replaces the first link.
                NodeKind::LowerLink(of_first) => path = of_first.clone(),
                // A link to itself changes nothing.
                _ => {
                    self.tree.insert(slot.dir, &slot.name, id);
                    return Ok(Some(id));
                }
            }
        }
        self.charge_names(path.len())?;
        let id = self.add(Node {
            attributes: Attributes {
                xattrs: None,
                ..attributes
            },
            kind: NodeKind::LowerLink(path),
        })?;
        self.tree.insert(slot.dir, &slot.name, id);
        self.pending.push((slot.clone(), id));
        Ok(None)
    }

    /// Adds a whiteout, which hides a name of the lower layers.
    pub(crate) fn whiteout(&mut self, dir: NodeId, name: &[u8]) -> Result<()> {
        match self.tree.child(dir, name) {
            Some(id) => {
                self.charge_names(name.len())?;
                let name = name.into();
                self.whiteouts.insert(Slot { dir, name });
                self.set_opaque(id);
                if let NodeKind::Directory(directory) = &mut self.tree.node_mut(id).kind {
                    directory.implicit = false;
                }
            }
            None => {
                self.charge_names(name.len())?;
                let id = self.add(Node {
                    attributes: Attributes::default(),
                    kind: NodeKind::Whiteout,
                })?;
                self.tree.insert(dir, name, id);
            }
        }
        Ok(())
    }

    /// Records a whiteout that an entry is about to replace.
    fn record_whiteout(&mut self, slot: &Slot) -> Result<()> {
        if let Some(id) = self.tree.child(slot.dir, &slot.name)
            && matches!(self.tree.node(id).kind, NodeKind::Whiteout)
        {
            self.charge_names(slot.name.len())?;
            self.whiteouts.insert(slot.clone());
        }
        Ok(())
    }

    /// Makes a directory opaque, so that it hides the contents of the same directory in lower
    /// layers. On other nodes the call has no effect: they hide the lower layers' entry of their
    /// name anyway.
    pub(crate) fn set_opaque(&mut self, dir: NodeId) {
        if let NodeKind::Directory(directory) = &mut self.tree.node_mut(dir).kind {
            directory.opaque = true;
        }
    }

    /// Shares equal attribute sets between entries.
    pub(crate) fn share_xattrs(
        &mut self,
        xattrs: std::collections::BTreeMap<Vec<u8>, Vec<u8>>,
    ) -> Result<Option<Xattrs>> {
        if xattrs.is_empty() {
            return Ok(None);
        }
        let xattrs = Arc::new(xattrs);
        if let Some(known) = self.xattrs.get(&xattrs) {
            return Ok(Some(known.clone()));
        }
        self.charge_names(xattrs.iter().map(|(n, v)| n.len() + v.len()).sum())?;
        self.xattrs.insert(xattrs.clone());
        Ok(Some(xattrs))
    }

    /// Ends the layer. `linked` is called for each name that may become a name of a file of this
    /// layer, if no lower layer has the target of the link.
    pub(crate) fn finish(mut self, mut linked: impl FnMut(&Self, &Slot, NodeId)) -> LayerTree {
        let pending = std::mem::take(&mut self.pending);
        let mut ends = HashMap::new();
        for (slot, id) in &pending {
            // A later entry may have taken the place.
            if self.is_named(slot, *id)
                && let Some(end) = self.follow_links(*id, &mut ends)
            {
                linked(&self, slot, end);
            }
        }
        self.tree
    }

    /// Follows a pending link, through other pending links, to a file of this layer. `ends` has the
    /// results for the links that were followed before.
    fn follow_links(
        &self,
        first: NodeId,
        ends: &mut HashMap<NodeId, Option<NodeId>>,
    ) -> Option<NodeId> {
        let mut chain = Vec::new();
        let mut at = first;
        let end = loop {
            if let Some(&known) = ends.get(&at) {
                break known;
            }
            match &self.tree.node(at).kind {
                NodeKind::Directory(_) | NodeKind::Whiteout => break None,
                NodeKind::LowerLink(target) => {
                    // Links that form a cycle have no end.
                    ends.insert(at, None);
                    chain.push(at);
                    let names: Vec<&[u8]> = target.split(|&b| b == b'/').collect();
                    match self.find(&names) {
                        Ok(Some(next)) => at = next,
                        Ok(None) | Err(_) => break None,
                    }
                }
                _ => break Some(at),
            }
        };
        ends.extend(chain.into_iter().map(|id| (id, end)));
        end
    }

    /// Finds the node at a path without changing the tree. Symlinks are followed except at the last
    /// name.
    fn find(&self, names: &[&[u8]]) -> Result<Option<NodeId>> {
        let mut dir = LayerTree::ROOT;
        let mut walk = PathWalk::new(names);
        while let Some(name) = walk.todo.pop() {
            if &*name == b".." {
                dir = self.parents.get(&dir).map_or(LayerTree::ROOT, |s| s.dir);
                continue;
            }
            let Some(id) = self.tree.child(dir, &name) else {
                return Ok(None);
            };
            if walk.todo.is_empty() {
                return Ok(Some(id));
            }
            match &self.tree.node(id).kind {
                NodeKind::Directory(_) => dir = id,
                NodeKind::Symlink(target) => dir = walk.follow(dir, target)?,
                _ => return Ok(None),
            }
        }
        Ok(Some(dir))
    }

    fn add_directory(
        &mut self,
        parent: NodeId,
        name: &[u8],
        opaque: bool,
        implicit: bool,
    ) -> Result<NodeId> {
        self.charge_names(2 * name.len())?;
        let id = self.add(Node {
            attributes: Attributes {
                permissions: 0o755,
                ..Attributes::default()
            },
            kind: NodeKind::Directory(Directory {
                opaque,
                implicit,
                ..Directory::default()
            }),
        })?;
        self.tree.insert(parent, name, id);
        let name = name.into();
        self.parents.insert(id, Slot { dir: parent, name });
        Ok(id)
    }

    fn add(&mut self, node: Node) -> Result<NodeId> {
        self.budget.entries += 1;
        let Budget {
            entries,
            max_entries,
            ..
        } = *self.budget;
        check_limit(LimitKind::Entries, entries, max_entries)?;
        Ok(self.tree.add(node))
    }

    fn charge_names(&mut self, bytes: usize) -> Result<()> {
        self.budget.name_bytes += bytes as u64;
        let bytes = self.budget.name_bytes;
        Ok(check_limit(LimitKind::NameBytes, bytes, MAX_NAME_BYTES)?)
    }

    /// Whether the path of `slot` still refers to this node: neither the node nor a directory above
    /// it was replaced.
    fn is_named(&self, slot: &Slot, id: NodeId) -> bool {
        let (mut slot, mut id) = (slot, id);
        loop {
            if self.tree.child(slot.dir, &slot.name) != Some(id) {
                return false;
            }
            match self.parents.get(&slot.dir) {
                Some(above) => (slot, id) = (above, slot.dir),
                None => return true,
            }
        }
    }

    fn path_of(&self, dir: NodeId, name: &[u8]) -> Vec<u8> {
        let mut names = vec![name];
        let mut at = dir;
        while let Some(slot) = self.parents.get(&at) {
            names.push(&slot.name);
            at = slot.dir;
        }
        names.reverse();
        names.join(&b'/')
    }
}

/// The rest of the way to a path, through symlinks.
struct PathWalk {
    /// The names that are still to be resolved, the next one last.
    todo: Vec<Box<[u8]>>,
    hops: usize,
    /// Names in the targets of symlinks so far.
    detour: usize,
}

impl PathWalk {
    fn new(names: &[&[u8]]) -> Self {
        PathWalk {
            todo: names.iter().rev().map(|&name| name.into()).collect(),
            hops: 0,
            detour: 0,
        }
    }

    /// Continues at the target of a symlink in `dir`. Returns the directory where the target
    /// begins.
    fn follow(&mut self, dir: NodeId, target: &[u8]) -> Result<NodeId> {
        self.hops += 1;
        for name in target.rsplit(|&b| b == b'/') {
            match name {
                b"" | b"." => continue,
                name if name.len() > 255 => {
                    return Err(TarProblem::NameTooLong { bytes: name.len() }.into());
                }
                name => self.todo.push(name.into()),
            }
            self.detour += 1;
        }
        if self.hops > MAX_HOPS || self.detour > MAX_DETOUR {
            return Err(TarProblem::TooManyLinks.into());
        }
        Ok(if target.starts_with(b"/") { LayerTree::ROOT } else { dir })
    }
}

/// Whether an extended attribute goes into the image.
///
/// The attributes of overlayfs and bcow are dropped: they would change the contents of a later
/// mount, and container engines that kept them had vulnerabilities. EROFS supports only the
/// kernel's namespaces.
pub(crate) fn keep_xattr(name: &[u8], warnings: &mut Warnings) -> bool {
    const KNOWN: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
    const ACLS: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];
    const MARKS: [&[u8]; 3] = [b"trusted.overlay.", b"user.overlay.", b"trusted.bcow."];
    if MARKS.iter().any(|prefix| name.starts_with(prefix)) {
        return false;
    }
    let known = ACLS.contains(&name)
        || KNOWN
            .iter()
            .any(|prefix| name.len() > prefix.len() && name.starts_with(prefix));
    if !known {
        warnings.dropped_xattr(name);
    }
    known
}

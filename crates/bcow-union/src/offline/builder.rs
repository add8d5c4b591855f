//! The tree of a layer while it is read, and the parts of the image in it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use bcow_erofs::reader::{Children, FileType, Filesystem, Inode, Nid, Walk};
use bcow_erofs::tree::{Attributes, Content, Directory, LayerTree, Node, NodeId, NodeKind, Xattrs};

use super::addresses::Segments;
use super::body::Body;
use super::error::{ChangesError, Problem, at, below};
use crate::upper::ACCESS_ACL;

/// A layer that is being read.
pub(super) struct Builder<'r> {
    pub(super) lower: &'r Filesystem,
    max_inodes: u64,
    pub(super) tree: LayerTree,
    /// Directories that list all their entries.
    pub(super) whole: HashSet<NodeId>,
    /// Files of the image with several names.
    pub(super) lowers: HashMap<Nid, NodeId>,
    xattrs: HashMap<BTreeMap<Vec<u8>, Vec<u8>>, Xattrs>,
    pub(super) bodies: Vec<Body>,
    pub(super) segments: Segments,
    pub(super) dropped_xattrs: BTreeMap<Vec<u8>, u64>,
    /// Paths of the image to which files of the tree are links.
    linked: BTreeSet<Vec<u8>>,
}

impl<'r> Builder<'r> {
    pub(super) fn new(lower: &'r Filesystem, max_inodes: u64) -> Self {
        Builder {
            lower,
            max_inodes,
            tree: LayerTree::new(),
            whole: HashSet::new(),
            lowers: HashMap::new(),
            xattrs: HashMap::new(),
            bodies: Vec::new(),
            segments: Segments::default(),
            dropped_xattrs: BTreeMap::new(),
            linked: BTreeSet::new(),
        }
    }

    pub(super) fn add(&mut self, node: Node) -> Result<NodeId, Problem> {
        if self.tree.len() as u64 >= self.max_inodes {
            return Err(Problem::TooMany {
                allowed: self.max_inodes,
            });
        }
        Ok(self.tree.add(node))
    }

    /// Hides a name of the image in a directory.
    pub(super) fn add_whiteout(&mut self, directory: NodeId, name: &[u8]) -> Result<(), Problem> {
        let node = self.add(Node {
            attributes: Attributes::default(),
            kind: NodeKind::Whiteout,
        })?;
        self.tree.insert(directory, name, node);
        Ok(())
    }

    pub(super) fn content(&mut self, body: Body) -> Result<Content, Problem> {
        let index = u32::try_from(self.bodies.len()).map_err(|_| Problem::TooLarge)?;
        let content = body.content(index, self.lower, &mut self.segments)?;
        self.bodies.push(body);
        Ok(content)
    }

    /// Whether an attribute can be in an image. Those that cannot be are counted.
    pub(super) fn keeps_xattr(&mut self, name: &[u8]) -> bool {
        let fits = fits_an_image(name);
        if !fits {
            *self.dropped_xattrs.entry(name.to_vec()).or_default() += 1;
        }
        fits
    }

    pub(super) fn share(&mut self, all: BTreeMap<Vec<u8>, Vec<u8>>) -> Option<Xattrs> {
        if all.is_empty() {
            return None;
        }
        if let Some(xattrs) = self.xattrs.get(&all) {
            return Some(xattrs.clone());
        }
        let xattrs = Arc::new(all.clone());
        self.xattrs.insert(all, xattrs.clone());
        Some(xattrs)
    }

    pub(super) fn lower_attributes(&mut self, inode: &Inode) -> Result<Attributes, Problem> {
        let mut all = BTreeMap::new();
        if inode.has_xattrs() {
            for (name, value) in self.lower.xattrs(inode)? {
                if fits_an_image(&name) {
                    all.insert(name, value);
                }
            }
        }
        Ok(Attributes {
            permissions: inode.permissions,
            uid: inode.uid,
            gid: inode.gid,
            mtime: inode.mtime,
            xattrs: self.share(all),
        })
    }

    pub(super) fn lower_directory(&mut self, inode: &Inode) -> Result<Node, Problem> {
        Ok(Node {
            attributes: self.lower_attributes(inode)?,
            kind: NodeKind::Directory(Directory::default()),
        })
    }

    pub(super) fn lower_file(&mut self, inode: &Inode) -> Result<NodeId, Problem> {
        if let Some(&node) = self.lowers.get(&inode.nid) {
            return Ok(node);
        }
        let attributes = self.lower_attributes(inode)?;
        let kind = match inode.kind {
            FileType::Regular => NodeKind::Regular(self.content(Body::of_lower(*inode))?),
            _ => self.lower_special(inode)?,
        };
        let node = self.add(Node { attributes, kind })?;
        if inode.nlink > 1 {
            self.lowers.insert(inode.nid, node);
        }
        Ok(node)
    }

    /// The type and its data of a file of the image that has no content.
    pub(super) fn lower_special(&self, inode: &Inode) -> Result<NodeKind, Problem> {
        let number = inode.rdev.unwrap_or_default();
        Ok(match inode.kind {
            FileType::Symlink => NodeKind::Symlink(self.lower.read_link(inode)?.into()),
            FileType::CharDevice => NodeKind::CharDevice(number),
            FileType::BlockDevice => NodeKind::BlockDevice(number),
            FileType::Fifo => NodeKind::Fifo,
            FileType::Socket | FileType::Directory | FileType::Regular => NodeKind::Socket,
        })
    }

    /// Whether the tree does not change this path of the image, so that the image's file is visible
    /// at the path.
    pub(super) fn shows_through(&self, path: &[u8]) -> bool {
        let mut at = LayerTree::ROOT;
        for name in path.split(|&byte| byte == b'/') {
            let is_directory = matches!(self.tree.node(at).kind, NodeKind::Directory(_));
            if !is_directory || self.whole.contains(&at) {
                return false;
            }
            match self.tree.child(at, name) {
                None => return true,
                Some(child) => at = child,
            }
        }
        false
    }

    /// Makes a file of the tree a link to this path of the image, if the path stays visible.
    pub(super) fn link_below(&mut self, path: &[u8], node: NodeId) {
        if self.shows_through(path) {
            self.tree.node_mut(node).kind = NodeKind::LowerLink(path.into());
            self.linked.insert(path.to_vec());
        }
    }

    /// Gives a file a name at a path of the image, which the tree does not change yet.
    pub(super) fn insert_below(&mut self, path: &[u8], node: NodeId) -> Result<(), Problem> {
        let mut at = LayerTree::ROOT;
        let mut lower = self.lower.inode(self.lower.root())?;
        let mut names = path.split(|&byte| byte == b'/').peekable();
        while let Some(name) = names.next() {
            if names.peek().is_none() {
                self.tree.insert(at, name, node);
                break;
            }
            let Some(entry) = self.lower.lookup(&lower, name)? else {
                break;
            };
            lower = self.lower.inode(entry.nid)?;
            at = match self.tree.child(at, name) {
                Some(child) => child,
                None => {
                    let mut node = self.lower_directory(&lower)?;
                    if let NodeKind::Directory(directory) = &mut node.kind {
                        directory.implicit = true;
                    }
                    let node = self.add(node)?;
                    self.tree.insert(at, name, node);
                    node
                }
            };
        }
        Ok(())
    }

    /// All names in the image of the wanted inodes that have several names.
    pub(super) fn names_of(
        &self,
        wanted: &HashSet<Nid>,
    ) -> Result<Vec<(Vec<u8>, Nid)>, ChangesError> {
        let mut found: Vec<(Vec<u8>, Nid)> = Vec::new();
        if wanted.is_empty() {
            return Ok(found);
        }
        let mut walk = Walk::new(self.lower);
        while let Some(inode) = walk.next().map_err(|error| below(walk.path())(error))? {
            if inode.nlink > 1 && inode.kind != FileType::Directory && wanted.contains(&inode.nid) {
                found.push((walk.path().to_vec(), inode.nid));
            }
        }
        Ok(found)
    }

    /// Takes the layer that was read.
    pub(super) fn take(&mut self) -> LayerTree {
        self.whole.clear();
        self.lowers.clear();
        std::mem::take(&mut self.tree)
    }

    /// Builds a tree of the image's objects at the paths of `layers`, with the targets of their
    /// links. The first layer is the one that was read.
    pub(super) fn touched(&mut self, layers: &[&LayerTree]) -> Result<(), ChangesError> {
        for layer in &layers[1..] {
            self.linked.extend(layer.lower_links().map(<[u8]>::to_vec));
        }
        let root = self.lower.inode(self.lower.root()).map_err(below(b""))?;
        *self.tree.node_mut(LayerTree::ROOT) = self.lower_directory(&root).map_err(at(b""))?;
        let roots: Vec<_> = layers
            .iter()
            .map(|&layer| (layer, LayerTree::ROOT))
            .collect();
        let mut pending = vec![(roots, LayerTree::ROOT, root, Vec::new())];
        while let Some((there, here, lower, path)) = pending.pop() {
            let directories = there.iter().filter_map(|&(layer, node)| {
                let NodeKind::Directory(directory) = &layer.node(node).kind else {
                    return None;
                };
                Some((layer, directory))
            });
            let directories: Vec<_> = directories.collect();
            // What is in the place of a directory hides all that is below it.
            let hides = |(_, directory): &(_, &Directory)| directory.opaque;
            if directories.len() < there.len() || directories.iter().any(hides) {
                self.list(here, lower, path)?;
                continue;
            }
            let mut changed: BTreeMap<&[u8], Vec<(&LayerTree, NodeId)>> = BTreeMap::new();
            for (layer, directory) in directories {
                for (name, &child) in &directory.children {
                    changed.entry(name).or_default().push((layer, child));
                }
            }
            for (name, there) in changed {
                let path = join(&path, name);
                let Some(entry) = self.lower.lookup(&lower, name).map_err(below(&path))? else {
                    continue;
                };
                let inode = self.lower.inode(entry.nid).map_err(below(&path))?;
                if inode.kind != FileType::Directory {
                    let node = self.lower_file(&inode).map_err(at(&path))?;
                    self.tree.insert(here, name, node);
                    continue;
                }
                let node = self.lower_directory(&inode).map_err(at(&path))?;
                let node = self.add(node).map_err(at(&path))?;
                self.tree.insert(here, name, node);
                pending.push((there, node, inode, path));
            }
        }
        for path in std::mem::take(&mut self.linked) {
            if let Some(nid) = self.lower.resolve(&path).map_err(below(&path))? {
                self.insert_lower(&path, nid).map_err(at(&path))?;
            }
        }
        // To know whether two names are the same inode, a comparison needs all names of the inode.
        let known = self.lowers.keys().copied().collect();
        for (path, nid) in self.names_of(&known)? {
            self.insert_lower(&path, nid).map_err(at(&path))?;
        }
        Ok(())
    }

    /// Adds a file of the image at its path there, unless the tree changes the path.
    fn insert_lower(&mut self, path: &[u8], nid: Nid) -> Result<(), Problem> {
        if self.shows_through(path) {
            let node = self.lower_file(&self.lower.inode(nid)?)?;
            self.insert_below(path, node)?;
        }
        Ok(())
    }

    /// Lists all that is below a directory of the image.
    fn list(&mut self, node: NodeId, lower: Inode, path: Vec<u8>) -> Result<(), ChangesError> {
        let mut pending = vec![(node, lower, path)];
        while let Some((node, lower, path)) = pending.pop() {
            self.whole.insert(node);
            let mut children = Children::sorted(lower);
            while let Some(child) = children.next(self.lower).map_err(below(&path))? {
                let path = join(&path, &child.name);
                let inode = self.lower.inode(child.nid).map_err(below(&path))?;
                let found = match inode.kind {
                    FileType::Directory => {
                        let directory = self.lower_directory(&inode).map_err(at(&path))?;
                        self.add(directory).map_err(at(&path))?
                    }
                    _ => self.lower_file(&inode).map_err(at(&path))?,
                };
                self.tree.insert(node, &child.name, found);
                if inode.kind == FileType::Directory {
                    pending.push((found, inode, path));
                }
            }
        }
        Ok(())
    }
}

pub(super) fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    match dir {
        [] => name.to_vec(),
        dir => [dir, b"/", name].concat(),
    }
}

/// Whether an attribute can be in an image. Attributes of overlayfs and of bcow are excluded,
/// because they would act as marks there.
fn fits_an_image(name: &[u8]) -> bool {
    const KNOWN: [&[u8]; 3] = [b"user.", b"trusted.", b"security."];
    const ACLS: [&[u8]; 2] = [ACCESS_ACL, b"system.posix_acl_default"];
    const MARKS: [&[u8]; 3] = [b"trusted.overlay.", b"user.overlay.", b"trusted.bcow."];
    let is_known = ACLS.contains(&name)
        || KNOWN
            .iter()
            .any(|prefix| name.len() > prefix.len() && name.starts_with(prefix));
    is_known && !MARKS.iter().any(|prefix| name.starts_with(prefix))
}

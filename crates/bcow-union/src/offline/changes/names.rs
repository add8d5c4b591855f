//! Files with several names, and the part of the image that a comparison needs.

use std::collections::HashSet;

use bcow_erofs::reader::{FileType, Nid, Walk};
use bcow_erofs::tree::{LayerTree, NodeKind};

use super::{Pending, Reader, at, below, join};
use crate::offline::error::{ChangesError, Problem};

impl Reader<'_> {
    /// Replaces files of the image in renamed directories by links to their other names, if such a
    /// name stays visible.
    pub(super) fn links_below(&mut self) -> Result<(), ChangesError> {
        if self.lowers.is_empty() {
            return Ok(());
        }
        for (path, nid) in self.names_of(&|nid| self.lowers.contains_key(&nid))? {
            if self.shows_through(&path)
                && let Some(&node) = self.lowers.get(&nid)
            {
                self.tree.node_mut(node).kind = NodeKind::LowerLink(path.into());
            }
        }
        Ok(())
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

    /// Builds a tree of the image's objects at the paths of `layer`.
    pub(super) fn touched(&mut self, layer: &LayerTree) -> Result<(), ChangesError> {
        self.whole.clear();
        self.index.clear();
        self.lowers.clear();
        let root = self.lower.inode(self.lower.root()).map_err(below(b""))?;
        *self.tree.node_mut(LayerTree::ROOT) = self.lower_directory(&root).map_err(at(b""))?;
        let mut pending = vec![(LayerTree::ROOT, LayerTree::ROOT, root, Vec::new())];
        while let Some((there, here, lower, path)) = pending.pop() {
            let NodeKind::Directory(directory) = &layer.node(there).kind else {
                continue;
            };
            if directory.opaque {
                self.pending.push(Pending {
                    node: here,
                    path,
                    in_upper: false,
                    lower: Some(lower),
                    is_whole: true,
                });
                continue;
            }
            for (name, &child) in &directory.children {
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
                if matches!(layer.node(child).kind, NodeKind::Directory(_)) {
                    pending.push((child, node, inode, path));
                } else {
                    self.pending.push(Pending {
                        node,
                        path,
                        in_upper: false,
                        lower: Some(inode),
                        is_whole: true,
                    });
                }
            }
        }
        while let Some(next) = self.pending.pop() {
            self.directory(next)?;
        }
        // To know whether two names are the same inode, a comparison needs all names of the inode.
        if self.lowers.is_empty() {
            return Ok(());
        }
        let known: HashSet<Nid> = self.lowers.keys().copied().collect();
        for (path, nid) in self.names_of(&|nid| known.contains(&nid))? {
            self.other_name(&path, nid).map_err(at(&path))?;
        }
        Ok(())
    }

    /// All names in the image of the wanted inodes that have several names.
    pub(super) fn names_of(
        &self,
        wanted: &dyn Fn(Nid) -> bool,
    ) -> Result<Vec<(Vec<u8>, Nid)>, ChangesError> {
        let mut found: Vec<(Vec<u8>, Nid)> = Vec::new();
        let mut walk = Walk::new(self.lower);
        while let Some(inode) = walk.next().map_err(|error| below(walk.path())(error))? {
            if inode.nlink > 1 && inode.kind != FileType::Directory && wanted(inode.nid) {
                found.push((walk.path().to_vec(), inode.nid));
            }
        }
        Ok(found)
    }

    /// Adds a name of the image, unless the tree changes this path.
    pub(super) fn other_name(&mut self, path: &[u8], nid: Nid) -> Result<(), Problem> {
        if !self.shows_through(path) {
            return Ok(());
        }
        let mut at = LayerTree::ROOT;
        let mut lower = self.lower.inode(self.lower.root())?;
        let mut names = path.split(|&byte| byte == b'/').peekable();
        while let Some(name) = names.next() {
            if names.peek().is_none() {
                let node = self.node_below(nid)?;
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
}

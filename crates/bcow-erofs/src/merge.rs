//! Merges layers into one tree, with the semantics of overlayfs.
//!
//! The result is the same as if each layer were unpacked on its own and stacked: a whiteout hides
//! the name in the layers below but not in its own layer; an opaque directory hides the contents of
//! the same directory below; a directory merges with a directory, and any other object replaces the
//! one below. Hardlinks across layers, which overlayfs cannot represent, are resolved in the merged
//! view of the layers below, as by a program that unpacks all layers into one tree.

use std::collections::BTreeMap;

use crate::tree::{
    Directory, LayerTree, Node, NodeId, NodeKind, Tree, TreeError, TreeProblem, path_of, take_node,
    validated_tree,
};

/// Limit on symbolic links in a hardlink's target path, as in the kernel.
const MAX_LINKS: u32 = 40;

/// Layers cannot be merged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MergeError {
    /// A layer is not valid, or does not fit onto the layers below it.
    #[error("layer {layer} (the lowest is 0): {source}")]
    Layer {
        /// Index of the layer, 0 is the lowest.
        layer: usize,
        /// What is wrong.
        source: TreeError,
    },
    /// The merged tree is not valid.
    #[error(transparent)]
    Tree(#[from] TreeError),
}

/// Merges `layers`, lowest first.
///
/// An implicit directory takes the attributes of the directory below it, if there is one. A
/// hardlink to a lower file becomes another name of the same inode, even if the layer hides or
/// replaces the file's old name. An empty list of layers gives an empty root directory.
pub fn merge(layers: Vec<LayerTree>) -> Result<Tree, MergeError> {
    let mut merged = LayerTree::new();
    for (layer, tree) in layers.into_iter().enumerate() {
        merged
            .apply(tree.nodes)
            .map_err(|source| MergeError::Layer { layer, source })?;
    }
    Ok(validated_tree(merged.nodes)?)
}

/// A link that no lower layer could resolve, and its place.
struct OpenLink {
    dir: NodeId,
    name: Box<[u8]>,
    id: NodeId,
}

const UNSEEN: u32 = u32::MAX;

/// The tree of the layers applied so far. There are no whiteouts, and links to lower layers only
/// while a layer is applied. Nodes without a name stay in the arena until [`validated_tree`] drops
/// them.
impl LayerTree {
    fn apply(&mut self, mut layer: Vec<Node>) -> Result<(), TreeError> {
        // Resolve links before any change: the layer may hide the targets of its own links.
        let mut links: BTreeMap<u32, NodeId> = BTreeMap::new();
        for (id, node) in layer.iter().enumerate() {
            if let NodeKind::LowerLink(target) = &node.kind
                && let Some(found) = self.resolve(target)
            {
                links.insert(id as u32, found);
            }
        }

        // The new id of each node of the layer.
        let mut new_ids = vec![UNSEEN; layer.len()];
        new_ids[0] = 0;
        let mut open_links = Vec::new();
        let mut pending = vec![(LayerTree::ROOT, LayerTree::ROOT)];
        while let Some((lower, upper)) = pending.pop() {
            let node = take_node(&mut layer[upper.0 as usize]);
            let NodeKind::Directory(directory) = node.kind else {
                continue;
            };
            if !directory.implicit {
                self.node_mut(lower).attributes = node.attributes;
            }
            let mut names = std::mem::take(self.children_mut(lower));
            if directory.opaque {
                names.clear();
            }
            for (name, id) in directory.children {
                let known = new_ids[id.0 as usize];
                if known != UNSEEN {
                    if self.is_directory(NodeId(known)) {
                        *self.children_mut(lower) = names;
                        let path = path_of(&self.nodes, lower, Some(&name));
                        return Err(TreeProblem::DirectoryLinkedTwice.at(path));
                    }
                    names.insert(name, NodeId(known));
                    continue;
                }
                let node = &mut layer[id.0 as usize];
                match &node.kind {
                    NodeKind::Whiteout => {
                        names.remove(&name);
                    }
                    NodeKind::LowerLink(_) => match links.get(&id.0) {
                        Some(&found) => {
                            names.insert(name, found);
                        }
                        None => {
                            let id = self.add(take_node(node));
                            names.insert(name.clone(), id);
                            let dir = lower;
                            open_links.push(OpenLink { dir, name, id });
                        }
                    },
                    NodeKind::Directory(_) => {
                        let below = names.get(&name).copied();
                        let to = match below.filter(|&below| self.is_directory(below)) {
                            Some(below) => below,
                            None => {
                                let new = self.add(Node {
                                    attributes: node.attributes.clone(),
                                    kind: NodeKind::Directory(Directory::default()),
                                });
                                names.insert(name, new);
                                new
                            }
                        };
                        new_ids[id.0 as usize] = to.0;
                        pending.push((to, id));
                    }
                    _ => {
                        let new = self.add(take_node(node));
                        new_ids[id.0 as usize] = new.0;
                        names.insert(name, new);
                    }
                }
            }
            *self.children_mut(lower) = names;
        }
        self.resolve_in_own_layer(open_links)
    }

    /// A link whose target no lower layer has may refer to a file of its own layer, or to another
    /// such link.
    fn resolve_in_own_layer(&mut self, mut open: Vec<OpenLink>) -> Result<(), TreeError> {
        while !open.is_empty() {
            let before = open.len();
            let (mut rest, mut ends) = (Vec::new(), BTreeMap::new());
            for link in open {
                match self.follow(link.id, &mut ends) {
                    Some(found) => {
                        self.insert(link.dir, &link.name, found);
                    }
                    None => rest.push(link),
                }
            }
            // The path of a link may lead through another one, which has a target now.
            open = rest;
            if open.len() == before {
                let link = open.swap_remove(0);
                let path = path_of(&self.nodes, link.dir, Some(&link.name));
                let target = match take_node(self.node_mut(link.id)).kind {
                    NodeKind::LowerLink(target) => target.into_vec(),
                    other => unreachable!("{other:?} is not a link"),
                };
                let reason = "neither this layer nor one below has such a file";
                return Err(TreeProblem::Link { target, reason }.at(path));
            }
        }
        Ok(())
    }

    /// Follows a link, through other links, to a file. `ends` has the results for the links that
    /// were followed before.
    fn follow(&self, link: NodeId, ends: &mut BTreeMap<NodeId, Option<NodeId>>) -> Option<NodeId> {
        let mut chain = Vec::new();
        let mut at = link;
        let end = loop {
            if let Some(&known) = ends.get(&at) {
                break known;
            }
            let NodeKind::LowerLink(target) = &self.node(at).kind else {
                break Some(at);
            };
            // Links that form a cycle have no end.
            ends.insert(at, None);
            chain.push(at);
            match self.resolve(target) {
                Some(next) => at = next,
                None => break None,
            }
        };
        ends.extend(chain.into_iter().map(|id| (id, end)));
        end
    }

    fn is_directory(&self, id: NodeId) -> bool {
        matches!(self.node(id).kind, NodeKind::Directory(_))
    }

    /// Finds the target of a hardlink (any node except a directory). Symbolic links on the way are
    /// followed inside the tree; the last component is not followed.
    fn resolve(&self, path: &[u8]) -> Option<NodeId> {
        let mut todo: Vec<&[u8]> = path.rsplit(|&b| b == b'/').collect();
        let mut way = vec![LayerTree::ROOT];
        let mut links = 0;
        while let Some(name) = todo.pop() {
            match name {
                b"" | b"." => continue,
                b".." => {
                    if way.len() > 1 {
                        way.pop();
                    }
                    continue;
                }
                _ => {}
            }
            let id = self.child(*way.last()?, name)?;
            match &self.node(id).kind {
                NodeKind::Directory(_) => way.push(id),
                _ if todo.is_empty() => return Some(id),
                NodeKind::Symlink(target) => {
                    links += 1;
                    if links > MAX_LINKS {
                        return None;
                    }
                    if target.starts_with(b"/") {
                        way.truncate(1);
                    }
                    todo.extend(target.rsplit(|&b| b == b'/'));
                }
                _ => return None,
            }
        }
        None
    }
}

//! Finds the entries of a layer that upper layers hide.
//!
//! Layers are read uppermost first, so that hidden content is never stored.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use bcow_erofs::tree::{LayerTree, NodeId, NodeKind};

use crate::builder::{LayerBuilder, Slot};

/// The complete layers above the current one.
#[derive(Default)]
pub(crate) struct UpperLayers {
    layers: Vec<LayerTree>,
    /// Last names of the targets of links from upper layers to lower ones. A file with such a name
    /// is kept even if it is hidden, because the target of a link is known only after all layers
    /// are read.
    linked: HashSet<Box<[u8]>>,
    /// The upper layers' view of a directory of the current layer.
    cache: HashMap<NodeId, Rc<View>>,
}

/// The upper layers' view of a directory.
struct View {
    /// Whether the upper layers hide all of the current layer's entries in the directory.
    hidden: bool,
    /// The same directory in the upper layers that have it.
    same: Vec<(usize, NodeId)>,
}

impl UpperLayers {
    /// Adds the next complete layer.
    pub(crate) fn push(&mut self, layer: LayerTree) {
        for id in reachable(&layer) {
            if let NodeKind::LowerLink(target) = &layer.node(id).kind {
                let name = target.rsplit(|&b| b == b'/').next().unwrap_or(target);
                self.linked.insert(name.into());
            }
        }
        self.layers.push(layer);
        self.cache.clear();
    }

    /// All layers, uppermost first.
    pub(crate) fn into_layers(self) -> Vec<LayerTree> {
        self.layers
    }

    /// Whether the upper layers hide the file at this place, so that its content can be dropped.
    pub(crate) fn hides(&mut self, layer: &LayerBuilder<'_>, slot: &Slot) -> bool {
        if self.layers.is_empty() || self.linked.contains(&slot.name) {
            return false;
        }
        let view = self.view(layer, slot.dir);
        view.hidden
            || view
                .same
                .iter()
                .any(|&(i, dir)| self.layers[i].child(dir, &slot.name).is_some())
    }

    fn view(&mut self, layer: &LayerBuilder<'_>, dir: NodeId) -> Rc<View> {
        // Start at the nearest directory whose view is known. This is a loop and not a recursion,
        // because an archive decides the depth of its paths.
        let mut missing = Vec::new();
        let mut at = dir;
        let mut view = loop {
            if let Some(view) = self.cache.get(&at) {
                break view.clone();
            }
            match layer.parent(at) {
                Some(slot) => {
                    missing.push((at, slot));
                    at = slot.dir;
                }
                None => {
                    let view = self.root_view();
                    self.cache.insert(at, view.clone());
                    break view;
                }
            }
        };
        for (id, slot) in missing.into_iter().rev() {
            view = Rc::new(self.step(&view, &slot.name));
            self.cache.insert(id, view.clone());
        }
        view
    }

    fn root_view(&self) -> Rc<View> {
        let root = LayerTree::ROOT;
        Rc::new(View {
            hidden: self.layers.iter().any(|layer| is_opaque(layer, root)),
            same: (0..self.layers.len()).map(|i| (i, root)).collect(),
        })
    }

    fn step(&self, parent: &View, name: &[u8]) -> View {
        let mut view = View {
            hidden: parent.hidden,
            same: Vec::new(),
        };
        for &(i, dir) in &parent.same {
            let layer = &self.layers[i];
            let Some(id) = layer.child(dir, name) else {
                continue;
            };
            match layer.node(id).kind {
                NodeKind::Directory(_) => {
                    view.hidden |= is_opaque(layer, id);
                    view.same.push((i, id));
                }
                // A file, link or whiteout replaces the directory.
                _ => view.hidden = true,
            }
        }
        view
    }
}

fn is_opaque(layer: &LayerTree, id: NodeId) -> bool {
    matches!(&layer.node(id).kind, NodeKind::Directory(d) if d.opaque)
}

/// Every node with a name, once for each of its names.
pub(crate) fn reachable(layer: &LayerTree) -> impl Iterator<Item = NodeId> {
    let mut pending = vec![LayerTree::ROOT];
    std::iter::from_fn(move || {
        let id = pending.pop()?;
        if let NodeKind::Directory(directory) = &layer.node(id).kind {
            pending.extend(directory.children.values());
        }
        Some(id)
    })
}

//! The inodes of the store that the kernel knows.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crate::layer::Layer;
use crate::reference::Reference;

/// The inode number of the root directory.
pub const ROOT: u64 = 1;

#[derive(Debug)]
pub struct LayerDirectory {
    pub image: Reference,
    /// The digest in the name.
    pub digest: String,
    pub layer: Layer,
    /// The description for the engine.
    pub info: Vec<u8>,
}

/// What an inode is.
#[derive(Debug, Clone)]
pub enum Kind {
    /// The root directory.
    Root,
    /// The directory of an image.
    Image(Reference),
    Layer(Arc<LayerDirectory>),
    /// The link to the mount, which it names.
    Diff(Arc<[u8]>),
    /// The description.
    Info(Arc<LayerDirectory>),
    /// The blob of the ordinary image.
    Blob(Arc<LayerDirectory>),
}

impl Kind {
    /// How long the kernel may cache the attributes.
    pub fn valid_for(&self) -> Duration {
        match self {
            // Ten years: some kernels take the largest number for a time in the past.
            Kind::Root => Duration::from_secs(10 * 365 * 24 * 3600),
            _ => Duration::ZERO,
        }
    }
}

/// A name in a directory.
type Name = (u64, Box<[u8]>);

struct Node {
    kind: Kind,
    name: Name,
    /// Lookups that the kernel has not taken back.
    lookups: u64,
}

/// The inodes. The kernel says which of them it knows, so their number is bounded by its caches.
pub struct Nodes {
    last: u64,
    by_id: HashMap<u64, Node>,
    by_name: HashMap<Name, u64>,
}

impl Nodes {
    /// The root directory only.
    pub fn new() -> Self {
        Nodes {
            last: ROOT,
            by_id: HashMap::new(),
            by_name: HashMap::new(),
        }
    }

    /// The inode with this number.
    pub fn get(&self, id: u64) -> Option<Kind> {
        match id {
            ROOT => Some(Kind::Root),
            id => self.by_id.get(&id).map(|node| node.kind.clone()),
        }
    }

    /// The number of the inode with this name, for a reply to a lookup.
    pub fn enter(&mut self, parent: u64, name: &[u8], kind: Kind) -> u64 {
        let key: Name = (parent, name.into());
        let id = match self.by_name.get(&key) {
            Some(&id) => id,
            None => {
                self.last += 1;
                self.by_name.insert(key.clone(), self.last);
                self.last
            }
        };
        let node = self.by_id.entry(id).or_insert_with(|| Node {
            kind: kind.clone(),
            name: key,
            lookups: 0,
        });
        node.kind = kind;
        node.lookups += 1;
        id
    }

    /// Takes back lookups.
    pub fn forget(&mut self, id: u64, lookups: u64) {
        let Some(node) = self.by_id.get_mut(&id) else {
            return;
        };
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups == 0
            && let Some(node) = self.by_id.remove(&id)
        {
            self.by_name.remove(&node.name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inode_keeps_its_number_until_the_kernel_forgets_it() {
        let mut nodes = Nodes::new();
        let image = || Kind::Image(Reference::decode(b"aC5vcmcvYQ==").unwrap());
        let id = nodes.enter(ROOT, b"a", image());
        assert_eq!(nodes.enter(ROOT, b"a", image()), id);
        assert_ne!(nodes.enter(id, b"a", image()), id);
        nodes.forget(id, 1);
        assert!(nodes.get(id).is_some());
        nodes.forget(id, 1);
        assert!(nodes.get(id).is_none());
        assert_ne!(nodes.enter(ROOT, b"a", image()), id);
        assert!(matches!(nodes.get(ROOT), Some(Kind::Root)));
        nodes.forget(77, 1);
        assert_eq!((nodes.by_id.len(), nodes.by_name.len()), (2, 2));
    }
}

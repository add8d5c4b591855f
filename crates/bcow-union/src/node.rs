//! Node ids: the numbers of inodes in the FUSE protocol.

use bcow_erofs::reader::Nid;

/// Id of an inode in the FUSE protocol, which is also its `st_ino`.
///
/// For an inode of the image it is the EROFS nid, as in a kernel mount of the image. So it is the
/// same in every mount of the image and needs no table. FUSE reserves two numbers: 0 (no node) and
/// 1 (the root). [`NodeIds`] maps the image's root to 1, and other inodes with these nids to ids of
/// their own.
///
/// For an inode that exists only in an upper, it is the host's inode number with bit 60 set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NodeId(pub u64);

impl NodeId {
    /// The root directory.
    pub const ROOT: NodeId = NodeId(1);
}

/// The one-to-one mapping between node ids and nids of one image.
#[derive(Debug, Clone, Copy)]
pub struct NodeIds {
    root: Nid,
}

/// Added to the nids 0 and 1, whose numbers FUSE reserves. No nid is this large: a nid counts units
/// of 32 bytes.
const ASIDE: u64 = 1 << 62;

impl NodeIds {
    /// The mapping for the image with this root.
    pub fn new(root: Nid) -> Self {
        NodeIds { root }
    }

    pub fn node(&self, nid: Nid) -> NodeId {
        match nid.0 {
            _ if nid == self.root => NodeId::ROOT,
            small @ 0..=1 => NodeId(ASIDE + small),
            other => NodeId(other),
        }
    }

    /// The nid of a node id that [`NodeIds::node`] gave.
    pub fn nid(&self, node: NodeId) -> Nid {
        match node.0 {
            _ if node == NodeId::ROOT => self.root,
            aside if (ASIDE..=ASIDE + 1).contains(&aside) => Nid(aside - ASIDE),
            other => Nid(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_nid_has_its_own_node_id_and_comes_back() {
        for root in [0, 1, 36, 1 << 40] {
            let ids = NodeIds::new(Nid(root));
            let mut seen = std::collections::HashSet::new();
            for nid in [0, 1, 2, 36, 37, 1 << 40, 1 << 59] {
                let node = ids.node(Nid(nid));
                assert_ne!(node.0, 0);
                assert_eq!(node == NodeId::ROOT, nid == root);
                assert!(seen.insert(node));
                assert_eq!(ids.nid(node), Nid(nid));
            }
        }
    }
}

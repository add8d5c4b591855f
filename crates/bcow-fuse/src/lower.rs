//! An image as a lower directory of overlayfs that hides all directories below it.
//!
//! A layer of bcow is not a layer of overlayfs: it refers to files of the layers below it (spec,
//! section 17). So the lower directory for a layer shows the merged tree of this layer and of all
//! layers below it, and hides what the other lower directories show:
//!
//! - each directory in its root is marked as opaque;
//! - its root has a whiteout for each name that the root of a layer has and the merged tree lacks.
//!
//! overlayfs ignores a mark on the root itself.

use std::collections::HashSet;
use std::ops::ControlFlow;

use bcow_erofs::reader::{ErofsError, FileType, Filesystem, Inode, Nid};
use bcow_erofs::tree::DeviceNumber;
use bcow_union::NodeId;
use bcow_union::fs::DirectoryEntry;

/// Names in the root directories, at most. The marks and whiteouts are in memory.
pub const MAX_NAMES: usize = 1 << 16;
/// The node id and the directory cookie of the first whiteout. Both are larger than those of any
/// image: a nid counts units of 32 bytes, and a cookie is an offset in a directory.
pub(crate) const FIRST: u64 = 1 << 61;

/// Which extended attributes overlayfs obeys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverlayXattrs {
    /// `trusted.overlay.*`: the default of overlayfs.
    Trusted,
    /// `user.overlay.*`: overlayfs with the mount option `userxattr`, as in a user namespace.
    User,
}

impl OverlayXattrs {
    /// Those that overlayfs obeys in the user namespace of this process.
    pub fn here() -> Self {
        // The initial namespace maps all IDs to themselves (user_namespaces(7)).
        let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        if map.split_whitespace().eq(["0", "0", "4294967295"]) {
            OverlayXattrs::Trusted
        } else {
            OverlayXattrs::User
        }
    }

    fn prefix(self) -> &'static [u8] {
        match self {
            OverlayXattrs::Trusted => b"trusted.overlay.",
            OverlayXattrs::User => b"user.overlay.",
        }
    }

    fn opaque(self) -> &'static [u8] {
        match self {
            OverlayXattrs::Trusted => b"trusted.overlay.opaque",
            OverlayXattrs::User => b"user.overlay.opaque",
        }
    }
}

/// Why a tree cannot be shown as a lower directory.
#[derive(Debug, thiserror::Error)]
pub enum LowerError {
    /// A root directory cannot be read.
    #[error(transparent)]
    Read(#[from] ErofsError),
    #[error("the root directories have more than {MAX_NAMES} names")]
    TooManyNames,
}

/// What a lower directory shows in addition to its tree.
#[derive(Debug)]
pub struct OverlayLower {
    xattrs: OverlayXattrs,
    /// The directories in the root.
    opaque: HashSet<Nid>,
    /// The names of the whiteouts, sorted.
    whiteouts: Vec<Vec<u8>>,
}

impl OverlayLower {
    /// For the merged tree `merged` of `layers`.
    pub fn new<'l>(
        merged: &Filesystem,
        layers: impl IntoIterator<Item = &'l Filesystem>,
        xattrs: OverlayXattrs,
    ) -> Result<Self, LowerError> {
        let (mut shown, mut opaque) = (HashSet::new(), HashSet::new());
        each_in_root(merged, &mut |name, nid, kind| {
            if kind == FileType::Directory {
                opaque.insert(nid);
            }
            shown.insert(name.to_vec());
            shown.len() <= MAX_NAMES
        })?;
        let mut hidden = HashSet::new();
        for layer in layers {
            each_in_root(layer, &mut |name, _, _| {
                if !shown.contains(name) {
                    hidden.insert(name.to_vec());
                }
                hidden.len() <= MAX_NAMES
            })?;
        }
        let mut whiteouts: Vec<Vec<u8>> = hidden.into_iter().collect();
        whiteouts.sort_unstable();
        Ok(OverlayLower {
            xattrs,
            opaque,
            whiteouts,
        })
    }

    /// The whiteout with this name in the root.
    pub(crate) fn find(&self, name: &[u8]) -> Option<NodeId> {
        let at = self.whiteouts.binary_search_by(|known| (**known).cmp(name));
        Some(id_of(at.ok()?))
    }

    /// Whether this is the node of a whiteout.
    pub(crate) fn is_whiteout(&self, id: NodeId) -> bool {
        (FIRST..FIRST + self.whiteouts.len() as u64).contains(&id.0)
    }

    /// The inode of a whiteout; that of the root gives the owner and the times.
    pub(crate) fn whiteout(root: Inode) -> Inode {
        let mut inode = root;
        inode.kind = FileType::CharDevice;
        inode.permissions = 0;
        inode.size = 0;
        inode.nlink = 1;
        inode.rdev = Some(DeviceNumber { major: 0, minor: 0 });
        inode
    }

    /// Lists the whiteouts. Cookies below the first one are of the image.
    pub(crate) fn list(
        &self,
        cookie: u64,
        each: &mut dyn FnMut(DirectoryEntry<'_>) -> ControlFlow<()>,
    ) {
        let from = usize::try_from(cookie.saturating_sub(FIRST)).unwrap_or(usize::MAX);
        for (index, name) in self.whiteouts.iter().enumerate().skip(from) {
            let entry = DirectoryEntry {
                name,
                node: id_of(index),
                kind: FileType::CharDevice,
                next_cookie: id_of(index + 1).0,
            };
            if each(entry).is_break() {
                return;
            }
        }
    }

    /// The attribute that marks an inode, `None` if it has no mark.
    pub(crate) fn mark(&self, nid: Nid) -> Option<&'static [u8]> {
        self.opaque.contains(&nid).then_some(self.xattrs.opaque())
    }

    /// Whether overlayfs obeys the attribute. Those that an image stores are not shown: they would
    /// lead overlayfs to files outside of the image.
    pub(crate) fn is_obeyed(&self, name: &[u8]) -> bool {
        name.starts_with(self.xattrs.prefix())
    }
}

fn id_of(index: usize) -> NodeId {
    NodeId(FIRST + index as u64)
}

/// Calls `each` for the names in the root, until it returns false.
fn each_in_root(
    tree: &Filesystem,
    each: &mut dyn FnMut(&[u8], Nid, FileType) -> bool,
) -> Result<(), LowerError> {
    let root = tree.inode(tree.root())?;
    let mut is_within = true;
    tree.read_dir(&root, 0, &mut |entry| {
        if matches!(entry.name, b"." | b"..") {
            return ControlFlow::Continue(());
        }
        is_within = each(entry.name, entry.nid, entry.kind);
        if is_within { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    if is_within { Ok(()) } else { Err(LowerError::TooManyNames) }
}

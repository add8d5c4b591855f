//! Computes the names and bytes that each layer of a stack adds to the merged tree, and those that
//! it hides.
//!
//! The walk visits each directory in all layers at once, by the rules of [`crate::merge`]; it holds
//! no tree in memory.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::overlay::{Role, role};
use crate::reader::{Children, ErofsError, FileType, Filesystem, Inode, Nid};

/// The names and file bytes of one layer, by what happens to them in the merged tree.
///
/// The counts are of names, not inodes, and without the root. A directory that several layers have
/// belongs to the lowest one. The bytes of a file count once for all its names, and are hidden if
/// all its names are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LayerAccount {
    /// Names in the merged tree that come from this layer.
    pub added_entries: u64,
    /// Bytes of this layer's files in the merged tree.
    pub added_bytes: u64,
    /// Names of this layer that upper layers hide.
    pub hidden_entries: u64,
    /// Bytes of this layer's files that upper layers hide.
    pub hidden_bytes: u64,
    /// Names of lower layers that this layer hides.
    pub hides_entries: u64,
    /// Bytes of files of lower layers that this layer hides.
    pub hides_bytes: u64,
    /// Whiteouts of this layer, including those that hide nothing.
    pub whiteouts: u64,
}

/// A layer cannot be walked.
#[derive(Debug, thiserror::Error)]
#[error("layer {}: {source}", .layer + 1)]
pub struct AccountError {
    /// Index of the layer, 0 for the lowest.
    pub layer: usize,
    /// The cause.
    pub source: ErofsError,
}

/// Computes the account of each of `layers`, lowest first.
pub fn account(layers: &[&Filesystem]) -> Result<Vec<LayerAccount>, AccountError> {
    let mut walk = Walk {
        layers,
        accounts: vec![LayerAccount::default(); layers.len()],
        pending: Vec::new(),
        seen: HashSet::new(),
        several_names: HashMap::new(),
        links: Vec::new(),
    };
    let mut roots = Merged::Nothing;
    for (layer, fs) in layers.iter().enumerate() {
        let root = walk.node(layer, fs.root())?;
        if root.role == (Role::Directory { opaque: true }) {
            // The root is always visible, but its contents may be hidden.
            if let Merged::Directories(hidden) = std::mem::replace(&mut roots, Merged::Nothing) {
                walk.pending.push((hidden, Fate::HiddenBy(layer)));
            }
        }
        match &mut roots {
            Merged::Directories(directories) => directories.push((layer, root.inode)),
            _ => roots = Merged::Directories(vec![(layer, root.inode)]),
        }
    }
    if let Merged::Directories(roots) = roots {
        walk.pending.push((roots, Fate::Visible));
    }
    while let Some((directories, fate)) = walk.pending.pop() {
        walk.directory(directories, fate)?;
    }
    walk.settle_links()?;
    walk.settle_several_names();
    Ok(walk.accounts)
}

/// A name in one layer.
struct LayerNode {
    layer: usize,
    inode: Inode,
    role: Role,
}

/// The object of a name after merging the layers so far.
enum Merged {
    Nothing,
    File(LayerNode),
    /// The same directory in several layers, lowest first.
    Directories(Vec<(usize, Inode)>),
}

#[derive(Clone, Copy)]
enum Fate {
    Visible,
    HiddenBy(usize),
}

struct Walk<'l> {
    layers: &'l [&'l Filesystem],
    accounts: Vec<LayerAccount>,
    pending: Vec<(Vec<(usize, Inode)>, Fate)>,
    /// Directories that were walked. In a valid file system each has one name.
    seen: HashSet<(usize, Nid)>,
    /// Files with several names: their bytes, and the layer that hides the first hidden name,
    /// unless another name is visible.
    several_names: HashMap<(usize, Nid), (u64, Fate)>,
    /// Visible names of files of lower layers: the layer, and the path there.
    links: Vec<(usize, Vec<u8>)>,
}

impl Walk<'_> {
    fn failed(layer: usize) -> impl Fn(ErofsError) -> AccountError {
        move |source| AccountError { layer, source }
    }

    fn node(&self, layer: usize, nid: Nid) -> Result<LayerNode, AccountError> {
        let fs = self.layers[layer];
        let inode = fs.inode(nid).map_err(Self::failed(layer))?;
        let role = role(fs, &inode).map_err(Self::failed(layer))?;
        Ok(LayerNode { layer, inode, role })
    }

    /// Determines the fate of each name in a directory that these layers have.
    fn directory(
        &mut self,
        directories: Vec<(usize, Inode)>,
        fate: Fate,
    ) -> Result<(), AccountError> {
        let mut names: BTreeMap<Vec<u8>, Vec<(usize, Nid)>> = BTreeMap::new();
        for (layer, inode) in directories {
            let nid = inode.nid;
            if !self.seen.insert((layer, nid)) {
                return Err(Self::failed(layer)(ErofsError::DirectoryTwice { nid }));
            }
            let mut children = Children::sorted(inode);
            while let Some(child) = children
                .next(self.layers[layer])
                .map_err(Self::failed(layer))?
            {
                let found = names.entry(child.name).or_default();
                found.push((layer, child.nid));
            }
        }
        for found in names.into_values() {
            let mut merged = Merged::Nothing;
            for (layer, nid) in found {
                let node = self.node(layer, nid)?;
                merged = self.put_over(merged, node);
            }
            self.settle(merged, fate);
        }
        Ok(())
    }

    /// Merges the next layer's object of a name with the result so far.
    fn put_over(&mut self, below: Merged, node: LayerNode) -> Merged {
        let layer = node.layer;
        match (below, node.role) {
            (Merged::Directories(mut directories), Role::Directory { opaque: false }) => {
                directories.push((layer, node.inode));
                Merged::Directories(directories)
            }
            (below, role) => {
                self.settle(below, Fate::HiddenBy(layer));
                match role {
                    Role::Whiteout => {
                        self.accounts[layer].whiteouts += 1;
                        Merged::Nothing
                    }
                    Role::Directory { .. } => Merged::Directories(vec![(layer, node.inode)]),
                    Role::LowerLink | Role::Other => Merged::File(node),
                }
            }
        }
    }

    /// Counts a name by its fate; the names in a directory follow later.
    fn settle(&mut self, merged: Merged, fate: Fate) {
        match merged {
            Merged::Nothing => {}
            Merged::Directories(directories) => {
                self.count(directories[0].0, 1, 0, fate);
                self.pending.push((directories, fate));
            }
            Merged::File(node) => self.settle_file(node, fate),
        }
    }

    fn settle_file(&mut self, node: LayerNode, fate: Fate) {
        let LayerNode { layer, inode, role } = node;
        self.count(layer, 1, 0, fate);
        match (role, inode.kind) {
            (Role::LowerLink, _) => {
                if let (Fate::Visible, Ok(target)) = (fate, self.layers[layer].read_link(&inode)) {
                    self.links.push((layer, target));
                }
            }
            (_, FileType::Regular) if inode.nlink > 1 => {
                let (_, known) = self
                    .several_names
                    .entry((layer, inode.nid))
                    .or_insert((inode.size, fate));
                if matches!(fate, Fate::Visible) {
                    *known = fate;
                }
            }
            (_, FileType::Regular) => self.count(layer, 0, inode.size, fate),
            _ => {}
        }
    }

    fn count(&mut self, layer: usize, entries: u64, bytes: u64, fate: Fate) {
        let account = &mut self.accounts[layer];
        // Sizes come from the inodes and may be anything, so the sums saturate.
        let add = |sum: &mut u64, value| *sum = sum.saturating_add(value);
        match fate {
            Fate::Visible => {
                add(&mut account.added_entries, entries);
                add(&mut account.added_bytes, bytes);
            }
            Fate::HiddenBy(above) => {
                add(&mut account.hidden_entries, entries);
                add(&mut account.hidden_bytes, bytes);
                add(&mut self.accounts[above].hides_entries, entries);
                add(&mut self.accounts[above].hides_bytes, bytes);
            }
        }
    }

    fn settle_several_names(&mut self) {
        for ((layer, _), (bytes, fate)) in std::mem::take(&mut self.several_names) {
            self.count(layer, 0, bytes, fate);
        }
    }

    /// A file whose own name is hidden is still visible if an upper layer has a link to it.
    fn settle_links(&mut self) -> Result<(), AccountError> {
        let mut shown = HashSet::new();
        for (layer, path) in std::mem::take(&mut self.links) {
            let Some((file, path)) = self.look_up(layer, path)? else {
                continue;
            };
            let key = (file.layer, file.inode.nid);
            if file.inode.kind != FileType::Regular || !shown.insert(key) {
                continue;
            }
            if let Some((_, fate)) = self.several_names.get_mut(&key) {
                *fate = Fate::Visible;
                continue;
            }
            // Find the layer above that hides the file's one name, if any. A hidden name stays
            // hidden, which permits a binary search.
            let (mut below, mut hider) = (file.layer + 1, self.layers.len() + 1);
            while below + 1 < hider {
                let middle = below + (hider - below) / 2;
                let there = self.look_up_name(middle, &path)?;
                if there.is_some_and(|found| (found.layer, found.inode.nid) == key) {
                    below = middle
                } else {
                    hider = middle
                }
            }
            if let Some(hiding) = (hider <= self.layers.len()).then(|| hider - 1) {
                let bytes = file.inode.size;
                let account = &mut self.accounts[file.layer];
                account.hidden_bytes = account.hidden_bytes.saturating_sub(bytes);
                account.added_bytes = account.added_bytes.saturating_add(bytes);
                let above = &mut self.accounts[hiding];
                above.hides_bytes = above.hides_bytes.saturating_sub(bytes);
            }
        }
        Ok(())
    }

    /// The object at `path` in the lowest `count` layers, merged. Links to files of lower layers
    /// are followed; the result includes the path of the target.
    fn look_up(
        &self,
        mut count: usize,
        mut path: Vec<u8>,
    ) -> Result<Option<(LayerNode, Vec<u8>)>, AccountError> {
        loop {
            let Some(node) = self.look_up_name(count, &path)? else {
                return Ok(None);
            };
            if node.role != Role::LowerLink {
                return Ok(Some((node, path)));
            }
            // Each step leads to lower layers, so the loop ends.
            count = node.layer;
            path = self.layers[node.layer]
                .read_link(&node.inode)
                .map_err(Self::failed(node.layer))?;
        }
    }

    fn look_up_name(&self, count: usize, path: &[u8]) -> Result<Option<LayerNode>, AccountError> {
        // The directory in the layers that contribute to it, uppermost first.
        let mut directories = Vec::new();
        for layer in (0..count).rev() {
            let root = self.node(layer, self.layers[layer].root())?;
            let opaque = root.role == (Role::Directory { opaque: true });
            directories.push((layer, root.inode));
            if opaque {
                break;
            }
        }
        let mut names = path.split(|&b| b == b'/').filter(|name| !name.is_empty());
        let Some(mut name) = names.next() else {
            return Ok(None);
        };
        loop {
            let next_name = names.next();
            let mut below = Vec::new();
            for (layer, directory) in &directories {
                let found = self.layers[*layer]
                    .lookup(directory, name)
                    .map_err(Self::failed(*layer))?;
                let Some(entry) = found else {
                    continue;
                };
                let node = self.node(*layer, entry.nid)?;
                match node.role {
                    Role::Directory { opaque } => {
                        below.push((*layer, node.inode));
                        if opaque {
                            break;
                        }
                    }
                    Role::LowerLink | Role::Other if below.is_empty() && next_name.is_none() => {
                        return Ok(Some(node));
                    }
                    // A whiteout, an object that replaces a directory above, or a non-directory on
                    // the way.
                    _ => break,
                }
            }
            let Some(next) = next_name.filter(|_| !below.is_empty()) else {
                return Ok(None);
            };
            name = next;
            directories = below;
        }
    }
}

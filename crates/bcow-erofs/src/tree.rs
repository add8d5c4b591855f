//! Trees of files: the content of one layer ([`LayerTree`]) and of a file system ([`Tree`]).
//!
//! A [`LayerTree`] is built from one source (a layer's tar, a directory), with entries in any
//! order. It may have whiteouts, opaque marks and hardlinks to files of lower layers.
//! [`crate::merge`] merges layers into a [`Tree`], which is validated; the EROFS writer accepts
//! only this form.
//!
//! A tree does not contain the *content* of files, only its location. The content is in the address
//! space of the image, or in a store of tails ([`TailSource`]).

mod validate;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use validate::{TreeError, TreeProblem};
pub(crate) use validate::{display_path, take_node, validated_tree};

/// The index of a node in the arena of its tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub(crate) u32);

impl NodeId {
    /// The index for vectors with an entry for each node of the arena.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// A time: seconds since 1970, and nanoseconds to add to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp {
    /// Whole seconds, negative before 1970.
    pub seconds: i64,
    /// Nanoseconds, below 1_000_000_000.
    pub nanoseconds: u32,
}

/// The raw values of extended attributes, by full name (`user.x`, `security.capability`). Nodes
/// with equal attributes share one map, because many files have the same ones.
pub type Xattrs = Arc<BTreeMap<Vec<u8>, Vec<u8>>>;

/// The attributes of every type of inode.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Attributes {
    /// Permission bits with set-id and sticky bits (`0o7777`).
    pub permissions: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time.
    pub mtime: Timestamp,
    /// Extended attributes; `None` if there are none.
    pub xattrs: Option<Xattrs>,
}

/// A device number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DeviceNumber {
    /// Major, below 4096.
    pub major: u32,
    /// Minor, below 2^20.
    pub minor: u32,
}

/// An inode, which may have several names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Mode bits, owner, times and xattrs.
    pub attributes: Attributes,
    /// The type and its data.
    pub kind: NodeKind,
}

/// The type of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeKind {
    /// A directory.
    Directory(Directory),
    /// A regular file.
    Regular(Content),
    /// A symbolic link and its target (1..=4095 bytes).
    Symlink(Box<[u8]>),
    /// A character device.
    CharDevice(DeviceNumber),
    /// A block device.
    BlockDevice(DeviceNumber),
    /// A named pipe.
    Fifo,
    /// A Unix socket.
    Socket,
    /// Layers only: hides the name in the layers below.
    Whiteout,
    /// Layers only: a hardlink to a file of the layers below, by its path (relative, no leading
    /// slash, `.` and `..` resolved).
    LowerLink(Box<[u8]>),
}

/// The entries of a directory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Directory {
    /// Children by name, in byte order, without `.` and `..`.
    pub children: BTreeMap<Box<[u8]>, NodeId>,
    /// Layers only: hides the contents of the same directory in the layers below.
    pub opaque: bool,
    /// Layers only: the layer has no entry for this directory, only for paths below it. If a lower
    /// layer has the directory, the attributes of the lower one apply.
    pub implicit: bool,
}

/// The location of a regular file's bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    /// File size in bytes.
    pub size: u64,
    /// The location of the whole blocks.
    pub blocks: Blocks,
    /// The bytes after the last whole block, if they are stored inline, beside the inode. Only with
    /// [`Blocks::Flat`]. If `None`, a partial last block is in the address space, padded with
    /// zeros.
    pub tail: Option<Tail>,
}

/// The location of content blocks of 4096 bytes in the address space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Blocks {
    /// One contiguous run. The start has no meaning if the file has no whole block.
    Flat {
        /// Block number (byte offset / 4096).
        start: u32,
    },
    /// Chunks of `4096 << chunk_shift` bytes. Each chunk has its own location or is a hole. For
    /// sparse files, and for files that share parts with other files.
    Chunked {
        /// log2 of the chunk size in blocks, 0..=31.
        chunk_shift: u8,
        /// Runs of chunks in file order, without overlaps. Chunks in no run are holes. The last
        /// chunk of the file may have fewer blocks.
        runs: Box<[ChunkRun]>,
    },
    /// The content was not stored, because an upper layer hides the file. The merge returns an
    /// error if the file is visible.
    Dropped,
}

/// `count` chunks from chunk `first` on, stored contiguously.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkRun {
    /// Index of the first chunk in the file.
    pub first: u64,
    /// Number of chunks.
    pub count: u64,
    /// Block number in the address space where the run starts.
    pub start: u32,
}

/// The location of tail bytes in a [`TailSource`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tail {
    /// Byte offset in the tail store.
    pub offset: u64,
    /// Length in bytes, 1..=4095.
    pub length: u16,
}

/// A store of file tails. The EROFS writer reads a tail when it writes the inode.
pub trait TailSource {
    /// Fills `buf` with the bytes at `offset` of the store.
    fn read_tail(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()>;
}

impl TailSource for Vec<u8> {
    fn read_tail(&self, offset: u64, buf: &mut [u8]) -> std::io::Result<()> {
        let range = usize::try_from(offset)
            .ok()
            .and_then(|start| self.get(start..start.checked_add(buf.len())?));
        match range {
            Some(bytes) => {
                buf.copy_from_slice(bytes);
                Ok(())
            }
            None => Err(std::io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

/// The tree of one source: an arena of nodes. Node 0 is the root directory.
#[derive(Debug, Clone)]
pub struct LayerTree {
    pub(crate) nodes: Vec<Node>,
}

impl LayerTree {
    /// The root directory's id.
    pub const ROOT: NodeId = NodeId(0);

    /// An empty layer: an implicit root directory, mode 0755, owner 0:0, time 0.
    pub fn new() -> Self {
        let root = Node {
            attributes: Attributes {
                permissions: 0o755,
                ..Attributes::default()
            },
            kind: NodeKind::Directory(Directory {
                implicit: true,
                ..Directory::default()
            }),
        };
        LayerTree { nodes: vec![root] }
    }

    /// The node with this id.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    /// The node with this id, for changes.
    pub fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.0 as usize]
    }

    /// Adds a node that has no name yet.
    pub fn add(&mut self, node: Node) -> NodeId {
        // A caller limits the entries to 2^31.
        let id = NodeId(self.nodes.len() as u32);
        self.nodes.push(node);
        id
    }

    /// The targets of the links to files of the layers below.
    pub fn lower_links(&self) -> impl Iterator<Item = &[u8]> {
        self.nodes.iter().filter_map(|node| match &node.kind {
            NodeKind::LowerLink(target) => Some(&**target),
            _ => None,
        })
    }

    /// The directory's entry `name`; `None` if there is no such entry, or if `dir` is not a
    /// directory.
    pub fn child(&self, dir: NodeId, name: &[u8]) -> Option<NodeId> {
        match &self.node(dir).kind {
            NodeKind::Directory(directory) => directory.children.get(name).copied(),
            _ => None,
        }
    }

    /// Adds the name `name` of node `id` to the directory `dir`. Returns the node that had this
    /// name before.
    ///
    /// # Panics
    ///
    /// If `dir` is not a directory, which is a bug of the caller.
    pub fn insert(&mut self, dir: NodeId, name: &[u8], id: NodeId) -> Option<NodeId> {
        self.children_mut(dir).insert(name.into(), id)
    }

    /// The children of the directory `dir`. Panics as [`LayerTree::insert`] does.
    pub(crate) fn children_mut(&mut self, dir: NodeId) -> &mut BTreeMap<Box<[u8]>, NodeId> {
        match &mut self.node_mut(dir).kind {
            NodeKind::Directory(directory) => &mut directory.children,
            other => panic!("{other:?} is not a directory"),
        }
    }

    /// Number of nodes in the arena, with and without names.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether the root is the only node.
    pub fn is_empty(&self) -> bool {
        self.nodes.len() == 1
    }
}

impl Default for LayerTree {
    fn default() -> Self {
        Self::new()
    }
}

/// The path of the node `id`, or of the entry `name` in this directory, without leading slash. The
/// search visits all nodes with a name.
pub(crate) fn path_of(nodes: &[Node], id: NodeId, name: Option<&[u8]>) -> Vec<u8> {
    let mut parents: BTreeMap<NodeId, (NodeId, &[u8])> = BTreeMap::new();
    let mut pending = vec![LayerTree::ROOT];
    while let Some(dir) = pending.pop() {
        let NodeKind::Directory(directory) = &nodes[dir.index()].kind else {
            continue;
        };
        for (name, &child) in &directory.children {
            parents.entry(child).or_insert_with(|| {
                pending.push(child);
                (dir, &name[..])
            });
        }
    }
    let mut names = Vec::from_iter(name);
    let mut at = id;
    while at != LayerTree::ROOT
        && let Some(&(parent, name)) = parents.get(&at)
    {
        names.push(name);
        at = parent;
    }
    names.reverse();
    names.join(&b'/')
}

/// A valid tree, the only input of the writer:
///
/// - a name has 1 to 255 bytes without `/` and NUL, and is not `.` or `..`;
/// - each directory except the root has one name, and every other node at least one;
/// - the tree has no whiteouts, opaque marks, links to lower layers or dropped contents;
/// - all content has block addresses of 32 bits.
#[derive(Debug, Clone)]
pub struct Tree {
    nodes: Vec<Node>,
}

impl Tree {
    /// The root directory's id.
    pub const ROOT: NodeId = NodeId(0);

    /// The node with this id.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    /// Number of inodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether the root is the only node.
    pub fn is_empty(&self) -> bool {
        self.nodes.len() == 1
    }

    /// Replaces the content of each regular file by the result of `replace`: first the files
    /// `first`, in their order, and then all others. Calls `replace` once for a file with several
    /// names. The result must have the same size, and its runs must be in order and below 2^32
    /// blocks.
    ///
    /// # Panics
    ///
    /// If the result has another size, which is a bug of the caller.
    pub fn replace_contents<E>(
        &mut self,
        first: &[NodeId],
        replace: &mut dyn FnMut(&Content) -> Result<Content, E>,
    ) -> Result<(), E> {
        let mut is_done = vec![false; self.nodes.len()];
        let all = self.ids();
        for id in first.iter().copied().chain(all) {
            if std::mem::replace(&mut is_done[id.index()], true) {
                continue;
            }
            if let NodeKind::Regular(content) = &mut self.nodes[id.index()].kind {
                let size = content.size;
                *content = replace(content)?;
                assert_eq!(content.size, size, "the content of a file keeps its size");
            }
        }
        Ok(())
    }

    /// All ids. A directory comes before its children, and its children are adjacent.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// A path of this node, without leading slash; empty for the root. The search visits the whole
    /// tree, so use this method only for error messages.
    pub fn path(&self, id: NodeId) -> Vec<u8> {
        path_of(&self.nodes, id, None)
    }

    /// The node at `path`; `None` if the tree has no such node. Empty components are ignored, and
    /// symbolic links are not followed.
    pub fn find(&self, path: &[u8]) -> Option<NodeId> {
        let mut at = Self::ROOT;
        for name in path.split(|&b| b == b'/').filter(|name| !name.is_empty()) {
            let NodeKind::Directory(directory) = &self.node(at).kind else {
                return None;
            };
            at = *directory.children.get(name)?;
        }
        Some(at)
    }
}

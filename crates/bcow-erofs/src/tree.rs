//! Trees of files: what a layer says ([`LayerTree`]) and what a file system holds ([`Tree`]).
//!
//! A [`LayerTree`] is built from one source (a layer's tar, a directory) in whatever order entries
//! come; it may hold whiteouts, opaque marks and hardlinks to files of lower layers. [`crate::merge`]
//! folds layers into a [`Tree`], the validated form and the only one the EROFS writer takes.
//!
//! File *content* is not in the tree. It lies in the address space already (or in a tail store), and
//! the tree says where.

mod validate;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use validate::TreeError;
pub(crate) use validate::{build, show, take};

/// A node's place in its tree's arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub(crate) u32);

impl NodeId {
    /// Index into vectors that run along the arena.
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

/// Seconds since 1970 and nanoseconds (0..1_000_000_000) after them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp {
    /// Whole seconds, negative before 1970.
    pub seconds: i64,
    /// Nanoseconds, below 1_000_000_000.
    pub nanoseconds: u32,
}

/// Extended attributes by full name (`user.x`, `security.capability`), values as they are.
/// Shared: most files have none, and those that have some often have the same.
pub type Xattrs = Arc<BTreeMap<Vec<u8>, Vec<u8>>>;

/// What every inode has, whatever its type.
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceNumber {
    /// Major, below 4096.
    pub major: u32,
    /// Minor, below 2^20.
    pub minor: u32,
}

/// An inode, possibly under several names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Mode bits, owner, times, xattrs.
    pub attributes: Attributes,
    /// Its type and what goes with it.
    pub kind: NodeKind,
}

/// What a node is.
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
    /// Layers only: a hardlink to this path (relative, no leading slash, `.` and `..` resolved) of the
    /// layers below.
    LowerLink(Box<[u8]>),
}

/// A directory's names.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Directory {
    /// Children by name, in byte order, without `.` and `..`.
    pub children: BTreeMap<Box<[u8]>, NodeId>,
    /// Layers only: hides everything of the same directory in the layers below.
    pub opaque: bool,
    /// Layers only: made because a child needed it; attributes are the lower layer's if it has the directory.
    pub implicit: bool,
}

/// Where a regular file's bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Content {
    /// File size in bytes.
    pub size: u64,
    /// Where its whole blocks are.
    pub blocks: Blocks,
    /// Bytes behind the last whole block that are kept apart, to be stored beside the inode.
    /// Only with [`Blocks::Flat`]. If `None`, a part-filled last block lies in the address space,
    /// padded with zeros.
    pub tail: Option<Tail>,
}

/// A run of content blocks of 4096 bytes in the address space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Blocks {
    /// One contiguous run that starts at this block number of the address space
    /// (meaningless if the file has no whole block).
    Flat {
        /// Block number (byte offset / 4096).
        start: u32,
    },
    /// Chunks of `4096 << chunk_shift` bytes, each somewhere or nowhere. Sparse files, and files whose
    /// parts are shared.
    Chunked {
        /// log2 of the chunk size in blocks, 0..=31.
        chunk_shift: u8,
        /// Runs of chunks in file order that do not overlap; chunks in no run are holes.
        /// The last chunk of the file may be short, at a block's granularity.
        runs: Box<[ChunkRun]>,
    },
    /// The content was not kept because nothing can reach it (it is hidden by a layer above).
    /// The merge refuses to show such a file.
    Dropped,
}

/// `count` chunks from `first` on, stored one behind the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkRun {
    /// Index of the first chunk in the file.
    pub first: u64,
    /// Number of chunks.
    pub count: u64,
    /// Block number in the address space where they start.
    pub start: u32,
}

/// Tail bytes in a [`TailSource`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tail {
    /// Byte offset in the tail store.
    pub offset: u64,
    /// Length in bytes, 1..=4095.
    pub length: u16,
}

/// Where tails wait until the inodes are written.
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

/// What one source says: an arena of nodes with one root directory.
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

    /// The node with this id, to be changed.
    pub fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.0 as usize]
    }

    /// Adds a node that no directory names yet.
    pub fn add(&mut self, node: Node) -> NodeId {
        let id =
            NodeId(u32::try_from(self.nodes.len()).expect("the entry limit is far below 2^32"));
        self.nodes.push(node);
        id
    }

    /// The directory's entry `name`; `None` if there is none or `dir` is no directory.
    pub fn child(&self, dir: NodeId, name: &[u8]) -> Option<NodeId> {
        match &self.node(dir).kind {
            NodeKind::Directory(directory) => directory.children.get(name).copied(),
            _ => None,
        }
    }

    /// Gives `id` a name in `dir` and returns what had the name before.
    ///
    /// # Panics
    ///
    /// If `dir` is no directory, which is the caller's mistake.
    pub fn insert(&mut self, dir: NodeId, name: &[u8], id: NodeId) -> Option<NodeId> {
        match &mut self.node_mut(dir).kind {
            NodeKind::Directory(directory) => directory.children.insert(name.into(), id),
            other => panic!("insert into {other:?}, which is no directory"),
        }
    }

    /// Takes a name out of a directory and returns what it named.
    pub fn remove(&mut self, dir: NodeId, name: &[u8]) -> Option<NodeId> {
        match &mut self.node_mut(dir).kind {
            NodeKind::Directory(directory) => directory.children.remove(name),
            _ => None,
        }
    }

    /// Number of nodes in the arena, whether a directory names them or not.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether there is nothing but the root.
    pub fn is_empty(&self) -> bool {
        self.nodes.len() == 1
    }
}

impl Default for LayerTree {
    fn default() -> Self {
        Self::new()
    }
}

/// A valid tree, the only thing the writer takes.
///
/// Names are 1 to 255 bytes without `/` and NUL and are not `.` or `..`; each directory has one name; every
/// node has at least one; there are no whiteouts, opaque marks, links to lower layers or dropped contents;
/// contents lie within 32-bit block addresses.
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

    /// Whether there is nothing but the root.
    pub fn is_empty(&self) -> bool {
        self.nodes.len() == 1
    }

    /// Gives each regular file another content, of the same size: what `replace` makes of the one it has. Files with several
    /// names are asked for once. A content's runs stay in order and below 2^32 blocks.
    pub fn replace_contents<E>(
        &mut self,
        replace: &mut dyn FnMut(&Content) -> Result<Content, E>,
    ) -> Result<(), E> {
        for node in &mut self.nodes {
            if let NodeKind::Regular(content) = &mut node.kind {
                let size = content.size;
                *content = replace(content)?;
                assert_eq!(content.size, size, "the content of a file keeps its size");
            }
        }
        Ok(())
    }

    /// All ids. A directory comes before its children, and its children lie next to each other.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// A path of this node, without leading slash; empty for the root. Looks through the tree, so it is
    /// for error messages.
    pub fn path(&self, id: NodeId) -> Vec<u8> {
        let mut names: Vec<&[u8]> = Vec::new();
        let mut at = id;
        // Parents have smaller ids, so one pass from the back finds the whole way up.
        for dir in (0..self.nodes.len() as u32).rev().map(NodeId) {
            if at == Self::ROOT {
                break;
            }
            if let NodeKind::Directory(directory) = &self.node(dir).kind
                && let Some((name, _)) = directory.children.iter().find(|&(_, &child)| child == at)
            {
                names.push(name);
                at = dir;
            }
        }
        names.reverse();
        names.join(&b'/')
    }

    /// The node at `path` (components between slashes; links are not followed).
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

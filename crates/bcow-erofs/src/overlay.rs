//! A layer as a file system of its own, in overlayfs form, and the conversion back.
//!
//! | in a [`LayerTree`] | in the file system |
//! |---|---|
//! | [`NodeKind::Whiteout`] | character device 0:0 |
//! | [`Directory::opaque`] | [`OPAQUE`] = `y` |
//! | [`Directory::implicit`] | [`IMPLICIT`] = `y` |
//! | [`NodeKind::LowerLink`] | symbolic link to `/TARGET` with [`LINK`] = `y`, no other xattr |
//! | character device 0:0 | the same with [`DEVICE`] = `y` |
//!
//! The first two are those of overlayfs (`Documentation/filesystems/overlayfs.rst`), so the kernel
//! can stack such layers directly. overlayfs cannot represent the others: it shows an implicit
//! directory with its own attributes, a link as a symbolic link, and takes the device for a
//! whiteout.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::mem::take;
use std::ops::ControlFlow;
use std::sync::Arc;

use crate::format::BLOCK_BYTES;
use crate::reader::{ErofsError, ExtentSource, FileType, Filesystem, Inode, Nid};
use crate::tree::{
    Attributes, Blocks, ChunkRun, Content, DeviceNumber, Directory, LayerTree, Node, NodeId,
    NodeKind, Tail, Tree, TreeError, Xattrs,
};

/// Marks a directory that hides the contents of the same directory in the layers below.
pub const OPAQUE: &[u8] = b"trusted.overlay.opaque";
/// Marks a directory for which the layer has no entry, only for paths below it. If a lower layer
/// has the directory, the attributes of the lower one apply.
pub const IMPLICIT: &[u8] = b"trusted.bcow.implicit";
/// Marks a symbolic link that represents a hardlink to a file of a lower layer.
pub const LINK: &[u8] = b"trusted.bcow.link";
/// Marks a character device 0:0 that is not a whiteout.
pub const DEVICE: &[u8] = b"trusted.bcow.device";
/// The value of all marks.
const YES: &[u8] = b"y";

/// Device number of a whiteout.
const WHITEOUT: DeviceNumber = DeviceNumber { major: 0, minor: 0 };
/// Limit on the runs of chunks in one layer's files; a run takes 16 bytes.
const MAX_RUNS: usize = 32 << 20;

impl LayerTree {
    /// Converts this layer into a file system of its own; see the [module](crate::overlay).
    pub fn into_overlay(mut self) -> Result<Tree, TreeError> {
        for node in &mut self.nodes {
            match &mut node.kind {
                NodeKind::Whiteout => {
                    *node = Node {
                        attributes: Attributes::default(),
                        kind: NodeKind::CharDevice(WHITEOUT),
                    };
                }
                NodeKind::CharDevice(WHITEOUT) => mark(&mut node.attributes, DEVICE),
                NodeKind::Directory(directory) => {
                    if directory.opaque {
                        mark(&mut node.attributes, OPAQUE);
                    }
                    if directory.implicit {
                        mark(&mut node.attributes, IMPLICIT);
                    }
                }
                NodeKind::LowerLink(target) => {
                    let mut attributes = Attributes {
                        xattrs: None,
                        ..take(&mut node.attributes)
                    };
                    mark(&mut attributes, LINK);
                    *node = Node {
                        attributes,
                        kind: NodeKind::Symlink([b"/", &target[..]].concat().into()),
                    };
                }
                _ => {}
            }
        }
        self.into_tree()
    }
}

fn mark(attributes: &mut Attributes, name: &[u8]) {
    let xattrs = attributes.xattrs.get_or_insert_default();
    Arc::make_mut(xattrs).insert(name.to_vec(), YES.to_vec());
}

/// Whether an inode of a layer in overlayfs form is a whiteout.
pub fn is_whiteout(fs: &Filesystem, inode: &Inode) -> Result<bool, ErofsError> {
    Ok(inode.kind == FileType::CharDevice
        && inode.rdev == Some(WHITEOUT)
        && fs.xattr(inode, DEVICE)?.as_deref() != Some(YES))
}

/// The meaning of an inode of a layer in overlayfs form.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A whiteout: it hides the name in the layers below.
    Whiteout,
    /// A directory.
    Directory {
        /// Whether it hides the contents of the same directory in the layers below.
        opaque: bool,
    },
    /// A hardlink to a file of the layers below. The inode is a symbolic link with the path of that
    /// file.
    LowerLink,
    /// Any other inode.
    Other,
}

/// The meaning of an inode of a layer in overlayfs form.
pub fn role(fs: &Filesystem, inode: &Inode) -> Result<Role, ErofsError> {
    let has = |name| Ok::<_, ErofsError>(fs.xattr(inode, name)?.as_deref() == Some(YES));
    Ok(match inode.kind {
        FileType::Directory => Role::Directory {
            opaque: has(OPAQUE)?,
        },
        FileType::Symlink if has(LINK)? => Role::LowerLink,
        FileType::CharDevice if is_whiteout(fs, inode)? => Role::Whiteout,
        _ => Role::Other,
    })
}

/// The form of a file system.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TreeForm {
    /// A layer in overlayfs form, with marks.
    Layer,
    /// A complete tree without marks: a character device 0:0 is a device.
    Whole,
}

/// Options for reading a layer.
pub struct ReadOptions<'a> {
    /// The form of the file system.
    pub form: TreeForm,
    /// Maps content: takes the device byte where a run of blocks starts and the run's length in
    /// bytes, and returns the block number for the tree; `None` if content cannot lie there.
    pub place: &'a dyn Fn(u64, u64) -> Option<u32>,
    /// Offset to add to the device bytes of tails.
    pub tails: u64,
    /// Limit on inodes.
    pub max_inodes: u64,
}

/// A layer cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// The file system is damaged.
    #[error(transparent)]
    Erofs(#[from] ErofsError),
    /// A directory has a second name, so the tree would have no end.
    #[error("inode {}: the directory has a second name", .nid.0)]
    DirectoryLinkedTwice {
        /// The directory.
        nid: Nid,
    },
    /// The block size is not that of layers made by bcow.
    #[error("its file system has blocks of {block_bytes} bytes, not 4096")]
    BlockBytes {
        /// Block size in bytes.
        block_bytes: u32,
    },
    /// There are more inodes than allowed.
    #[error("its number of inodes exceeds the limit of {allowed}")]
    TooMany {
        /// The limit.
        allowed: u64,
    },
    /// The files have too many runs of chunks.
    #[error("its files are in more than {MAX_RUNS} pieces")]
    TooManyRuns,
    /// A file's content lies at an address where no content can be.
    #[error(
        "inode {}: its content at byte {offset} (length {length}) lies outside the content area",
        .nid.0
    )]
    Place {
        /// The file.
        nid: Nid,
        /// Device byte.
        offset: u64,
        /// Length in bytes.
        length: u64,
    },
    /// A mark is on an inode that it does not fit.
    #[error("inode {}: it is marked as a link, but has no target below the root", .nid.0)]
    Mark {
        /// The marked inode.
        nid: Nid,
    },
}

/// Reads a layer from a file system of the form of [`LayerTree::into_overlay`].
///
/// The offset of a tail is its device byte plus `options.tails`; a merge reads the tails from
/// there. A hostile file system takes the memory of at most `max_inodes` nodes with their names.
pub fn read_layer(fs: &Filesystem, options: &ReadOptions<'_>) -> Result<LayerTree, LayerError> {
    let block_bytes = fs.superblock().block_bytes;
    if block_bytes as usize != BLOCK_BYTES {
        return Err(LayerError::BlockBytes { block_bytes });
    }
    let mut reader = LayerReader {
        fs,
        options,
        tree: LayerTree::new(),
        known: HashMap::new(),
        xattrs: HashSet::new(),
        runs: 0,
        pending: Vec::new(),
    };
    let root = fs.inode(fs.root())?;
    let node = reader.node(&root)?;
    *reader.tree.node_mut(LayerTree::ROOT) = node;
    reader.known.insert(root.nid.0, LayerTree::ROOT);
    reader.pending.push((LayerTree::ROOT, root));
    while let Some((id, inode)) = reader.pending.pop() {
        reader.directory(id, &inode)?;
    }
    Ok(reader.tree)
}

struct LayerReader<'a> {
    fs: &'a Filesystem,
    options: &'a ReadOptions<'a>,
    tree: LayerTree,
    /// Directories, and inodes with several names.
    known: HashMap<u64, NodeId>,
    xattrs: HashSet<Xattrs>,
    runs: usize,
    pending: Vec<(NodeId, Inode)>,
}

impl LayerReader<'_> {
    fn directory(&mut self, id: NodeId, inode: &Inode) -> Result<(), LayerError> {
        let mut names: Vec<(Box<[u8]>, Nid)> = Vec::new();
        let allowed = self.options.max_inodes;
        self.fs.read_dir(inode, 0, &mut |entry| {
            if !matches!(entry.name, b"." | b"..") {
                names.push((entry.name.into(), entry.nid));
            }
            if names.len() as u64 > allowed {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })?;
        if names.len() as u64 > allowed {
            return Err(LayerError::TooMany { allowed });
        }
        for (name, nid) in names {
            let child = match self.known.get(&nid.0) {
                Some(&child) => match self.tree.node(child).kind {
                    NodeKind::Directory(_) => {
                        return Err(LayerError::DirectoryLinkedTwice { nid });
                    }
                    _ => child,
                },
                None => self.add(nid)?,
            };
            self.tree.insert(id, &name, child);
        }
        Ok(())
    }

    fn add(&mut self, nid: Nid) -> Result<NodeId, LayerError> {
        let allowed = self.options.max_inodes;
        if self.tree.len() as u64 >= allowed {
            return Err(LayerError::TooMany { allowed });
        }
        let inode = self.fs.inode(nid)?;
        let node = self.node(&inode)?;
        let id = self.tree.add(node);
        let is_directory = inode.kind == FileType::Directory;
        if is_directory || inode.nlink > 1 {
            self.known.insert(nid.0, id);
        }
        if is_directory {
            self.pending.push((id, inode));
        }
        Ok(id)
    }

    fn node(&mut self, inode: &Inode) -> Result<Node, LayerError> {
        let mut marks = Marks::default();
        let xattrs = self.xattrs(inode, &mut marks)?;
        let kind = match inode.kind {
            FileType::Directory => NodeKind::Directory(Directory {
                opaque: marks.opaque,
                implicit: marks.implicit,
                ..Directory::default()
            }),
            FileType::Regular => NodeKind::Regular(self.content(inode)?),
            FileType::Symlink => {
                let target = self.fs.read_link(inode)?;
                if marks.link {
                    match target.strip_prefix(b"/") {
                        Some(target) if !target.is_empty() => NodeKind::LowerLink(target.into()),
                        _ => return Err(LayerError::Mark { nid: inode.nid }),
                    }
                } else {
                    NodeKind::Symlink(target.into())
                }
            }
            FileType::CharDevice => match inode.rdev.unwrap_or(WHITEOUT) {
                WHITEOUT if self.options.form == TreeForm::Layer && !marks.device => {
                    NodeKind::Whiteout
                }
                number => NodeKind::CharDevice(number),
            },
            FileType::BlockDevice => NodeKind::BlockDevice(inode.rdev.unwrap_or(WHITEOUT)),
            FileType::Fifo => NodeKind::Fifo,
            FileType::Socket => NodeKind::Socket,
        };
        Ok(Node {
            attributes: Attributes {
                permissions: inode.permissions,
                uid: inode.uid,
                gid: inode.gid,
                mtime: inode.mtime,
                xattrs,
            },
            kind,
        })
    }

    fn xattrs(&mut self, inode: &Inode, marks: &mut Marks) -> Result<Option<Xattrs>, LayerError> {
        if !inode.has_xattrs() {
            return Ok(None);
        }
        let mut map = BTreeMap::new();
        for (name, value) in self.fs.xattrs(inode)? {
            match marks.flag(&name) {
                Some(flag) if self.options.form == TreeForm::Layer => *flag = value == YES,
                _ => {
                    map.insert(name, value);
                }
            }
        }
        if map.is_empty() {
            return Ok(None);
        }
        if let Some(xattrs) = self.xattrs.get(&map) {
            return Ok(Some(xattrs.clone()));
        }
        let xattrs = Arc::new(map);
        self.xattrs.insert(xattrs.clone());
        Ok(Some(xattrs))
    }

    fn content(&mut self, inode: &Inode) -> Result<Content, LayerError> {
        let mut content = Content {
            size: inode.size,
            blocks: Blocks::Flat { start: 0 },
            tail: None,
        };
        let block = BLOCK_BYTES as u64;
        if let Some(chunk_shift) = inode.chunk_shift() {
            let mut runs = Vec::new();
            for extent in self.fs.extents(inode, 0) {
                let extent = extent?;
                let ExtentSource::Device { offset } = extent.source else {
                    continue;
                };
                self.runs += 1;
                if self.runs > MAX_RUNS {
                    return Err(LayerError::TooManyRuns);
                }
                runs.push(ChunkRun {
                    first: (extent.offset / block) >> chunk_shift,
                    count: extent.length.div_ceil(block << chunk_shift),
                    start: self.place(inode, offset, extent.length.next_multiple_of(block))?,
                });
            }
            content.blocks = Blocks::Chunked {
                chunk_shift,
                runs: runs.into(),
            };
            return Ok(content);
        }
        for extent in self.fs.extents(inode, 0) {
            let extent = extent?;
            match extent.source {
                // A file may be one single hole.
                ExtentSource::Hole => {
                    content.blocks = Blocks::Chunked {
                        chunk_shift: 31,
                        runs: Box::default(),
                    };
                }
                ExtentSource::Device { offset } if inode.is_inline_tail(offset) => {
                    content.tail = Some(Tail {
                        offset: self.options.tails + offset,
                        // A tail is shorter than a block.
                        length: extent.length as u16,
                    });
                }
                ExtentSource::Device { offset } => {
                    let length = extent.length.next_multiple_of(block);
                    let start = self.place(inode, offset, length)?;
                    content.blocks = Blocks::Flat { start };
                }
            }
        }
        Ok(content)
    }

    fn place(&self, inode: &Inode, offset: u64, length: u64) -> Result<u32, LayerError> {
        (self.options.place)(offset, length).ok_or(LayerError::Place {
            nid: inode.nid,
            offset,
            length,
        })
    }
}

#[derive(Default)]
struct Marks {
    opaque: bool,
    implicit: bool,
    link: bool,
    device: bool,
}

impl Marks {
    fn flag(&mut self, name: &[u8]) -> Option<&mut bool> {
        match name {
            OPAQUE => Some(&mut self.opaque),
            IMPLICIT => Some(&mut self.implicit),
            LINK => Some(&mut self.link),
            DEVICE => Some(&mut self.device),
            _ => None,
        }
    }
}

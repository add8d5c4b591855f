//! The tree inside an image: EROFS format, reader, writer, and merge of layers.
//!
//! The path of an image through this crate:
//!
//! 1. A source fills one [`tree::LayerTree`] per layer. File content is stored elsewhere; the tree
//!    has its location.
//! 2. [`merge::merge`] merges the layers into one validated [`tree::Tree`]
//!    ([`tree::LayerTree::into_tree`] validates a single layer). A layer that is stored on its own
//!    takes the form of [`overlay`] instead, and is read back from there for a merge.
//! 3. [`writer::Plan`] lays out the metadata and writes it; [`writer::Plan::superblock`] comes
//!    last.
//! 4. [`reader::Filesystem`] reads the file system from any [`bcow::BlockDevice`]; [`check::check`]
//!    looks for damage, [`damage::damaged_files`] names the files that it affects, and
//!    [`extract::extract`] extracts the tree into a directory of the host.
//!
//! The writer uses EROFS features that Linux 5.15 and later mount: 4 KiB blocks, compact and
//! extended inodes, plain, inline and chunk-based layouts (incompat `chunked-file`), inline and
//! shared xattrs, and the superblock checksum. A stack that the kernel mounts with one device per
//! layer also has a device table (incompat `device-table`, Linux 5.16). The source of the format is
//! the kernel's `Documentation/filesystems/erofs.rst` and `fs/erofs/erofs_fs.h`.
//!
//! ```
//! use std::convert::Infallible;
//! use std::sync::Arc;
//!
//! use bcow_erofs::reader::Filesystem;
//! use bcow_erofs::tree::{Attributes, LayerTree, Node, NodeKind};
//! use bcow_erofs::writer::{Plan, WriteOptions};
//!
//! let mut layer = LayerTree::new();
//! let link = layer.add(Node {
//!     attributes: Attributes::default(),
//!     kind: NodeKind::Symlink(b"target"[..].into()),
//! });
//! layer.insert(LayerTree::ROOT, b"link", link);
//! let tree = layer.into_tree()?;
//!
//! let plan = Plan::new(&tree, &WriteOptions { metadata_start: 4096, inline_max: 0 })?;
//! let mut image = vec![0; 4096];
//! let tails: Vec<u8> = Vec::new();
//! plan.write(&tails, &mut |bytes| {
//!     image.extend_from_slice(bytes);
//!     Ok::<(), Infallible>(())
//! })?;
//! let blocks = image.len() as u64 / 4096;
//! image[1024..4096].copy_from_slice(&plan.superblock(blocks));
//!
//! let fs = Filesystem::open(Arc::new(image))?;
//! let nid = fs.resolve(b"/link")?.expect("the tree has the link");
//! assert_eq!(fs.read_link(&fs.inode(nid)?)?, b"target");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![warn(missing_docs)]

pub mod account;
pub mod check;
pub mod damage;
#[cfg(feature = "testing")]
pub mod debug;
pub mod diff;
pub mod extract;
mod format;
pub mod merge;
pub mod overlay;
pub mod reader;
pub mod tree;
pub mod writer;

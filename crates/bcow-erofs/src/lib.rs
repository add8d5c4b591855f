//! The tree inside an image: EROFS format, reader, writer, merge of layers.
//!
//! The way of an image through this crate:
//!
//! 1. a source fills one [`tree::LayerTree`] per layer (file content goes elsewhere, the tree says where);
//! 2. [`merge::merge`] folds the layers into one validated [`tree::Tree`]
//!    ([`tree::LayerTree::into_tree`] does it for a single layer);
//! 3. [`writer::Plan`] lays the metadata out and streams it, [`writer::Plan::superblock`] comes last;
//!    (a layer that is stored on its own goes through [`overlay`] in place of step 2, and comes back from there to be
//!    merged);
//! 4. [`reader::Filesystem`] reads it back from any [`bcow::BlockDevice`]; [`check::check`] looks for damage.
//!
//! The EROFS features used, all of which Linux 5.15 and later mount: 4 KiB blocks, compact and extended
//! inodes, plain, inline and chunk-based layouts (incompat `chunked-file`), inline and shared xattrs,
//! superblock checksum; for stacks that the kernel mounts with one device per layer also a device table (incompat
//! `device-table`, Linux 5.16). The format's source is the kernel's `Documentation/filesystems/erofs.rst` and
//! `fs/erofs/erofs_fs.h`.

pub mod account;
pub mod check;
pub mod debug;
pub mod diff;
pub mod format;
pub mod merge;
pub mod overlay;
pub mod reader;
pub mod tree;
pub mod writer;

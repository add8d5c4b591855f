//! The metadata of an ext4 file system, over content that is elsewhere; and a reader of ext4.
//!
//! A caller describes a tree, and where in the file system's address space the content of its files
//! lies. This crate writes everything else: superblock, groups, inodes, directories, extended
//! attributes, an empty journal. It writes no content and reads none. The same description gives
//! the same bytes.
//!
//! 1. [`Geometry`] computes from [`GeometryOptions`] where tables and journal lie, and which areas
//!    are free for content.
//! 2. [`Writer::add`] takes one [`Node`] after the other and passes metadata to a [`Sink`].
//! 3. [`Writer::finish`] compares names with inodes, and writes what depends on all of them.
//!
//! A [`Reader`] reads such a file system, also after a kernel has written to it.
//!
//! ```
//! use bcow_ext4::{
//!     BlockRange, Content, DirEntry, Extent, FileKind, Geometry, GeometryOptions, Identity,
//!     InodeNumber, Node, Sink, Timestamp, Writer,
//! };
//!
//! struct Image(Vec<u8>);
//!
//! impl Sink for Image {
//!     fn write_at(&mut self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
//!         let at = offset as usize;
//!         self.0[at..at + bytes.len()].copy_from_slice(bytes);
//!         Ok(())
//!     }
//! }
//!
//! # fn main() -> Result<(), bcow_ext4::Ext4Error> {
//! let options = GeometryOptions { bytes: 16 << 20, inodes: 2, journal_blocks: None };
//! let geometry = Geometry::new(options)?;
//! let mut image = Image(vec![0; 16 << 20]);
//! let content = BlockRange { start: geometry.front_end() + 64, count: 1 };
//! let identity = Identity {
//!     uuid: [1; 16],
//!     hash_seed: [2; 16],
//!     label: *b"example\0\0\0\0\0\0\0\0\0",
//!     created: 1_700_000_000,
//!     lost_and_found: true,
//! };
//! let mut writer = Writer::new(&geometry, identity, &[content], &mut image)?;
//! let time = Timestamp { seconds: 1_700_000_000, nanoseconds: 0 };
//! let node = |permissions, content| Node {
//!     permissions, uid: 0, gid: 0, accessed: time, modified: time, changed: time, created: time,
//!     links: 1, xattrs: &[], content,
//! };
//! let entries = [DirEntry { name: b"file", inode: writer.number(1), kind: FileKind::Regular }];
//! let root = Content::Directory { parent: InodeNumber::ROOT, entries: &entries };
//! writer.add(&node(0o755, root))?;
//! let extents = [Extent { logical: 0, physical: content.start, blocks: 1 }];
//! writer.add(&node(0o644, Content::File { bytes: 5, extents: &extents }))?;
//! writer.finish()?;
//! # Ok(())
//! # }
//! ```
//!
//! The features are those of `mke2fs` today: extents, 64-bit block numbers, checksums on all
//! metadata, flexible groups, hash trees in directories, nanoseconds. Two differ, see
//! [`Geometry`]'s module: all tables lie at the front, and descriptors of groups that Linux adds
//! while the file system is mounted lie in these groups (`meta_bg`, in place of `resize_inode`).
//!
//! The source of the format is the kernel's `Documentation/filesystems/ext4` and `fs/ext4`.

mod acl;
mod checksum;
mod directory;
mod error;
mod extents;
mod format;
mod geometry;
mod hash;
mod inode;
mod links;
mod node;
mod output;
mod reader;
mod space;
mod table;
mod writer;
mod xattr;

pub use error::{Ext4Error, InodeProblem};
pub use geometry::{Geometry, GeometryOptions, MAX_BYTES, MIN_BYTES};
pub use node::{
    BlockRange, Content, DeviceNumber, DirEntry, Extent, FileKind, InodeNumber, Node, Timestamp,
    Xattr,
};
pub use output::Sink;
pub use reader::{
    Extents, Features, FilesystemBytes, Inode, InodeTable, MappedExtent, Name, ReadError, Reader,
    Structure,
};
pub use writer::{Identity, Summary, Writer};

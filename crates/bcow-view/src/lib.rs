//! A *view*: the tree of an EROFS file system, laid out as an ext4 over the same content.
//!
//! [`lay_out`] writes the metadata of the ext4 to a sink and returns where content comes from.
//! Nothing of it is copied:
//!
//! ```text
//! ext4   | tables, journal, directories | windows onto the EROFS device | fragments | free ...
//!                                              |                            |
//! EROFS  | content, block by block ... <-------+      ends of files, <------+      metadata |
//!                                                     shared blocks
//! ```
//!
//! - A [`Window`] shows a range of the EROFS device, in its order. A file's blocks are at the start
//!   of the window plus their place on the device. Blocks of a window that no file has (the
//!   metadata of the EROFS) are free blocks of the ext4.
//! - A [`Fragment`] is one block with some bytes of the device at its start, and zeros behind. The
//!   end of a file is one, as ext4 expects zeros behind the end; so is a block that another file
//!   has already, as ext4 allows no sharing; and content that does not begin at a block.
//!
//! A [`ViewCache`] makes a file of the view of an image, a BCoW disk of metadata, windows and
//! fragments, and keeps it for all disks over that image. [`create_instance`] makes such a disk.
//! [`Compared`] finds out which inodes such a disk has changed.
//!
//! ```
//! use bcow_view::{BLOCK_BYTES, Options, lay_out};
//!
//! # struct Tables(std::collections::BTreeMap<u64, Vec<u8>>);
//! # impl bcow_ext4::Sink for Tables {
//! #     fn write_at(&mut self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
//! #         self.0.insert(offset, bytes.to_vec());
//! #         Ok(())
//! #     }
//! # }
//! # use bcow_erofs::{tree::LayerTree, writer::{Plan, WriteOptions}};
//! # let plan_options = WriteOptions { metadata_start: 4096, inline_max: 0 };
//! # let tree = LayerTree::new().into_tree()?;
//! # let plan = Plan::new(&tree, &plan_options)?;
//! # let mut image = vec![0; 4096];
//! # plan.write(&Vec::<u8>::new(), &mut |bytes| {
//! #     image.extend_from_slice(bytes);
//! #     Ok::<(), std::convert::Infallible>(())
//! # })?;
//! # let blocks = image.len() as u64 / 4096;
//! # image[1024..4096].copy_from_slice(&plan.superblock(blocks));
//! # let mut tables = Tables(Default::default());
//! let fs = bcow_erofs::reader::Filesystem::open(std::sync::Arc::new(image))?;
//! let options = Options { bytes: 1 << 30, journal_blocks: None, seed: [7; 32] };
//! let view = lay_out(&fs, &options, &mut tables)?;
//! for window in &view.windows {
//!     let (at, from) = (window.start * BLOCK_BYTES, window.device_start * BLOCK_BYTES);
//!     println!("byte {at} of the ext4 is byte {from} of the EROFS");
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod bound;
mod cache;
mod compare;
mod entries;
mod error;
mod file;
mod instance;
mod lay_out;
mod numbers;
mod place;
mod ranges;
mod survey;
mod viewed_image;

pub use cache::{CachedView, ViewCache};
pub use compare::{CompareError, Compared};
pub use entries::{Removal, Remove, ViewEntry};
pub use error::ViewError;
pub use instance::{DEFAULT_BYTES, Instance, create_instance};
pub use lay_out::{Options, View, lay_out};
pub use numbers::{Numbers, ViewName};
pub use place::{Fragment, Window};
pub use viewed_image::ViewedImage;

/// Block size of the ext4, and of an EROFS that a view can be made of, in bytes.
pub const BLOCK_BYTES: u64 = 4096;

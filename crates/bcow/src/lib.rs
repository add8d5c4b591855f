//! One BCoW file and the files below it: reading, writing, checking, and operations on whole disks.
//!
//! A BCoW file holds an address space of blocks: a sealed image, or a disk that stores its own
//! blocks and shows those of a backing elsewhere. `spec/bcow-v1.md` defines the format; the crate
//! [`format`] validates its structures.
//!
//! The path through the crate, from the bytes upwards:
//!
//! - [`Storage`] is the interface to the bytes of a file, [`BlockDevice`] and [`WritableDevice`]
//!   are the interface to an address space.
//! - [`Image`] reads a file; [`BlockCache`] keeps its decoded blocks.
//! - [`Disk`] reads and writes a file that is not sealed.
//! - [`chain`] finds and opens the files below a disk, under a policy of the user. [`lock`] and
//!   [`LockedFile`] keep a second writer away.
//! - [`ImageWriter`] writes a file in one pass, a [`Composer`] a sealed disk of pieces. [`NewFile`]
//!   gives the file its name when it is complete.
//! - [`operation`] commits, rebases, seals, compacts, compares and snapshots whole disks.
//! - [`check`](mod@check) finds and repairs damage.
//!
//! ```
//! use std::sync::Arc;
//! use bcow::{BlockDevice, CreateOptions, Disk, Image, MemoryStorage, OpenOptions, WritableDevice};
//!
//! let storage = Arc::new(MemoryStorage::default());
//! let disk = Disk::create_alone(storage.clone(), &CreateOptions::disk(1 << 20))?;
//! disk.write_at(8000, b"some content")?;
//! disk.flush()?; // durable from here on
//! disk.close()?;
//!
//! let image = Image::open_storage(storage, &OpenOptions::default())?;
//! let mut buf = [0; 12];
//! image.read_at(8000, &mut buf)?;
//! assert_eq!(&buf, b"some content");
//! # Ok::<(), bcow::Error>(())
//! ```

#![warn(missing_docs)]

mod attributes;
mod cache;
pub mod chain;
pub mod check;
mod checked;
mod codec;
mod copy;
mod date;
mod device;
mod disk;
mod error;
mod image;
pub mod lock;
mod locked;
mod log;
mod map;
mod merged;
mod merkle;
mod new_file;
pub mod operation;
mod overlay;
mod owners;
mod piece;
mod restored;
mod root;
mod same;
mod storage;
#[doc(hidden)]
pub mod sync;
mod threads;
mod verify;
mod writer;

pub use bcow_format as format;
pub use cache::{BlockCache, CacheFigures};
pub use copy::copy_file;
pub use date::rfc3339;
pub use device::{BlockDevice, Content, Space, Status, WritableDevice};
pub use disk::{CreateOptions, Disk, Layout, Ledger, Statistics};
pub use error::{BlockProblem, Error};
pub use image::{
    BackingResolver, Image, NoBackings, OneBacking, OpenOptions, UnreadBackings, give_zeros,
    identity,
};
pub use locked::{LockFileError, LockedFile, backing_of, header_of, snapshot_time};
pub use map::{Extent, Mapping, ShownBy};
pub use merkle::{leaf_hash, node_hash};
pub use new_file::{NewFile, NewFileError};
pub use restored::RestoredFile;
pub use same::known_same;
pub use storage::{FileIdentity, MemoryStorage, Storage, Version};
pub use verify::Verify;
pub use writer::{
    Composer, Composition, Compression, DiskForm, ImageWriter, Keep, WriterOptions, Written,
    append_disk, verify_written,
};

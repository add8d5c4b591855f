//! BCoW files and their chains: storage, open, map, read, write, check, cache.
//!
//! [`Storage`] is the interface to the bytes of a file; [`BlockDevice`] is the interface to its
//! address space. [`Image`] reads a file, [`ImageWriter`] writes a sealed one in one pass,
//! [`check`](mod@check) checks one.
//!
//! ```
//! use std::sync::Arc;
//! use bcow::{BlockDevice, Image, ImageWriter, MemoryStorage, OpenOptions, WriterOptions};
//!
//! let storage = Arc::new(MemoryStorage::default());
//! let mut writer = ImageWriter::on_storage(storage.clone(), WriterOptions::default())?;
//! let at = writer.position();
//! writer.append(b"some content")?;
//! writer.finish(&[], &serde_json::json!({}))?;
//!
//! let image = Image::open_storage(storage, &OpenOptions::default())?;
//! let mut buf = [0; 12];
//! image.read_at(at, &mut buf)?;
//! assert_eq!(&buf, b"some content");
//! # Ok::<(), bcow::Error>(())
//! ```

mod cache;
pub mod chain;
pub mod check;
mod checked;
mod codec;
mod date;
pub mod device;
pub mod disk;
pub mod error;
mod image;
pub mod lock;
mod locked;
mod log;
mod map;
mod merkle;
mod new_file;
pub mod operation;
mod overlay;
mod root;
mod same;
pub mod storage;
#[doc(hidden)]
pub mod sync;
mod threads;
mod writer;

pub use bcow_format as format;
pub use cache::{BlockCache, CacheFigures};
pub use date::rfc3339;
pub use device::{BlockDevice, Content, Space, Status, WritableDevice};
pub use disk::{CreateOptions, Disk, Layout};
pub use error::{BlockProblem, Error};
pub use image::{
    BackingResolver, Image, NoBackings, OneBacking, OpenOptions, UnreadBackings, Verify, identity,
};
pub use locked::{LockFileError, LockedFile, header_of};
pub use map::{Extent, Mapping};
pub use new_file::{NewFile, NewFileError};
pub use same::known_same;
pub use storage::{FileIdentity, MemoryStorage, Storage};
pub use writer::{
    Compression, DiskForm, ImageWriter, Keep, WriterOptions, Written, append_disk, verify_written,
};

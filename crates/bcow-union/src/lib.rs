//! A writable file system: a read-only image below, a directory of the host above (the upper), and
//! block-level copy-on-write between them.
//!
//! # The path of a request
//!
//! [`fs::UnionFs`] answers the requests of a mount. Its tree is the union of the image's tree and
//! of the upper's tree. A request passes these layers downwards:
//!
//! ```text
//! fs        names, attributes, content; copy-up, promotion, durability
//! partial   files of which the upper stores only the written blocks; the image has the rest
//! account   space and inodes of the upper, against its limits
//! upper     the directory on the host, with the format of overlayfs's upper directory
//! image     the file system in the image
//! ```
//!
//! [`offline`] reads and checks an upper that is not mounted. [`errors`] counts and logs failures.
//!
//! # Example
//!
//! Writes a file into the union of an image and a directory:
//!
//! ```no_run
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! use bcow_erofs::reader::Filesystem;
//! use bcow_union::fs::{Caller, LowerImage, New, Privileges, UnionFs};
//! use bcow_union::{NodeId, UnionOptions};
//!
//! fn example(image: Arc<Filesystem>, upper: &Path) -> Result<(), Box<dyn std::error::Error>> {
//!     let lower = LowerImage {
//!         fs: image,
//!         identity: [7; 32],
//!         name: "image.bcow".into(),
//!     };
//!     let union = UnionFs::open(lower, upper, "an example", &UnionOptions::default())?;
//!     let caller = Caller { uid: 0, gid: 0, pid: 1, umask: 0o022 };
//!     let file = union.make(&caller, NodeId::ROOT, b"hello", 0o644, &New::File)?;
//!     union.write(file.node, 0, b"Hello, world\n", Privileges::Drop)?;
//!     union.close()?;
//!     Ok(())
//! }
//! ```

mod account;
mod blocks;
mod bytes;
mod errno;
pub mod errors;
pub mod fs;
mod host;
mod image;
mod ledger;
pub mod log;
mod mountinfo;
mod node;
pub mod offline;
mod options;
mod partial;
#[cfg(feature = "testing")]
pub mod testing;
mod upper;

pub use image::{COUNTED_EXTENTS, Image};
pub use mountinfo::unescape;
pub use node::NodeId;
pub use options::{SMALL_BYTES, SyncPolicy, UnionOptions};
pub use upper::{
    DiskInstance, DiskReader, DiskRecord, Driver, FileSystem, HeldUpper, ImageName, Instance, META,
    UnfinishedUpper, UpperError, UpperReader, UpperSnapshot, disk_path, driver_of, fork_upper,
    list_snapshots, recover_snapshots, remove_snapshot, roll_back_upper, snapshot_directory,
    snapshot_path, take_snapshot,
};

/// The object of a search with `lseek` (`SEEK_DATA`, `SEEK_HOLE`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seek {
    /// The next stored byte.
    Data,
    /// The next byte that is not stored, or the end of the file.
    Hole,
}

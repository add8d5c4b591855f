//! Disks in foreign formats: raw and qcow2.
//!
//! The path of a disk through this crate: [`RawDisk`] or [`Qcow2Disk`] opens a file as a block
//! device. [`pieces`] reads the content of any block device in order and skips zeros.
//! [`Qcow2Writer`] writes this content to a qcow2 image.
//!
//! A qcow2 image may be hostile. bcow checks its header before the library imago reads the image,
//! opens the files that it names only in directories that the caller allows, and converts a panic
//! of imago to an error ([`is_guarded`]).
//!
//! ```
//! use bcow_foreign::{ClusterCompression, Piece, Qcow2Disk, Qcow2Writer, RawDisk, Stopped, pieces};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! # let (raw, qcow2) = (directory.path().join("disk.raw"), directory.path().join("disk.qcow2"));
//! # std::fs::write(&raw, [1; 8192])?;
//! let disk = RawDisk::open(&raw)?;
//! let file = std::fs::File::create_new(&qcow2)?;
//! let mut writer = Qcow2Writer::new(&file, disk.bytes(), ClusterCompression::Zlib)?;
//! let copied = pieces(&disk, disk.bytes(), &mut |piece| match piece {
//!     Piece::Data { bytes, .. } => writer.data(bytes),
//!     Piece::Zeros { length, .. } => writer.zeros(length),
//! });
//! match copied {
//!     Ok(()) => writer.finish()?,
//!     Err(Stopped::Read(error)) => return Err(error.into()),
//!     Err(Stopped::Consumer(error)) => return Err(error.into()),
//! };
//! assert_eq!(Qcow2Disk::open(&qcow2, &[])?.bytes(), 8192);
//! # Ok(())
//! # }
//! ```

mod error;
mod guard;
mod host;
mod pieces;
mod qcow2;
mod qcow2_writer;
mod raw;

pub use error::ForeignError;
pub use guard::is_guarded;
pub use pieces::{Piece, Stopped, pieces};
pub use qcow2::Qcow2Disk;
pub use qcow2_writer::{ClusterCompression, Qcow2Writer};
pub use raw::RawDisk;

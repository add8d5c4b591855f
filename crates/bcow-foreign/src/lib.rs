//! Disks in foreign formats: raw and qcow2.
//!
//! [`RawDisk`] and [`Qcow2Disk`] read such files as block devices. [`pieces`] reads the content of
//! any block device in order and skips zeros. [`Qcow2Writer`] writes this content to a qcow2 image.

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

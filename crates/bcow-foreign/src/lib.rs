//! Disks in other forms than BCoW: raw and qcow2, read and written.
//!
//! [`RawDisk`] and [`Qcow2Disk`] are such files as block devices. [`pieces`] goes through any block device in order,
//! zeros told apart from what has to be read; [`Qcow2Writer`] makes a qcow2 image of what it gives.

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

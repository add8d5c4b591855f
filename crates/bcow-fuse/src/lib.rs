//! The FUSE frontend: mounts a BCoW image as a file system.
//!
//! The path of a request: the kernel sends it through `/dev/fuse`, `fuser` decodes it, the adapter
//! converts it, and [`fs::ImageFs`] answers it from a [`bcow_erofs::reader::Filesystem`], which
//! reads blocks of a [`bcow::BlockDevice`].
//!
//! ```no_run
//! use std::{path::Path, sync::Arc};
//! use bcow_fuse::{ImageFs, MountOptions, Session};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = std::fs::read("image.erofs")?;
//! let image = bcow_erofs::reader::Filesystem::open(Arc::new(device))?;
//! let fs = ImageFs::new(Arc::new(image));
//! // From here on programs can use the mount. Serving ends when it is unmounted.
//! Session::mount(fs, Arc::default(), Path::new("/mnt"), &MountOptions::default(), 4)?.serve()?;
//! # Ok(())
//! # }
//! ```

mod adapter;
mod any;
mod bind;
mod buffers;
mod callers;
pub mod daemon;
mod direct;
mod disk;
mod error;
mod first_messages;
pub mod fs;
mod fusermount;
#[cfg(feature = "testing")]
mod fuzz;
pub mod growth;
mod helper;
pub mod idle;
pub mod kernel;
mod loop_mount;
pub mod lower;
mod mount;
pub mod mounter;
mod mountinfo;
pub mod options;
mod outcome;
pub mod owners;
mod packets;
mod process;
mod request_threads;
pub mod session;
pub mod shared;
pub mod signals;
pub mod starter;
pub mod stats;
mod takeover;
mod unmount;

pub use any::AnySession;
pub use bcow_union::NodeId;
pub use bind::bind;
pub use direct::mount_files;
pub use error::MountError;
pub use fs::ImageFs;
#[cfg(feature = "testing")]
pub use fuzz::fuzz_arguments;
pub use kernel::KernelSession;
pub use mount::refuse_root;
pub use mountinfo::Driver;
pub use options::MountOptions;
pub use outcome::{Ended, Ending};
pub use session::{Session, Unmounted, Unmounter};
pub use stats::MountStats;
pub use takeover::Handover;
pub use unmount::{MountedImage, WhenBusy, mounted_image, mounted_images, unmount};

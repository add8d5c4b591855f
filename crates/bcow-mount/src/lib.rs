//! What a mount with the *kernel driver* needs of the kernel: a FUSE mount that no path reaches, a
//! loop device, and a file system of the kernel on that device.
//!
//! ```text
//! DIR                      a file system of the kernel: ext4, xfs, btrfs, EROFS   [`filesystem`]
//!  | block requests
//! /dev/loopN               with direct I/O, so that no page is cached twice       [`LoopDevice`]
//!  | reads and writes of one file
//! detached FUSE mount      the file `bcow:PID:NAME`                               [`HiddenMount`]
//!  | requests on /dev/fuse
//! the process of the mount
//! ```
//!
//! A file that holds an EROFS needs none of that below the file system: [`mount_files`].
//!
//! The crate knows nothing of disks. Its user serves the requests, and must do so before it
//! attaches the loop device: the kernel reads the attributes of the file then.
//!
//! ```no_run
//! use bcow_mount::filesystem::{self, AccessTimes, Kind, Settings};
//! use bcow_mount::{Access, HiddenMount, LoopDevice};
//!
//! # fn serve(connection: std::os::fd::OwnedFd) {}
//! # fn main() -> Result<(), bcow_mount::Error> {
//! let (hidden, connection) = HiddenMount::new()?;
//! serve(connection); // in another thread, with a file "disk"
//! let file = hidden.open("disk", Access::ReadWrite)?;
//! let device = LoopDevice::attach(&file, Access::ReadWrite)?;
//! let settings = Settings {
//!     read_only: false,
//!     nosuid: true,
//!     nodev: true,
//!     noexec: false,
//!     access_times: AccessTimes::Off,
//!     sync: false,
//!     discard: true,
//!     commit_seconds: None,
//!     barriers: true,
//! };
//! filesystem::mount(device.path(), Kind::Ext4, "/mnt".as_ref(), settings)?;
//! # Ok(())
//! # }
//! ```

mod apart;
mod direct;
mod error;
pub mod filesystem;
mod freeze;
mod growth;
mod hidden;
mod ioctl;
mod loop_device;
mod memory;
mod name;

pub use apart::{run_apart, run_apart_with};
pub use direct::{file_of_source, mount_files};
pub use error::Error;
pub use freeze::{Freezer, hold_frozen, thaw, while_frozen};
pub use growth::{grow, may_grow, set_size};
pub use hidden::{HiddenMount, close_backing};
pub use loop_device::{Access, LoopDevice, backing_of, is_served};
pub use memory::{Pages, release_heap, serve_writeback};
pub use name::HiddenName;

/// Name that the process of a mount takes while it closes an upper or writes a trace. Commands that
/// wait for its end recognise it by this name.
pub const CLOSING: &std::ffi::CStr = c"bcow-closing";

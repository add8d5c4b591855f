//! Mounts of BCoW images and disks: from the options of a mount to its end, with both drivers.
//!
//! [`MountArgs`] are the options. [`mount::run`] makes a mount, and serves it in this process or in
//! a background process; [`mount::pooled`] has the mounts in the process of a pool. Of each mount,
//! [`mount::fuse`] and [`mount::kernel`] open the content and start the session, and
//! [`bcow_images::running`] lists it for other processes. [`umount`] ends a mount, [`ask`] reads
//! its statistics, and [`grow`] grows its disk.
//!
//! [`bcow_images::upper`] reads the uppers that writable mounts leave behind.
//!
//! A background process, and the process that asks a mount for its statistics, are this program
//! again. So the program must call [`mount::run`] for the arguments `mount ...`, and
//! [`ask::print_statistics`] for the arguments `stats --direct -- DIR`.
//!
//! ```
//! use bcow_mounts::helper::{Caller, Request, translate};
//!
//! // As mount(8) calls its helper for a line of fstab(5).
//! let arguments = ["debian.bcow", "/mnt", "-o", "ro,pool=web"].map(Into::into);
//! let Request::Run(command) = translate(arguments.into_iter(), Caller::Other)? else {
//!     panic!("it asks for a mount");
//! };
//! assert_eq!(command[1..], ["mount", "--pool=web", "-o", "ro", "--", "debian.bcow", "/mnt"]);
//! # Ok::<(), bcow_images::error::CommandError>(())
//! ```

mod args;
pub mod ask;
pub mod control;
pub mod cpus;
mod disk_ledger;
mod error;
pub mod grow;
pub mod heap;
pub mod helper;
mod kernel_upper;
pub mod limits;
pub mod metrics;
pub mod mount;
mod mount_users;
pub mod named_mount;
pub mod nbd_device;
mod pool_name;
mod remote_report;
pub mod umount;

pub use args::MountArgs;
pub use error::failure;
pub use pool_name::PoolName;

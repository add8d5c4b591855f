//! Growth of a disk that is mounted with the kernel driver, and of the file system on it.
//!
//! Another process of root makes the steps: it sets the size of the file behind the loop device,
//! which the process of the mount answers by growing the disk; has the loop device take that size;
//! and asks the kernel to grow the file system. Each step can be repeated, so after an interruption
//! the same call completes the growth.

use std::fs::File;
use std::io;
use std::path::Path;

use bcow_mount::LoopDevice;
use bcow_mount::filesystem::Kind;

use crate::error::MountError;
use crate::mountinfo::Driver;
use crate::unmount::{MountedImage, mounted_image};

/// How far a growth got before an error.
#[derive(Debug, thiserror::Error)]
pub enum GrowError {
    /// The disk and the file system have their old size.
    #[error(transparent)]
    Nothing(MountError),
    /// The disk has grown, the file system has not.
    #[error(transparent)]
    Disk(MountError),
}

/// Grows the disk of `mount`, and the file system on it, to `bytes` bytes. `hidden` is the hidden
/// mount of its process, as a path through `/proc`.
pub fn grow(mount: &MountedImage, hidden: &Path, bytes: u64) -> Result<(), GrowError> {
    let nothing = GrowError::Nothing;
    let grow_disk = |source: io::Error| MountError::GrowDisk {
        path: mount.path.clone(),
        source,
    };
    let Driver::Kernel(name) = &mount.driver else {
        return Err(nothing(grow_disk(io::ErrorKind::Unsupported.into())));
    };
    let mut kinds = Kind::ALL.into_iter();
    let kind = kinds.find(|kind| kind.name() == mount.file_system);
    let kind = kind.ok_or_else(|| nothing(grow_disk(io::ErrorKind::Unsupported.into())))?;
    bcow_mount::may_grow(kind).map_err(|error| nothing(error.into()))?;
    let directory = File::open(&mount.path).map_err(|error| nothing(grow_disk(error)))?;
    // The path leads to the same mount since then, or the next step finds another loop device.
    match mounted_image(&mount.path) {
        Ok(now) if now.device == mount.device => {}
        Ok(_) => return Err(nothing(MountError::NotMounted(mount.path.clone()))),
        Err(error) => return Err(nothing(error)),
    }
    let device = LoopDevice::of_mount(Path::new(&mount.source), name);
    let device = device.map_err(|error| nothing(error.into()))?;
    bcow_mount::set_size(hidden, name, bytes).map_err(|error| nothing(grow_disk(error)))?;
    let grown = device
        .take_size_of_file()
        .and_then(|()| bcow_mount::grow(&directory, kind, bytes));
    grown.map_err(|error| GrowError::Disk(error.into()))
}

/// Grows the mounted file system that has `directory` to the size of its disk, in the process that
/// serves the disk.
pub(crate) fn grow_own(directory: &Path, kind: Kind, bytes: u64) -> Result<(), MountError> {
    let grown = bcow_mount::run_apart(|| {
        let directory = File::open(directory).map_err(|source| MountError::Mountpoint {
            path: directory.to_owned(),
            source,
        })?;
        Ok(bcow_mount::grow(&directory, kind, bytes)?)
    });
    grown.unwrap_or_else(|| Err(MountError::no_thread()))
}

//! Whether `bcow` serves a mount, and its end.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use crate::host::{At, HostError};

/// The state of a directory on which `bcow` mounts.
#[derive(Debug, PartialEq, Eq)]
pub enum MountState {
    /// Nothing is mounted there.
    NotMounted,
    /// A process serves the mount.
    Served,
    /// Its process has ended.
    Dead,
}

/// Finds out the state of a directory on which only `bcow` mounts.
pub fn state_of(path: &Path) -> Result<MountState, HostError> {
    // The kernel answers attributes from its caches, but it sends statfs to the process.
    match rustix::fs::statfs(path) {
        Ok(_) => {}
        Err(Errno::NOENT) => return Ok(MountState::NotMounted),
        Err(Errno::NOTCONN | Errno::CONNABORTED) => return Ok(MountState::Dead),
        Err(errno) => return Err(errno).at("examine", path),
    }
    let above = path.parent().unwrap_or(path);
    let device = |path: &Path| {
        fs::metadata(path)
            .map(|found| found.dev())
            .at("examine", path)
    };
    if device(path)? == device(above)? {
        Ok(MountState::NotMounted)
    } else {
        Ok(MountState::Served)
    }
}

/// Unmounts all that is mounted at a path; a link there is not followed. Does nothing if that is
/// nothing.
pub fn unmount(path: &Path, flags: UnmountFlags) -> Result<(), HostError> {
    loop {
        match rustix::mount::unmount(path, flags | UnmountFlags::NOFOLLOW) {
            Ok(()) => {}
            Err(Errno::INVAL | Errno::NOENT) => return Ok(()),
            // An ordinary user gets this also where nothing is mounted.
            Err(Errno::PERM) if matches!(state_of(path), Ok(MountState::NotMounted)) => {
                return Ok(());
            }
            Err(errno) => return Err(errno).at("unmount", path),
        }
    }
}

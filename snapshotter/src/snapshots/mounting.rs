//! The mounts of layers at directories of snapshots.
//!
//! Each is a mount by `bcow`, in a process of its own or in that of a pool. It does not need this
//! process: the next one finds it at its directory.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use bcow_tool::host::make_private;
use bcow_tool::registry::{explained, on_one_line};
use bcow_tool::{At, HostError, MountState, Tool, state_of, unmount};
use rustix::mount::{MountPropagationFlags, UnmountFlags, mount_change};

use crate::error::Error;
use crate::protocol::Mount;

/// The directory of a snapshot that is the source of containerd's bind mounts.
pub const ROOT: &str = "root";
/// The directory of a snapshot with the layers below a layer that is unpacked.
pub const LOWER: &str = "lower";

/// Makes the mounts of a snapshot.
pub struct Mounter<'s> {
    pub tool: &'s Tool,
    /// The name of the snapshot.
    pub snapshot: &'s str,
    /// The image in a registry that has the lowest layers, and the file with its credentials.
    pub remote: Option<(&'s str, PathBuf)>,
    /// Counts the mounts that are made again.
    pub made_again: &'s AtomicU64,
}

impl Mounter<'_> {
    /// Mounts layers at a directory, unless they are mounted there.
    pub fn ensure(&self, layers: &Mount, directory: &Path) -> Result<(), Error> {
        let (snapshot, at) = (self.snapshot, directory.display());
        let state = state_of(directory)?;
        // An attempt to mount has made the directory, at least.
        let is_again = state != MountState::NotMounted || directory.is_dir();
        match state {
            MountState::Served => return Ok(()),
            MountState::Dead => {
                tracing::error!(
                    "snapshot {snapshot:?}: the mount at {at} has no process any more; it is made \
                     again"
                );
                end(directory)?;
            }
            MountState::NotMounted if is_again => {
                tracing::info!("snapshot {snapshot:?}: the mount at {at} is made again");
            }
            MountState::NotMounted => make_private(directory)?,
        }
        self.tool
            .mount(&layers.source, directory, &layers.options.join(","))
            .map_err(|error| {
                let why = match &self.remote {
                    Some((image, auth_file)) => explained(&error, image, auth_file),
                    None => on_one_line(&error),
                };
                let source = &layers.source;
                Error::Mount(format!(
                    "snapshot {snapshot:?}: cannot mount {source} at {at}: {why}"
                ))
            })?;
        if is_again {
            self.made_again.fetch_add(1, Ordering::Relaxed);
        }
        // What is mounted inside a bind mount of it must not appear here.
        let private = MountPropagationFlags::PRIVATE;
        Ok(mount_change(directory, private).at("make private", directory)?)
    }
}

/// Ends the mounts at a directory. Bind mounts of it, and programs that use it, keep the file
/// system until they end.
pub fn end(directory: &Path) -> Result<(), HostError> {
    unmount(directory, UnmountFlags::DETACH)
}

/// Ends the mounts in the directory of a snapshot.
pub fn end_in(snapshot: &Path) -> Result<(), HostError> {
    // A link would lead to mounts of others.
    if snapshot
        .symlink_metadata()
        .is_ok_and(|found| found.is_dir())
    {
        end(&snapshot.join(ROOT))?;
        end(&snapshot.join(LOWER))?;
    }
    Ok(())
}

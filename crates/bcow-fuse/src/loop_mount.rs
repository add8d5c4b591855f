//! Where a file system of the kernel is mounted.

use std::path::PathBuf;

use bcow_mount::{HiddenName, backing_of, run_apart};

use crate::mountinfo;
use crate::unmount::{Unmounted, unmount_places};

/// A mount of the kernel on a loop device of bcow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoopMount {
    /// The canonical mountpoint.
    pub target: PathBuf,
    /// The device number of the mount. Another mount may have it after this one has ended.
    pub device: Option<String>,
    /// The loop device and the file behind it, by which the mount is known to be this one.
    pub loop_device: PathBuf,
    /// See [`LoopMount::loop_device`].
    pub name: HiddenName,
}

impl LoopMount {
    /// The mount that was just made at `target`.
    pub(crate) fn new(target: PathBuf, loop_device: PathBuf, name: HiddenName) -> Self {
        let listed = mountinfo::mounted_at(&target).ok().flatten();
        LoopMount {
            device: listed.map(|entry| entry.device),
            loop_device,
            name,
            target,
        }
    }

    /// The device number; empty if the kernel does not list the mount.
    pub(crate) fn number(&self) -> &str {
        self.device.as_deref().unwrap_or_default()
    }

    /// Whether the loop device still has the file of this mount.
    pub fn exists(&self) -> bool {
        backing_of(&self.loop_device).as_ref() == Some(&self.name)
    }

    /// Unmounts if the mount still exists. Safe to call several times.
    pub fn unmount(&self) -> Unmounted {
        if self.exists() {
            unmount_in_use(self.device.as_deref())
        } else {
            Unmounted::Gone
        }
    }
}

/// Unmounts the file system with this device number. The kernel may wait for the process that
/// serves it, so no descriptor of this process may be in the way.
pub(crate) fn unmount_in_use(device: Option<&str>) -> Unmounted {
    run_apart(|| unmount_places(device)).unwrap_or(Unmounted::Stays)
}

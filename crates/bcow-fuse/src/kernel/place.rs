//! Where a file system of the kernel is mounted, and how another process continues to serve it.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use bcow_mount::{HiddenName, backing_of, run_apart};
use rustix::io::Errno;

use crate::disk::DiskFiles;
use crate::mountinfo;
use crate::outcome::Outcome;
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
    pub(super) fn new(target: PathBuf, loop_device: PathBuf, name: HiddenName) -> Self {
        let listed = mountinfo::mounted_at(&target).ok().flatten();
        LoopMount {
            device: listed.map(|entry| entry.device),
            loop_device,
            name,
            target,
        }
    }

    /// The device number; empty if the kernel does not list the mount.
    pub(super) fn number(&self) -> &str {
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
fn unmount_in_use(device: Option<&str>) -> Unmounted {
    run_apart(|| unmount_places(device)).unwrap_or(Unmounted::Stays)
}

/// A mount with the kernel driver that another process can serve.
#[derive(Debug)]
pub struct DiskHandover {
    /// The connection of the hidden mount to the kernel.
    pub connection: OwnedFd,
    /// The hidden mount.
    pub hidden: OwnedFd,
    pub place: LoopMount,
    /// The flags of the protocol that the kernel and the first process agreed on.
    pub agreed: u64,
    /// Of a disk: what another process needs to continue with it.
    pub disk: Option<DiskFiles>,
    /// The pipe for the outcome. `bcow umount` may have it open.
    pub outcome: Option<OwnedFd>,
}

impl DiskHandover {
    /// Unmounts a mount that no process serves. Programs that use it get errors. No other process
    /// may keep the descriptors: the kernel would wait for answers.
    pub fn unmount(self) -> Unmounted {
        // Requests fail from now on, so the kernel does not wait for answers.
        drop((self.connection, self.hidden));
        self.place.unmount()
    }

    /// Reports how the disk of a mount that has ended was closed.
    pub fn report_end(self, has_all: bool) {
        if let Ok(outcome) = Outcome::of(self.outcome) {
            outcome.report(if has_all { Ok(()) } else { Err(Errno::IO) });
        }
    }

    /// As [`DiskHandover::unmount`], for a process that knows only the device number.
    pub fn unmount_by_number(
        connection: OwnedFd,
        hidden: Option<OwnedFd>,
        device: Option<&str>,
    ) -> Unmounted {
        drop((connection, hidden));
        unmount_in_use(device)
    }
}

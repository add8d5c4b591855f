//! How another process continues to serve a mount with the kernel driver.

use std::os::fd::OwnedFd;

use bcow_union::HeldUpper;
use rustix::io::Errno;

use crate::disk::DiskFiles;
use crate::loop_mount::{LoopMount, unmount_in_use};
use crate::outcome::Outcome;
use crate::unmount::Unmounted;

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
    /// The upper that the disk belongs to. The process that takes over has opened it again already.
    pub upper: Option<HeldUpper>,
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

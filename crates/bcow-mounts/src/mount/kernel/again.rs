//! A mount with the kernel driver whose process ends: the content is opened again, for another
//! process.

use std::path::Path;
use std::sync::Arc;

use bcow::lock::LockError;
use bcow::operation::LiveDisk;
use bcow::{LockFileError, LockedFile};
use bcow_fuse::kernel::{Device, DiskFiles, DiskHandover};
use bcow_fuse::{KernelSession, MountOptions};
use bcow_images::disks::{cannot_lock, is_writable_disk, lock_note};
use bcow_images::error::{CommandError, Context};
use bcow_images::running::Service;

use super::super::driver::Way;
use super::super::fuse::Mounted;
use super::super::host::Host;
use super::{Asked, Opened, disk_path, open_asked, open_unchecked};
use crate::args::MountArgs;
use crate::disk_ledger::LedgerUse;
use crate::error::failure;
use bcow_images::image::Messages;
use bcow_images::kernel_upper::is_kernel_upper;
use bcow_images::upper::holder_of_note;

/// Opens the content of a mount, after the end of the process that has served it. The kernel has
/// parsed its metadata, so that is not checked again.
pub fn open(
    args: &MountArgs,
    way: &Way,
    options: &MountOptions,
    host: &Host<'_>,
    ledger_use: LedgerUse<'_>,
    ui: &dyn Messages,
) -> Result<Opened, CommandError> {
    match (way, args.upper.path()) {
        (Way::Upper { reason }, Some(upper)) => {
            require_upper(upper)?;
            // The disk has its size, which another command may have changed during the mount.
            let asked = Asked {
                size: None,
                read_only: options.asks_for_read_only(),
            };
            open_asked(args, host, upper, reason.clone(), asked, ledger_use, ui)
        }
        _ => match open_unchecked(args, host, ledger_use)? {
            Some((opened, _)) => Ok(opened),
            None => Err(CommandError::new("the kernel cannot mount it any more")),
        },
    }
}

/// Checks that the content of a mount, which this process still serves, can be opened again.
/// Returns the identity of the image; `None` for a disk.
pub fn check(args: &MountArgs, host: &Host<'_>) -> Result<Option<[u8; 32]>, CommandError> {
    if let Some(upper) = args.upper.path() {
        require_upper(upper)?;
    } else if !args.has_layers() && is_writable_disk(&args.image) {
        return require_own_lock(disk_path(args)).map(|()| None);
    }
    let options = args.open_options(&host.cache);
    let image = args.open_image(&options)?;
    Ok(Some(image.identity()))
}

/// An upper that is gone would be begun again.
fn require_upper(upper: &Path) -> Result<(), CommandError> {
    if is_kernel_upper(upper) {
        Ok(())
    } else {
        Err(CommandError::new(format!(
            "{} is not the upper of the mount any more",
            upper.display()
        )))
    }
}

/// Fails unless the file at `disk` is the one that this process has locked.
fn require_own_lock(disk: &Path) -> Result<(), CommandError> {
    match LockedFile::open(disk, &lock_note("pool restart")) {
        Err(LockFileError::Lock(LockError::Writer(note)))
            if holder_of_note(&note) == Some(std::process::id()) =>
        {
            Ok(())
        }
        Ok(_) => Err(CommandError::new(format!(
            "another file has the name {} now",
            disk.display()
        ))),
        Err(error) => Err(cannot_lock(disk, disk, &error)),
    }
}

impl Opened {
    /// What the next process needs to continue with the disk.
    pub fn disk_files(&self) -> Option<&DiskFiles> {
        self.disk_files.as_ref()
    }

    /// Closes a disk whose mount has ended.
    pub fn close(self) -> Result<(), CommandError> {
        let Device::Writable(disk) = self.device else {
            return Ok(());
        };
        let closed = Arc::into_inner(disk).map_or(Ok(()), LiveDisk::close);
        closed.context(|| format!("cannot close the disk {}", self.path.display()))
    }

    /// Takes over a mount of this content from a process that has ended.
    pub fn take_over(
        self,
        args: &MountArgs,
        host: &Host<'_>,
        handover: DiskHandover,
        service: Service,
    ) -> Result<Mounted, CommandError> {
        let start = |disk, stats, threads| {
            KernelSession::take_over(disk, stats, handover, threads)
                .map_err(|error| failure(&error))
        };
        let describe = |session: &KernelSession| {
            Ok(Service {
                owners: None,
                descriptor: session.descriptor(),
                ..service
            })
        };
        self.serve(args, host, start, describe)
    }
}

//! How the mounts of a pool pass from one process to the next.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::ErrorKind::NotFound;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bcow::format::hex;
use bcow_fuse::kernel::{DiskFiles, DiskHandover};
use bcow_fuse::shared::SharedHandover;
use bcow_fuse::{AnySession, Handover, Session};
use bcow_images::error::{CommandError, Context};
use bcow_mounts::mount::fuse::{Mounted, Opened};
use bcow_mounts::mount::host::UpperUse;
use bcow_mounts::mount::kernel;
use bcow_mounts::mount::pooled::{self, PAUSES};
use bcow_mounts::{MountArgs, failure};
use bcow_union::HeldUpper;

use super::{Collected, MountInProgress, Pool, log_failure, side_by_side};
use crate::asked::{Asked, OwnDirectory};
use crate::given::Kept;
use crate::link::Packet;
use crate::record::{DiskRecord, MountRecord};

impl Pool {
    /// Gives the supervisor the data with which another process can take over this mount. Returns
    /// the record, or `None` if no other process can take over the mount.
    pub(super) fn keep(&self, number: u64, mounted: &Mounted, asked: Asked) -> Option<MountRecord> {
        self.try_keep(number, mounted, asked)
            .unwrap_or_else(|error| {
                log_failure(&error);
                None
            })
    }

    fn try_keep(
        &self,
        number: u64,
        mounted: &Mounted,
        asked: Asked,
    ) -> Result<Option<MountRecord>, CommandError> {
        let (identity, service) = (hex(&mounted.identity), mounted.service.clone());
        let (record, kept) = match &mounted.session {
            AnySession::Fuse(session) => {
                let Some(handover) = session.hand_over().map_err(|error| failure(&error))? else {
                    return Ok(None);
                };
                let target = handover.target.into();
                let record = MountRecord::new(asked, target, handover.agreed, identity, service)
                    .with_slots(session.slots());
                let kept = Kept {
                    disk: None,
                    connection: handover.connection,
                    record: store(&record)?,
                    device: handover.device,
                    is_disk: false,
                    companion: handover.ledger,
                    upper: handover.upper,
                    outcome: handover.outcome,
                };
                (record, kept)
            }
            AnySession::Kernel(session) => {
                let Some(handover) = session.hand_over().map_err(|error| failure(&error))? else {
                    return Ok(None);
                };
                let (target, _) = session.place();
                let agreed = handover.agreed;
                let record = MountRecord::new(asked, target.into(), agreed, identity, service)
                    .with_kernel_driver(&handover);
                let kept = Kept {
                    disk: handover.disk,
                    connection: handover.connection,
                    record: store(&record)?,
                    device: handover.place.device,
                    is_disk: true,
                    companion: Some(handover.hidden),
                    upper: handover.upper,
                    outcome: handover.outcome,
                };
                (record, kept)
            }
        };
        let sent = kept.send(&self.link, number);
        Ok(sent.is_ok().then_some(record))
    }

    /// Gives the supervisor what another process needs to continue with a disk from now on.
    pub(super) fn keep_disk(&self, number: u64, files: &DiskFiles) {
        let descriptors = [files.file.as_fd(), files.ledger.as_fd()];
        self.replace_kept(number, &Packet::Disk { number }, &descriptors);
    }

    fn replace_kept(&self, number: u64, packet: &Packet, descriptors: &[BorrowedFd<'_>]) {
        if !self.notify_supervisor(packet, descriptors) {
            // With the earlier ones, another process would lose the changes of the next requests.
            self.release(number);
        }
    }

    /// The mount has ended, or no other process can continue it.
    pub(super) fn release(&self, number: u64) {
        self.notify_supervisor(&Packet::Release { number }, &[]);
    }

    /// Takes over the mounts of the previous process, and the hidden mount of the files that they
    /// share. Mounts whose image cannot be opened again are unmounted. Fails if the hidden mount
    /// cannot be taken over: another process may be able to.
    pub fn take_over(
        self: &Arc<Self>,
        mounts: BTreeMap<u64, Kept>,
        shared: Option<SharedHandover>,
    ) -> Result<(), CommandError> {
        if let (Some(files), Some(shared)) = (&self.files, shared) {
            let taken_over = files.take_over(shared);
            taken_over.map_err(|error| failure(&error))?;
        }
        self.state().next = mounts.last_key_value().map_or(0, |(number, _)| number + 1);
        side_by_side(mounts.into_iter(), |(number, kept)| {
            if let Err(error) = self.take_over_one(number, kept) {
                log_failure(&error);
                self.lost.fetch_add(1, Ordering::Relaxed);
                self.release(number);
            }
        });
        if let Some(files) = &self.files {
            files.end_takeover();
        }
        Ok(())
    }

    fn take_over_one(self: &Arc<Self>, number: u64, kept: Kept) -> Result<(), CommandError> {
        let record = MountRecord::load(&kept.record).context(|| "cannot read its record");
        let error = match (record, kept.companion.is_some()) {
            (Ok(record), true) if record.disk.is_some() => {
                return self.take_over_disk(number, record, kept);
            }
            (record, _) if !kept.is_disk => return self.take_over_fuse(number, record, kept),
            (Err(error), _) => error,
            (Ok(_), false) => CommandError::new("its hidden mount is missing"),
            (Ok(_), true) => CommandError::new("its record names no disk"),
        };
        self.release(number);
        let place = kept.device.clone().unwrap_or_default();
        kept.unmount();
        Err(self.not_taken_over(&place, &error))
    }

    fn take_over_fuse(
        self: &Arc<Self>,
        number: u64,
        record: Result<MountRecord, CommandError>,
        kept: Kept,
    ) -> Result<(), CommandError> {
        let (ledger, held) = (kept.companion, kept.upper);
        let held = held.as_ref();
        let mut upper = None;
        let mut handover = Handover {
            connection: kept.connection,
            target: PathBuf::new(),
            device: kept.device,
            agreed: 0,
            ledger: None,
            upper: None,
            outcome: kept.outcome,
        };
        let opened = record.and_then(|record| {
            handover.target = OsString::from(record.target.clone()).into();
            handover.agreed = record.agreed;
            upper.clone_from(&record.service.upper);
            let mount = MountInProgress::of_taken_over(self);
            let slots = record.slots();
            let upper_use = match (&record.service.upper, &ledger) {
                (Some(_), Some(ledger)) => UpperUse::TakeOver {
                    ledger: ledger.as_fd(),
                    upper: held,
                    slots: &slots,
                },
                (Some(upper), None) => {
                    return Err(CommandError::new(format!(
                        "the ledger of its upper {upper} is missing"
                    )));
                }
                (None, _) => UpperUse::None,
            };
            let opened = self.open_again(&record, &PAUSES, upper_use)?;
            Ok((mount, opened, record))
        });
        let place = handover.target.display().to_string();
        match opened {
            Ok((mount, opened, record)) => {
                let mounted = opened
                    .take_over(&record.args(held)?, handover, record.service(held))
                    .map_err(|error| self.not_taken_over(&place, &error))?;
                let session = mounted.session.fuse();
                let ledger = session.map_or(Ok(None), Session::ledger);
                if let Some(ledger) = ledger.map_err(|error| failure(&error))? {
                    // Before this process answers a request: the supervisor still has the ledger of
                    // the previous process, which would miss the changes of that request.
                    self.replace_kept(number, &Packet::Companion { number }, &[ledger.as_fd()]);
                }
                mount.arrive(number, mounted, Some(record))
            }
            // It was unmounted here, and its upper was removed. Another mount namespace, of a
            // program that is ending, may still have the mount.
            Err(_) if was_removed(upper.as_deref(), held) && is_unmounted(&handover) => {
                self.release(number);
                Ok(())
            }
            Err(error) => {
                handover.unmount();
                Err(self.not_taken_over(&place, &error))
            }
        }
    }

    fn take_over_disk(
        self: &Arc<Self>,
        number: u64,
        record: MountRecord,
        kept: Kept,
    ) -> Result<(), CommandError> {
        let (Some(disk), Some(hidden)) = (&record.disk, kept.companion) else {
            return Ok(());
        };
        let (files, upper) = (kept.disk, kept.upper);
        let held = upper.as_ref();
        let target = PathBuf::from(OsString::from(record.target.clone()));
        let target = target.display().to_string();
        let place = record.place(disk).context(|| "cannot read its record")?;
        let handover = DiskHandover {
            connection: kept.connection,
            hidden,
            place: place.clone(),
            agreed: record.agreed,
            disk: None,
            upper: None,
            outcome: kept.outcome,
        };
        if !place.exists() {
            // The loop device has closed the file: the mount has ended meanwhile. The disk may lack
            // changes that the previous process has acknowledged; they are in the ledger.
            let closed = if disk.is_writable {
                self.open_disk_again(&record, disk, files.as_ref(), held)
                    .and_then(|(_, opened)| opened.close())
            } else {
                Ok(())
            };
            // Before the pipe for the outcome: another process may use the upper and the disk then.
            drop((files, upper));
            self.release(number);
            handover.report_end(closed.is_ok());
            return closed;
        }
        let mount = MountInProgress::of_taken_over(self);
        let opened = self.open_disk_again(&record, disk, files.as_ref(), held);
        // The opened disk has descriptors of its own.
        drop(files);
        if opened.is_err() {
            // The supervisor closes its connection too. The kernel waits for answers as long as any
            // process has the connection.
            self.release(number);
        }
        match opened {
            Ok((args, opened)) => {
                if let Some(files) = opened.disk_files() {
                    // Before this process answers a request. If the one before was killed while it
                    // took a snapshot, the supervisor still has the disk below.
                    self.keep_disk(number, files);
                }
                let service = record.service(held);
                let mounted = opened
                    .take_over(&args, &self.host(), handover, service)
                    .map_err(|error| {
                        // The session has closed the connection.
                        self.release(number);
                        place.unmount();
                        self.not_taken_over(&target, &error)
                    })?;
                mount.arrive(number, mounted, Some(record))
            }
            Err(error) => {
                handover.unmount();
                Err(self.not_taken_over(&target, &error))
            }
        }
    }

    /// The error of a mount that this process cannot take over.
    fn not_taken_over(&self, place: &str, error: &CommandError) -> CommandError {
        let name = &self.name;
        let lost = format!("pool {name}: cannot take over {place}, which is unmounted");
        let lost = CommandError::new(lost).caused_by_text(error.message());
        let causes = error.causes().iter().cloned();
        causes.fold(lost, CommandError::caused_by_text)
    }

    /// Opens the image of a mount again. It must be the same image: the kernel has cached its names
    /// and inodes.
    pub(super) fn open_again(
        &self,
        record: &MountRecord,
        pauses: &[Duration],
        upper_use: UpperUse<'_>,
    ) -> Result<Opened, CommandError> {
        // If the directory is gone, a relative path leads to no image or to another one.
        let _place = OwnDirectory::enter(record.asked.directory.clone(), None).ok();
        let held = match upper_use {
            UpperUse::TakeOver { upper, .. } => upper,
            UpperUse::New | UpperUse::None => None,
        };
        let args = record.args(held)?;
        let (host, messages) = (self.host(), Collected::default());
        let opened = pooled::open_again(&args, &host, pauses, upper_use, &messages)?;
        if hex(&opened.identity) == record.identity {
            Ok(opened)
        } else {
            Err(another_image())
        }
    }

    /// Opens the content of a mount with the kernel driver again. A writable disk must have all
    /// changes that the previous process has acknowledged, because the kernel relies on them. So
    /// the disk has stayed locked, and has a ledger.
    fn open_disk_again(
        &self,
        record: &MountRecord,
        disk: &DiskRecord,
        files: Option<&DiskFiles>,
        held: Option<&HeldUpper>,
    ) -> Result<(MountArgs, kernel::Opened), CommandError> {
        let _place = OwnDirectory::enter(record.asked.directory.clone(), None).ok();
        let args = record.args(held)?;
        if disk.is_writable && files.is_none() {
            return Err(CommandError::new("the ledger of its disk is missing"));
        }
        let files = files.map(|files| (files, held));
        let opened = pooled::open_disk_again(&args, &self.host(), files, &Collected::default())?;
        // The identity of a disk without an upper changes with its content.
        let is_image = record.service.upper.is_some() || !disk.is_writable;
        if is_image && hex(&opened.identity) != record.identity {
            Err(another_image())
        } else {
            Ok((args, opened))
        }
    }
}

fn store(record: &MountRecord) -> Result<OwnedFd, CommandError> {
    record
        .store()
        .context(|| "cannot store the record of a mount")
}

/// Whether the upper of a mount was removed: the one that was kept, or the one at the path.
fn was_removed(path: Option<&str>, held: Option<&HeldUpper>) -> bool {
    let is_missing = |path: &str| {
        let found = std::fs::symlink_metadata(path);
        matches!(found, Err(error) if error.kind() == NotFound)
    };
    held.map_or_else(|| path.is_some_and(is_missing), HeldUpper::is_removed)
}

/// Whether a mount has ended, or is at least not visible to this process.
fn is_unmounted(handover: &Handover) -> bool {
    let is_visible = || {
        let (Some(device), Ok(mounts)) = (&handover.device, bcow_fuse::mounted_images()) else {
            return true;
        };
        mounts.iter().any(|mount| mount.device == *device)
    };
    handover.has_ended() || !is_visible()
}

pub(super) fn another_image() -> CommandError {
    CommandError::new("another image has its place now")
}

//! The kernel driver: a file system of the kernel on a disk that this process serves.
//!
//! The order of the steps: the disk is open and recovered; its file is served on a hidden mount; a
//! loop device opens the file; the kernel mounts the file system of the loop device. Each step can
//! fail, and then the steps before it are undone in reverse.
//!
//! A pool can replace its process, as planned or after a crash. The kernel relies on all that it
//! has written. Between two flushes, the tables of a disk are in the memory of the process; so a
//! disk in a pool has a ledger ([`bcow::Ledger`]), with which the next process continues. An image
//! never changes.
//!
//! At the end, the kernel unmounts the file system, which writes back all pages; detaches the loop
//! device, because nothing has it open any more; and closes the file. This process sees the close,
//! ends its service, and makes the disk durable.

mod handover;
mod service;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Weak};

use bcow::operation::{LiveDisk, Monitor, Removed, SnapshotError};
use bcow::{BlockDevice, Disk, Ledger, WritableDevice};
use bcow_mount::filesystem::{self, HEAD_BYTES, Settings};
use bcow_mount::{Access, Freezer, HiddenMount, HiddenName, run_apart};
use bcow_union::HeldUpper;
use bcow_union::errors::ErrorLog;
use bcow_union::log::{self, Severity};
use parking_lot::Mutex;
use rustix::io::{DupFlags, Errno};

use crate::adapter::disk::DiskFile;
use crate::disk::{Lifetime, OnClosed};
use crate::error::MountError;
use crate::growth;
use crate::idle;
use crate::mount::usable_mountpoint;
use crate::mounter::{self, Mounter, Wanted};
use crate::options::{MountOptions, no_interval};
use crate::outcome::Outcome;
use crate::process::show_closing;
use crate::session::{Closer, Unmounter};
use crate::signals::Signals;
use crate::stats::{DiskUse, MountStats};
use crate::unmount::Unmounted;
use service::Service;

pub use crate::loop_mount::LoopMount;
pub use handover::DiskHandover;

pub use crate::disk::{Barriers, Device, DiskFiles, DiskMount};
pub use bcow_mount::filesystem::Kind;

/// Finds the file system on a device.
pub fn detect(device: &dyn BlockDevice) -> Result<Kind, MountError> {
    Ok(filesystem::detect(&head(device)?)?)
}

/// The start of a device, by which its file system is known.
pub fn head(device: &dyn BlockDevice) -> Result<Vec<u8>, MountError> {
    let mut head = vec![0; device.size().min(HEAD_BYTES as u64) as usize];
    device.read_at(0, &mut head).map_err(MountError::ReadDisk)?;
    Ok(head)
}

/// A mount with the kernel driver. Dropping it unmounts; if the mount is in use, it unmounts
/// lazily, and programs that use it get errors when this process ends.
pub struct KernelSession {
    mount: Arc<KernelMount>,
    service: Service,
    kind: Kind,
    /// Known until the disk is closed.
    disk: Option<Arc<LiveDisk>>,
    path: PathBuf,
    files: Arc<KeptFiles>,
    /// The upper, for another process.
    held: Option<Arc<HeldUpper>>,
    outcome: Arc<Outcome>,
    release: Arc<Release>,
    /// Whether another process has the descriptors of the hidden mount.
    is_shared: AtomicBool,
}

/// Releases what belongs to a disk, once: at the end of the session, or of its process. A leaf
/// lock; it is not held during the release.
struct Release(Mutex<Option<OnClosed>>);

/// What another process needs to continue with the disk. The lock is held while a snapshot is
/// taken, which replaces the files.
struct KeptFiles(Mutex<Option<DiskFiles>>);

/// Takes snapshots of the disk of a [`KernelSession`] while it is served.
#[derive(Clone)]
pub struct DiskSnapshots {
    mount: Arc<KernelMount>,
    disk: Weak<LiveDisk>,
    files: Arc<KeptFiles>,
    path: PathBuf,
}

/// Stops a [`KernelSession`] from another thread, for a process that takes it over.
#[derive(Clone)]
pub struct DiskStopper {
    mount: Arc<KernelMount>,
    disk: Weak<LiveDisk>,
    held: Weak<HeldUpper>,
    release: Arc<Release>,
    path: PathBuf,
}

/// The file system that the kernel has mounted.
#[derive(Debug)]
struct KernelMount {
    place: LoopMount,
    lifetime: Arc<Lifetime>,
    /// Has made the mount, if this process may not.
    mounter: Option<Mounter>,
}

/// A mount with the kernel driver that is about to be made.
pub struct NewMount {
    disk: DiskMount,
    target: PathBuf,
    kind: Kind,
    settings: Settings,
    /// The hidden mount, and its connection to the kernel.
    hidden: (HiddenMount, OwnedFd),
}

impl NewMount {
    /// Checks that the file system on `disk` can be mounted at `target`. Afterwards, a process with
    /// a [`Mounter`] needs no right to mount.
    pub fn prepare(
        disk: DiskMount,
        target: &Path,
        options: &MountOptions,
    ) -> Result<Self, MountError> {
        let target = usable_mountpoint(target)?;
        let kind = detect(disk.device.block_device())?;
        let settings = options.for_kernel(&disk)?;
        if settings.commit_seconds.is_some() && !matches!(kind, Kind::Ext4 | Kind::Btrfs) {
            return Err(no_interval());
        }
        let hidden = HiddenMount::new()?;
        Ok(NewMount {
            disk,
            target,
            kind,
            settings,
            hidden,
        })
    }

    pub fn disk(&self) -> &DiskMount {
        &self.disk
    }

    /// Mounts. `threads` threads (at least one) serve the disk and count their requests in `stats`.
    /// Programs can use the mount once this returns.
    pub fn mount(
        self,
        stats: Arc<MountStats>,
        threads: usize,
        mounter: Option<Mounter>,
    ) -> Result<KernelSession, MountError> {
        let NewMount {
            disk,
            target,
            kind,
            settings,
            hidden,
        } = self;
        let access = match disk.device {
            Device::Writable(_) => Access::ReadWrite,
            Device::ReadOnly(_) => Access::ReadOnly,
        };
        let lifetime = Arc::new(Lifetime::default());
        let name = HiddenName::of(disk.upper.as_ref().unwrap_or(&disk.path));
        let errors = Arc::new(ErrorLog::default());
        let file = disk_file(&disk, &name, &stats, &errors, &lifetime);
        // Nothing may fail after the mount: the end of the service would wait for the end of the
        // mount.
        let outcome = Outcome::new()?;
        let service = Service::start(file, threads, hidden)?;
        let mounted = match &mounter {
            Some(mounter) => {
                let wanted = Wanted {
                    kind: kind.name().to_owned(),
                    name: name.to_string(),
                    is_writable: access == Access::ReadWrite,
                    has_barriers: disk.barriers == Barriers::On,
                };
                service.with_hidden(|hidden| mounter.mount(wanted, hidden.as_fd()))
            }
            None => service
                .apart(|hidden| mounter::mount(hidden, &name, access, kind, &target, settings)),
        };
        // The kernel says EIO if the disk fails a write, which the journal needs for example.
        let attached = mounted.map_err(|error| match lifetime.lost() {
            Some(errno) => MountError::WriteDisk {
                disk: disk.path.clone(),
                source: errno.into(),
            },
            None => error,
        })?;
        tracing::info!(
            "{} on {}, direct I/O: {}",
            kind.name(),
            attached.device.display(),
            attached.has_direct_io
        );
        let mount = KernelMount {
            place: LoopMount::new(target, attached.device, name),
            lifetime,
            mounter,
        };
        Ok(KernelSession::on(
            disk, kind, mount, service, &stats, &errors, outcome,
        ))
    }
}

impl KernelSession {
    /// Takes over a mount whose process has ended. The content must be that of that process. The
    /// kernel sends the requests again that it has not answered. Another process still has the
    /// descriptors of the mount.
    pub fn take_over(
        disk: DiskMount,
        stats: Arc<MountStats>,
        handover: DiskHandover,
        threads: usize,
    ) -> Result<Self, MountError> {
        let DiskHandover {
            connection,
            hidden,
            place,
            agreed,
            disk: _,
            upper: _,
            outcome,
        } = handover;
        let kind = detect(disk.device.block_device())?;
        let lost = match &disk.device {
            Device::Writable(disk) => disk.with(|disk| disk.ledger().map(Ledger::lost)),
            Device::ReadOnly(_) => None,
        };
        let lost = lost.transpose().map_err(MountError::Ledger)?.flatten();
        let lifetime = Arc::new(Lifetime::taken_over(lost.map(Errno::from_raw_os_error)));
        let errors = Arc::new(ErrorLog::default());
        let file = disk_file(&disk, &place.name, &stats, &errors, &lifetime);
        // Nothing may fail after the beginning of the service: its end would wait for that of the
        // connection.
        let outcome = Outcome::of(outcome)?;
        let service = Service::take_over(file, threads, hidden, connection, agreed)?;
        let mount = KernelMount {
            place,
            lifetime,
            mounter: None,
        };
        let session = Self::on(disk, kind, mount, service, &stats, &errors, outcome);
        session.is_shared.store(true, Relaxed);
        Ok(session)
    }

    fn on(
        disk: DiskMount,
        kind: Kind,
        mount: KernelMount,
        service: Service,
        stats: &Arc<MountStats>,
        errors: &Arc<ErrorLog>,
        outcome: Outcome,
    ) -> Self {
        let size = disk.device.block_device().size();
        let writable = match disk.device {
            Device::Writable(disk) => Some(disk),
            Device::ReadOnly(_) => None,
        };
        stats.set_mounted(&mount.place.target, errors);
        stats.set_disk(DiskUse {
            disk: writable.as_ref().map_or_else(Weak::new, Arc::downgrade),
            path: disk.path.clone(),
            upper: disk.upper,
            size,
            filesystem: kind.name(),
            loop_device: mount.place.loop_device.clone(),
            barriers: disk.barriers,
            outcome: outcome.descriptor(),
        });
        idle::watch(stats);
        KernelSession {
            mount: Arc::new(mount),
            service,
            kind,
            disk: writable,
            path: disk.path,
            files: Arc::new(KeptFiles(Mutex::new(disk.files))),
            held: disk.held.map(Arc::new),
            outcome: Arc::new(outcome),
            release: Arc::new(Release(Mutex::new(disk.on_closed))),
            is_shared: AtomicBool::new(false),
        }
    }

    /// What another process needs to take over the mount, also after a crash of this process.
    /// `None` for a disk without [`DiskMount::files`], and on a kernel before Linux 6.9.
    pub fn hand_over(&self) -> Result<Option<DiskHandover>, MountError> {
        let disk = match (&self.disk, &*self.files.0.lock()) {
            (Some(_), None) => return Ok(None),
            (_, files) => files.as_ref().map(DiskFiles::try_clone).transpose(),
        };
        let disk = disk.map_err(MountError::process("duplicate a descriptor"))?;
        let upper = self.held.as_deref().map(HeldUpper::try_clone).transpose();
        let upper = upper.map_err(MountError::process("duplicate a descriptor"))?;
        let outcome = self.outcome.hand_over()?;
        let descriptors = self.service.descriptors().duplicate()?;
        self.is_shared.store(descriptors.is_some(), Relaxed);
        Ok(descriptors.map(|(connection, hidden)| DiskHandover {
            connection,
            hidden,
            place: self.mount.place.clone(),
            agreed: self.service.descriptors().agreed(),
            disk,
            upper,
            outcome: Some(outcome),
        }))
    }

    /// A handle that stops the session for a process that takes it over; `None` for content that
    /// never changes, and if [`KernelSession::hand_over`] gives nothing.
    pub fn stopper(&self) -> Option<DiskStopper> {
        let disk = self.disk.as_ref()?;
        let can_be_handed_over =
            self.files.0.lock().is_some() && self.service.descriptors().can_be_handed_over();
        can_be_handed_over.then(|| DiskStopper {
            mount: Arc::clone(&self.mount),
            disk: Arc::downgrade(disk),
            held: self.held.as_ref().map_or_else(Weak::new, Arc::downgrade),
            release: Arc::clone(&self.release),
            path: self.path.clone(),
        })
    }

    /// A handle that takes snapshots of the disk while the session is being served; `None` for
    /// content that never changes.
    pub fn snapshots(&self) -> Option<DiskSnapshots> {
        Some(DiskSnapshots {
            mount: Arc::clone(&self.mount),
            disk: Arc::downgrade(self.disk.as_ref()?),
            files: Arc::clone(&self.files),
            path: self.path.clone(),
        })
    }

    /// Grows the file system to `bytes` bytes, the size of its disk.
    pub fn grow_file_system(&self, bytes: u64) -> Result<(), MountError> {
        match &self.mount.mounter {
            Some(mounter) => mounter.grow(bytes),
            None => growth::grow_own(&self.mount.place.target, self.kind, bytes),
        }
    }

    /// The mountpoint with symbolic links resolved, and the mount's device number if the kernel
    /// lists the mount.
    pub fn place(&self) -> (PathBuf, Option<String>) {
        (
            self.mount.place.target.clone(),
            self.mount.place.device.clone(),
        )
    }

    /// The descriptor of the hidden mount. Other processes of root read the statistics of the mount
    /// through it.
    pub fn descriptor(&self) -> Option<RawFd> {
        self.service.descriptors().number()
    }

    /// A handle that unmounts while the session is being served.
    pub(crate) fn unmounter(&self) -> Unmounter {
        let mount = Arc::clone(&self.mount);
        Unmounter::new(move || mount.unmount())
    }

    /// A handle that makes the disk durable while the session is being served; `None` for content
    /// that does not change.
    pub(crate) fn closer(&self) -> Option<Closer> {
        let disk = Arc::downgrade(self.disk.as_ref()?);
        let outcome = Arc::downgrade(&self.outcome);
        let path = self.path.clone();
        Some(Closer::new(move || {
            let (Some(disk), Some(outcome)) = (disk.upgrade(), outcome.upgrade()) else {
                // The session has ended.
                return Ok(());
            };
            let flushed = disk.flush();
            outcome.report(flushed.as_ref().map(|_| ()).map_err(|_| Errno::IO));
            flushed.map_err(MountError::close_disk(&path))
        }))
    }

    /// Like [`KernelSession::serve`], but SIGTERM, SIGINT and, in the foreground, SIGHUP unmount.
    /// If files are in use, the mount is detached and served until they are closed. A second signal
    /// flushes the disk and ends this process at once.
    pub fn serve_until_signal(self, signals: Signals) -> Result<(), MountError> {
        let target = self.mount.place.target.clone();
        let (mount, closer) = (self.unmounter(), self.closer());
        let close = move || closer.map_or(Ok(()), |closer| closer.close());
        signals.end_mount(target, move || mount.unmount(), close)?;
        self.serve(|| {})
    }

    /// Serves until the mount is gone. Then all written data is durable. Calls `let_go` when the
    /// kernel has closed the file: the kernel ends the connection when no process has the
    /// descriptors of [`KernelSession::hand_over`] any more.
    pub fn serve(mut self, let_go: impl FnOnce()) -> Result<(), MountError> {
        self.mount.lifetime.wait(|| {
            // A failure is reported again by each later write, and at the end.
            if let Some(disk) = &self.disk
                && let Err(error) = disk.flush()
            {
                log::log(Severity::Error, &error.to_string());
            }
        });
        if let Some(disk) = &self.disk {
            // After `let_go`, no other process can continue. The close reports the error.
            let _ = disk.flush();
        }
        // They have the locks of the disk and of the upper too.
        *self.files.0.lock() = None;
        self.held = None;
        let_go();
        self.is_shared.store(false, Relaxed);
        let served = self.service.stop();
        show_closing();
        let closed = self.close();
        let result = closed.and(served);
        // Before the outcome is closed: another process may use the disk then.
        self.release.release(result.is_ok());
        result
    }

    /// Makes the disk durable and reports the result.
    fn close(&mut self) -> Result<(), MountError> {
        let Some(disk) = self.disk.take() else {
            self.outcome.report(Ok(()));
            return Ok(());
        };
        let is_removed = disk.is_removed();
        let closed = match Arc::try_unwrap(disk) {
            Ok(disk) => disk.close(),
            // Statistics are being read.
            Err(disk) => disk.with(Disk::checkpoint),
        };
        let lost = self.mount.lifetime.lost();
        if is_removed {
            self.outcome.report_removed();
            return Err(MountError::Removed(self.path.clone()));
        }
        self.outcome.report(match (&closed, lost) {
            (_, Some(errno)) => Err(errno),
            (Err(_), None) => Err(Errno::IO),
            (Ok(()), None) => Ok(()),
        });
        closed.map_err(MountError::close_disk(&self.path))?;
        match lost {
            None => Ok(()),
            Some(errno) => Err(MountError::LostWrites {
                disk: self.path.clone(),
                source: errno.into(),
            }),
        }
    }
}

impl Drop for KernelSession {
    fn drop(&mut self) {
        let unmounted = self.mount.unmount();
        if unmounted != Unmounted::Gone || self.is_shared.load(Relaxed) {
            // The threads end with the process, or when no process has the descriptors. A wait for
            // the last user could take forever.
            self.service.abandon();
        }
    }
}

impl KernelMount {
    /// Unmounts if the mount still exists; lazily, if it is in use. Safe to call several times.
    fn unmount(&self) -> Unmounted {
        match &self.mounter {
            _ if self.lifetime.has_ended() => Unmounted::Gone,
            Some(mounter) => mounter.unmount(),
            None => self.place.unmount(),
        }
    }
}

impl Release {
    fn release(&self, has_all: bool) {
        let release = self.0.lock().take();
        if let Some(release) = release {
            release(has_all);
        }
    }
}

/// More than a new disk and the freeze of its file system take of the host.
const SPACE_BYTES: u64 = 1 << 20;

impl DiskSnapshots {
    /// Whether the disk is still being served.
    pub fn is_open(&self) -> bool {
        self.disk.strong_count() > 0
    }

    /// Whether the disk is the one in the file with this device number and inode number.
    pub fn is_at(&self, device: u64, inode: u64) -> bool {
        let disk = self.disk.upgrade();
        disk.is_some_and(|disk| disk.is_at(device, inode))
    }

    /// Makes the present content the snapshot `name`, as [`LiveDisk::snapshot`], while the file
    /// system is frozen: it has all that programs have written, and needs no replay. Returns the
    /// path of the snapshot. `freezer` starts a process that freezes, if no [`Mounter`] does: see
    /// [`bcow_mount::hold_frozen`].
    ///
    /// If another process can continue with the disk, it needs the ledger that `new_ledger` makes,
    /// with its memory file. `is_replaced` gets what that process needs from now on.
    pub fn take(
        &self,
        name: &str,
        note: &str,
        freezer: impl FnOnce(&Path, &str) -> io::Result<Freezer>,
        new_ledger: impl FnOnce() -> io::Result<(OwnedFd, Arc<Ledger>)>,
        is_replaced: impl FnOnce(&DiskFiles),
    ) -> Result<PathBuf, MountError> {
        let mut files = self.files.0.lock();
        let disk = self.disk()?;
        let failed = MountError::process("make a ledger for the new disk");
        let kept = match &*files {
            Some(_) => {
                let (memory, ledger) = new_ledger().map_err(&failed)?;
                // There may be no descriptor left for the new file. The next process would refuse
                // this one.
                let file = memory.try_clone().map_err(&failed)?;
                let files = DiskFiles {
                    file,
                    ledger: memory,
                };
                Some((files, ledger))
            }
            None => None,
        };
        let (new_files, ledger) = kept.unzip();
        let replace = |file: &File| {
            let Some(mut new_files) = new_files else {
                return;
            };
            // In the place of an open descriptor, this does not fail.
            let _ = rustix::io::dup3(file, &mut new_files.file, DupFlags::CLOEXEC);
            is_replaced(files.insert(new_files));
        };
        let taken = self.while_frozen(freezer, || disk.snapshot(name, note, ledger, replace))?;
        Ok(taken.path.clone())
    }

    /// Makes a copy of the disk the snapshot `name`, as [`LiveDisk::copy`], while the file system
    /// is frozen.
    pub fn copy(
        &self,
        name: &str,
        freezer: impl FnOnce(&Path, &str) -> io::Result<Freezer>,
    ) -> Result<PathBuf, MountError> {
        let _files = self.files.0.lock();
        let disk = self.disk()?;
        self.while_frozen(freezer, || disk.copy(name))
    }

    /// Removes the snapshot `name`, as [`LiveDisk::remove`].
    pub fn remove(
        &self,
        name: &str,
        note: &str,
        monitor: &dyn Monitor,
    ) -> Result<Removed, MountError> {
        let removed = self.disk()?.remove(name, note, monitor);
        removed.map_err(MountError::RemoveSnapshot)
    }

    /// The disk, if it is mounted and has lost no write.
    fn disk(&self) -> Result<Arc<LiveDisk>, MountError> {
        let place = &self.mount.place;
        let (Some(disk), true) = (self.disk.upgrade(), place.exists()) else {
            return Err(MountError::NotMounted(place.target.clone()));
        };
        match self.mount.lifetime.lost() {
            None => Ok(disk),
            Some(errno) => Err(MountError::LostWrites {
                disk: self.path.clone(),
                source: errno.into(),
            }),
        }
    }

    fn while_frozen<T>(
        &self,
        freezer: impl FnOnce(&Path, &str) -> io::Result<Freezer>,
        take: impl FnOnce() -> Result<T, SnapshotError>,
    ) -> Result<T, MountError> {
        self.require_space()?;
        let disk = self.disk()?;
        let prepare = || disk.prepare().map_err(SnapshotError::Disk);
        let (place, mounter) = (&self.mount.place, self.mount.mounter.as_ref());
        let freezer = match mounter {
            Some(mounter) => mounter.freeze().map(Freezer::from),
            None => freezer(&place.target, place.number()),
        };
        let thaw = || {
            tracing::warn!(
                "the process that froze {} was killed",
                place.target.display()
            );
            let thawed = match mounter {
                Some(mounter) => mounter.thaw(),
                None => run_apart(|| bcow_mount::thaw(&place.target, place.number()))
                    .unwrap_or_else(|| Err(Errno::AGAIN.into()))
                    .map_err(MountError::process("thaw it")),
            };
            if let Err(error) = thawed {
                log::log(Severity::Error, &error.to_string());
            }
        };
        let taken =
            freezer.and_then(|freezer| bcow_mount::while_frozen(freezer, prepare, take, thaw));
        let failed = MountError::process("freeze its file system");
        taken.map_err(failed)?.map_err(MountError::Snapshot)
    }

    /// Fails if the host is full: the file system would meet that when it is frozen, and end.
    fn require_space(&self) -> Result<(), MountError> {
        let host = rustix::fs::statvfs(&self.path);
        let host = host.map_err(|errno| MountError::Snapshot(SnapshotError::Host(errno.into())))?;
        let has_inode = host.f_files == 0 || host.f_ffree > 0;
        if host.f_bfree.saturating_mul(host.f_frsize) >= SPACE_BYTES && has_inode {
            return Ok(());
        }
        let full = SnapshotError::Host(Errno::NOSPC.into());
        Err(MountError::Snapshot(full))
    }
}

impl DiskStopper {
    /// The upper of the mount; `None` if it has none, or has ended.
    pub fn upper(&self) -> Option<Arc<HeldUpper>> {
        self.held.upgrade()
    }

    /// Makes everything durable in tables, while requests continue: a [`DiskStopper::stop`] that
    /// follows has less to do and rarely fails.
    pub fn prepare(&self) -> Result<(), MountError> {
        match self.disk.upgrade() {
            Some(disk) => disk.prepare().map_err(MountError::close_disk(&self.path)),
            // The session has ended.
            None => Ok(()),
        }
    }

    /// Ends the requests in progress, stops all later ones for ever, and makes everything durable.
    /// The caller ends the process afterwards. Returns false if the mount is ending. After an
    /// error, another process can still continue with the ledger.
    pub fn stop(&self) -> Result<bool, MountError> {
        let Some(disk) = self.disk.upgrade() else {
            return Ok(false);
        };
        if !self.mount.lifetime.hand_over() {
            return Ok(false);
        }
        let closed = disk.with(Disk::close_for_exit);
        let has_all = closed.is_ok() && self.mount.lifetime.lost().is_none();
        self.release.release(has_all);
        closed.map_err(MountError::close_disk(&self.path))?;
        Ok(true)
    }
}

fn disk_file(
    disk: &DiskMount,
    name: &HiddenName,
    stats: &Arc<MountStats>,
    errors: &Arc<ErrorLog>,
    lifetime: &Arc<Lifetime>,
) -> DiskFile {
    DiskFile {
        name: name.to_string(),
        device: disk.device.clone(),
        barriers: disk.barriers,
        stats: Arc::clone(stats),
        errors: Arc::clone(errors),
        lifetime: Arc::clone(lifetime),
        first_messages: disk.files.as_ref().map(|_| Arc::default()),
    }
}

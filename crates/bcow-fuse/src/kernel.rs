//! The kernel door: a file system of the kernel on a disk that this process serves.
//!
//! The order of the steps: the disk is open and recovered; its file is served on a hidden mount; a
//! loop device opens the file; the kernel mounts the file system of the loop device. Each step can
//! fail, and then the steps before it are undone in reverse.
//!
//! At the end, the kernel unmounts the file system, which writes back all pages; detaches the loop
//! device, because nothing has it open any more; and closes the file. This process sees the close,
//! ends its service, and makes the disk durable.

use std::io;
use std::os::fd::{AsFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

use bcow::{BlockDevice, Disk, WritableDevice};
use bcow_mount::filesystem::{self, Found, HEAD_BYTES};
use bcow_mount::{
    Access, Attach, HiddenMount, HiddenName, LoopDevice, backing_of, run_apart, run_apart_with,
};
use bcow_union::errors::ErrorLog;
use bcow_union::log::{self, Severity};
use rustix::io::Errno;

use crate::adapter::disk::DiskFile;
use crate::disk::{Lifetime, OnClosed};
use crate::error::MountError;
use crate::growth;
use crate::idle;
use crate::mount::{Unmounted, unmount_places, usable_mountpoint};
use crate::mountinfo;
use crate::options::{MountOptions, no_interval};
use crate::outcome::Outcome;
use crate::process::{abort_on_panic, show_closing};
use crate::signals::Signals;
use crate::stats::{DiskUse, MountStats};

pub use crate::disk::{Barriers, Device, DiskMount};
pub use bcow_mount::filesystem::Kind;

/// Finds the file system on a device.
pub fn detect(device: &dyn BlockDevice) -> Result<Found, MountError> {
    Ok(filesystem::detect(&head(device)?)?)
}

/// The start of a device, by which its file system is known.
pub fn head(device: &dyn BlockDevice) -> Result<Vec<u8>, MountError> {
    let mut head = vec![0; device.size().min(HEAD_BYTES as u64) as usize];
    device.read_at(0, &mut head).map_err(MountError::ReadDisk)?;
    Ok(head)
}

/// A mount at the kernel door. Dropping it unmounts; if the mount is in use, it unmounts lazily,
/// and programs that use it get errors when this process ends.
pub struct KernelSession {
    mount: Arc<KernelMount>,
    service: Service,
    kind: Kind,
    /// Known until the disk is closed.
    disk: Option<Arc<Disk>>,
    path: PathBuf,
    outcome: Arc<Outcome>,
    on_closed: Option<OnClosed>,
}

/// Ends a [`KernelSession`] from another thread.
#[derive(Debug, Clone)]
pub(crate) struct KernelUnmounter {
    mount: Arc<KernelMount>,
}

/// Makes the disk of a [`KernelSession`] durable from another thread, before the process ends.
#[derive(Debug, Clone)]
pub(crate) struct KernelCloser {
    disk: Weak<Disk>,
    outcome: Weak<Outcome>,
    path: PathBuf,
}

/// The file system that the kernel has mounted.
#[derive(Debug)]
struct KernelMount {
    target: PathBuf,
    /// The device number of the mount. Another mount may have it after this one has ended.
    device: Option<String>,
    /// The loop device and the file behind it, by which the mount is known to be this one.
    loop_device: PathBuf,
    name: HiddenName,
    lifetime: Arc<Lifetime>,
}

/// The threads that answer requests for the file of the disk, and the hidden mount that has it.
struct Service {
    hidden: Option<HiddenMount>,
    thread: Option<JoinHandle<io::Result<()>>>,
    lifetime: Arc<Lifetime>,
}

impl KernelSession {
    /// Mounts the file system on `disk` at `target`. `threads` threads (at least one) serve the
    /// disk and count their requests in `stats`. Programs can use the mount once this returns.
    pub fn mount(
        disk: DiskMount,
        stats: Arc<MountStats>,
        target: &Path,
        options: &MountOptions,
        threads: usize,
    ) -> Result<Self, MountError> {
        let target = usable_mountpoint(target)?;
        let size = match &disk.device {
            Device::Writable(disk) => disk.size(),
            Device::ReadOnly(device) => device.size(),
        };
        let found = match &disk.device {
            Device::Writable(disk) => detect(&**disk)?,
            Device::ReadOnly(device) => detect(&**device)?,
        };
        let settings = options.for_kernel(&disk)?;
        if settings.commit_seconds.is_some() && !matches!(found.kind, Kind::Ext4 | Kind::Btrfs) {
            return Err(no_interval());
        }
        let access = match disk.device {
            Device::Writable(_) => Access::ReadWrite,
            Device::ReadOnly(_) => Access::ReadOnly,
        };
        let errors = Arc::new(ErrorLog::default());
        let lifetime = Arc::new(Lifetime::default());
        let outcome = Arc::new(Outcome::new()?);
        let name = HiddenName::of(disk.upper.as_ref().unwrap_or(&disk.path));
        let writable = match &disk.device {
            Device::Writable(disk) => Some(Arc::clone(disk)),
            Device::ReadOnly(_) => None,
        };
        let service = Service::start(
            DiskFile {
                name: name.to_string(),
                device: disk.device,
                barriers: disk.barriers,
                stats: Arc::clone(&stats),
                errors: Arc::clone(&errors),
                lifetime: Arc::clone(&lifetime),
            },
            threads,
        )?;
        let attach = Attach {
            block_bytes: filesystem::device_block_bytes(found, size),
            access,
        };
        let loop_device = service.apart(|hidden| {
            let file = hidden.open(&name.to_string(), attach.access)?;
            // Dropped at the end: the loop device lives as long as the mount then.
            let device = LoopDevice::attach(file.as_fd(), attach)?;
            filesystem::mount(device.path(), found.kind, &target, settings)?;
            tracing::info!(
                "{} on {} (blocks of {} bytes), direct I/O: {}",
                found.kind.name(),
                device.path().display(),
                attach.block_bytes,
                device.has_direct_io()
            );
            Ok(device.path().to_owned())
        })?;
        let listed = mountinfo::mounted_at(&target).ok().flatten();
        let mount = KernelMount {
            device: listed.map(|entry| entry.device),
            loop_device,
            name,
            target,
            lifetime,
        };
        stats.set_mounted(&mount.target, &errors);
        stats.set_disk(DiskUse {
            disk: writable.as_ref().map_or_else(Weak::new, Arc::downgrade),
            path: disk.path.clone(),
            upper: disk.upper.clone(),
            size,
            filesystem: found.kind.name(),
            loop_device: mount.loop_device.clone(),
            barriers: disk.barriers,
            outcome: outcome.descriptor(),
        });
        idle::watch(&stats);
        Ok(KernelSession {
            mount: Arc::new(mount),
            service,
            kind: found.kind,
            disk: writable,
            path: disk.path,
            outcome,
            on_closed: disk.on_closed,
        })
    }

    /// Grows the file system to `bytes` bytes, the size of its disk.
    pub fn grow_file_system(&self, bytes: u64) -> Result<(), MountError> {
        growth::grow_own(&self.mount.target, self.kind, bytes)
    }

    /// The mountpoint with symbolic links resolved, and the mount's device number if the kernel
    /// lists the mount.
    pub fn place(&self) -> (PathBuf, Option<String>) {
        (self.mount.target.clone(), self.mount.device.clone())
    }

    /// The descriptor of the hidden mount. Other processes of root read the statistics of the mount
    /// through it.
    pub fn descriptor(&self) -> Option<RawFd> {
        self.service.hidden.as_ref().map(HiddenMount::descriptor)
    }

    /// A handle that unmounts while the session is being served.
    pub(crate) fn unmounter(&self) -> KernelUnmounter {
        KernelUnmounter {
            mount: Arc::clone(&self.mount),
        }
    }

    /// A handle that makes the disk durable while the session is being served; `None` for content
    /// that does not change.
    pub(crate) fn closer(&self) -> Option<KernelCloser> {
        Some(KernelCloser {
            disk: Arc::downgrade(self.disk.as_ref()?),
            outcome: Arc::downgrade(&self.outcome),
            path: self.path.clone(),
        })
    }

    /// Like [`KernelSession::serve`], but SIGTERM, SIGINT and, in the foreground, SIGHUP unmount.
    /// If files are in use, the mount is detached and served until they are closed. A second signal
    /// flushes the disk and ends this process at once.
    pub fn serve_until_signal(self, signals: Signals) -> Result<(), MountError> {
        abort_on_panic();
        let mount = Arc::clone(&self.mount);
        let closer = self.closer();
        std::thread::Builder::new()
            .name("signals".into())
            .spawn(move || {
                let name = signals.wait();
                let unmounted = mount.unmount();
                if let Some(warning) = unmounted.warning(name, &mount.target) {
                    log::log(Severity::Warning, &warning);
                }
                signals.wait();
                if let Some(closer) = closer
                    && let Err(error) = closer.close()
                {
                    log::log(Severity::Error, &error.to_string());
                }
                // The kernel sees that the connection is closed, and fails the requests in flight.
                std::process::exit(1);
            })
            .map_err(|source| MountError::Process {
                action: "start a thread",
                source,
            })?;
        self.serve()
    }

    /// Serves until the mount is gone. Then all written data is durable.
    pub fn serve(mut self) -> Result<(), MountError> {
        self.mount.lifetime.wait(|| {
            // A failure is reported again by each later write, and at the end.
            if let Some(disk) = &self.disk
                && let Err(error) = disk.flush()
            {
                log::log(Severity::Error, &error.to_string());
            }
        });
        let served = self.service.stop();
        show_closing();
        let closed = self.close();
        let result = closed.and(served);
        // Before the outcome is closed: another process may use the disk then.
        if let Some(on_closed) = self.on_closed.take() {
            on_closed(result.is_ok());
        }
        result
    }

    /// Makes the disk durable and reports the result.
    fn close(&mut self) -> Result<(), MountError> {
        let Some(disk) = self.disk.take() else {
            self.outcome.report(Ok(()));
            return Ok(());
        };
        let closed = match Arc::try_unwrap(disk) {
            Ok(disk) => disk.close(),
            // Statistics are being read.
            Err(disk) => disk.checkpoint(),
        };
        let failed = |source| MountError::CloseDisk {
            disk: self.path.clone(),
            source,
        };
        let lost = self.mount.lifetime.lost();
        self.outcome.report(match (&closed, lost) {
            (_, Some(errno)) => Err(errno),
            (Err(_), None) => Err(Errno::IO),
            (Ok(()), None) => Ok(()),
        });
        closed.map_err(failed)?;
        match lost {
            None => Ok(()),
            Some(errno) => Err(MountError::LostWrites {
                disk: self.path.clone(),
                source: errno.into(),
            }),
        }
    }
}

impl KernelUnmounter {
    /// Unmounts. If the mount is in use, unmounts lazily.
    pub(crate) fn unmount(&self) -> Unmounted {
        self.mount.unmount()
    }
}

impl KernelCloser {
    /// Makes the written data durable. The caller ends the process afterwards.
    pub(crate) fn close(&self) -> Result<(), MountError> {
        let (Some(disk), Some(outcome)) = (self.disk.upgrade(), self.outcome.upgrade()) else {
            // The session has ended.
            return Ok(());
        };
        let flushed = disk.flush();
        outcome.report(flushed.as_ref().map(|_| ()).map_err(|_| Errno::IO));
        flushed.map_err(|source| MountError::CloseDisk {
            disk: self.path.clone(),
            source,
        })
    }
}

impl Drop for KernelSession {
    fn drop(&mut self) {
        if self.mount.unmount() != Unmounted::Gone {
            // The threads end with the process. A wait for the last user could take forever.
            self.service.thread = None;
        }
    }
}

impl KernelMount {
    /// Unmounts if the mount still exists. Safe to call several times.
    fn unmount(&self) -> Unmounted {
        let is_ours = || backing_of(&self.loop_device).as_ref() == Some(&self.name);
        if self.lifetime.has_ended() || !is_ours() {
            return Unmounted::Gone;
        }
        run_apart(|| unmount_places(self.device.as_deref())).unwrap_or(Unmounted::Stays)
    }
}

fn no_thread() -> MountError {
    MountError::Process {
        action: "start a thread",
        source: io::ErrorKind::OutOfMemory.into(),
    }
}

impl Service {
    /// Makes the hidden mount and serves it.
    fn start(file: DiskFile, threads: usize) -> Result<Self, MountError> {
        let (hidden, connection) = HiddenMount::new()?;
        let lifetime = Arc::clone(&file.lifetime);
        let mut config = fuser::Config::default();
        config.n_threads = Some(threads.max(1));
        // The kernel itself refuses other users.
        let all = fuser::SessionACL::All;
        let session =
            fuser::Session::from_fd(file, connection, all, config).map_err(MountError::Session)?;
        let ending = Arc::clone(&lifetime);
        let thread = std::thread::Builder::new()
            .name("disk".into())
            .spawn(move || {
                let ended = session.run();
                ending.end();
                ended
            })
            .map_err(|source| MountError::Process {
                action: "start a thread",
                source,
            })?;
        Ok(Service {
            hidden: Some(hidden),
            thread: Some(thread),
            lifetime,
        })
    }

    /// Runs `work` in a thread that has no descriptor of this process but that of the hidden mount.
    /// The other threads answer the requests that `work` waits for.
    fn apart<T: Send>(
        &self,
        work: impl FnOnce(&HiddenMount) -> Result<T, bcow_mount::Error> + Send,
    ) -> Result<T, MountError> {
        // Only `stop` takes the hidden mount.
        let Some(hidden) = &self.hidden else {
            return Err(MountError::Session(io::ErrorKind::NotConnected.into()));
        };
        let done = run_apart_with(hidden.as_fd(), || work(hidden));
        Ok(done.ok_or_else(no_thread)??)
    }

    /// Ends the service, when the file is closed.
    fn stop(&mut self) -> Result<(), MountError> {
        self.hidden = None;
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        match thread.join() {
            Ok(ended) => ended.map_err(MountError::Session),
            // The hook of a panic has ended the process.
            Err(_) => Ok(()),
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.stop();
        self.lifetime.end();
    }
}

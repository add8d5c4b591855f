//! The kernel driver: a disk with a file system of the kernel.

pub mod again;

use std::fs::File;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use bcow::operation::LiveDisk;
use bcow::{BlockDevice, LockFileError, LockedFile, OpenOptions};
use bcow_erofs::check as erofs_check;
use bcow_erofs::reader::Filesystem;
use bcow_fuse::kernel::{self, Barriers, Device, DiskFiles, DiskMount, Kind, NewMount};
use bcow_fuse::mounter::Mounter;
use bcow_fuse::options::Access;
use bcow_fuse::stats::ServedBy;
use bcow_fuse::{AnySession, KernelSession, MountError, MountOptions, MountStats};
use bcow_images::disks::{Below, cannot_lock, is_writable_disk, lock_note};
use bcow_images::error::{CommandError, Context};
use bcow_images::record::Recording;
use bcow_images::running::Service;
use bcow_images::size::{Human, disk_size};
use bcow_mount::filesystem;
use bcow_union::{DiskInstance, SyncPolicy};

use super::ahead;
use super::direct;
use super::fuse::{Mounted, about, service};
use super::host::Host;
use crate::args::{DriverChoice, MountArgs};
use crate::disk_ledger::{LedgerUse, OpenLedger};
use crate::error::{because, failure, usage};
use crate::kernel_upper::{self, Asked, WritableUpper};
use bcow_images::image::Messages;
use bcow_images::upper::{RETRY_PAUSE, cannot_use, may_release_soon, note};

/// A disk to mount, and what keeps it open.
pub struct Opened {
    device: Device,
    /// The identity of the image.
    pub identity: [u8; 32],
    /// The reason for this driver.
    reason: String,
    /// The file of the disk.
    path: PathBuf,
    /// The files of an image that the kernel reads by itself: no process has to serve such a mount.
    pub files: Option<Vec<PathBuf>>,
    /// Why the kernel cannot read an image by itself.
    why_served: Option<String>,
    /// The size in bytes to which the file system is to grow.
    grows_to: Option<u64>,
    /// What the next process of a pool needs to continue with the disk.
    disk_files: Option<DiskFiles>,
    /// The upper, locked. Dropped after the disk.
    upper: Option<DiskInstance>,
    fetching: Option<ahead::Ready>,
    recording: Option<Recording>,
}

/// Opens the disk, and returns it if the kernel shall mount it. Checks the metadata of an image,
/// because the kernel parses it next, with fewer checks.
pub fn open(args: &MountArgs, host: &Host<'_>) -> Result<Option<Opened>, CommandError> {
    let Some((mut opened, kind)) = open_unchecked(args, host, new_ledger(host))? else {
        return Ok(None);
    };
    if kind == Kind::Erofs {
        require_sound(args, &opened.device)?;
    }
    if let Some(path) = &args.record {
        let (Device::ReadOnly(device), Kind::Erofs) = (&opened.device, kind) else {
            return Err(cannot_record());
        };
        // After the check, which reads all metadata.
        let recording = Recording::start(device.clone(), opened.identity, path)?;
        opened.device = Device::ReadOnly(recording.device());
        opened.recording = Some(recording);
    }
    Ok(Some(opened))
}

/// Opens the disk, and returns it with the kind of its file system if the kernel shall mount it.
fn open_unchecked(
    args: &MountArgs,
    host: &Host<'_>,
    ledger_use: LedgerUse<'_>,
) -> Result<Option<(Opened, Kind)>, CommandError> {
    // Before the disk starts threads.
    let limit = bcow_mount::serve_writeback();
    let options = args.open_options(&host.cache);
    let mut opened = if !args.has_layers() && is_writable_disk(&args.image) {
        open_writable(args, host, &options, ledger_use)?
    } else {
        open_sealed(args, &options)?
    };
    let found = kernel::detect(opened.device.block_device());
    let kind = match (found, args.driver) {
        (Ok(kind), DriverChoice::Kernel) => kind,
        (Ok(kind), _) if kind != Kind::Erofs => kind,
        // The FUSE driver reads EROFS, and names the problem of other content.
        (Ok(_) | Err(MountError::Kernel(_)), DriverChoice::Auto | DriverChoice::Fuse) => {
            return Ok(None);
        }
        (Err(error), _) => return Err(cannot(args.image.shown()).caused_by(&error)),
    };
    require_privilege(args.image.shown(), kind)?;
    if kind != Kind::Erofs {
        (opened.files, opened.why_served) = (None, None);
    }
    if opened.files.is_none() {
        require_no_deadlock(args.image.shown(), limit)?;
    }
    opened.reason = match (args.driver, &opened.why_served) {
        (DriverChoice::Kernel, None) => "as --driver says".to_owned(),
        (DriverChoice::Kernel, Some(why)) => format!("as --driver says; {why}"),
        _ => format!("the disk holds {}", kind.name()),
    };
    Ok(Some((opened, kind)))
}

/// Opens the upper, or begins one.
pub fn open_upper(
    args: &MountArgs,
    host: &Host<'_>,
    upper: &Path,
    reason: String,
    mount_options: &MountOptions,
    ui: &dyn Messages,
) -> Result<Opened, CommandError> {
    let asked = Asked {
        size: args.upper.size.map(disk_size).transpose()?,
        read_only: mount_options.asks_for_read_only(),
    };
    open_asked(args, host, upper, reason, asked, new_ledger(host), ui)
}

/// A pool replaces its process; a process of its own has no other one after it.
fn new_ledger(host: &Host<'_>) -> LedgerUse<'static> {
    match host.pool {
        Some(_) => LedgerUse::New,
        None => LedgerUse::None,
    }
}

fn open_asked(
    args: &MountArgs,
    host: &Host<'_>,
    upper: &Path,
    reason: String,
    asked: Asked,
    ledger_use: LedgerUse<'_>,
    ui: &dyn Messages,
) -> Result<Opened, CommandError> {
    if args.record.is_some() {
        return Err(cannot_record());
    }
    // Before the disk starts threads.
    let limit = bcow_mount::serve_writeback();
    // A new upper belongs to this driver, so a machine that lacks the driver gets none.
    require_privilege(args.image.shown(), Kind::Ext4)?;
    require_no_deadlock(args.image.shown(), limit)?;
    require_devices(args.image.shown())?;
    let options = args.open_options(&host.cache);
    // The process changes its directory later, and publishes the path of the upper.
    let path =
        std::path::absolute(upper).context(|| format!("cannot use upper {}", upper.display()))?;
    let image = args.open_image(&options)?;
    host.let_signals_through()?;
    let note = note(args.directory());
    let open = |open: &mut dyn FnMut() -> _| host.when_free(ui, open);
    let opened =
        kernel_upper::open_or_begin(&image, &path, asked, &note, &options, ledger_use, open)?;
    let WritableUpper {
        disk,
        grows_to,
        files: disk_files,
        instance,
    } = opened;
    let marked = instance.refuse_after_volatile(args.upper.sync);
    marked.map_err(|error| cannot_use(&error))?;
    let identity = image.identity();
    if !kernel::detect(&disk).is_ok_and(|kind| kind == Kind::Ext4) {
        return Err(CommandError::new(format!(
            "the disk of the upper {} holds no ext4",
            upper.display()
        ))
        .hint("another program has changed it: name a new upper"));
    }
    let device = Device::Writable(Arc::new(disk));
    Ok(Opened {
        reason,
        grows_to,
        disk_files,
        fetching: ahead::prepare(args, &image),
        ..Opened::new(device, identity, instance.disk_path(), Some(instance))
    })
}

/// Fails unless this process may mount a file system of this kind.
fn require_privilege(image: &Path, kind: Kind) -> Result<(), CommandError> {
    let with_hint = |refused: CommandError, other: Option<&str>| match (kind, other) {
        (Kind::Erofs, _) => refused.hint("`--driver fuse` mounts an image for its user"),
        (_, Some(hint)) => refused.hint(hint),
        (kind, None) => refused.caused_by_text(format!(
            "{} can be mounted only by the driver of the kernel",
            kind.name()
        )),
    };
    if !rustix::process::geteuid().is_root() {
        let refused = CommandError::new(format!(
            "only root can mount {} with the kernel driver",
            image.display()
        ));
        return Err(with_hint(refused, None));
    }
    filesystem::require_privilege(kind)
        .map_err(|error| with_hint(cannot(image).caused_by(&error), error.hint()))
}

/// Fails if the memory group of this process has this limit: see [`bcow_mount::serve_writeback`].
fn require_no_deadlock(image: &Path, limit: Option<u64>) -> Result<(), CommandError> {
    match limit {
        Some(bytes) => Err(cannot(image)
            .caused_by_text(format!(
                "this process is in a control group of {} of memory and lacks CAP_SYS_RESOURCE; a \
                 shortage of memory would block it for good",
                Human(bytes)
            ))
            .hint("mount outside that group, or with the capability")),
        None => Ok(()),
    }
}

/// Fails unless this process can open the devices that a mount needs.
fn require_devices(image: &Path) -> Result<(), CommandError> {
    for (device, module) in [("/dev/fuse", "fuse"), ("/dev/loop-control", "loop")] {
        let opened = File::options().read(true).write(true).open(device);
        if let Err(error) = opened {
            return Err(cannot(image)
                .caused_by_text(format!("{device}: {error}"))
                .hint(match error.kind() {
                    ErrorKind::NotFound => {
                        format!("load the kernel module with `modprobe {module}`")
                    }
                    _ => format!("a container needs access to it: `--device {device}`"),
                }));
        }
    }
    Ok(())
}

fn cannot_record() -> CommandError {
    CommandError::usage(
        "--record is not supported yet for disks, and uppers with the kernel driver",
    )
    .hint("record a mount of the image without the upper")
}

fn cannot(image: &Path) -> CommandError {
    let name = image.display();
    CommandError::new(format!("cannot mount {name} with the kernel driver"))
}

/// Fails unless the metadata of the EROFS on `device` passes the check of `bcow fsck`: the kernel
/// parses it next, with fewer checks.
fn require_sound(args: &MountArgs, device: &Device) -> Result<(), CommandError> {
    let name = args.image.display();
    let cannot = || format!("cannot mount {name} with the kernel driver");
    let device: Arc<dyn BlockDevice> = match device {
        Device::Writable(disk) => disk.clone(),
        Device::ReadOnly(device) => device.clone(),
    };
    let tree = Filesystem::open(device).context(cannot)?;
    let found = erofs_check::check(&tree, &erofs_check::CheckOptions { read_data: false });
    match found.iter().find(|finding| finding.is_error()) {
        None => Ok(()),
        Some(first) => Err(CommandError::new(cannot())
            .caused_by_text(format!(
                "its file system is damaged: {}: {}",
                first.place, first.message
            ))
            .hint(format!("`bcow fsck {name}` lists all damage"))),
    }
}

fn open_writable(
    args: &MountArgs,
    host: &Host<'_>,
    options: &OpenOptions,
    ledger_use: LedgerUse<'_>,
) -> Result<Opened, CommandError> {
    let below = Below::new(&args.stores, options)?;
    let (file, continues) = match ledger_use.kept_file()? {
        Some(file) => {
            let path = disk_path(args);
            let continued = LockedFile::continue_with(file, path, &lock_note("mount"));
            continued.map_err(|error| cannot_lock(args.image.shown(), path, &error))?
        }
        None => (lock_when_free(args, host)?, true),
    };
    let ledger = ledger_use.of_disk(continues).open()?;
    let noted = ledger.as_ref().map(OpenLedger::ledger);
    let (disk, height) = below.open_disk(args.image.shown(), &file, noted)?;
    let disk_files = ledger.map(|ledger| ledger.files(file.file())).transpose()?;
    let identity = disk.identity_hash();
    let path = args.image.absolute().into();
    let device = Device::Writable(Arc::new(LiveDisk::new(disk, file, height)));
    Ok(Opened {
        disk_files,
        ..Opened::new(device, identity, path, None)
    })
}

fn open_sealed(args: &MountArgs, options: &OpenOptions) -> Result<Opened, CommandError> {
    let image = args.open_image(options)?;
    let (files, why_served) = match direct::files(args, &image) {
        Ok(files) => (Some(files), None),
        Err(reason) => (None, Some(reason)),
    };
    let path = args.image.absolute().into();
    let device = Device::ReadOnly(image.image().clone());
    Ok(Opened {
        files,
        why_served,
        fetching: ahead::prepare(args, &image),
        ..Opened::new(device, image.identity(), path, None)
    })
}

/// The path of the disk. `is_writable_disk` has selected the name of a file.
fn disk_path(args: &MountArgs) -> &Path {
    args.image.path().unwrap_or(args.image.shown())
}

/// Locks the disk. Waits for a process that is ending an earlier mount of it.
fn lock_when_free(args: &MountArgs, host: &Host<'_>) -> Result<LockedFile, CommandError> {
    let start = Instant::now();
    let path = disk_path(args);
    loop {
        let error = match LockedFile::open(path, &lock_note("mount")) {
            Err(LockFileError::Lock(holder)) if may_release_soon(&holder, start.elapsed()) => {
                holder
            }
            other => return other.map_err(|error| cannot_lock(args.image.shown(), path, &error)),
        };
        tracing::debug!("waiting for the end of another mount: {error}");
        // Only the call that blocked the signals can fail.
        let _ = host.let_signals_through();
        std::thread::sleep(RETRY_PAUSE);
    }
}

/// Mounts the disk. `confine` takes the rights from this process that only the mount needs, if
/// another process has them.
pub fn mount(
    opened: Opened,
    args: &MountArgs,
    options: &MountOptions,
    host: &Host<'_>,
    confine: impl FnOnce(&DiskMount) -> Result<Option<Mounter>, CommandError>,
) -> Result<Mounted, CommandError> {
    let grows_to = opened.grows_to;
    let cannot = |error: MountError| cannot_mount(args.image.shown(), &error);
    let start = |disk, stats, threads| {
        let new = NewMount::prepare(disk, args.directory(), options).map_err(cannot)?;
        let mounter = confine(new.disk())?;
        let session = new.mount(stats, threads, mounter).map_err(cannot)?;
        if let Some(bytes) = grows_to {
            session.grow_file_system(bytes).map_err(cannot)?;
        }
        Ok(session)
    };
    let describe = |session: &KernelSession| {
        let (mountpoint, device) = session.place();
        Ok(Service {
            descriptor: session.descriptor(),
            ..service(args, host, &mountpoint, device)?
        })
    };
    opened.serve(args, host, start, describe)
}

impl Opened {
    /// A disk that is to be mounted as it is.
    fn new(device: Device, identity: [u8; 32], path: PathBuf, upper: Option<DiskInstance>) -> Self {
        Opened {
            device,
            identity,
            reason: String::new(),
            path,
            files: None,
            why_served: None,
            grows_to: None,
            disk_files: None,
            upper,
            fetching: None,
            recording: None,
        }
    }

    /// Serves the disk by the session that `start` begins with a number of threads, and that
    /// `describe` describes.
    fn serve<S>(
        self,
        args: &MountArgs,
        host: &Host<'_>,
        start: S,
        describe: impl FnOnce(&KernelSession) -> Result<Service, CommandError>,
    ) -> Result<Mounted, CommandError>
    where
        S: FnOnce(DiskMount, Arc<MountStats>, usize) -> Result<KernelSession, CommandError>,
    {
        let instance = self.upper;
        let upper = instance.as_ref().map(|upper| upper.path().to_owned());
        let shared = instance.as_ref().filter(|_| host.pool.is_some());
        let held = shared.map(DiskInstance::hold).transpose();
        let held = held.context(|| format!("cannot keep {} open", self.path.display()))?;
        let driver = ServedBy {
            name: "kernel".to_owned(),
            reason: self.reason,
        };
        let recording = self.recording.as_ref();
        let about = about(args, host, self.identity, driver, recording);
        let stats = Arc::new(MountStats::new(about));
        let is_sealed = matches!(self.device, Device::ReadOnly(_));
        let release = move |has_all: bool| {
            if let (true, Some(instance)) = (has_all, &instance) {
                // A clean end: the host's kernel has all data. If the note stays, it only counts
                // after a crash of the machine.
                let _ = instance.forget_volatile();
            }
            drop(instance);
        };
        let disk = DiskMount {
            device: self.device,
            path: self.path,
            upper,
            held,
            barriers: match args.upper.sync {
                SyncPolicy::Volatile => Barriers::Off,
                _ => Barriers::On,
            },
            files: self.disk_files,
            on_closed: Some(Box::new(release)),
        };
        let session = start(disk, Arc::clone(&stats), host.threads(args, !is_sealed))?;
        Ok(Mounted {
            service: describe(&session)?,
            session: AnySession::Kernel(session),
            stats,
            identity: self.identity,
            access: Access::Owner,
            fetching: self.fetching,
            recording: self.recording,
        })
    }
}

/// The error of a mount, with a hint.
pub fn cannot_mount(image: &Path, error: &MountError) -> CommandError {
    match error {
        MountError::Kernel(_) | MountError::ReadDisk(_) | MountError::WriteDisk { .. } => {
            because(cannot(image), error)
        }
        MountError::NotWithDriver { .. }
        | MountError::UnsupportedOption { .. }
        | MountError::SealedDisk(_) => usage(error),
        error => failure(error),
    }
}

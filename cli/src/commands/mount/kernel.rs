//! The kernel door: a disk with a file system of the kernel.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bcow::lock::LockError;
use bcow::{BlockCache, BlockDevice, Disk, LockFileError, LockedFile, OpenOptions, Verify};
use bcow_erofs::check as erofs_check;
use bcow_erofs::reader::Filesystem;
use bcow_fuse::kernel::{self, Barriers, Device, DiskMount, Kind};
use bcow_fuse::options::Access;
use bcow_fuse::stats::{About, ServedBy};
use bcow_fuse::{KernelSession, MountError, MountOptions, MountStats};
use bcow_mount::Writeback;
use bcow_oci::ImageName;
use bcow_union::SyncPolicy;

use super::{Args, DoorChoice, Running, VerifyWhat, default_threads, failure, refuse_mounted};
use crate::disks::{Below, cannot_lock, is_disk, is_writable_disk, lock_note};
use crate::error::{CommandError, Context, exit};
use crate::image::{OpenImage, parse_name};
use crate::names;
use crate::running::{self, Service};
use crate::size::Human;
use crate::upper::{NOTICES_WITHIN, PAUSE, holder_of_note, is_closing};

/// A disk to mount, and what keeps it open.
pub struct Opened {
    device: Device,
    identity: [u8; 32],
    kind: Kind,
    /// Dropped after the disk.
    _lock: Option<LockedFile>,
}

/// Refuses options that the kernel door does not have, if the user asked for that door.
pub fn refuse_unsupported(args: &Args) -> Result<(), CommandError> {
    let not_yet = |what: &str| {
        Err(
            CommandError::usage(format!("{what} is not supported yet at the kernel door"))
                .hint("`--door fuse` has it"),
        )
    };
    if args.door != DoorChoice::Kernel {
        return match args.upper.sync() {
            SyncPolicy::Strict => Ok(()),
            _ if args.upper.path().is_some() || may_mount(args) => Ok(()),
            _ => Err(CommandError::usage("--sync needs an upper or a disk")
                .hint("`--upper DIR` names the directory that takes the changes")),
        };
    }
    if args.upper.path().is_some() {
        return not_yet("--upper");
    }
    if !args.layers().is_empty() {
        return not_yet("a layer on top of the image");
    }
    if matches!(args.upper.sync(), SyncPolicy::Batch(_)) {
        return not_yet("--sync batch");
    }
    Ok(())
}

/// Whether the kernel mounts the disk if it holds a file system for that. The kernel mounts an
/// image only if the user asks for it, because its driver then parses what the image holds.
pub fn may_mount(args: &Args) -> bool {
    let is_disk = matches!(parse_name(&args.image), Ok(ImageName::File(path)) if is_disk(&path));
    match args.door {
        DoorChoice::Kernel => true,
        DoorChoice::Fuse => false,
        DoorChoice::Auto => is_disk && args.upper.path().is_none() && args.layers().is_empty(),
    }
}

/// Opens the disk, and returns it if the kernel shall mount it.
pub fn open(running: &Running<'_>, cache: &BlockCache) -> Result<Option<Opened>, CommandError> {
    let args = running.args;
    // Before the disk starts threads.
    let writeback = bcow_mount::serve_writeback();
    let options = OpenOptions {
        cache: cache.clone(),
        verify: match args.verify {
            VerifyWhat::Checksums => Verify::Checksums,
            VerifyWhat::Merkle => Verify::Merkle,
        },
    };
    let opened = match is_writable_disk(&args.image) {
        true => open_writable(running, &options)?,
        false => open_sealed(args, &options)?,
    };
    let device: &dyn BlockDevice = match &opened.0 {
        Device::Writable(disk) => &**disk,
        Device::ReadOnly(device) => &**device,
    };
    let cannot = |error: &MountError| {
        let name = args.image.display();
        let failure = CommandError::new(format!("cannot mount {name} at the kernel door"));
        failure.caused_by(error)
    };
    let kind = match (kernel::detect(device), args.door) {
        (Ok(found), DoorChoice::Kernel) => found.kind,
        (Ok(found), _) if found.kind != Kind::Erofs => found.kind,
        // The FUSE door reads EROFS, and names the problem of other content.
        (Ok(_) | Err(MountError::Kernel(_)), DoorChoice::Auto) => return Ok(None),
        (Ok(found), DoorChoice::Fuse) => found.kind,
        (Err(error), _) => return Err(cannot(&error)),
    };
    if kind == Kind::Erofs {
        require_sound(args, &opened.0)?;
    }
    if !rustix::process::geteuid().is_root() {
        return Err(CommandError::new(format!(
            "only root can mount {}: it holds {}, which only the kernel reads",
            args.image.display(),
            kind.name()
        )));
    }
    if let Writeback::MayDeadlock { limit_bytes } = writeback {
        return Err(CommandError::new(format!(
            "cannot mount {} at the kernel door",
            args.image.display()
        ))
        .caused_by_text(format!(
            "this process is in a control group of {} of memory and lacks CAP_SYS_RESOURCE; a \
             shortage of memory would block it for good",
            Human(limit_bytes)
        ))
        .hint("mount outside that group, or with the capability"));
    }
    let (device, identity, lock) = opened;
    Ok(Some(Opened {
        device,
        identity,
        kind,
        _lock: lock,
    }))
}

/// Fails unless the metadata of the EROFS on `device` passes the check of `bcow fsck`: the kernel
/// parses it next, with fewer checks.
fn require_sound(args: &Args, device: &Device) -> Result<(), CommandError> {
    let name = args.image.display();
    let cannot = || format!("cannot mount {name} at the kernel door");
    let device: Arc<dyn BlockDevice> = match device {
        Device::Writable(disk) => disk.clone(),
        Device::ReadOnly(device) => device.clone(),
    };
    let tree = Filesystem::open(device).context(cannot)?;
    let found = erofs_check::check(&tree, &erofs_check::CheckOptions { read_data: false });
    let mut errors = found
        .iter()
        .filter(|finding| finding.severity == erofs_check::Severity::Error);
    match errors.next() {
        None => Ok(()),
        Some(first) => Err(CommandError::new(cannot())
            .caused_by_text(format!(
                "its file system is damaged: {}: {}",
                names::printable(&first.place),
                names::printable(&first.message)
            ))
            .hint(format!("`bcow fsck {name}` lists all damage"))),
    }
}

type OpenDevice = (Device, [u8; 32], Option<LockedFile>);

fn open_writable(running: &Running<'_>, options: &OpenOptions) -> Result<OpenDevice, CommandError> {
    let args = running.args;
    let below = Below::new(&args.stores, options)?;
    let file = lock_when_free(running)?;
    let disk: Disk = below.open_disk(&args.image, &file)?;
    let identity = disk.identity_hash();
    Ok((Device::Writable(Arc::new(disk)), identity, Some(file)))
}

fn open_sealed(args: &Args, options: &OpenOptions) -> Result<OpenDevice, CommandError> {
    let image = OpenImage::open_with(&args.image, &args.stores, options)?;
    let identity = image.identity();
    Ok((Device::ReadOnly(image.image().clone()), identity, None))
}

/// Locks the disk. Waits for a process that is ending an earlier mount of it.
fn lock_when_free(running: &Running<'_>) -> Result<LockedFile, CommandError> {
    let (args, start) = (running.args, Instant::now());
    let name = &args.image;
    let path = match parse_name(name)? {
        ImageName::File(path) => path,
        // `may_mount` has selected a file.
        _ => name.clone(),
    };
    loop {
        let error = match LockedFile::open(&path, &lock_note("mount")) {
            Err(error) if ends_soon(&error, start.elapsed()) => error,
            other => return other.map_err(|error| cannot_lock(name, &path, &error)),
        };
        tracing::debug!("waiting for the end of another mount: {error}");
        // Only the call that blocked the signals can fail.
        let _ = running.signals.let_through();
        std::thread::sleep(PAUSE);
    }
}

fn ends_soon(error: &LockFileError, waited: Duration) -> bool {
    match error {
        LockFileError::Lock(LockError::Writer(note)) => match holder_of_note(note) {
            Some(pid) => is_closing(pid) || waited < NOTICES_WITHIN,
            None => false,
        },
        LockFileError::Lock(LockError::InUse) => waited < NOTICES_WITHIN,
        _ => false,
    }
}

/// Mounts, and serves to the end.
pub fn run(
    opened: Opened,
    running: Running<'_>,
    options: MountOptions,
    cache: BlockCache,
) -> Result<(), CommandError> {
    let args = running.args;
    refuse_mounted(args.directory())?;
    let file = PathBuf::from(parse_name(&args.image)?.absolute());
    let stats = Arc::new(MountStats::new(About {
        image: file.clone().into(),
        file: file.clone(),
        identity: opened.identity,
        cache,
        door: Some(ServedBy {
            name: "kernel".to_owned(),
            reason: match args.door {
                DoorChoice::Kernel => "as --door says".to_owned(),
                _ => format!("the disk holds {}", opened.kind.name()),
            },
        }),
    }));
    let is_sealed = matches!(opened.device, Device::ReadOnly(_));
    let disk = DiskMount {
        device: opened.device,
        path: file.clone(),
        barriers: match args.upper.sync() {
            SyncPolicy::Volatile => Barriers::Off,
            _ => Barriers::On,
        },
    };
    let threads = args
        .threads
        .map_or_else(|| default_threads(!is_sealed), usize::from);
    let session = KernelSession::mount(
        disk,
        Arc::clone(&stats),
        args.directory(),
        &options,
        threads,
    )
    .map_err(|error| cannot_mount(args.image.as_path(), &error))?;
    let (mountpoint, device) = session.place();
    let is_writable = bcow_fuse::mounted_image(&mountpoint).is_ok_and(|mount| mount.is_writable);
    running.answer_metrics(stats)?;
    let service = Service {
        kind: "mount".to_owned(),
        image: file.to_string_lossy().into_owned(),
        layers: Vec::new(),
        export: None,
        upper: None,
        at: vec![mountpoint.to_string_lossy().into_owned()],
        mode: if is_writable { "rw" } else { "ro" }.to_owned(),
        since: running::now(),
        device,
        descriptor: session.descriptor(),
    };
    running.serve(service, Access::Owner, |signals| {
        session.serve_until_signal(signals)
    })
}

fn cannot_mount(image: &Path, error: &MountError) -> CommandError {
    match error {
        MountError::Kernel(_) | MountError::ReadDisk(_) => {
            let name = image.display();
            let cannot = CommandError::new(format!("cannot mount {name} at the kernel door"));
            let cannot = cannot.caused_by(error);
            match error.hint() {
                Some(hint) => cannot.hint(hint),
                None => cannot,
            }
        }
        MountError::NotAtDoor { .. } | MountError::SealedDisk(_) => {
            failure(error).exit_with(exit::USAGE)
        }
        error => failure(error),
    }
}

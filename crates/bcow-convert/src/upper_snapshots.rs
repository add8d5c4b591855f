//! Snapshots of the uppers of writable mounts, forks of them, and the way back to a snapshot.
//!
//! A snapshot of an upper of the FUSE driver is a further upper in it.
//!
//! An upper of the kernel driver has a disk, and its snapshots are those of the disk. The disk is
//! over a view of an image; none of the operations reads the image. A fork is an upper with hard
//! links of the snapshot and of the snapshots below it, under the same names. So each file exists
//! as long as an upper needs it.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::chain::MAX_DEPTH;
use bcow::format::{BackingEntry, BackingName};
use bcow::lock::FileLock;
use bcow::operation::{Removed, Snapshotted, snapshot};
use bcow::{
    BlockDevice, CreateOptions, Disk, Image, LockFileError, LockedFile, OpenOptions,
    UnreadBackings, backing_of,
};
use bcow_images::disks::{cannot_lock, lock_note};
use bcow_images::error::{CommandError, Context};
use bcow_images::image::Messages;
use bcow_images::new_file::NewFile;
use bcow_images::readable_upper::ReadableUpper;
use bcow_images::requests::{ask, ask_to_remove, cannot_snapshot};
use bcow_images::running::LOCK_IN_UPPER;
use bcow_images::snapshots::{Snapshot, find_snapshot, snapshots};
use bcow_images::upper::{cannot_use, tree_snapshot};
use bcow_union::{
    DiskInstance, Driver, META, SyncPolicy, UnfinishedUpper, UpperError, UpperSnapshot, disk_path,
    snapshot_path,
};
use rustix::fs::Mode;

use crate::snapshots::{Beside, ForkedDisk, Removal, free_name, require_nothing_over};
use crate::work::Work;

/// The record of an upper, and its name for the size of the file system.
const RECORD: &str = "instance.json";
const SIZE: &str = "size";
/// Permission bits with which other users can write.
const OTHERS_WRITE: u32 = 0o022;
/// The view and the image, below the files of a disk.
const BELOW_FILES: usize = 2;

/// An upper of the kernel driver that no other process uses.
struct LockedUpper {
    /// The disk. Its lock is released first.
    file: LockedFile,
    instance: DiskInstance,
}

impl LockedUpper {
    fn open(upper: &Path, command: &str) -> Result<Self, CommandError> {
        let instance = DiskInstance::open_existing(upper, &lock_note(command));
        let mut instance = instance.map_err(|error| cannot_use(&error))?;
        match (instance.take_disk(), instance.record()) {
            (Some(file), Some(_)) => Ok(LockedUpper { file, instance }),
            _ => Err(cannot_use(&UpperError::Incomplete(upper.to_owned()))),
        }
    }

    /// Makes the content of the disk its snapshot `name`.
    fn snapshot(&self, name: &str) -> Result<Snapshotted, CommandError> {
        let upper = self.instance.path();
        let refused = self.instance.refuse_after_volatile(SyncPolicy::Strict);
        refused.map_err(|error| cannot_use(&error))?;
        let cannot = || format!("cannot take a snapshot of {}", upper.display());
        let below = chain(self.file.path())?;
        let height = below.len() - 1 + BELOW_FILES;
        let options = OpenOptions::default();
        let disk = Disk::open(self.file.storage(), &options, &UnreadBackings).context(cannot)?;
        let (height, note) = (height as u32, lock_note("snapshot"));
        snapshot(&Arc::new(disk), &self.file, name, height, &note, None)
            .map_err(|error| cannot_snapshot(upper.display(), &error))
    }
}

fn driver_of(upper: &Path) -> Result<Option<Driver>, CommandError> {
    bcow_union::driver_of(upper).map_err(|error| cannot_use(&error))
}

/// Makes the content of the upper at `upper` its snapshot `name`. If it is mounted, the process of
/// the mount does it. Returns the path of the snapshot.
pub fn take_upper_snapshot(upper: &Path, name: &str) -> Result<PathBuf, CommandError> {
    let is_disk = driver_of(upper)? == Some(Driver::Kernel);
    let taken = if is_disk {
        LockedUpper::open(upper, "snapshot").and_then(|locked| Ok(locked.snapshot(name)?.path))
    } else {
        let taken = bcow_union::take_snapshot(upper, name, &lock_note("snapshot"));
        taken.map_err(|error| cannot_use(&error))
    };
    match taken {
        Err(error) if error.may_pass() => {
            if !ask(&upper.join(LOCK_IN_UPPER), upper.display(), name)? {
                Err(error)
            } else if is_disk {
                find_snapshot(upper.display(), &disk_path(upper), name)
            } else {
                tree_snapshot(upper, name)
            }
        }
        taken => taken,
    }
}

/// The snapshots of the upper at `upper`, the oldest first.
pub fn upper_snapshots(upper: &Path) -> Result<Vec<Snapshot>, CommandError> {
    if driver_of(upper)? == Some(Driver::Kernel) {
        return snapshots(&disk_path(upper));
    }
    let found = bcow_union::list_snapshots(upper).map_err(|error| cannot_use(&error))?;
    let of = |found: UpperSnapshot| Snapshot {
        path: snapshot_path(upper, &found.name),
        name: found.name,
        taken: found.taken,
        bytes: found.stored_bytes,
        stored_bytes: found.stored_bytes,
        backing: None,
        used_by: Vec::new(),
        other_links: 0,
    };
    Ok(found.into_iter().map(of).collect())
}

/// Removes the snapshot `name` of the upper at `upper`. If the disk or another snapshot is over it,
/// that one takes its data first.
pub fn remove_upper_snapshot(
    upper: &Path,
    name: &str,
    work: &Work<'_>,
) -> Result<Removed, CommandError> {
    if driver_of(upper)? == Some(Driver::Fuse) {
        let removed = bcow_union::remove_snapshot(upper, name, &lock_note("snapshot rm"));
        removed.map_err(|error| cannot_use(&error))?;
        return Ok(Removed {
            into: None,
            bytes: 0,
        });
    }
    let open = |file: &LockedFile| {
        let options = OpenOptions::default();
        Disk::open(file.storage(), &options, &Beside::of(file.path()))
            .context(|| format!("cannot open {}", file.path().display()))
    };
    let path = disk_path(upper);
    let removal = Removal {
        path: path.canonicalize().unwrap_or(path),
        shown: upper.display().to_string(),
        name,
        open: &open,
        work,
    };
    match LockedUpper::open(upper, "snapshot rm") {
        Err(error) if error.may_pass() => {
            let lock = upper.join(LOCK_IN_UPPER);
            removal.in_use(|| ask_to_remove(&lock, upper.display(), name), error)
        }
        Err(error) => Err(error),
        Ok(LockedUpper { file, instance }) => {
            // Fails if a file is below itself.
            chain(file.path())?;
            let removed = removal.at_rest(Some(file));
            drop(instance);
            removed
        }
    }
}

/// Gives the upper at `upper` the content of its snapshot `name`. What it had becomes the snapshot
/// `keep`; without one, its changes since its last snapshot are lost. Returns the disk, for the
/// kernel driver.
pub fn roll_back_upper(
    upper: &Path,
    name: &str,
    keep: Option<&str>,
) -> Result<Option<ForkedDisk>, CommandError> {
    if driver_of(upper)? == Some(Driver::Fuse) {
        let note = lock_note("rollback");
        tree_snapshot(upper, name)?;
        keep.map_or(Ok(upper.to_owned()), |keep| {
            bcow_union::take_snapshot(upper, keep, &note)
        })
        .and_then(|_| bcow_union::roll_back_upper(upper, name, &note))
        .map_err(|error| cannot_use(&error))?;
        return Ok(None);
    }
    let mut locked = LockedUpper::open(upper, "rollback")?;
    let cannot = || format!("cannot roll back {}", upper.display());
    let path = locked.file.path().to_owned();
    let target = find_snapshot(upper.display(), &path, name)?;
    // All that can fail comes before the snapshot.
    let new = NewFile::replace(&path)?;
    let forked = write_over(&target, new.file().try_clone().context(cannot)?)?;
    // A record may have less than the disk, and not more.
    let recorded = locked.instance.shrink_to(forked.bytes);
    recorded.map_err(|error| cannot_use(&error))?;
    match keep {
        Some(keep) => locked.file = locked.snapshot(keep)?.file,
        None => require_nothing_over(&locked.file, upper.display())?,
    }
    new.inner()
        .take_attributes(locked.file.file())
        .context(cannot)?;
    new.complete()?;
    // A snapshot is durable, also that of a volatile mount.
    let _ = locked.instance.forget_volatile();
    Ok(Some(forked))
}

/// Makes a new upper at `new` that begins with the snapshot `name` of the upper at `from`, or
/// without a name with its content. Of the kernel driver, it takes a snapshot first then, and
/// returns the disk of the new upper.
pub fn fork_upper(
    from: &Path,
    name: Option<&str>,
    new: &Path,
    messages: &dyn Messages,
) -> Result<Option<ForkedDisk>, CommandError> {
    if driver_of(from)? == Some(Driver::Fuse) {
        return fork_tree(from, name, new, messages).map(|()| None);
    }
    let cannot = || format!("cannot create {}", new.display());
    let begun = UnfinishedUpper::begin_new(new).map_err(|error| cannot_use(&error))?;
    let path = disk_path(from);
    let device = |path: &Path| path.metadata().map(|metadata| metadata.dev());
    if device(&begun.made()).context(cannot)? != device(&path).context(cannot)? {
        return Err(CommandError::new(cannot())
            .caused_by_text("it is in another file system than the upper, whose files it shares"));
    }
    let snapshot = match name {
        Some(name) => find_snapshot(from.display(), &path, name)?,
        None => take_upper_snapshot(from, &free_name(&snapshots(&path)?))?,
    };
    let meta = begun.made().join(META);
    DirBuilder::new()
        .mode(0o700)
        .create(&meta)
        .context(cannot)?;
    let mut locked = Vec::new();
    for file in chain(&snapshot)? {
        let open = File::open(&file).context(cannot)?;
        // Its owner could change it, and the kernel trusts the file system of a fork.
        let metadata = open.metadata().context(cannot)?;
        let own = rustix::process::geteuid().as_raw();
        if ![own, 0].contains(&metadata.uid()) || metadata.mode() & OTHERS_WRITE != 0 {
            return Err(cannot_use(&UpperError::Foreign(file)));
        }
        // A removal of one of them waits for this lock, and finds the new link then.
        let shared = FileLock::shared(&open).map_err(LockFileError::Lock);
        shared.map_err(|error| cannot_lock(&file, &file, &error))?;
        locked.push(open);
        let name = file.file_name().unwrap_or_default();
        std::fs::hard_link(&file, meta.join(name)).context(cannot)?;
    }
    let disk = disk_path(&begun.made());
    let file = File::create_new(&disk).context(cannot)?;
    rustix::fs::fchmod(&file, Mode::from_raw_mode(0o600))
        .map_err(io::Error::from)
        .context(cannot)?;
    let forked = write_over(&snapshot, file)?;
    let record = record(&from.join(META).join(RECORD), forked.bytes).context(cannot)?;
    let written = meta.join(RECORD);
    std::fs::write(&written, record).context(cannot)?;
    // At the end, so that a host with a journal writes it once.
    for path in [&disk, &written, &meta, &begun.made()] {
        File::open(path)
            .and_then(|file| file.sync_all())
            .context(cannot)?;
    }
    begun.complete().map_err(|error| cannot_use(&error))?;
    Ok(Some(forked))
}

/// As [`fork_upper`], for the FUSE driver.
fn fork_tree(
    from: &Path,
    name: Option<&str>,
    new: &Path,
    messages: &dyn Messages,
) -> Result<(), CommandError> {
    let fork = |from: &Path| bcow_union::fork_upper(from, new).map_err(|error| cannot_use(&error));
    if let Some(name) = name {
        return fork(&tree_snapshot(from, name)?);
    }
    match fork(from) {
        // It is mounted.
        Err(error) if error.may_pass() => fork(&ReadableUpper::find(from, messages)?.path),
        forked => forked,
    }
}

/// The record at `path`, for a file system of `bytes` bytes.
fn record(path: &Path, bytes: u64) -> io::Result<String> {
    let mut record: serde_json::Value = serde_json::from_slice(&std::fs::read(path)?)?;
    record[SIZE] = bytes.into();
    Ok(format!("{record}\n"))
}

/// Writes an empty disk over the snapshot at `below` into `file`.
fn write_over(below: &Path, file: File) -> Result<ForkedDisk, CommandError> {
    let cannot = || format!("cannot make a disk over {}", below.display());
    let options = OpenOptions::default();
    let storage = Arc::new(File::open(below).context(cannot)?);
    let image = Image::open_with_backings(storage, &options, &UnreadBackings).context(cannot)?;
    let create = CreateOptions::like(&image).context(cannot)?;
    let name = below.file_name().unwrap_or_default().to_string_lossy();
    let entry = BackingEntry {
        name: BackingName::FileName {
            name: name.into_owned(),
            identity: Some(image.identity_hash()),
        },
        size: image.size(),
    };
    let forked = ForkedDisk {
        bytes: create.size,
        backing: entry.name.to_string(),
    };
    let over = (entry, image as Arc<dyn BlockDevice>);
    Disk::create(Arc::new(file), &create, Some(over), &options).context(cannot)?;
    Ok(forked)
}

/// The file of a disk at `path`, and the snapshots below it.
fn chain(path: &Path) -> Result<Vec<PathBuf>, CommandError> {
    let cannot = || format!("cannot read the snapshots below {}", path.display());
    let mut files = vec![path.to_owned()];
    while let Some(last) = files.last() {
        let backing = backing_of(File::open(last).context(cannot)?);
        match backing.map(|entry| entry.name) {
            Some(BackingName::FileName { name, .. }) if files.len() <= MAX_DEPTH as usize => {
                files.push(path.with_file_name(name));
            }
            Some(BackingName::FileName { .. }) => {
                return Err(CommandError::new(cannot()).caused_by_text("a file is below itself"));
            }
            _ => break,
        }
    }
    Ok(files)
}

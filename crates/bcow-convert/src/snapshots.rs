//! Snapshots of disks, forks of disks, and the way back to a snapshot.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::operation::{
    Snapshotted, absorb_backing, record_identity, remove_unfinished, snapshot, snapshot_path,
    sync_directory_of,
};
use bcow::{
    BackingResolver, BlockDevice, CreateOptions, Disk, Image, LockedFile, OpenOptions,
    UnreadBackings,
};
use bcow_images::Name;
use bcow_images::backing::{backing, require_in_reach};
use bcow_images::disks::{
    Below, cannot_lock, is_writable_disk, lock_disk, lock_note, open_writable,
};
use bcow_images::error::{CommandError, Context};
use bcow_images::image::{StoreArgs, cannot_open_file};
use bcow_images::new_file::NewFile;
use bcow_images::requests::{ask, cannot_snapshot};
use bcow_images::snapshots::{Snapshot, disk_path, disks_over, find_snapshot, snapshots};

use crate::rewrite::operation_failure;
use crate::work::Work;

/// Makes the content of the disk `disk` its snapshot `name`. If another process of bcow serves the
/// disk, that process does it. Returns the path of the snapshot.
pub fn take_snapshot(disk: &Name, name: &str, stores: &StoreArgs) -> Result<PathBuf, CommandError> {
    match take_at_rest(disk, name, stores) {
        Ok(taken) => Ok(taken.path),
        Err(error) if error.may_pass() => {
            let path = disk_path(disk)?;
            if ask(&path, disk, name)? {
                find_snapshot(disk, &path, name)
            } else {
                Err(error)
            }
        }
        Err(error) => Err(error),
    }
}

/// Makes the content of a disk that no other process uses its snapshot `name`.
fn take_at_rest(disk: &Name, name: &str, stores: &StoreArgs) -> Result<Snapshotted, CommandError> {
    let opened = open_writable(disk, stores, &OpenOptions::default(), "snapshot")?;
    let (below, note) = (Arc::new(opened.disk), lock_note("snapshot"));
    let taken = snapshot(&below, &opened.file, name, opened.height, &note, None);
    taken.map_err(|error| cannot_snapshot(disk, &error))
}

/// A new disk over a snapshot.
#[derive(Debug)]
pub struct ForkedDisk {
    /// Size of the disk in bytes.
    pub bytes: u64,
    /// The name of its backing.
    pub backing: String,
}

/// Makes a new disk at `new` over `from`: a snapshot, or a disk that does not change. Of a writable
/// disk, it takes a snapshot first.
pub fn fork(from: &Name, new: &Path, stores: &StoreArgs) -> Result<ForkedDisk, CommandError> {
    let file = NewFile::create_new(new)?;
    if !is_writable_disk(from) {
        return write_over(from, file, new, stores);
    }
    // Fails where the new disk would not find its backing, before there is a snapshot.
    match backing(from, false, new, stores, &OpenOptions::default()) {
        // Another process writes to it.
        Err(error) if error.may_pass() => require_in_reach(new, &disk_path(from)?, stores)?,
        found => drop(found?),
    }
    let snapshot = take_snapshot(from, &free_name(&snapshots(&disk_path(from)?)?), stores)?;
    write_over(&Name::file(&snapshot), file, new, stores)
}

/// The name of the snapshot for a fork of what has these snapshots.
pub(crate) fn free_name(taken: &[Snapshot]) -> String {
    let is_free = |name: &String| taken.iter().all(|snapshot| snapshot.name != *name);
    let name = (1..).map(|number| format!("fork-{number}")).find(is_free);
    name.unwrap_or_default()
}

/// Writes an empty disk over `below` into `file`, which becomes `path`.
fn write_over(
    below: &Name,
    file: NewFile,
    path: &Path,
    stores: &StoreArgs,
) -> Result<ForkedDisk, CommandError> {
    let (forked, below) = begin_over(below, &file, path, stores)?;
    file.complete()?;
    // Until the file has its name, only this lock shows that the backing is in use.
    drop(below);
    Ok(forked)
}

/// As [`write_over`], but `file` does not get its name. The image is `below`.
fn begin_over(
    below: &Name,
    file: &NewFile,
    path: &Path,
    stores: &StoreArgs,
) -> Result<(ForkedDisk, Arc<Image>), CommandError> {
    let options = OpenOptions::default();
    let (entry, image) = backing(below, false, path, stores, &options)?;
    let cannot = || format!("cannot create {}", path.display());
    let create = CreateOptions::like(&image).context(cannot)?;
    let storage = Arc::new(file.file().try_clone().context(cannot)?);
    let over = Some((entry.clone(), image.clone() as Arc<dyn BlockDevice>));
    Disk::create(storage, &create, over, &options)
        .and_then(Disk::close)
        .context(cannot)?;
    let forked = ForkedDisk {
        bytes: create.size,
        backing: entry.name.to_string(),
    };
    Ok((forked, image))
}

/// Replaces the disk `disk` by an empty one over its snapshot `name`. What the disk showed becomes
/// the snapshot `keep`; without one, the data of the disk since its last snapshot is lost.
pub fn roll_back(
    disk: &Name,
    name: &str,
    keep: Option<&str>,
    stores: &StoreArgs,
) -> Result<ForkedDisk, CommandError> {
    let path = disk_path(disk)?;
    let target = find_snapshot(disk, &path, name)?;
    // All that can fail comes before the snapshot.
    let new = NewFile::replace(&path)?;
    let (forked, _below) = begin_over(&Name::file(&target), &new, &path, stores)?;
    // The lock keeps writers away until the new file has replaced the old one.
    let file = match keep {
        Some(keep) => take_at_rest(disk, keep, stores)?.file,
        None => {
            let file = lock_disk(disk, "rollback")?;
            require_nothing_over(&file, disk)?;
            file
        }
    };
    new.inner()
        .take_attributes(file.file())
        .context(|| format!("cannot write {disk}"))?;
    new.complete()?;
    Ok(forked)
}

/// Fails if a disk is over the disk in `file`, which the user calls `shown`.
pub(crate) fn require_nothing_over(
    file: &LockedFile,
    shown: impl fmt::Display,
) -> Result<(), CommandError> {
    match tree_over(file.path())?.first() {
        None => Ok(()),
        Some(over) => Err(CommandError::new(format!("cannot roll back {shown}"))
            .caused_by_text(format!("it is the backing of {}", over.path.display()))),
    }
}

/// A snapshot that was removed.
#[derive(Debug)]
pub struct RemovedSnapshot {
    /// The path of the disk that took its data.
    pub into: Option<PathBuf>,
    /// Number of bytes that were written or zeroed there.
    pub bytes: u64,
}

/// Opens the disk in a locked file.
type OpenLocked<'a> = &'a dyn Fn(&LockedFile) -> Result<Disk, CommandError>;

/// Removes the snapshot `name` of the disk `disk`. If one disk or snapshot is over it, that one
/// takes its data first.
pub fn remove_snapshot(
    disk: &Name,
    name: &str,
    stores: &StoreArgs,
    work: &Work<'_>,
) -> Result<RemovedSnapshot, CommandError> {
    let own = lock_disk(disk, "snapshot rm")?;
    let below = Below::new(stores, &OpenOptions::default())?;
    let open = |file: &LockedFile| {
        let opened = below.open_disk(file.path(), file, None);
        opened.map(|(disk, _)| disk)
    };
    remove_from(own, &disk.to_string(), name, &open, work)
}

/// Removes the snapshot `name` of the disk in `own`, which the user calls `shown`.
///
/// All disks over the snapshot are locked: they record the identities of the files below them, and
/// these change. Each disk shows the same content at each moment, also after a crash. A crash can
/// leave the snapshot, and disks that record no identity.
pub(crate) fn remove_from(
    own: LockedFile,
    shown: &str,
    name: &str,
    open: OpenLocked<'_>,
    work: &Work<'_>,
) -> Result<RemovedSnapshot, CommandError> {
    let own_path = own.path().to_owned();
    let mut own = Some(own);
    let cannot = || format!("cannot remove {shown}@{name}");
    if let Ok(path) = snapshot_path(&own_path, name) {
        remove_unfinished(&path).context(cannot)?;
    }
    let path = find_snapshot(shown, &own_path, name)?;
    // Fails while a program reads it, or makes a disk over it. The users of another link of the
    // file keep that one.
    let lock_removed = || {
        if is_shared(&path) {
            return Ok(None);
        }
        LockedFile::open_snapshot(&path, &lock_note("snapshot rm"))
            .map(Some)
            .map_err(|error| cannot_lock(&path, &path, &error))
    };
    drop(lock_removed()?);
    let tree = tree_over(&path)?;
    let direct: Vec<&Over> = tree.iter().filter(|over| over.parent.is_none()).collect();
    if let [first, second, ..] = direct[..] {
        return Err(CommandError::new(cannot())
            .caused_by_text(format!(
                "it is the backing of {} and {}",
                first.path.display(),
                second.path.display()
            ))
            .hint(
                "`bcow rebase` gives a disk another backing, and `bcow snapshot rm` removes a \
                 snapshot",
            ));
    }
    // The disks over another link of the file record its identity too.
    if let Some(over) = tree.iter().find(|over| is_shared(&over.path)) {
        return Err(CommandError::new(cannot())
            .caused_by_text(format!(
                "it is below {}, which forks have too",
                over.path.display()
            ))
            .hint("first remove the forks, or the later snapshots that they have"));
    }
    let lock = |over: &Over| match own.take_if(|file| file.path() == over.path) {
        Some(file) => Ok(file),
        None => LockedFile::open_snapshot(&over.path, &lock_note("snapshot rm"))
            .map_err(|error| cannot_lock(&over.path, &over.path, &error)),
    };
    let files: Vec<LockedFile> = tree.iter().map(lock).collect::<Result<_, CommandError>>()?;
    // Before the locks, another command may have changed what is over what.
    let is_changed = |expected: &[Over]| Ok::<_, CommandError>(tree_over(&path)? != expected);
    let changed = || {
        CommandError::new(cannot())
            .caused_by_text("the disks over it have changed meanwhile")
            .hint("run the command again")
    };
    if is_changed(&tree)? {
        return Err(changed());
    }
    let options = OpenOptions::default();
    let record = |index: usize, identity| {
        record_identity(&files[index].storage(), &options, identity).context(cannot)
    };
    // A disk forgets the identity of a file before that file changes.
    for index in (1..files.len()).rev() {
        record(index, None)?;
    }
    let merged = match files.first() {
        Some(file) => merge(&path, file, open, work, &cannot),
        None => Ok(0),
    };
    for index in 1..files.len() {
        let below = files[tree[index].parent.unwrap_or_default()].storage();
        let below = Image::open_with_backings(below, &options, &UnreadBackings).context(cannot)?;
        record(index, Some(below.identity_hash()))?;
    }
    let bytes = merged?;
    let _removed = lock_removed()?;
    if is_changed(&[])? {
        return Err(changed());
    }
    std::fs::remove_file(&path)
        .and_then(|()| sync_directory_of(&path))
        .context(cannot)?;
    Ok(RemovedSnapshot {
        into: files.first().map(|file| file.path().to_owned()),
        bytes,
    })
}

/// A disk or snapshot that is over another one.
#[derive(Debug, PartialEq, Eq)]
struct Over {
    path: PathBuf,
    /// The index of the file below it; `None` for the one at the bottom of the tree.
    parent: Option<usize>,
}

/// Whether another directory has the file at `path` too.
fn is_shared(path: &Path) -> bool {
    path.metadata().is_ok_and(|file| file.nlink() > 1)
}

/// The disks that are over the file at `bottom`, directly and through others. Each is behind the
/// disk below it.
fn tree_over(bottom: &Path) -> Result<Vec<Over>, CommandError> {
    let mut over = disks_over(bottom)?;
    let mut tree: Vec<Over> = Vec::new();
    let mut parent = None;
    loop {
        let below = parent.map_or(bottom, |index: usize| tree[index].path.as_path());
        let name = below.file_name().unwrap_or_default().to_string_lossy();
        let paths = over.remove(&*name).unwrap_or_default();
        tree.extend(paths.into_iter().map(|path| Over { path, parent }));
        let next = parent.map_or(0, |index| index + 1);
        if next == tree.len() {
            return Ok(tree);
        }
        parent = Some(next);
    }
}

/// Copies what the snapshot at `path` stores into the disk in `file`, which is over it, and gives
/// that disk the backing of the snapshot. Returns the number of bytes that were written or zeroed.
fn merge(
    path: &Path,
    file: &LockedFile,
    open: OpenLocked<'_>,
    work: &Work<'_>,
    cannot: &dyn Fn() -> String,
) -> Result<u64, CommandError> {
    let options = OpenOptions::default();
    let storage = Arc::new(File::open(path).context(cannot)?);
    let removed = Image::open_with_backings(storage, &options, &UnreadBackings)
        .map_err(|error| cannot_open_file(path, path, &error))?;
    let disk = open(file)?;
    let backing = match removed.disk_backing() {
        Some(entry) => {
            let device = UnreadBackings.resolve(entry).context(cannot)?;
            device.map(|device| (entry.clone(), device))
        }
        None => None,
    };
    let below_bytes = backing.as_ref().map_or(0, |(entry, _)| entry.size);
    let bytes = absorb_backing(&disk, removed.size(), below_bytes, work)
        .map_err(|error| operation_failure(&error, cannot, cannot))?;
    disk.set_backing(backing)
        .and_then(|()| disk.close())
        .context(cannot)?;
    Ok(bytes)
}

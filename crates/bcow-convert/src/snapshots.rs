//! Snapshots of disks, forks of disks, and the way back to a snapshot.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::format::{BackingEntry, BackingName};
use bcow::operation::{
    Over, RemoveError, Removed, Snapshotted, absorb_backing, is_shared, record_identity,
    remove_unfinished, snapshot, snapshot_path, sync_directory_of, tree_over, tree_to_change,
};
use bcow::{
    BackingResolver, BlockDevice, CreateOptions, Disk, Error, Image, LockedFile, OpenOptions,
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
use bcow_images::requests::{ask, ask_to_remove, cannot_remove, cannot_snapshot};
use bcow_images::snapshots::{Snapshot, disk_path, find_snapshot, snapshots};

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
    let cannot = || format!("cannot roll back {shown}");
    match tree_over(file.path()).context(cannot)?.first() {
        None => Ok(()),
        Some(over) => Err(CommandError::new(cannot())
            .caused_by_text(format!("it is the backing of {}", over.path.display()))),
    }
}

/// Removes the snapshot `name` of the disk `disk`. If one disk or snapshot is over it, that one
/// takes its data first. If another process of bcow serves the disk, that process does it.
pub fn remove_snapshot(
    disk: &Name,
    name: &str,
    stores: &StoreArgs,
    work: &Work<'_>,
) -> Result<Removed, CommandError> {
    let below = Below::new(stores, &OpenOptions::default())?;
    let open = |file: &LockedFile| {
        let opened = below.open_disk(file.path(), file, None);
        opened.map(|(disk, _)| disk)
    };
    let removal = Removal {
        path: disk_path(disk)?,
        shown: disk.to_string(),
        name,
        open: &open,
        work,
    };
    match lock_disk(disk, "snapshot rm") {
        Err(error) if error.may_pass() => {
            removal.in_use(|| ask_to_remove(&removal.path, disk, name), error)
        }
        own => removal.at_rest(Some(own?)),
    }
}

/// The removal of the snapshot `name`.
pub(crate) struct Removal<'a> {
    /// The path of the disk, with its links resolved, and its name for the user.
    pub(crate) path: PathBuf,
    pub(crate) shown: String,
    pub(crate) name: &'a str,
    /// Opens the disk in a locked file.
    pub(crate) open: &'a dyn Fn(&LockedFile) -> Result<Disk, CommandError>,
    pub(crate) work: &'a Work<'a>,
}

impl Removal<'_> {
    /// Removes a snapshot of a disk that another process uses. `ask` asks that process, and
    /// `refused` is the error if it takes no requests.
    pub(crate) fn in_use(
        &self,
        ask: impl FnOnce() -> Result<Option<Removed>, CommandError>,
        refused: CommandError,
    ) -> Result<Removed, CommandError> {
        let path = find_snapshot(&self.shown, &self.path, self.name)?;
        let tree = tree_over(&path).map_err(|error| self.failed(error.into()))?;
        if tree.iter().any(|over| over.path == self.path) {
            ask()?.ok_or(refused)
        } else {
            // The disk does not change, as after a rollback.
            self.at_rest(None)
        }
    }

    /// Removes a snapshot while no other process uses the disks over it. `own` is the lock of the
    /// disk, which is needed if it is one of them.
    ///
    /// All disks over the snapshot are locked: they record the identities of the files below them,
    /// and these change. Each disk shows the same content at each moment, also after a crash. A
    /// crash can leave the snapshot, and disks that record no identity.
    pub(crate) fn at_rest(&self, mut own: Option<LockedFile>) -> Result<Removed, CommandError> {
        let cannot = || format!("cannot remove {}@{}", self.shown, self.name);
        if let Ok(path) = snapshot_path(&self.path, self.name) {
            remove_unfinished(&path).context(cannot)?;
        }
        let path = find_snapshot(&self.shown, &self.path, self.name)?;
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
        // The disks over another link of a file record its identity too.
        let tree = tree_to_change(&path, 0).map_err(|error| self.failed(error))?;
        let lock = |over: &Over| match own.take_if(|file| file.path() == over.path) {
            Some(file) => Ok(file),
            None => LockedFile::open_snapshot(&over.path, &lock_note("snapshot rm"))
                .map_err(|error| cannot_lock(&over.path, &over.path, &error)),
        };
        let files: Vec<LockedFile> = tree.iter().map(lock).collect::<Result<_, CommandError>>()?;
        // Before the locks, another command may have changed what is over what.
        let require = |expected: &[Over]| {
            let is_same = tree_over(&path).context(cannot)? == expected;
            is_same
                .then_some(())
                .ok_or(self.failed(RemoveError::Changed))
        };
        require(&tree)?;
        let options = OpenOptions::default();
        let record = |index: usize, identity| {
            record_identity(&files[index].storage(), &options, identity).context(cannot)
        };
        // A disk forgets the identity of a file before that file changes.
        for index in (1..files.len()).rev() {
            record(index, None)?;
        }
        let merged = match files.first() {
            Some(file) => merge(&path, file, self.open, self.work, &cannot),
            None => Ok(0),
        };
        for index in 1..files.len() {
            let below = files[tree[index].parent.unwrap_or_default()].storage();
            let below =
                Image::open_with_backings(below, &options, &UnreadBackings).context(cannot)?;
            record(index, Some(below.identity_hash()))?;
        }
        let bytes = merged?;
        let _removed = lock_removed()?;
        require(&[])?;
        std::fs::remove_file(&path)
            .and_then(|()| sync_directory_of(&path))
            .context(cannot)?;
        Ok(Removed {
            into: files.first().map(|file| file.path().to_owned()),
            bytes,
        })
    }

    fn failed(&self, error: RemoveError) -> CommandError {
        cannot_remove(&self.shown, self.name, &error)
    }
}

/// Copies what the snapshot at `path` stores into the disk in `file`, which is over it, and gives
/// that disk the backing of the snapshot. Returns the number of bytes that were written or zeroed.
fn merge(
    path: &Path,
    file: &LockedFile,
    open: &dyn Fn(&LockedFile) -> Result<Disk, CommandError>,
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

/// Resolves the snapshots in a directory, as they were recorded. A view of an image is not read.
pub(crate) struct Beside<'a>(&'a Path);

impl<'a> Beside<'a> {
    /// Resolves the snapshots beside the file at `path`.
    pub(crate) fn of(path: &'a Path) -> Self {
        Beside(path.parent().unwrap_or(Path::new("/")))
    }
}

impl BackingResolver for Beside<'_> {
    fn resolve(&self, backing: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, Error> {
        let BackingName::FileName { name, identity } = &backing.name else {
            return UnreadBackings.resolve(backing);
        };
        let file = File::open(self.0.join(name)).map_err(|source| Error::Io {
            action: "open",
            offset: 0,
            source,
        })?;
        let options = OpenOptions::default();
        let image = Image::open_with_backings(Arc::new(file), &options, self)?;
        let is_other = identity.is_some_and(|identity| identity != image.identity_hash());
        if is_other || image.size() != backing.size {
            let problem = format!("{name} is not the file over which the disk was made");
            return Err(Error::Unsupported(problem));
        }
        Ok(Some(image))
    }
}

//! Snapshots of an upper of the FUSE driver, forks, and the way back.
//!
//! A snapshot is a further upper, `.bcow/snapshots/NAME`, with a record that says so: no writer
//! opens it. It is made in the work directory, becomes durable, and then gets its name.
//!
//! What becomes the upper NAME (a fork, or an upper that goes back) is made in `.NAME.bcow-part`
//! beside it. The next command that makes something there, or the next writer of the upper, removes
//! the directory that a killed process left.

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use bcow::lock::FileLock;
use bcow::operation::is_snapshot_name;
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::beneath::open_directory_beneath;
use super::copy::copy_content;
use super::directory::{open_inside, open_root};
use super::lock::open_lock;
use super::part::{MADE, SNAPSHOTS, UnfinishedUpper};
use super::record;
use super::work::{self, Temporary};
use super::{Instance, InstanceRecord, META, UpperError, UpperReader};
use crate::host::{errno_of, stored_bytes};
use crate::options::SyncPolicy;

/// The directory in [`SNAPSHOTS`] from which snapshots are removed. No snapshot has this name.
const REMOVED: &str = ".removed";

/// A snapshot of an upper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpperSnapshot {
    /// Its name.
    pub name: String,
    /// When it was taken, in seconds since 1970.
    pub taken: i64,
    /// Bytes that its files take up on the host. Other files may share them.
    pub stored_bytes: u64,
}

/// The path of the snapshot `name` of the upper at `upper`. It is the path of an upper.
pub fn snapshot_path(upper: &Path, name: &str) -> PathBuf {
    snapshot_directory(upper).join(name)
}

/// The directory with the snapshots of the upper at `upper`.
pub fn snapshot_directory(upper: &Path) -> PathBuf {
    upper.join(META).join(SNAPSHOTS)
}

/// As [`snapshot_path`]. Fails if no snapshot can have this name.
fn checked_path(upper: &Path, name: &str) -> Result<PathBuf, UpperError> {
    let path = snapshot_path(upper, name);
    if is_snapshot_name(name) {
        Ok(path)
    } else {
        Err(UpperError::io(&path, "use this name", Errno::INVAL))
    }
}

/// Takes the snapshot `name` of an upper that no process uses. `note` names this process to others.
/// Returns its path.
pub fn take_snapshot(upper: &Path, name: &str, note: &str) -> Result<PathBuf, UpperError> {
    let instance = Instance::open_existing(upper, note)?;
    instance.refuse_after_volatile(SyncPolicy::Strict)?;
    NewSnapshot::copy(&instance, name)?.place()
}

/// The snapshots of an upper, the oldest first.
pub fn list_snapshots(upper: &Path) -> Result<Vec<UpperSnapshot>, UpperError> {
    let Some(snapshots) = open_snapshots(upper)? else {
        return Ok(Vec::new());
    };
    let failed = |errno| UpperError::io(upper, "list its snapshots", errno);
    let mut found = Vec::new();
    for name in work::list(snapshots.as_fd()).map_err(failed)? {
        let Some(name) = String::from_utf8(name)
            .ok()
            .filter(|name| is_snapshot_name(name))
        else {
            continue;
        };
        // It is written when the snapshot is taken.
        let record = format!("{name}/{META}/{}", record::FILE);
        let stat = rustix::fs::statat(&snapshots, record, AtFlags::SYMLINK_NOFOLLOW);
        if let Ok(stat) = stat {
            let stored_bytes = match stored_below(snapshots.as_fd(), name.as_bytes()) {
                // It is being removed.
                Err(Errno::NOENT) => continue,
                stored => stored.map_err(failed)?,
            };
            let (taken, since) = (stat.st_mtime, (stat.st_mtime, stat.st_mtime_nsec));
            let snapshot = UpperSnapshot {
                name,
                taken,
                stored_bytes,
            };
            found.push((since, snapshot));
        }
    }
    found.sort_by_key(|(since, _)| *since);
    Ok(found.into_iter().map(|(_, snapshot)| snapshot).collect())
}

/// Bytes that a directory takes up on the host, with all in it.
fn stored_below(root: BorrowedFd<'_>, path: &[u8]) -> Result<u64, Errno> {
    let (mut stored, mut seen) = (0, HashSet::new());
    let mut todo = vec![path.to_vec()];
    while let Some(path) = todo.pop() {
        let directory = open_directory_beneath(root, &path)?;
        stored += stored_bytes(&rustix::fs::fstat(&directory)?);
        for name in work::list(directory.as_fd())? {
            let stat = rustix::fs::statat(&directory, &name[..], AtFlags::SYMLINK_NOFOLLOW)?;
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                todo.push([&path[..], b"/", &name].concat());
            } else if stat.st_nlink == 1 || seen.insert(stat.st_ino) {
                stored += stored_bytes(&stat);
            }
        }
    }
    Ok(stored)
}

/// Removes a snapshot, also of an upper that is mounted. Fails if a process reads the snapshot.
pub fn remove_snapshot(upper: &Path, name: &str, note: &str) -> Result<(), UpperError> {
    let path = checked_path(upper, name)?;
    let none = || UpperError::NoSnapshot(path.clone());
    let failed = |errno| match errno {
        Errno::NOENT => none(),
        errno => UpperError::io(&path, "remove it", errno),
    };
    let snapshots = open_snapshots(upper)?.ok_or_else(none)?;
    rustix::fs::flock(&snapshots, FlockOperation::LockExclusive).map_err(failed)?;
    let snapshot = work::open_directory(snapshots.as_fd(), name.as_bytes()).map_err(failed)?;
    let _lock = match open_inside(snapshot.as_fd(), &path, META)? {
        Some(meta) => lock_new(meta.as_fd(), &path, note)?,
        None => return Err(none()),
    };
    let removed = match rustix::fs::mkdirat(&snapshots, REMOVED, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => work::open_directory(snapshots.as_fd(), REMOVED.as_bytes()),
        Err(errno) => Err(errno),
    };
    let removed = removed.map_err(failed)?;
    let emptied = || work::empty(removed.as_fd(), None);
    let moved = || {
        rustix::fs::renameat(&snapshots, name, &removed, MADE)?;
        rustix::fs::fsync(&snapshots)
    };
    let unlinked = || rustix::fs::unlinkat(&snapshots, REMOVED, AtFlags::REMOVEDIR);
    let done = emptied().and_then(|()| moved()).and_then(|()| emptied());
    done.and_then(|()| unlinked()).map_err(failed)
}

/// Makes a further upper at `new` with the content of the upper at `from`, which no process writes
/// to, or of a snapshot. `new` does not exist, or is an empty directory.
pub fn fork_upper(from: &Path, new: &Path) -> Result<(), UpperError> {
    let source = UpperReader::open(from)?;
    if source.is_lost()? {
        return Err(UpperError::Volatile(from.to_owned()));
    }
    let part = UnfinishedUpper::begin_new(new)?;
    fill(&part, &source, new)?;
    part.complete()
}

/// Goes back: gives an upper that no process uses the content of its snapshot `name`. All snapshots
/// stay. `note` names this process to others.
pub fn roll_back_upper(upper: &Path, name: &str, note: &str) -> Result<(), UpperError> {
    let failed = |errno| UpperError::io(upper, "replace it", errno);
    // A rename does not follow a symbolic link.
    let path = upper.canonicalize();
    let path = path.map_err(|error| failed(errno_of(&error)))?;
    // Locks the upper.
    let before = Instance::open_existing(&path, note)?;
    let from = checked_path(&path, name)?;
    let source = UpperReader::open(&from).map_err(|error| match error {
        UpperError::Missing(path) => UpperError::NoSnapshot(path),
        error => error,
    })?;
    let part = UnfinishedUpper::begin(&path)?;
    fill(&part, &source, &path)?;
    let made = work::open_directory(part.directory.as_fd(), MADE.as_bytes()).map_err(failed)?;
    let meta = work::open_directory(made.as_fd(), META.as_bytes()).map_err(failed)?;
    let _lock = lock_new(meta.as_fd(), &path, note)?;
    let moved = rustix::fs::renameat(before.meta(), SNAPSHOTS, &meta, SNAPSHOTS);
    let (parent, name) = (&part.parent, part.name());
    let flags = RenameFlags::EXCHANGE;
    let exchange = || rustix::fs::renameat_with(&part.directory, MADE, parent, name, flags);
    let exchanged = moved.and_then(|()| {
        rustix::fs::fsync(&meta)?;
        exchange()?;
        let synced = rustix::fs::fsync(&part.directory).and_then(|()| rustix::fs::fsync(parent));
        synced.inspect_err(|_| {
            // The upper is as before for all processes.
            let _ = exchange();
        })
    });
    if exchanged.is_err() {
        part.return_snapshots(before.meta()).map_err(failed)?;
    }
    exchanged.map_err(failed)
}

/// Moves the snapshots back that a killed rollback left beside the upper at `upper`, if no process
/// uses the upper. `note` names this process to others.
pub fn recover_snapshots(upper: &Path, note: &str) {
    let Ok(path) = upper.canonicalize() else {
        return;
    };
    let part = UnfinishedUpper::path_of(&path);
    if snapshot_directory(&part.join(MADE)).is_dir() {
        // Each writer does it, so a process that uses the upper has done it.
        let _ = Instance::open_existing(&path, note);
    }
}

/// Opens the directory of the snapshots; `None` if there are none.
fn open_snapshots(upper: &Path) -> Result<Option<OwnedFd>, UpperError> {
    let root = open_root(upper)?;
    let Some(meta) = open_inside(root.as_fd(), upper, META)? else {
        return Ok(None);
    };
    open_inside(meta.as_fd(), &upper.join(META), SNAPSHOTS)
}

/// Locks the upper at `path`, whose directory [`META`] is `meta`.
fn lock_new(meta: BorrowedFd<'_>, path: &Path, note: &str) -> Result<FileLock, UpperError> {
    let failed = |errno| UpperError::io(path, "open its lock .bcow/lock", errno);
    let file = open_lock(meta, OFlags::RDWR | OFlags::CREATE).map_err(failed)?;
    let file = file.ok_or(Errno::NOENT).map_err(failed)?;
    FileLock::exclusive(&file, note).map_err(|error| UpperError::InUse(path.to_owned(), error))
}

/// Makes the copy of an upper in `directory` an upper: writes its record, a lock, and all of it to
/// the disk. `snapshot` is its name if it is a snapshot. `path` is for messages.
fn complete(
    directory: BorrowedFd<'_>,
    record: &InstanceRecord,
    snapshot: Option<&str>,
    path: &Path,
) -> Result<(), UpperError> {
    let failed = |errno| UpperError::io(path, "write it", errno);
    let meta = work::open_directory(directory, META.as_bytes()).map_err(failed)?;
    open_lock(meta.as_fd(), OFlags::RDWR | OFlags::CREATE).map_err(failed)?;
    let record = InstanceRecord {
        snapshot: snapshot.map(str::to_owned),
        ..record.clone()
    };
    record::write(&record, meta.as_fd(), path)?;
    rustix::fs::syncfs(directory).map_err(failed)
}

/// A snapshot that has its content, but not its name.
pub(crate) struct NewSnapshot<'i> {
    instance: &'i Instance,
    name: &'i str,
    path: PathBuf,
    temporary: Temporary<'i>,
    directory: File,
}

impl<'i> NewSnapshot<'i> {
    /// Copies an upper, which nothing changes meanwhile except by passthrough.
    pub fn copy(instance: &'i Instance, name: &'i str) -> Result<Self, UpperError> {
        let path = checked_path(instance.path(), name)?;
        if path.symlink_metadata().is_ok() {
            return Err(UpperError::Exists(path));
        }
        let failed = |errno| UpperError::io(&path, "write it", errno);
        let (temporary, directory) = instance.temporary_directory().map_err(failed)?;
        copy_content(&UpperReader::of(instance)?, directory.as_fd()).map_err(failed)?;
        Ok(NewSnapshot {
            instance,
            name,
            path,
            temporary,
            directory,
        })
    }

    /// Makes the snapshot durable and gives it its name. The upper may change meanwhile.
    pub fn place(self) -> Result<PathBuf, UpperError> {
        let path = self.path;
        let failed = |errno| match errno {
            Errno::EXIST => UpperError::Exists(path.clone()),
            errno => UpperError::io(&path, "write it", errno),
        };
        let record = self.instance.record();
        complete(self.directory.as_fd(), record, Some(self.name), &path)?;
        let meta = self.instance.meta();
        match rustix::fs::mkdirat(meta, SNAPSHOTS, Mode::RWXU) {
            Ok(()) => rustix::fs::fsync(meta).map_err(failed)?,
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(failed(errno)),
        }
        let snapshots = work::open_directory(meta, SNAPSHOTS.as_bytes()).map_err(failed)?;
        let placed = self
            .temporary
            .place_new(snapshots.as_fd(), self.name.as_bytes());
        placed
            .and_then(|()| rustix::fs::fsync(&snapshots))
            .map_err(failed)?;
        Ok(path)
    }
}

/// Makes a copy of `source` that can become the upper at `path`.
fn fill(part: &UnfinishedUpper, source: &UpperReader, path: &Path) -> Result<(), UpperError> {
    let failed = |errno| UpperError::io(path, "create it", errno);
    let record = source.record().ok_or_else(|| UpperError::Record {
        path: source.path().join(META),
        problem: "it has no record of an image".into(),
    })?;
    let made = work::open_directory(part.directory.as_fd(), MADE.as_bytes()).map_err(failed)?;
    copy_content(source, made.as_fd()).map_err(failed)?;
    complete(made.as_fd(), record, None, path)
}

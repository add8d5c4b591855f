//! Snapshots: the file of a disk becomes its snapshot, and a new empty disk over it gets the name
//! of the disk. No data is copied.
//!
//! The snapshot NAME of the disk `vm.bcow` is the file `vm.bcow@NAME` in the same directory. So the
//! disk finds it by the ordinary rules for backings by file name, as the snapshot finds its own
//! backing, and each command takes it by its path. The file has a mark with its name (spec section
//! 3), and bcow does not open it for writing.
//!
//! The order of the steps keeps the content of the disk under its name at each moment:
//!
//! 1. The disk becomes durable, with an empty log.
//! 2. The mark is written. Under the name of the disk, it has no effect.
//! 3. A new empty disk becomes durable, and gets the name of the snapshot. Its backing has that
//!    name, so it is the only file that is below itself, and every reader refuses it.
//! 4. Both files exchange their names, which is one atomic operation of the host.
//! 5. The directory becomes durable. The host keeps the order of changes of names, so the name of
//!    step 3 needs no barrier of its own.
//! 6. The snapshot loses its unused space, which can take the longest: writers need not wait for
//!    it.
//!
//! After a crash between 3 and 4, a file remains that is no snapshot. [`remove_unfinished`] removes
//! it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow_format::BackingName;
use rustix::fs::{CWD, RenameFlags, renameat_with};

use super::compare::status_or_hole;
use super::{Monitor, OperationError, Phase, STEP_BYTES, step};
use crate::chain::MAX_DEPTH;
use crate::copy_file;
use crate::lock::{FileLock, LockError};
use crate::locked::{backing_of, mark_snapshot};
use crate::new_file::parent_of;
use crate::{
    BlockDevice, Content, Disk, Error, Ledger, LockedFile, NewFile, NewFileError, Space,
    WritableDevice,
};

/// Between the file name of a disk and the name of its snapshot.
const SEPARATOR: char = '@';
/// Greatest length in bytes of the name of a file.
const MAX_NAME_BYTES: usize = 255;

/// A disk whose earlier file is a snapshot now.
pub struct Snapshotted {
    /// The disk that this file was.
    pub earlier: Earlier,
    /// The new disk, over the earlier one.
    pub disk: Disk,
    /// Its file, under the name of the disk, and locked.
    pub file: LockedFile,
    /// Path of the snapshot.
    pub path: PathBuf,
}

/// A disk whose file became a snapshot. Dropping this releases the unused space of the file; others
/// can read it meanwhile.
pub struct Earlier(Arc<Disk>);

impl Drop for Earlier {
    fn drop(&mut self) {
        // The snapshot is complete. After a failure, it only has unused space.
        let _ = self.0.finish();
    }
}

/// The reason why there is no snapshot. The disk has not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The name of the snapshot has other characters than allowed, or is too long.
    #[error(
        "the name of a snapshot begins with a letter or a digit, and has letters, digits, `.`, `_` \
         and `-`"
    )]
    Name,
    /// The file of the snapshot would have a name that is too long or is not UTF-8.
    #[error("the name of its file is too long or is not UTF-8")]
    FileName,
    /// The disk is on a block device, which has no place for a second file.
    #[error("it is no regular file")]
    NoRegularFile,
    /// The file of the disk has another name now, or was removed.
    #[error("another file has its name now")]
    Moved,
    /// There is a file with the name of the snapshot.
    #[error("{} exists", .0.display())]
    Exists(PathBuf),
    /// The new disk would be over more than [`MAX_DEPTH`] files.
    #[error("{MAX_DEPTH} files are below the disk, and there can be no more")]
    TooDeep,
    /// The disk cannot be made durable.
    #[error(transparent)]
    Disk(Error),
    /// The new disk cannot be written.
    #[error("a new disk over it cannot be written: {0}")]
    New(Error),
    /// The new file cannot be made.
    #[error("a new disk over it cannot be written: {0}")]
    NewFile(NewFileError),
    /// The new file cannot be locked.
    #[error("a new disk over it cannot be locked: {0}")]
    Lock(LockError),
    /// An error of the host.
    #[error(transparent)]
    Host(io::Error),
    /// The host cannot exchange the names of the two files.
    #[error("the file system cannot exchange the names of two files: {0}")]
    Exchange(io::Error),
}

/// Whether a snapshot can have this name.
pub fn is_snapshot_name(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(is_allowed)
}

/// The path of the snapshot `name` of the disk at `disk`, whose links are resolved.
pub fn snapshot_path(disk: &Path, name: &str) -> Result<PathBuf, SnapshotError> {
    if !is_snapshot_name(name) {
        return Err(SnapshotError::Name);
    }
    let file = disk.file_name().and_then(|file| file.to_str());
    let file = file.map(|file| format!("{file}{SEPARATOR}{name}"));
    let file = file.filter(|file| file.len() <= MAX_NAME_BYTES);
    Ok(disk.with_file_name(file.ok_or(SnapshotError::FileName)?))
}

/// The name of the snapshot in `file`, if that is a name for a snapshot of the disk `disk`. Both
/// are names of files.
pub fn snapshot_name<'f>(disk: &str, file: &'f str) -> Option<&'f str> {
    let name = file.strip_prefix(disk)?.strip_prefix(SEPARATOR)?;
    snapshot_path(Path::new(disk), name).ok().map(|_| name)
}

/// Makes the file of a disk its snapshot `name`, and a new empty disk of its size and layout over
/// it. `disk` is open in `file`, with `height` files below it; the caller has stopped all its
/// writers. `note` names this process to other writers.
///
/// The new disk reads through the file of `disk`. It has `ledger`, an empty one.
pub fn snapshot(
    disk: &Arc<Disk>,
    file: &LockedFile,
    name: &str,
    height: u32,
    note: &str,
    ledger: Option<Arc<Ledger>>,
) -> Result<Snapshotted, SnapshotError> {
    if height >= MAX_DEPTH {
        return Err(SnapshotError::TooDeep);
    }
    let (path, new) = begin(file, name)?;
    let file_name = name_of(&path)?;
    disk.checkpoint().map_err(SnapshotError::Disk)?;
    mark_snapshot(file.file(), file_name)
        .and_then(|()| file.file().sync_data())
        .map_err(SnapshotError::Host)?;
    let copied = || new.file().try_clone().map_err(SnapshotError::Host);
    // A writer that opens the disk from the exchange on meets this lock.
    let lock = FileLock::exclusive(new.file(), note).map_err(SnapshotError::Lock)?;
    let over = disk.create_over(file_name.to_owned(), Arc::new(copied()?), ledger);
    let over = over.map_err(SnapshotError::New)?;
    let new_file = LockedFile::of(copied()?, file.path().to_owned(), lock);
    new.file()
        .sync_all()
        .map_err(|error| SnapshotError::NewFile(NewFileError::Write(error)))?;
    new.name_as(file_name)
        .map_err(|error| not_made(&path, error))?;
    exchange(file.path(), &path).map_err(|error| {
        // The cause is more precise than an error here.
        let _ = remove_unfinished(&path);
        SnapshotError::Exchange(error)
    })?;
    // A process that continues after the end of this one reads the snapshot.
    if let Err(error) = file.share() {
        tracing::warn!("{} cannot be locked for readers: {error}", path.display());
    }
    Ok(Snapshotted {
        earlier: Earlier(disk.clone()),
        disk: over,
        file: new_file,
        path,
    })
}

/// Makes a copy of the file of a disk the snapshot `name`, which is not durable. The disk stays as
/// it is, and so the snapshot can be removed while the disk is in use. `disk` is open in `file`;
/// the caller has stopped all its writers. Returns the path of the snapshot.
pub fn copy_snapshot(disk: &Disk, file: &LockedFile, name: &str) -> Result<PathBuf, SnapshotError> {
    let (path, new) = begin(file, name)?;
    let file_name = name_of(&path)?;
    disk.checkpoint().map_err(SnapshotError::Disk)?;
    copy_file(file.file(), new.file())
        .and_then(|()| mark_snapshot(new.file(), file_name))
        .map_err(SnapshotError::Host)?;
    new.name_as(file_name)
        .map_err(|error| not_made(&path, error))?;
    Ok(path)
}

/// Begins a new file for the snapshot `name` of the disk in `file`. Returns the path of the
/// snapshot with it.
fn begin(file: &LockedFile, name: &str) -> Result<(PathBuf, NewFile), SnapshotError> {
    if !file.has_its_name() {
        return Err(SnapshotError::Moved);
    }
    let metadata = file.file().metadata().map_err(SnapshotError::Host)?;
    if !metadata.is_file() {
        return Err(SnapshotError::NoRegularFile);
    }
    let path = snapshot_path(file.path(), name)?;
    remove_unfinished(&path).map_err(SnapshotError::Host)?;
    let new = NewFile::create_new(&path).map_err(|error| not_made(&path, error))?;
    new.take_attributes(file.file())
        .map_err(|error| SnapshotError::NewFile(NewFileError::Write(error)))?;
    Ok((path, new))
}

fn not_made(path: &Path, error: NewFileError) -> SnapshotError {
    match error {
        NewFileError::Exists => SnapshotError::Exists(path.to_owned()),
        error => SnapshotError::NewFile(error),
    }
}

fn name_of(path: &Path) -> Result<&str, SnapshotError> {
    let name = path.file_name().and_then(|name| name.to_str());
    name.ok_or(SnapshotError::FileName)
}

/// Exchanges the names of two files of one directory, durably or not at all.
fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    let swap = || renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE);
    swap()?;
    sync_directory_of(one).inspect_err(|_| {
        // The names are as before for all processes; after a power cut, either is.
        let _ = swap();
    })
}

/// Makes the names in the directory of the file at `path` durable.
pub fn sync_directory_of(path: &Path) -> io::Result<()> {
    File::open(parent_of(path))?.sync_all()
}

/// Removes the file that an interrupted [`snapshot`] left at `path`: an empty disk that names
/// itself as its backing. The caller has locked the disk whose snapshot the file would be.
pub fn remove_unfinished(path: &Path) -> io::Result<()> {
    let Ok(file) = File::open(path) else {
        return Ok(());
    };
    let backing = backing_of(file).map(|entry| entry.name);
    let is_own = |name: &str| path.file_name() == Some(name.as_ref());
    match backing {
        Some(BackingName::FileName { name, .. }) if is_own(&name) => std::fs::remove_file(path),
        _ => Ok(()),
    }
}

/// Copies the own data of the backing of `disk` into it, where `disk` has none of its own, and
/// makes `disk` durable: then it shows the same content over the backing of its backing, which has
/// `below` bytes. `backing_bytes` is the size of the backing. Returns the number of bytes that were
/// written or zeroed.
pub fn absorb_backing(
    disk: &Disk,
    backing_bytes: u64,
    below: u64,
    monitor: &dyn Monitor,
) -> Result<u64, OperationError> {
    let written = Absorber::new(disk, backing_bytes, below).all(monitor)?;
    disk.flush().map_err(OperationError::Write)?;
    Ok(written)
}

/// Copies data of the backing of a disk into the disk, piece by piece.
pub(super) struct Absorber<'d> {
    disk: &'d Disk,
    backing_bytes: u64,
    below: u64,
    buffer: Vec<u8>,
}

/// A range of the disk; one with something to do has at most [`STEP_BYTES`].
pub(super) struct AbsorbedPiece {
    at: u64,
    pub(super) length: u64,
    /// What there is to do, if anything.
    pub(super) work: Option<Absorb>,
}

#[derive(Clone, Copy)]
pub(super) enum Absorb {
    Copy,
    Zero,
}

impl<'d> Absorber<'d> {
    /// As for [`absorb_backing`].
    pub(super) fn new(disk: &'d Disk, backing_bytes: u64, below: u64) -> Self {
        Absorber {
            disk,
            backing_bytes,
            below,
            buffer: Vec::new(),
        }
    }

    /// Copies all. The disk is not durable afterwards.
    pub(super) fn all(mut self, monitor: &dyn Monitor) -> Result<u64, OperationError> {
        monitor.phase(Phase::Commit, Some(self.disk.size()));
        let (mut at, mut written) = (0, 0);
        while at < self.disk.size() {
            let piece = self.piece(at)?;
            written += self.absorb(&piece)?;
            step(monitor, piece.length)?;
            at += piece.length;
        }
        Ok(written)
    }

    /// The piece from `at` on, a place in the disk.
    pub(super) fn piece(&self, at: u64) -> Result<AbsorbedPiece, OperationError> {
        let is_behind = at >= self.backing_bytes;
        let size = self.disk.size();
        let end = if is_behind { size } else { self.backing_bytes.min(size) };
        let status = status_or_hole(self.disk, at, end - at).map_err(OperationError::Read)?;
        let work = match (status.depth, status.content) {
            (2, Content::Data) => Some(Absorb::Copy),
            // The end of the backing hides the end of a larger file below it.
            (depth, _) if depth == 2 || (depth != 1 && is_behind && at < self.below) => {
                Some(Absorb::Zero)
            }
            _ => None,
        };
        Ok(AbsorbedPiece {
            at,
            length: match work {
                Some(_) => status.length.min(STEP_BYTES),
                // Most of a disk has nothing to copy.
                None => status.length,
            },
            work,
        })
    }

    /// Reads a piece, if it is to be copied.
    pub(super) fn read(&mut self, piece: &AbsorbedPiece) -> Result<(), OperationError> {
        if let Some(Absorb::Copy) = piece.work {
            self.buffer.resize(piece.length as usize, 0);
            let read = self.disk.read_at(piece.at, &mut self.buffer);
            read.map_err(OperationError::Read)?;
        }
        Ok(())
    }

    /// Copies a piece. Returns the number of bytes that were written or zeroed.
    pub(super) fn absorb(&mut self, piece: &AbsorbedPiece) -> Result<u64, OperationError> {
        let &AbsorbedPiece { at, length, work } = piece;
        match work {
            None => return Ok(0),
            Some(Absorb::Copy) => {
                self.read(piece)?;
                self.disk.write_at(at, &self.buffer)
            }
            Some(Absorb::Zero) => self.disk.write_zeroes(at, length, Space::Free),
        }
        .map_err(OperationError::Write)?;
        Ok(length)
    }
}

//! Commit into the backing: the own data of a disk moves into the disk below it.
//!
//! The order of the steps keeps the visible content at each moment:
//!
//! 1. The disk forgets the identity of its backing, because the backing is about to change. Only
//!    then is the backing opened for writing: if it has a log, the opening changes its identity.
//! 2. The own data is copied. The disk still has the data, so a half-done copy does not show.
//! 3. The backing becomes durable.
//! 4. The disk records the new identity.
//! 5. The disk drops its own data.
//!
//! A backing that is smaller than the disk grows after step 1. Between this growth and its record
//! in the disk the two sizes differ, and the disk does not open. A power cut there leaves that
//! state; the next commit recognises it and continues.

use std::path::PathBuf;
use std::sync::Arc;

use bcow_format::{BackingEntry, BackingName};

use super::{Monitor, OperationError, Phase, STEP_BYTES, step};
use crate::chain::{ChainCause, ChainProblem, Opener, Policy};
use crate::locked::{LockFileError, LockedFile};
use crate::{
    BackingResolver, BlockDevice, Content, Disk, Error, Extent, Image, Mapping, OneBacking,
    OpenOptions, Space, Storage, UnreadBackings, WritableDevice,
};

/// The result of a commit into the backing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Number of bytes that were written into the backing or zeroed there.
    pub bytes: u64,
    /// Path of the backing.
    pub backing: PathBuf,
}

/// The reason why a disk was not committed into its backing. The visible content of the disk has
/// not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommitError {
    /// The disk cannot be opened.
    #[error(transparent)]
    Disk(Error),
    /// The disk has no backing.
    #[error("it has no backing")]
    NoBacking,
    /// The backing is named by digest. Such a backing never changes.
    #[error("its backing is named by digest, and never changes")]
    BackingByDigest,
    /// The backing is on another machine, and only read from there.
    #[error("the backing {0} is on another machine, where bcow writes no disk")]
    Url(String),
    /// The backing is the view of an image, which does not change.
    #[error("the backing is a view of an image, and never changes")]
    View,
    /// The backing cannot be opened for reading, or is not the recorded one.
    #[error(transparent)]
    Chain(Arc<ChainProblem>),
    /// The backing cannot be locked for writing.
    #[error("backing {}: {source}", path.display())]
    Lock {
        /// Path of the backing.
        path: PathBuf,
        /// The cause.
        source: LockFileError,
    },
    /// The backing cannot be opened for writing.
    #[error("backing {}: {source}", path.display())]
    Backing {
        /// Path of the backing.
        path: PathBuf,
        /// The cause.
        source: Error,
        /// The problem with a file below the backing, if that is the cause.
        below: Option<Arc<ChainProblem>>,
    },
    /// The backing changed between its check and its lock.
    #[error("its backing changed while it was opened")]
    BackingChanged,
    /// The copy ended early.
    #[error(transparent)]
    Operation(#[from] OperationError),
}

/// Writes the own data of the disk in `file` into its backing, which must be a writable disk, and
/// drops it from `file`. `policy` finds the backing; `note` names the process to others that want
/// to write to the backing meanwhile.
///
/// Other disks over the same backing do not open any more afterwards, because their backing has
/// changed.
pub fn commit_into_backing(
    file: &LockedFile,
    policy: &Policy<'_>,
    note: &str,
    monitor: &dyn Monitor,
) -> Result<Committed, CommitError> {
    let options = &policy.options;
    let image = Image::open_with_backings(file.storage(), options, &UnreadBackings)
        .map_err(CommitError::Disk)?;
    let entry = image.disk_backing().ok_or(CommitError::NoBacking)?;
    let identity = match entry.name {
        BackingName::FileName { identity, .. } => identity,
        BackingName::Digest(_) => return Err(CommitError::BackingByDigest),
        BackingName::Url { ref url, .. } => return Err(CommitError::Url(url.clone())),
        BackingName::View { .. } => return Err(CommitError::View),
    };
    // Opened for reading first: an error of the backing comes before any write.
    let opener = Opener::new(file.path(), policy.clone());
    let path = match opener.open(entry) {
        Ok(_) => opener.files().into_iter().next().and_then(|file| file.path),
        Err(problem) => match &problem.cause {
            ChainCause::Size { path, found, .. } if is_interrupted(&image, *found) => path.clone(),
            _ => return Err(CommitError::Chain(problem)),
        },
    };
    let path = path.ok_or(CommitError::BackingByDigest)?;
    drop((image, opener));
    let locked = LockedFile::open(&path, note).map_err(|source| CommitError::Lock {
        path: path.clone(),
        source,
    })?;
    let opener = Opener::new(locked.path(), policy.clone());
    let failed = |source| CommitError::Backing {
        path: locked.path().to_owned(),
        source,
        below: opener.problems().into_iter().next(),
    };
    let found = Image::open_with_backings(locked.storage(), options, &UnreadBackings)
        .map_err(failed)?
        .identity_hash();
    if identity.is_some_and(|identity| identity != found) {
        return Err(CommitError::BackingChanged);
    }
    let open = || Disk::open(locked.storage(), options, &opener).map_err(failed);
    let (disk, backing) = open_over(file.storage(), options, open)?;
    let bytes = commit(disk, &backing, monitor)?;
    // The disk is closed, so this is the last reference.
    if let Some(backing) = Arc::into_inner(backing) {
        backing.close().map_err(OperationError::Write)?;
    }
    Ok(Committed {
        bytes,
        backing: locked.path().to_owned(),
    })
}

/// Whether a commit of this disk was interrupted when its backing had grown to `size` bytes.
fn is_interrupted(image: &Image, size: u64) -> bool {
    let unidentified = image.disk_backing().is_some_and(|entry| {
        let name = &entry.name;
        matches!(name, BackingName::FileName { identity: None, .. }) && entry.size < size
    });
    unidentified && size == image.size()
}

/// Opens a backing for writing with `open_backing`, and the disk in `storage` over it, for
/// [`commit`]. The caller has compared the identity of the backing, which the disk forgets first.
/// Repairs the size that an interrupted commit left.
pub fn open_over(
    storage: Arc<dyn Storage>,
    options: &OpenOptions,
    open_backing: impl FnOnce() -> Result<Disk, CommitError>,
) -> Result<(Disk, Arc<Disk>), CommitError> {
    let image = Image::open_with_backings(storage.clone(), options, &UnreadBackings)
        .map_err(CommitError::Disk)?;
    record_identity(&storage, options, None).map_err(CommitError::Disk)?;
    let backing = Arc::new(open_backing()?);
    let open = || {
        let entry = image.disk_backing();
        if is_interrupted(&image, backing.size())
            && entry.is_some_and(|entry| reads_as_zeros(&*backing, entry.size))
        {
            let disk = Disk::open(storage.clone(), options, &UnreadBackings)?;
            record(&disk, &backing, entry, None)?;
        }
        Disk::open(storage, options, &OneBacking(Some(backing.clone())))
    };
    let disk = open().map_err(CommitError::Disk)?;
    Ok((disk, backing))
}

/// Makes the disk in `storage` record another identity of its backing, which it names by its file
/// name; with `None`, the disk opens over any backing of that name and size.
pub fn record_identity(
    storage: &Arc<dyn Storage>,
    options: &OpenOptions,
    new: Option<[u8; 32]>,
) -> Result<(), Error> {
    let disk = Disk::open(storage.clone(), options, &UnreadBackings)?;
    let Some(mut entry) = disk.backing() else {
        return Ok(());
    };
    let BackingName::FileName { identity, .. } = &mut entry.name else {
        return Ok(());
    };
    if std::mem::replace(identity, new) != new {
        let device = UnreadBackings.resolve(&entry)?;
        disk.set_backing(device.map(|device| (entry, device)))?;
    }
    Ok(())
}

/// Whether a device stores no data from `at` on, as after it has grown.
fn reads_as_zeros(device: &dyn BlockDevice, mut at: u64) -> bool {
    while at < device.size() {
        match device.status(at, device.size() - at) {
            Ok(status) if status.content != Content::Data => at += status.length,
            _ => return false,
        }
    }
    true
}

/// Writes the own data of `disk` into `backing`, over which it was opened, and drops it from the
/// disk. Both are durable afterwards. Returns the number of bytes that were written or zeroed.
pub fn commit(
    disk: Disk,
    backing: &Arc<Disk>,
    monitor: &dyn Monitor,
) -> Result<u64, OperationError> {
    let entry = disk.backing();
    monitor.phase(Phase::Commit, Some(disk.size()));
    let identity =
        |identity| record(&disk, backing, entry.as_ref(), identity).map_err(OperationError::Write);
    identity(None)?;
    if disk.size() > backing.size() {
        backing.resize(disk.size()).map_err(OperationError::Write)?;
        identity(None)?;
    }
    let copied = copy_own(&|at| disk.map(at), &disk, backing, monitor)?;
    monitor.phase(Phase::Sync, None);
    backing.checkpoint().map_err(OperationError::Write)?;
    identity(Some(backing.identity_hash()))?;
    disk.clear()
        .and_then(|()| disk.close())
        .map_err(OperationError::Write)?;
    Ok(copied)
}

/// Records the present size of the backing, and its identity if that will not change any more.
fn record(
    disk: &Disk,
    backing: &Arc<Disk>,
    entry: Option<&BackingEntry>,
    identity: Option<[u8; 32]>,
) -> Result<(), Error> {
    let name = match entry.map(|entry| &entry.name) {
        Some(BackingName::FileName { name, .. }) => name.clone(),
        Some(BackingName::Digest(_) | BackingName::Url { .. } | BackingName::View { .. }) => {
            let problem = "a commit into a backing that cannot change";
            return Err(Error::Unsupported(problem.into()));
        }
        None => return Err(Error::Unsupported("a commit without a backing".into())),
    };
    let entry = BackingEntry {
        name: BackingName::FileName { name, identity },
        size: backing.size(),
    };
    disk.set_backing(Some((entry, backing.clone())))
}

/// Writes the own data of `from`, whose extents are `map`, into `to`. Returns the number of bytes
/// that were written or zeroed.
pub(super) fn copy_own(
    map: &dyn Fn(u64) -> Result<Extent, Error>,
    from: &dyn BlockDevice,
    to: &Disk,
    monitor: &dyn Monitor,
) -> Result<u64, OperationError> {
    let (mut at, mut copied) = (0, 0);
    let mut buffer = Vec::new();
    while at < from.size() {
        let extent = map(at).map_err(OperationError::Read)?;
        let end = extent.offset + extent.length;
        while at < end {
            let length = STEP_BYTES.min(end - at);
            match extent.mapping {
                Mapping::Backing { .. } | Mapping::Hole => {}
                Mapping::Zero => {
                    to.write_zeroes(at, length, Space::Free)
                        .map_err(OperationError::Write)?;
                    copied += length;
                }
                Mapping::Raw { .. } | Mapping::Compressed { .. } | Mapping::Open { .. } => {
                    buffer.resize(length as usize, 0);
                    from.read_at(at, &mut buffer)
                        .map_err(OperationError::Read)?;
                    to.write_at(at, &buffer).map_err(OperationError::Write)?;
                    copied += length;
                }
            }
            step(monitor, length)?;
            at += length;
        }
    }
    Ok(copied)
}

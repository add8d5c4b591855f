//! Removal of a snapshot below a disk that is in use.
//!
//! What only the snapshot has goes into the file over it. If that is the disk, the disk takes the
//! data piece by piece; the operations of programs wait for one piece at most. If it is another
//! snapshot, that does not change while it is in use: a new file has the data of both, and gets
//! the name of the upper one. It begins as a copy of the larger file, which is a reflink where the
//! host has them.
//!
//! In the second case all files above record a new identity of the file below them. The order of
//! the steps is that of a removal at rest: each forgets the identity before the file below it
//! changes, and records the new one afterwards. So after a kill at any moment, each disk shows what
//! it showed, and the snapshot is there or not.
//!
//! The operations of programs wait for the steps with names and identities, not for the copy.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bcow_format::{BackingEntry, BackingName};

use super::commit::{copy_own, record_identity};
use super::live::{LiveDisk, Top};
use super::over::{Over, is_shared, tree_over};
use super::snapshot::{Absorber, SnapshotError, snapshot_path, sync_directory_of};
use super::{Monitor, OperationError, Phase, step};
use crate::copy::copy_file_in_pieces;
use crate::lock::{AloneWith, FileLock, LockError};
use crate::locked::mark_snapshot_of;
use crate::{
    BlockDevice, Disk, Error, FileIdentity, Image, LockFileError, LockedFile, NewFile,
    NewFileError, OneBacking, OpenOptions, Storage, UnreadBackings, WritableDevice, snapshot_time,
};

/// A snapshot that was removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Removed {
    /// The path of the disk or snapshot that took its data.
    pub into: Option<PathBuf>,
    /// Number of bytes that were written or zeroed there.
    pub bytes: u64,
}

/// The reason why a snapshot was not removed. What each disk shows has not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RemoveError {
    /// The snapshot cannot have this name.
    #[error(transparent)]
    Name(SnapshotError),
    /// The disk is not over the snapshot.
    #[error("it is not below the disk")]
    NotBelow,
    /// Several disks are directly over the snapshot.
    #[error("it is the backing of {} and {}", .0.display(), .1.display())]
    Several(PathBuf, PathBuf),
    /// A file over the snapshot, which would change, has a link in another directory.
    #[error("it is below {}, which forks have too", .0.display())]
    Shared(PathBuf),
    /// Another command has changed the disks meanwhile.
    #[error("the disks over it have changed meanwhile")]
    Changed,
    /// A file is in use.
    #[error("{}: {source}", path.display())]
    InUse {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: LockError,
    },
    /// A file cannot be opened and locked.
    #[error("{}: {source}", path.display())]
    Lock {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: LockFileError,
    },
    /// The copy ended early.
    #[error(transparent)]
    Operation(#[from] OperationError),
    /// A file cannot be opened as a disk, or cannot record another backing.
    #[error(transparent)]
    Disk(#[from] Error),
    /// The new file cannot be made.
    #[error(transparent)]
    NewFile(#[from] NewFileError),
    /// An error of the host.
    #[error(transparent)]
    Host(#[from] io::Error),
}

/// The disks over the snapshot at `bottom`, of which one at most is directly over it, so that it
/// can take the data of the snapshot. The first `replaced` of them get other files; the others
/// record the identities of these, and so have no links in other directories.
pub fn tree_to_change(bottom: &Path, replaced: usize) -> Result<Vec<Over>, RemoveError> {
    let tree = tree_over(bottom).map_err(RemoveError::Host)?;
    let mut direct = tree.iter().filter(|over| over.parent.is_none());
    if let (Some(first), Some(second)) = (direct.next(), direct.next()) {
        let [first, second] = [first, second].map(|over| over.path.clone());
        return Err(RemoveError::Several(first, second));
    }
    match tree
        .iter()
        .skip(replaced)
        .find(|over| is_shared(&over.path))
    {
        Some(over) => Err(RemoveError::Shared(over.path.clone())),
        None => Ok(tree),
    }
}

/// A file below the disk.
#[derive(Clone)]
struct Link {
    entry: BackingEntry,
    image: Arc<Image>,
}

impl Link {
    fn identity(&self) -> Option<FileIdentity> {
        self.image.storage().identity()
    }

    /// Whether it is the file at this path.
    fn is_at(&self, path: &Path) -> bool {
        let there = File::open(path).ok();
        let there = there.and_then(|file| Storage::identity(&file));
        there.is_some() && there == self.identity()
    }

    /// Locks the file for this process alone.
    fn alone(&self, path: &Path) -> Result<Option<AloneWith<'_>>, RemoveError> {
        let alone = self.image.storage().host_file().map(AloneWith::new);
        alone.transpose().map_err(|source| RemoveError::InUse {
            path: path.to_owned(),
            source,
        })
    }
}

/// The snapshot to remove, and the files beside it in the chain.
struct Place {
    /// Its path.
    path: PathBuf,
    /// The number of the snapshot in the chain.
    number: usize,
    removed: Link,
    /// What is below it.
    below: Option<(BackingEntry, Arc<dyn BlockDevice>)>,
}

impl Place {
    fn below_bytes(&self) -> u64 {
        self.below.as_ref().map_or(0, |(entry, _)| entry.size)
    }

    /// Locks the snapshot for this process alone, so that no command makes a disk over it. The
    /// users of another link of the file keep that one.
    fn alone_unless_shared(&self) -> Result<Option<AloneWith<'_>>, RemoveError> {
        if is_shared(&self.path) {
            return Ok(None);
        }
        self.removed.alone(&self.path)
    }
}

/// The files below a disk that are named by file names, the nearest first.
fn chain(disk: &Disk) -> Vec<Link> {
    let below = disk.below();
    let files = below.iter().flat_map(|below| below.files());
    let link = |(entry, device): (&BackingEntry, &Arc<dyn BlockDevice>)| {
        let is_file = matches!(entry.name, BackingName::FileName { .. });
        let image = Arc::clone(device).into_any().filter(|_| is_file)?;
        Some(Link {
            entry: entry.clone(),
            image: image.downcast().ok()?,
        })
    };
    files.map_while(link).collect()
}

impl LiveDisk {
    /// Removes the snapshot `name`, which is below the disk. `note` names this process to others
    /// that want to write to a file meanwhile. Operations continue while data is copied.
    pub fn remove(
        &self,
        name: &str,
        note: &str,
        monitor: &dyn Monitor,
    ) -> Result<Removed, RemoveError> {
        let _removing = self.begin_removal();
        let own = self.path();
        let path = snapshot_path(&own, name).map_err(RemoveError::Name)?;
        let (disk, place) = self.place(&path)?;
        // An error comes before the copy.
        drop(place.alone_unless_shared()?);
        if place.number == 0 {
            self.absorb(&disk, &place, monitor)
        } else {
            self.merge(&disk, &place, note, monitor)
        }
    }

    /// The disk that takes the writes now, and the place of the snapshot at `path` below it.
    fn place(&self, path: &Path) -> Result<(Arc<Disk>, Place), RemoveError> {
        let disk = self.disk();
        let chain = chain(&disk);
        let number = chain.iter().position(|link| link.is_at(path));
        let number = number.ok_or(RemoveError::NotBelow)?;
        let removed = chain[number].clone();
        let below = match removed.image.disk_backing() {
            Some(entry) => {
                let device = removed.image.backing(0).cloned();
                let missing = || Error::MissingBacking {
                    name: entry.name.to_string(),
                    logical: 0,
                };
                Some((entry.clone(), device.ok_or_else(missing)?))
            }
            None => None,
        };
        let place = Place {
            path: path.to_owned(),
            number,
            removed,
            below,
        };
        Ok((disk, place))
    }

    /// Removes the snapshot that is directly below the disk.
    fn absorb(
        &self,
        disk: &Arc<Disk>,
        place: &Place,
        monitor: &dyn Monitor,
    ) -> Result<Removed, RemoveError> {
        let over = |top: &Top| {
            let tree = tree_to_change(&place.path, 0)?;
            let is_own = tree
                .first()
                .is_some_and(|over| over.path == top.file.path());
            if is_own && Arc::ptr_eq(&top.disk, disk) {
                Ok(())
            } else {
                Err(RemoveError::Changed)
            }
        };
        over(&self.top())?;
        let removed = &place.removed;
        let mut absorber = Absorber::new(disk, removed.image.size(), place.below_bytes());
        monitor.phase(Phase::Commit, Some(disk.size()));
        let (mut at, mut bytes) = (0, 0);
        while at < disk.size() {
            let mut piece = absorber.piece(at)?;
            if piece.work.is_some() {
                // What the host has to read is in its cache when the gate closes.
                absorber.read(&piece)?;
                // No program changes the piece between the look and the copy.
                let closed = self.close_gate();
                if !Arc::ptr_eq(&closed.get().disk, disk) {
                    return Err(RemoveError::Changed);
                }
                piece = absorber.piece(at)?;
                bytes += absorber.absorb(&piece)?;
            }
            step(monitor, piece.length)?;
            at += piece.length;
        }
        disk.flush()?;
        let closed = self.close_gate();
        let top = closed.get();
        over(top)?;
        let _alone = place.alone_unless_shared()?;
        disk.set_backing(place.below.clone())?;
        top.height.fetch_sub(1, Ordering::Relaxed);
        let into = Some(top.file.path().to_owned());
        drop(closed);
        unlink(&place.path)?;
        Ok(Removed { into, bytes })
    }

    /// Removes a snapshot that is directly below another one.
    fn merge(
        &self,
        disk: &Arc<Disk>,
        place: &Place,
        note: &str,
        monitor: &dyn Monitor,
    ) -> Result<Removed, RemoveError> {
        let upper = chain(disk)[place.number - 1].clone();
        let tree = tree_to_change(&place.path, 1)?;
        let over = tree.first().ok_or(RemoveError::Changed)?;
        if !upper.is_at(&over.path) {
            return Err(RemoveError::Changed);
        }
        let over = over.path.clone();
        let (new, bytes) = merged(&upper, &over, place, disk, monitor)?;
        let closed = self.close_gate();
        let top = closed.get();
        let _alone = place.alone_unless_shared()?;
        replace(top, &upper, &over, place, new, note)?;
        top.height.fetch_sub(1, Ordering::Relaxed);
        drop(closed);
        unlink(&place.path)?;
        Ok(Removed {
            into: Some(over),
            bytes,
        })
    }
}

fn unlink(path: &Path) -> io::Result<()> {
    std::fs::remove_file(path)?;
    sync_directory_of(path)
}

/// Makes a file with the data of the snapshot and of `upper`, the file at `over` that is directly
/// over it. Returns it with the number of bytes that were written or zeroed beside the copy.
fn merged(
    upper: &Link,
    over: &Path,
    place: &Place,
    disk: &Disk,
    monitor: &dyn Monitor,
) -> Result<(NewFile, u64), RemoveError> {
    let open = |link: &Link, path: &Path| {
        let file = File::open(path)?;
        let is_same = Storage::identity(&file) == link.identity();
        is_same.then_some(file).ok_or(RemoveError::Changed)
    };
    let (upper_file, lower_file) = (open(upper, over)?, open(&place.removed, &place.path)?);
    let taken = snapshot_time(&upper_file, over).ok_or(RemoveError::Changed)?;
    let new = NewFile::create(over)?;
    new.take_attributes(&upper_file)?;
    let options = options(disk);
    let (lower, below) = (&place.removed.image, place.below.clone());
    let writable = |below: Option<Arc<dyn BlockDevice>>| -> Result<Disk, RemoveError> {
        let storage = Arc::new(new.file().try_clone()?);
        Ok(Disk::open(storage, &options, &OneBacking(below))?)
    };
    let stored = |file: &File| {
        use std::os::unix::fs::MetadataExt;
        file.metadata().map(|metadata| metadata.blocks())
    };
    let go_on = |()| step(monitor, 0).map_err(RemoveError::Operation);
    let is_small = stored(&upper_file)? <= stored(&lower_file)?;
    let (made, bytes) = if is_small && upper.image.size() == lower.size() {
        copy_file_in_pieces(&lower_file, new.file(), go_on)?;
        let made = writable(below.map(|(_, device)| device))?;
        monitor.phase(Phase::Commit, Some(upper.image.size()));
        let map = |at| upper.image.map(at);
        let bytes = copy_own(&map, &*upper.image, &made, monitor)?;
        (made, bytes)
    } else {
        copy_file_in_pieces(&upper_file, new.file(), go_on)?;
        let made = writable(Some(Arc::clone(lower) as Arc<dyn BlockDevice>))?;
        let bytes = Absorber::new(&made, lower.size(), place.below_bytes()).all(monitor)?;
        made.set_backing(below)?;
        (made, bytes)
    };
    made.close()?;
    monitor.phase(Phase::Sync, None);
    let name = over.file_name().unwrap_or_default();
    mark_snapshot_of(new.file(), &name.to_string_lossy(), taken)?;
    new.file().sync_all()?;
    Ok((new, bytes))
}

fn options(disk: &Disk) -> OpenOptions {
    OpenOptions {
        cache: disk.cache().clone(),
        ..OpenOptions::default()
    }
}

/// Gives `new` the name of `upper`, the file at `over`, and a place in the chain of the disk, which
/// no operation uses meanwhile.
fn replace(
    top: &Top,
    upper: &Link,
    over: &Path,
    place: &Place,
    new: NewFile,
    note: &str,
) -> Result<(), RemoveError> {
    let disk = &top.disk;
    let chain = chain(disk);
    let numbers = |link: &Link| {
        chain
            .iter()
            .position(|other| other.identity() == link.identity())
    };
    let (Some(at), Some(below)) = (numbers(upper), numbers(&place.removed)) else {
        return Err(RemoveError::Changed);
    };
    let tree = tree_to_change(&place.path, 1)?;
    let is_same = tree.first().is_some_and(|first| first.path == over);
    if at + 1 != below || !is_same || !upper.is_at(over) {
        return Err(RemoveError::Changed);
    }
    // No other process reads one of the files, or makes a disk over it.
    let _upper = upper.alone(over)?;
    let (mut alone, mut others) = (Vec::new(), Vec::new());
    for Over { path, .. } in tree
        .iter()
        .skip(1)
        .filter(|over| over.path != top.file.path())
    {
        match chain.iter().find(|link| link.is_at(path)) {
            Some(link) => alone.push(link.alone(path)?),
            None => others.push(LockedFile::open_snapshot(path, note).map_err(|source| {
                RemoveError::Lock {
                    path: path.clone(),
                    source,
                }
            })?),
        }
    }
    if tree_over(&place.path)? != tree {
        return Err(RemoveError::Changed);
    }
    let plain = OpenOptions::default();
    let record = |path: &Path, identity| {
        let storage: Arc<dyn Storage> =
            Arc::new(File::options().read(true).write(true).open(path)?);
        record_identity(&storage, &plain, identity).map_err(RemoveError::Disk)
    };
    // The disk first: if another process continues with it, this waits here for ever.
    let nearest = &chain[0];
    let device = |link: &Link| Arc::clone(&link.image) as Arc<dyn BlockDevice>;
    disk.set_backing(Some((with_identity(&nearest.entry, None), device(nearest))))?;
    let changed = || tree.iter().enumerate().skip(1);
    let is_top = |over: &Over| over.path == top.file.path();
    for (_, over) in changed().rev().filter(|(_, over)| !is_top(over)) {
        record(&over.path, None)?;
    }
    new.complete()?;
    for (_, over) in changed().filter(|(_, over)| !is_top(over)) {
        let below = over
            .parent
            .map_or(place.path.as_path(), |index| &tree[index].path);
        let below =
            Image::open_with_backings(Arc::new(File::open(below)?), &plain, &UnreadBackings);
        record(&over.path, Some(below?.identity_hash()))?;
    }
    let options = options(disk);
    let file = File::open(over)?;
    FileLock::shared(&file).map_err(|source| RemoveError::InUse {
        path: over.to_owned(),
        source,
    })?;
    let below = place.below.as_ref().map(|(_, device)| Arc::clone(device));
    let mut image = Image::open_with_backings(Arc::new(file), &options, &OneBacking(below))?;
    for link in chain[..at].iter().rev() {
        let storage = Arc::clone(link.image.storage());
        image = Image::open_with_backings(storage, &options, &OneBacking(Some(image)))?;
    }
    let entry = with_identity(&nearest.entry, Some(image.identity_hash()));
    disk.set_backing(Some((entry, image)))?;
    Ok(())
}

/// The same backing with another identity.
fn with_identity(entry: &BackingEntry, identity: Option<[u8; 32]>) -> BackingEntry {
    let mut entry = entry.clone();
    if let BackingName::FileName {
        identity: recorded, ..
    } = &mut entry.name
    {
        *recorded = identity;
    }
    entry
}

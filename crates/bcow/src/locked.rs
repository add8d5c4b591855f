//! The file of a writable disk, open and locked against other writers.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bcow_format::{
    BackingEntry, BackingName, HEADER_AREA_BYTES, Header, State, Use, choose_header,
    decode_backings, incompatible,
};

use crate::Storage;
use crate::checked::CheckedFile;
use crate::lock::{FileLock, LockError};

/// Attempts to lock a file that other processes keep replacing.
const MAX_REPLACEMENTS: u32 = 100;

/// Offset of the mark of a snapshot (spec section 3), and the bytes of its parts: the name of the
/// file with zeros behind it, and the time in nanoseconds since 1970.
const MARK_AT: u64 = 2048;
const MARK_NAME_BYTES: usize = 256;
const MARK_TIME_BYTES: usize = 8;

/// The file of a writable disk, open for reading and writing. No other process writes to it until
/// this is dropped.
#[derive(Debug)]
pub struct LockedFile {
    file: Arc<File>,
    path: PathBuf,
    _lock: FileLock,
}

/// The reason why a file was not opened and locked as a writable disk.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LockFileError {
    /// The host cannot open the file.
    #[error(transparent)]
    Open(io::Error),
    /// Another process uses the file.
    #[error(transparent)]
    Lock(LockError),
    /// The file is sealed.
    #[error("it is sealed, and never changes")]
    Sealed,
    /// The file belongs to the upper of a writable mount.
    #[error("it belongs to a writable mount, and is no disk")]
    Partial,
    /// The file has windows, which only sealed files have.
    #[error("it has windows onto other files")]
    Windows,
    /// The file is a snapshot of a disk.
    #[error("it is a snapshot, and never changes")]
    Snapshot,
    /// Another file has the name.
    #[error("another file has taken its place")]
    Replaced,
}

impl LockedFile {
    /// Opens and locks the disk at `path`; follows symbolic links. `note` names the process and its
    /// purpose to processes that are refused.
    ///
    /// Only the header is examined: a file without a valid header is locked too, and fails when it
    /// is opened as a disk.
    pub fn open(path: &Path, note: &str) -> Result<Self, LockFileError> {
        LockedFile::open_if(path, note, |file, path| match snapshot_time(file, path) {
            Some(_) => Err(LockFileError::Snapshot),
            None => Ok(()),
        })
    }

    /// Same as [`LockedFile::open`], also for a snapshot. The caller does not change what the file
    /// shows, and takes care of the disks over it.
    pub fn open_snapshot(path: &Path, note: &str) -> Result<Self, LockFileError> {
        LockedFile::open_if(path, note, |_, _| Ok(()))
    }

    fn open_if(
        path: &Path,
        note: &str,
        allow: impl Fn(&File, &Path) -> Result<(), LockFileError>,
    ) -> Result<Self, LockFileError> {
        for _ in 0..MAX_REPLACEMENTS {
            let path = path.canonicalize().map_err(LockFileError::Open)?;
            // The header is checked before the file is opened for writing: "it is sealed" helps
            // more than EACCES, which a read-only sealed file would give.
            if let Ok(file) = File::open(&path)
                && let Some(header) = header_of(&file)
            {
                check_writable(&header)?;
                allow(&file, &path)?;
            }
            let mut options = File::options();
            let file = options
                .read(true)
                .write(true)
                .open(&path)
                .map_err(LockFileError::Open)?;
            match LockedFile::lock(file, &path, note) {
                // The previous holder of the lock has replaced the file.
                Err(LockFileError::Replaced) => {}
                outcome => return outcome,
            }
        }
        Err(LockFileError::Replaced)
    }

    /// Continues with the file of a process that has ended: `file` has kept the lock, which belongs
    /// to the open file description. Returns true with it. If that process was killed while it took
    /// a snapshot, `file` is the snapshot, and has all data. Then this opens the new disk, which is
    /// over it, and returns false. Fails with [`LockFileError::Replaced`] if another file has the
    /// name `path`.
    pub fn continue_with(
        file: File,
        path: &Path,
        note: &str,
    ) -> Result<(Self, bool), LockFileError> {
        let path = path.canonicalize().map_err(LockFileError::Open)?;
        let over = File::open(&path).map_err(LockFileError::Open)?;
        match backing_of(over).as_ref().map(|entry| &entry.name) {
            Some(BackingName::FileName { name, .. })
                if is_at(&file, &path.with_file_name(name)).unwrap_or(false) =>
            {
                Ok((LockedFile::open(&path, note)?, false))
            }
            _ => Ok((LockedFile::lock(file, &path, note)?, true)),
        }
    }

    /// Locks an open file, which must be the one at `path`.
    fn lock(file: File, path: &Path, note: &str) -> Result<Self, LockFileError> {
        let path = path.canonicalize().map_err(LockFileError::Open)?;
        let lock = FileLock::exclusive(&file, note).map_err(LockFileError::Lock)?;
        if is_at(&file, &path).map_err(LockFileError::Open)? {
            Ok(LockedFile::of(file, path, lock))
        } else {
            Err(LockFileError::Replaced)
        }
    }

    /// The file at `path`, which has this lock.
    pub(crate) fn of(file: File, path: PathBuf, lock: FileLock) -> Self {
        LockedFile {
            file: Arc::new(file),
            path,
            _lock: lock,
        }
    }

    /// Whether the file has this device number and inode number.
    pub(crate) fn has_numbers(&self, device: u64, inode: u64) -> bool {
        let metadata = self.file.metadata();
        metadata.is_ok_and(|metadata| (metadata.dev(), metadata.ino()) == (device, inode))
    }

    /// Whether the path leads to the file.
    pub(crate) fn has_its_name(&self) -> bool {
        is_at(&self.file, &self.path).unwrap_or(false)
    }

    /// Lets readers lock the file. No writer can lock it as long as it is open. The change of the
    /// lock releases it for a moment (flock(2)), in which a writer can be faster.
    pub(crate) fn share(&self) -> Result<(), LockError> {
        FileLock::shared(&self.file)
    }

    /// The path, with links resolved.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The open file, for [`Disk::open`] and [`Image::open_with_backings`].
    ///
    /// [`Disk::open`]: crate::Disk::open
    /// [`Image::open_with_backings`]: crate::Image::open_with_backings
    pub fn storage(&self) -> Arc<dyn Storage> {
        self.file.clone()
    }
}

/// Whether the open file is the one at `path`.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let (open, there) = (file.metadata()?, std::fs::metadata(path)?);
    Ok((open.dev(), open.ino()) == (there.dev(), there.ino()))
}

/// The header of a file, if the file has a valid one; a file that cannot be read has none. Nothing
/// else of the file is examined.
pub fn header_of(storage: &dyn Storage) -> Option<Header> {
    let mut area = [0; HEADER_AREA_BYTES];
    storage.read_at(0, &mut area).ok()?;
    choose_header(&area).ok()
}

/// The backing that a disk names, according to its header. `None` for another file, and for one
/// whose header or backing table is damaged.
pub fn backing_of(file: File) -> Option<BackingEntry> {
    let header = header_of(&file).filter(|header| header.purpose == Use::Disk)?;
    let file = CheckedFile {
        storage: Arc::new(file),
        verifier: None,
    };
    let table = file.read_section(&header.backings).ok()?;
    decode_backings(&table, &header).ok()?.into_iter().next()
}

/// The time at which the open file at `path` became a snapshot of a disk; `None` for another file.
/// A snapshot has a mark with its name, so a copy with another name is an ordinary disk.
pub fn snapshot_time(file: &File, path: &Path) -> Option<SystemTime> {
    let name = path.file_name()?.as_encoded_bytes();
    header_of(file).filter(|header| check_writable(header).is_ok())?;
    let mut mark = [0; MARK_NAME_BYTES + MARK_TIME_BYTES];
    file.read_exact_at(&mut mark, MARK_AT).ok()?;
    let (marked, time) = mark.split_first_chunk::<MARK_NAME_BYTES>()?;
    let rest = marked.strip_prefix(name).filter(|_| !name.is_empty())?;
    rest.iter().all(|&byte| byte == 0).then_some(())?;
    let nanoseconds = u64::from_le_bytes(*time.first_chunk()?);
    Some(SystemTime::UNIX_EPOCH + Duration::from_nanos(nanoseconds))
}

/// Marks the file as the snapshot that has this file name, once it has the name. The caller makes
/// it durable.
pub(crate) fn mark_snapshot(file: &File, name: &str) -> io::Result<()> {
    mark_snapshot_of(file, name, SystemTime::now())
}

/// As [`mark_snapshot`], for a snapshot that was taken at this time.
pub(crate) fn mark_snapshot_of(file: &File, name: &str, taken: SystemTime) -> io::Result<()> {
    let since = taken.duration_since(SystemTime::UNIX_EPOCH);
    let since = since.unwrap_or_default();
    let nanoseconds = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
    let mut mark = name.as_bytes().to_vec();
    // File systems limit names to 255 bytes.
    mark.resize(MARK_NAME_BYTES, 0);
    mark.extend(nanoseconds.to_le_bytes());
    file.write_all_at(&mark, MARK_AT)
}

fn check_writable(header: &Header) -> Result<(), LockFileError> {
    match header.purpose {
        _ if header.state == State::Sealed => Err(LockFileError::Sealed),
        // An image is always sealed.
        Use::Image => Err(LockFileError::Sealed),
        Use::Disk if header.features.has_incompatible(incompatible::WINDOWS) => {
            Err(LockFileError::Windows)
        }
        Use::Disk => Ok(()),
        Use::Partial => Err(LockFileError::Partial),
    }
}

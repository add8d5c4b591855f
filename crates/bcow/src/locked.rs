//! The file of a writable disk, open and locked against other writers.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow_format::{HEADER_AREA_BYTES, Header, State, Use, choose_header, incompatible};

use crate::Storage;
use crate::lock::{FileLock, LockError};

/// Attempts to lock a file that other processes keep replacing.
const MAX_REPLACEMENTS: u32 = 100;

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
        for _ in 0..MAX_REPLACEMENTS {
            let path = path.canonicalize().map_err(LockFileError::Open)?;
            // The header is checked before the file is opened for writing: "it is sealed" helps
            // more than EACCES, which a read-only sealed file would give.
            if let Some(header) = File::open(&path).ok().and_then(|file| header_of(&file)) {
                check_writable(&header)?;
            }
            let mut options = File::options();
            let file = options
                .read(true)
                .write(true)
                .open(&path)
                .map_err(LockFileError::Open)?;
            match LockedFile::continue_with(file, &path, note) {
                // The previous holder of the lock has replaced the file.
                Err(LockFileError::Replaced) => {}
                outcome => return outcome,
            }
        }
        Err(LockFileError::Replaced)
    }

    /// Continues with the file of a process that has ended: `file` has kept the lock, which belongs
    /// to the open file description. Fails with [`LockFileError::Replaced`] if another file has the
    /// name `path`.
    pub fn continue_with(file: File, path: &Path, note: &str) -> Result<Self, LockFileError> {
        let path = path.canonicalize().map_err(LockFileError::Open)?;
        let lock = FileLock::exclusive(&file, note).map_err(LockFileError::Lock)?;
        if is_at(&file, &path).map_err(LockFileError::Open)? {
            Ok(LockedFile {
                file: Arc::new(file),
                path,
                _lock: lock,
            })
        } else {
            Err(LockFileError::Replaced)
        }
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

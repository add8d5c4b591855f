//! The lock of an upper: exclusive for its writer, shared for readers.

use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::Path;

use bcow::lock::FileLock;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::UpperError;
use super::beneath::open_regular;

/// Opens the lock file in the directory `meta`; `None` if it is missing.
pub(super) fn open_lock(meta: BorrowedFd<'_>, flags: OFlags) -> Result<Option<File>, Errno> {
    match open_regular(meta, "lock", flags) {
        Ok(file) => Ok(Some(file.into())),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Takes the reader's lock; `None` if the upper has no lock file yet. Its first writer creates one.
pub(super) fn lock_shared(meta: BorrowedFd<'_>, path: &Path) -> Result<Option<File>, UpperError> {
    let io = |errno| UpperError::io(path, "open its lock .bcow/lock", errno);
    let Some(file) = open_lock(meta, OFlags::RDONLY).map_err(io)? else {
        return Ok(None);
    };
    FileLock::shared(&file).map_err(|holder| UpperError::InUse(path.to_owned(), holder))?;
    Ok(Some(file))
}

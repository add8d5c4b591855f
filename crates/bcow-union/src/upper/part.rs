//! The directory beside an upper in which a fork of it, or the upper that a rollback makes, begins.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use bcow::operation::is_snapshot_name;
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::directory::remove_acls;
use super::work;
use super::{META, UpperError};
use crate::host::errno_of;

/// The directory of the snapshots in [`META`].
pub(crate) const SNAPSHOTS: &str = "snapshots";
/// What is made, in the directory of an [`UnfinishedUpper`].
pub(super) const MADE: &str = "upper";

/// The directory in which something is made that becomes an upper. The drop removes it, with all in
/// it; unless that would remove snapshots, which only a rollback can have left.
pub struct UnfinishedUpper {
    /// That of the upper, with links resolved.
    path: PathBuf,
    /// The directory of the upper.
    pub(super) parent: OwnedFd,
    pub(super) directory: OwnedFd,
}

impl UnfinishedUpper {
    /// The path of an upper, with links resolved, and the directory of the upper.
    fn place(path: &Path) -> Result<(PathBuf, OwnedFd), Errno> {
        let path = match path.canonicalize() {
            Ok(path) => path,
            Err(_) => std::path::absolute(path).map_err(|error| errno_of(&error))?,
        };
        let (Some(parent), Some(_)) = (path.parent(), path.file_name()) else {
            return Err(Errno::BUSY);
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let parent = rustix::fs::open(parent, flags, Mode::empty())?;
        Ok((path, parent))
    }

    /// The path of the directory in which the upper at `path` is made.
    pub(super) fn path_of(path: &Path) -> PathBuf {
        let mut file = OsString::from(".");
        file.push(path.file_name().unwrap_or_default());
        file.push(".bcow-part");
        path.with_file_name(file)
    }

    /// What a killed process of this user left; `None` also if it still runs.
    fn left_over(path: &Path) -> Result<Option<UnfinishedUpper>, Errno> {
        let (path, parent) = Self::place(path)?;
        let part = Self::path_of(&path);
        let name = name_of(&part).as_os_str().as_encoded_bytes();
        let Ok(directory) = work::open_directory(parent.as_fd(), name) else {
            return Ok(None);
        };
        let user = rustix::process::geteuid().as_raw();
        let exclusive = FlockOperation::NonBlockingLockExclusive;
        if rustix::fs::fstat(&directory)?.st_uid != user
            || rustix::fs::flock(&directory, exclusive).is_err()
        {
            return Ok(None);
        }
        Ok(Some(UnfinishedUpper {
            path,
            parent,
            directory,
        }))
    }

    /// Begins what is to become the upper at `path`, which is missing or an empty directory.
    pub fn begin_new(path: &Path) -> Result<UnfinishedUpper, UpperError> {
        // An upper can have snapshots in what a killed process left beside it.
        match path.read_dir().map(|mut entries| entries.next().is_none()) {
            Ok(true) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            _ => return Err(UpperError::Exists(path.to_owned())),
        }
        Self::begin(path)
    }

    /// Begins what is to become the upper at `path`. Removes what a killed process left there.
    pub(super) fn begin(path: &Path) -> Result<UnfinishedUpper, UpperError> {
        let failed = |errno| UpperError::io(path, "create it", errno);
        let left = Self::left_over(path).map_err(|errno| match errno {
            Errno::NOENT => UpperError::NoParent(path.to_owned()),
            errno => failed(errno),
        })?;
        drop(left);
        let (resolved, parent) = Self::place(path).map_err(failed)?;
        let part = Self::path_of(&resolved);
        let made = rustix::fs::mkdirat(&parent, name_of(&part), Mode::RWXU);
        made.map_err(|errno| match errno {
            Errno::EXIST => UpperError::Exists(part),
            errno => failed(errno),
        })?;
        let part = Self::left_over(path).map_err(failed)?;
        let part = part.ok_or_else(|| failed(Errno::BUSY))?;
        remove_acls(part.directory.as_fd(), path)?;
        rustix::fs::mkdirat(&part.directory, MADE, Mode::RWXU).map_err(failed)?;
        Ok(part)
    }

    /// The path of what is made.
    pub fn made(&self) -> PathBuf {
        Self::path_of(&self.path).join(MADE)
    }

    /// The name of the upper in its directory.
    pub(super) fn name(&self) -> &Path {
        name_of(&self.path)
    }

    /// Gives what was made, which is durable, the name of the upper.
    pub fn complete(self) -> Result<(), UpperError> {
        let placed = rustix::fs::renameat(&self.directory, MADE, &self.parent, self.name());
        let placed = placed.and_then(|()| rustix::fs::fsync(&self.parent));
        placed.map_err(|errno| match errno {
            Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR => UpperError::Exists(self.path.clone()),
            errno => UpperError::io(&self.path, "create it", errno),
        })
    }

    /// Moves snapshots back to the upper with the directory `meta`.
    pub(super) fn return_snapshots(&self, meta: BorrowedFd<'_>) -> Result<(), Errno> {
        let Some(from) = self.open(&format!("{MADE}/{META}"))? else {
            return Ok(());
        };
        // This needs no space.
        let flags = RenameFlags::NOREPLACE;
        match rustix::fs::renameat_with(&from, SNAPSHOTS, meta, SNAPSHOTS, flags) {
            Ok(()) => return rustix::fs::fsync(meta),
            Err(Errno::NOENT) => return Ok(()),
            // Another writer, which could not remove this directory, has taken snapshots.
            Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        let to = work::open_directory(meta, SNAPSHOTS.as_bytes())?;
        let from = work::open_directory(from.as_fd(), SNAPSHOTS.as_bytes())?;
        for name in snapshots_in(from.as_fd())? {
            rustix::fs::renameat_with(&from, &name[..], &to, &name[..], flags)?;
        }
        rustix::fs::fsync(&to)
    }

    /// Opens a directory in this one; `None` if it is missing.
    fn open(&self, path: &str) -> Result<Option<OwnedFd>, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.directory, path, flags, Mode::empty()) {
            Ok(directory) => Ok(Some(directory)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    fn has_snapshots(&self) -> Result<bool, Errno> {
        let directory = self.open(&format!("{MADE}/{META}/{SNAPSHOTS}"))?;
        directory.map_or(Ok(false), |directory| {
            Ok(!snapshots_in(directory.as_fd())?.is_empty())
        })
    }
}

fn name_of(path: &Path) -> &Path {
    Path::new(path.file_name().unwrap_or_default())
}

/// The names of the snapshots in a directory.
fn snapshots_in(directory: BorrowedFd<'_>) -> Result<Vec<Vec<u8>>, Errno> {
    let mut names = work::list(directory)?;
    names.retain(|name| std::str::from_utf8(name).is_ok_and(is_snapshot_name));
    Ok(names)
}

impl Drop for UnfinishedUpper {
    fn drop(&mut self) {
        // The next writer moves them back, when that is possible.
        if !matches!(self.has_snapshots(), Ok(false)) {
            return;
        }
        // If this fails, the next command removes it.
        let _ = work::empty(self.directory.as_fd(), None);
        let part = Self::path_of(&self.path);
        let _ = rustix::fs::unlinkat(&self.parent, name_of(&part), AtFlags::REMOVEDIR);
    }
}

/// Removes what a killed process left beside the upper at `path`, whose lock the caller holds.
/// Snapshots in it return to `meta`, the directory [`META`] of the upper.
pub(super) fn sweep(path: &Path, meta: BorrowedFd<'_>) -> Result<(), UpperError> {
    // A directory without a parent has nothing beside it.
    if let Ok(Some(part)) = UnfinishedUpper::left_over(path) {
        let returned = part.return_snapshots(meta);
        returned.map_err(|errno| UpperError::io(path, "move its snapshots back", errno))?;
    }
    Ok(())
}

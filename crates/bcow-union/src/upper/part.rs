//! The directory beside an upper in which a fork of it, or the upper that a rollback makes, begins.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::directory::remove_acls;
use super::work;
use super::{META, UpperError};
use crate::host::errno_of;

/// The directory of the snapshots in [`META`].
pub(crate) const SNAPSHOTS: &str = "snapshots";
/// What is made, in the directory of a [`Part`].
pub(super) const MADE: &str = "upper";

/// The directory in which something is made that gets the name `name` in `parent`. The drop removes
/// it, with all in it.
pub(super) struct Part {
    pub parent: OwnedFd,
    pub name: OsString,
    pub directory: OwnedFd,
}

impl Part {
    /// The directory and the name of `path`.
    fn place(path: &Path) -> Result<(OwnedFd, OsString), Errno> {
        let path = match path.canonicalize() {
            Ok(path) => path,
            Err(_) => std::path::absolute(path).map_err(|error| errno_of(&error))?,
        };
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Errno::BUSY);
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok((
            rustix::fs::open(parent, flags, Mode::empty())?,
            name.to_owned(),
        ))
    }

    pub fn file_name(name: &OsStr) -> OsString {
        let mut file = OsString::from(".");
        file.push(name);
        file.push(".bcow-part");
        file
    }

    /// What a killed process of this user left.
    fn left_over(parent: OwnedFd, name: OsString) -> Option<Part> {
        let file = Self::file_name(&name);
        let directory = work::open_directory(parent.as_fd(), file.as_encoded_bytes()).ok()?;
        let user = rustix::process::geteuid().as_raw();
        let is_own = rustix::fs::fstat(&directory).ok()?.st_uid == user;
        let exclusive = FlockOperation::NonBlockingLockExclusive;
        if !is_own || rustix::fs::flock(&directory, exclusive).is_err() {
            return None;
        }
        Some(Part {
            parent,
            name,
            directory,
        })
    }

    /// Begins what is to become the upper at `path`. Removes what a killed process left there.
    pub fn begin(path: &Path) -> Result<Part, UpperError> {
        let failed = |errno| UpperError::io(path, "create it", errno);
        let place = || Part::place(path);
        let (parent, name) = place().map_err(|errno| match errno {
            Errno::NOENT => UpperError::NoParent(path.to_owned()),
            errno => failed(errno),
        })?;
        drop(Self::left_over(parent, name));
        let (parent, name) = place().map_err(failed)?;
        let file = Self::file_name(&name);
        rustix::fs::mkdirat(&parent, Path::new(&file), Mode::RWXU).map_err(failed)?;
        let part = Self::left_over(parent, name).ok_or_else(|| failed(Errno::BUSY))?;
        remove_acls(part.directory.as_fd(), path)?;
        rustix::fs::mkdirat(&part.directory, MADE, Mode::RWXU).map_err(failed)?;
        Ok(part)
    }

    /// Moves snapshots back to the upper with the directory `meta`.
    pub fn return_snapshots(&self, meta: BorrowedFd<'_>) -> Result<(), Errno> {
        let from = format!("{MADE}/{META}/{SNAPSHOTS}");
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let from = match rustix::fs::openat(&self.directory, from, flags, Mode::empty()) {
            Err(Errno::NOENT) => return Ok(()),
            from => from?,
        };
        match rustix::fs::mkdirat(meta, SNAPSHOTS, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno),
        }
        let to = work::open_directory(meta, SNAPSHOTS.as_bytes())?;
        for name in work::list(from.as_fd())? {
            let flags = RenameFlags::NOREPLACE;
            rustix::fs::renameat_with(&from, &name[..], &to, &name[..], flags)?;
        }
        rustix::fs::fsync(&to).and_then(|()| rustix::fs::fsync(meta))
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // If this fails, the next command removes it.
        let _ = work::empty(self.directory.as_fd(), None);
        let file = Self::file_name(&self.name);
        let _ = rustix::fs::unlinkat(&self.parent, Path::new(&file), AtFlags::REMOVEDIR);
    }
}

/// Removes what a killed process left beside the upper at `path`, whose lock the caller holds.
/// Snapshots in it return to `meta`, the directory [`META`] of the upper.
pub(super) fn sweep(path: &Path, meta: BorrowedFd<'_>) -> Result<(), UpperError> {
    // A directory without a parent has nothing beside it.
    if let Ok((parent, name)) = Part::place(path)
        && let Some(part) = Part::left_over(parent, name)
    {
        let returned = part.return_snapshots(meta);
        returned.map_err(|errno| UpperError::io(path, "move its snapshots back", errno))?;
    }
    Ok(())
}

//! The directories of an upper: its root, and [`META`] with its lock.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use bcow::lock::FileLock;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::lock::open_lock;
use super::overlap::refuse_overlap;
use super::{
    ACCESS_ACL, Attribute, DEFAULT_ACL, HeldUpper, META, UpperError, set_noatime_new, work,
};

/// Opens the upper's root. Its path may be a symbolic link, because the user chose it.
pub(super) fn open_root(path: &Path) -> Result<OwnedFd, UpperError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = rustix::fs::open(path, flags, Mode::empty()).map_err(|errno| match errno {
        Errno::NOENT => UpperError::Missing(path.to_owned()),
        Errno::NOTDIR => UpperError::NotADirectory(path.to_owned()),
        errno => UpperError::io(path, "open it", errno),
    })?;
    // Mounts show the access time of the root.
    set_noatime_new(&opened);
    Ok(opened)
}

/// Opens the upper's root, and creates it if it is missing. Returns also whether it was created.
pub(super) fn open_or_create_root(path: &Path) -> Result<(OwnedFd, bool), UpperError> {
    match open_root(path) {
        Err(UpperError::Missing(_)) => {
            create_root(path)?;
            Ok((open_root(path)?, true))
        }
        other => Ok((other?, false)),
    }
}

fn create_root(path: &Path) -> Result<(), UpperError> {
    match rustix::fs::mkdir(path, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(Errno::NOENT) => Err(UpperError::NoParent(path.to_owned())),
        Err(errno) => Err(UpperError::io(path, "create it", errno)),
    }
}

/// Opens the internal directory `name` in `dir`. Creates it if it is missing.
pub(super) fn open_or_create(
    dir: BorrowedFd<'_>,
    upper: &Path,
    name: &str,
) -> Result<OwnedFd, UpperError> {
    let path = match name {
        META => upper.to_owned(),
        _ => upper.join(META),
    };
    match rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(UpperError::io(upper, "create its directory .bcow", errno)),
    }
    work::open_directory(dir, name.as_bytes()).map_err(|errno| meta_failed(&path, name, errno))
}

/// Opens the internal directory `name` in `dir`, whose path is `parent`; `None` if it is missing.
pub(super) fn open_inside(
    dir: BorrowedFd<'_>,
    parent: &Path,
    name: &str,
) -> Result<Option<OwnedFd>, UpperError> {
    match work::open_directory(dir, name.as_bytes()) {
        Ok(directory) => Ok(Some(directory)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(meta_failed(parent, name, errno)),
    }
}

/// The error for an internal directory that cannot be opened.
pub(super) fn meta_failed(parent: &Path, name: &str, errno: Errno) -> UpperError {
    let path = parent.join(name);
    match errno {
        Errno::NOTDIR | Errno::LOOP => UpperError::NotADirectory(path),
        errno => UpperError::io(&path, "open it", errno),
    }
}

/// Removes the ACLs that an internal directory inherited from its parent. Otherwise new files in it
/// would inherit them and carry them into the container's tree. Overlayfs does the same with its
/// work directory.
pub(super) fn remove_acls(dir: BorrowedFd<'_>, upper: &Path) -> Result<(), UpperError> {
    let removed = remove_acl(dir, DEFAULT_ACL).and_then(|()| {
        if Attribute::Open(dir).get(ACCESS_ACL)?.is_some() {
            // Without the ACL, the group bits of the mode, which were the ACL's mask, would grant
            // access to the group.
            rustix::fs::fchmod(dir, Mode::from_raw_mode(0o700))?;
            remove_acl(dir, ACCESS_ACL)?;
        }
        Ok(())
    });
    removed.map_err(|errno| {
        UpperError::io(
            upper,
            "remove inherited ACLs from its directory .bcow",
            errno,
        )
    })
}

/// Removes an ACL if it exists. Users other than the directory's owner may not even try to remove
/// one.
pub(super) fn remove_acl(dir: BorrowedFd<'_>, name: &[u8]) -> Result<(), Errno> {
    let at = Attribute::Open(dir);
    match at.get(name)? {
        Some(_) => at.clear(name).map(drop),
        None => Ok(()),
    }
}

pub(super) fn same_device(
    root: BorrowedFd<'_>,
    dir: BorrowedFd<'_>,
    upper: &Path,
    name: &str,
) -> Result<(), UpperError> {
    let path = upper.join(META).join(name);
    let device = |fd: BorrowedFd<'_>| {
        let stat =
            rustix::fs::fstat(fd).map_err(|errno| UpperError::io(&path, "open it", errno))?;
        Ok::<_, UpperError>(stat.st_dev)
    };
    if device(root)? == device(dir)? {
        Ok(())
    } else {
        Err(UpperError::AnotherFileSystem(path))
    }
}

/// Takes the writer's lock, or continues with that of a process that has ended.
pub(super) fn lock(
    meta: BorrowedFd<'_>,
    path: &Path,
    note: &str,
    held: Option<&HeldUpper>,
) -> Result<FileLock, UpperError> {
    let io = |errno| UpperError::io(path, "open its lock .bcow/lock", errno);
    let file = match held {
        Some(held) => held
            .lock_file()
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)),
        None => {
            open_lock(meta, OFlags::RDWR | OFlags::CREATE).and_then(|file| file.ok_or(Errno::NOENT))
        }
    }
    .map_err(io)?;
    let lock = FileLock::exclusive(&file, note)
        .map_err(|holder| UpperError::InUse(path.to_owned(), holder))?;
    // Of two that begin at the same time, the later one finds the other's lock.
    refuse_overlap(path)?;
    Ok(lock)
}

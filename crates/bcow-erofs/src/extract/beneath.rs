//! Opens and creates files below a directory without following symbolic links, and splits and joins
//! paths for these calls.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

const BENEATH: ResolveFlags = ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS);

/// Opens `path` below `directory`. Fails if a component of the path is a symbolic link, or if the
/// path leaves the directory.
pub(super) fn open_beneath(
    directory: BorrowedFd<'_>,
    path: &[u8],
    flags: OFlags,
) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::CLOEXEC;
    rustix::fs::openat2(directory, path, flags, Mode::empty(), BENEATH)
}

/// Creates the regular file `name` in `parent`, and opens it for writing. Fails if the name exists.
pub(super) fn create_beneath(parent: &OwnedFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    let new = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL;
    let flags = new | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat2(parent, name, flags, Mode::RUSR | Mode::WUSR, BENEATH)
}

/// Whether `name` in `parent` is a directory. `false` also if the host fails.
pub(super) fn is_directory(parent: &OwnedFd, name: &[u8]) -> bool {
    rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW)
        .is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir())
}

/// `directory/name`; `name` if `directory` is empty.
pub(super) fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    match directory {
        b"" => name.to_vec(),
        directory if directory.ends_with(b"/") => [directory, name].concat(),
        directory => [directory, b"/", name].concat(),
    }
}

/// Splits a path at its last slash into the directory and the name. The directory is `.` if the
/// path has no slash.
pub(super) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|&byte| byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (b".", path),
    }
}

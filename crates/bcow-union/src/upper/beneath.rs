//! Opens files below a directory, at any depth, without following symbolic links. Regular files
//! only are opened for I/O.
//!
//! An upper may come from an untrusted source. A device node in it would be the host's device,
//! also with the mount option `nodev`. An open of a pipe would block.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// The longest part of a path that is resolved at once, in bytes: below Linux's limit of 4096 with
/// the NUL.
const PIECE_BYTES: usize = 3800;

/// Flags so that an open does not follow a link, does not block, and does not acquire a controlling
/// terminal.
const CAREFUL: OFlags = OFlags::NOFOLLOW
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::CLOEXEC);

/// Opens `path` below `root`. Its components are separated by slashes; the empty path is `root`
/// itself. A symbolic link on the way fails with `ELOOP`. So does one as the last component, unless
/// `flags` have `O_PATH`.
pub(crate) fn open_beneath(
    root: BorrowedFd<'_>,
    path: &[u8],
    flags: OFlags,
) -> Result<OwnedFd, Errno> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    if path.is_empty() {
        return rustix::fs::openat(root, ".", flags, Mode::empty());
    }
    let mut at: Option<OwnedFd> = None;
    let mut rest = path;
    loop {
        let dir = at.as_ref().map_or(root, |at| at.as_fd());
        let piece = match rest.len() > PIECE_BYTES {
            true => rest[..PIECE_BYTES].iter().rposition(|&byte| byte == b'/'),
            false => None,
        };
        let Some(slash) = piece else {
            return open_piece(dir, rest, flags);
        };
        at = Some(open_piece(
            dir,
            &rest[..slash],
            OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        )?);
        rest = &rest[slash + 1..];
    }
}

/// Opens the regular file `name` of `dir`. With `O_CREAT` in `flags`, creates it with mode 0600.
/// Fails with `EINVAL` for other types of object, without an open: the open of some devices has
/// side effects.
pub(crate) fn open_regular(
    dir: BorrowedFd<'_>,
    name: &str,
    flags: OFlags,
) -> Result<OwnedFd, Errno> {
    match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => check_regular(&stat)?,
        Err(Errno::NOENT) if flags.contains(OFlags::CREATE) => {}
        Err(errno) => return Err(errno),
    }
    let file = rustix::fs::openat(dir, name, flags | CAREFUL, Mode::from_raw_mode(0o600))?;
    check_regular(&rustix::fs::fstat(&file)?)?;
    Ok(file)
}

/// Whether [`open_regular`] failed because the name is not a regular file, or because another
/// object took the name between the check and the open.
pub(crate) fn is_not_regular(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::INVAL | Errno::LOOP | Errno::ISDIR | Errno::NXIO
    )
}

/// Opens the regular file at `path` below `root` for reading. The caller has checked its type.
/// Fails with `EINVAL` if the file is not a regular file any more.
pub(crate) fn open_regular_beneath(root: BorrowedFd<'_>, path: &[u8]) -> Result<OwnedFd, Errno> {
    let file = open_beneath(root, path, OFlags::RDONLY | CAREFUL)?;
    check_regular(&rustix::fs::fstat(&file)?)?;
    Ok(file)
}

/// Whether `stat` describes a regular file.
pub(crate) fn is_regular(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

pub(super) fn check_regular(stat: &Stat) -> Result<(), Errno> {
    match is_regular(stat) {
        true => Ok(()),
        false => Err(Errno::INVAL),
    }
}

fn open_piece(dir: BorrowedFd<'_>, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    if !path.contains(&b'/') {
        return rustix::fs::openat(dir, path, flags, Mode::empty());
    }
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    match rustix::fs::openat2(dir, path, flags, Mode::empty(), resolve) {
        // Kernels before 5.6 do not have openat2(2), and some seccomp filters reject it.
        Err(Errno::NOSYS | Errno::PERM) => open_by_component(dir, path, flags),
        // A concurrent rename made the resolution fail.
        Err(Errno::AGAIN) => open_by_component(dir, path, flags),
        other => other,
    }
}

fn open_by_component(dir: BorrowedFd<'_>, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let way = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut at: Option<OwnedFd> = None;
    let mut names = path.split(|&byte| byte == b'/').peekable();
    while let Some(name) = names.next() {
        let flags = if names.peek().is_some() { way } else { flags };
        let dir = at.as_ref().map_or(dir, |at| at.as_fd());
        at = Some(rustix::fs::openat(dir, name, flags, Mode::empty())?);
    }
    at.ok_or(Errno::NOENT)
}

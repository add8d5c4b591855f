//! Opens what lies below a directory, however deep, following nothing, and no file but regular ones.
//!
//! An upper may come from anywhere. A device in it is the host's, whatever its mount says of devices; a pipe keeps who opens it
//! waiting.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// Longest piece of a path that is resolved at once: below Linux's limit of 4096 bytes with the NUL.
const PIECE_BYTES: usize = 3800;

/// What keeps an opening from following a link, from waiting, and from getting a terminal.
const CAREFUL: OFlags = OFlags::NOFOLLOW
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::CLOEXEC);

/// Opens `path`, components with slashes between, below `root`; the empty path is `root` itself. A symbolic link anywhere on
/// the way is `ELOOP`, also as the last component unless `flags` have `O_PATH`.
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

/// Opens the regular file `name` of `dir`; it is made, for its owner only, if `flags` have `O_CREAT`. Whatever else has the name is
/// `EINVAL`, and is not opened: some devices do something when they are.
pub(crate) fn open_regular(
    dir: BorrowedFd<'_>,
    name: &str,
    flags: OFlags,
) -> Result<OwnedFd, Errno> {
    match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => must_be_regular(&stat)?,
        Err(Errno::NOENT) if flags.contains(OFlags::CREATE) => {}
        Err(errno) => return Err(errno),
    }
    let file = rustix::fs::openat(dir, name, flags | CAREFUL, Mode::from_raw_mode(0o600))?;
    must_be_regular(&rustix::fs::fstat(&file)?)?;
    Ok(file)
}

/// Whether [`open_regular`] failed because what has the name is no regular file: found so before, or put there in the same moment.
pub(crate) fn is_no_regular_file(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::INVAL | Errno::LOOP | Errno::ISDIR | Errno::NXIO
    )
}

/// Opens the regular file at `path` below `root` for reading, which the caller has found to be one; `EINVAL` if it is not now.
pub(crate) fn open_regular_beneath(root: BorrowedFd<'_>, path: &[u8]) -> Result<OwnedFd, Errno> {
    let file = open_beneath(root, path, OFlags::RDONLY | CAREFUL)?;
    must_be_regular(&rustix::fs::fstat(&file)?)?;
    Ok(file)
}

/// Whether `stat` describes a regular file.
pub(crate) fn is_regular(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

pub(super) fn must_be_regular(stat: &Stat) -> Result<(), Errno> {
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
        // Kernels before 5.6, and filters of system calls that do not know it.
        Err(Errno::NOSYS | Errno::PERM) => open_by_component(dir, path, flags),
        // Somebody renamed something meanwhile.
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

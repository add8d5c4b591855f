//! Opens what lies below a directory, however deep, following nothing.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

/// Longest piece of a path that is resolved at once: below Linux's limit of 4096 bytes with the NUL.
const PIECE_BYTES: usize = 3800;

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

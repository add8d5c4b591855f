//! Opens files below a directory, at any depth, without following symbolic links. Regular files and
//! directories only are opened for I/O.
//!
//! An upper may come from an untrusted source. If bcow opened a device node in it, it would use the
//! host's device, even if the bcow mount has `nodev`: that option does not apply to bcow's own
//! opens. An open of a pipe would block.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use super::set_noatime_new;

/// The longest part of a path that is resolved at once, in bytes: below PATH_MAX, which is 4096
/// with the NUL.
const PART_BYTES: usize = 3800;

/// Flags of every open.
const NO_LINK: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC);

/// Flags of opens of regular files: an object of another type that took the name does not block the
/// open, and does not become the controlling terminal.
const SAFE_FLAGS: OFlags = NO_LINK.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);

/// Flags of directories on the way.
const PATH_DIRECTORY: OFlags = NO_LINK.union(OFlags::PATH).union(OFlags::DIRECTORY);

/// Opens the directory at `path` below `root` for reading. The components of `path` are separated
/// by slashes; the empty path is `root` itself. A symbolic link, on the way or as the last
/// component, fails with `ELOOP` or `ENOTDIR`. An empty component, `.` and `..` fail with `EINVAL`.
pub(crate) fn open_directory_beneath(root: BorrowedFd<'_>, path: &[u8]) -> Result<OwnedFd, Errno> {
    let directory = open_beneath(root, path, NO_LINK | OFlags::RDONLY | OFlags::DIRECTORY)?;
    set_noatime_new(&directory);
    Ok(directory)
}

/// Opens the regular file at `path` below `root` for reading, as [`open_directory_beneath`] does
/// with directories. The caller has checked its type. Fails with `EINVAL` if the file is not a
/// regular file any more.
pub(crate) fn open_regular_beneath(root: BorrowedFd<'_>, path: &[u8]) -> Result<OwnedFd, Errno> {
    let file = open_beneath(root, path, SAFE_FLAGS | OFlags::RDONLY)?;
    check_regular(&rustix::fs::fstat(&file)?)?;
    Ok(file)
}

fn open_beneath(root: BorrowedFd<'_>, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    if path.is_empty() {
        return rustix::fs::openat(root, ".", flags, Mode::empty());
    }
    // Not every kernel would refuse them.
    let mut names = path.split(|&byte| byte == b'/');
    if names.any(|name| matches!(name, b"" | b"." | b"..")) {
        return Err(Errno::INVAL);
    }
    let mut at: Option<OwnedFd> = None;
    let mut rest = path;
    loop {
        let dir = at.as_ref().map_or(root, |at| at.as_fd());
        let part = if rest.len() > PART_BYTES {
            rest[..PART_BYTES].iter().rposition(|&byte| byte == b'/')
        } else {
            None
        };
        let Some(slash) = part else {
            return open_part(dir, rest, flags);
        };
        at = Some(open_part(dir, &rest[..slash], PATH_DIRECTORY)?);
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
    let file = rustix::fs::openat(dir, name, flags | SAFE_FLAGS, Mode::from_raw_mode(0o600))?;
    check_regular(&rustix::fs::fstat(&file)?)?;
    Ok(file)
}

/// Whether [`open_regular`] failed because the name is not a regular file, or because another
/// object took the name between the check and the open.
pub(crate) fn is_not_regular_error(errno: Errno) -> bool {
    matches!(
        errno,
        Errno::INVAL | Errno::LOOP | Errno::ISDIR | Errno::NXIO
    )
}

/// Whether `stat` describes a regular file.
pub(crate) fn is_regular(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
}

pub(super) fn check_regular(stat: &Stat) -> Result<(), Errno> {
    if is_regular(stat) { Ok(()) } else { Err(Errno::INVAL) }
}

fn open_part(dir: BorrowedFd<'_>, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
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
    let mut at: Option<OwnedFd> = None;
    let mut names = path.split(|&byte| byte == b'/').peekable();
    while let Some(name) = names.next() {
        let flags = match names.peek() {
            Some(_) => PATH_DIRECTORY,
            None => flags,
        };
        let dir = at.as_ref().map_or(dir, |at| at.as_fd());
        at = Some(rustix::fs::openat(dir, name, flags, Mode::empty())?);
    }
    at.ok_or(Errno::NOENT)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::os::unix::fs::symlink;

    use super::*;

    type Open = fn(BorrowedFd<'_>, &[u8]) -> Result<OwnedFd, Errno>;

    /// As kernels without openat2(2) resolve the path.
    fn directory_by_component(root: BorrowedFd<'_>, path: &[u8]) -> Result<OwnedFd, Errno> {
        open_by_component(root, path, NO_LINK | OFlags::RDONLY | OFlags::DIRECTORY)
    }

    fn regular_by_component(root: BorrowedFd<'_>, path: &[u8]) -> Result<OwnedFd, Errno> {
        open_by_component(root, path, SAFE_FLAGS | OFlags::RDONLY)
    }

    #[test]
    fn symbolic_links_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("a/b")).unwrap();
        fs::write(dir.path().join("a/b/file"), "content").unwrap();
        symlink("a", dir.path().join("link")).unwrap();
        symlink("b", dir.path().join("a/link")).unwrap();
        symlink("file", dir.path().join("a/b/link")).unwrap();
        let root = File::open(dir.path()).unwrap();
        let root = root.as_fd();
        let directories: [Open; 2] = [open_directory_beneath, directory_by_component];
        for open in directories {
            assert!(open(root, b"a/b").is_ok());
            for path in ["link", "link/b", "a/link", "a/b/link", "a/b/file"] {
                let error = open(root, path.as_bytes()).unwrap_err();
                assert!(
                    matches!(error, Errno::LOOP | Errno::NOTDIR),
                    "{path}: {error}"
                );
            }
        }
        let files: [Open; 2] = [open_regular_beneath, regular_by_component];
        for open in files {
            assert!(open(root, b"a/b/file").is_ok());
            for path in ["link", "link/b/file", "a/link/file", "a/b/link"] {
                let error = open(root, path.as_bytes()).unwrap_err();
                assert!(
                    matches!(error, Errno::LOOP | Errno::NOTDIR),
                    "{path}: {error}"
                );
            }
        }
    }

    #[test]
    fn links_on_a_long_way_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let root = File::open(dir.path()).unwrap();
        let root = root.as_fd();
        let name = "x".repeat(250);
        // Below the limit of a system call, but more than one part.
        let deep = [&*name; 15].join("/");
        fs::create_dir_all(dir.path().join(&deep)).unwrap();
        let inner = open_directory_beneath(root, deep.as_bytes()).unwrap();
        rustix::fs::mkdirat(&inner, &name, Mode::from_raw_mode(0o700)).unwrap();
        rustix::fs::symlinkat(&name, &inner, "link").unwrap();
        let below = |name: &str| open_directory_beneath(root, format!("{deep}/{name}").as_bytes());
        assert!(deep.len() < PART_BYTES && deep.len() + name.len() > PART_BYTES);
        assert!(below(&name).is_ok());
        for name in ["link".to_owned(), format!("link/{name}")] {
            let error = below(&name).unwrap_err();
            assert!(matches!(error, Errno::LOOP | Errno::NOTDIR), "{error}");
        }
    }

    #[test]
    fn paths_lead_nowhere_but_below_the_root() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("root/a")).unwrap();
        fs::write(dir.path().join("file"), "outside").unwrap();
        let root = File::open(dir.path().join("root")).unwrap();
        for path in [
            "..",
            ".",
            "/",
            "/a",
            "a/",
            "a//a",
            "a/..",
            "../file",
            "a/../../file",
        ] {
            let path = path.as_bytes();
            let directory = open_directory_beneath(root.as_fd(), path);
            assert_eq!(directory.unwrap_err(), Errno::INVAL);
            let file = open_regular_beneath(root.as_fd(), path);
            assert_eq!(file.unwrap_err(), Errno::INVAL);
        }
    }

    #[test]
    fn pipes_are_not_opened_for_reading() {
        let dir = tempfile::tempdir().unwrap();
        let root = File::open(dir.path()).unwrap();
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(&root, "pipe", FileType::Fifo, mode, 0).unwrap();
        let open = open_regular_beneath(root.as_fd(), b"pipe");
        assert_eq!(open.unwrap_err(), Errno::INVAL);
        let open = open_directory_beneath(root.as_fd(), b"pipe");
        assert_eq!(open.unwrap_err(), Errno::NOTDIR);
    }
}

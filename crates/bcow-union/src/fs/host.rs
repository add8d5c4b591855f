//! Small operations on the host's file system. None of them follows a symlink of the upper.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};

use bcow_erofs::tree::Timestamp;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::Errno;

use super::types::SetTime;
use crate::upper::set_noatime_new;

pub(super) use crate::host::kind_of;

/// Opens `name` in `directory` with `O_PATH`; `None` if there is no such name.
pub(super) fn open_path(directory: impl AsFd, name: &[u8]) -> Result<Option<File>, Errno> {
    match rustix::fs::openat(
        directory,
        name,
        OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    ) {
        Ok(fd) => Ok(Some(File::from(fd))),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Opens a directory in `directory`, for listing, changes and syncs.
pub(super) fn open_directory(directory: impl AsFd, name: &[u8]) -> Result<File, Errno> {
    let opened = rustix::fs::openat(
        directory,
        name,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    set_noatime_new(&opened);
    Ok(File::from(opened))
}

/// Attributes of `name` in `directory`; `None` if there is no such name.
pub(super) fn stat_at(directory: impl AsFd, name: &[u8]) -> Result<Option<Stat>, Errno> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// A path to an open file, also to one without a name. Needs /proc.
pub(super) fn proc_path(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Opens a file again. Later reads do not change its access time if the process may use
/// `O_NOATIME`.
pub(super) fn reopen(file: &File, flags: OFlags) -> Result<File, Errno> {
    let open = |flags| rustix::fs::open(proc_path(file), flags | OFlags::CLOEXEC, Mode::empty());
    match open(flags | OFlags::NOATIME) {
        // Another user's file: `O_NOATIME` is not permitted.
        Err(Errno::PERM) => open(flags),
        other => other,
    }
    .map(File::from)
}

/// Adds a name to an open file, which may be open with `O_PATH`.
pub(super) fn link(file: &File, directory: impl AsFd, name: &[u8]) -> Result<(), Errno> {
    rustix::fs::linkat(
        CWD,
        proc_path(file),
        directory,
        name,
        AtFlags::SYMLINK_FOLLOW,
    )
}

/// Sets permission bits. Not for symlinks.
pub(super) fn set_mode(file: &File, permissions: u16) -> Result<(), Errno> {
    let mode = Mode::from_raw_mode(u32::from(permissions) & 0o7777);
    match rustix::fs::fchmod(file, mode) {
        // The file is open with `O_PATH`.
        Err(Errno::BADF) => rustix::fs::chmod(proc_path(file), mode),
        other => other,
    }
}

/// Sets the owner. Does not follow a symlink.
pub(super) fn set_owner(file: &File, uid: Option<u32>, gid: Option<u32>) -> Result<(), Errno> {
    rustix::fs::chownat(
        file,
        c"",
        uid.map(rustix::fs::Uid::from_raw),
        gid.map(rustix::fs::Gid::from_raw),
        AtFlags::EMPTY_PATH,
    )
}

/// Sets times. Does not follow a symlink.
pub(super) fn set_times(
    file: &File,
    atime: Option<SetTime>,
    mtime: Option<SetTime>,
) -> Result<(), Errno> {
    let times = Timestamps {
        last_access: timespec(atime),
        last_modification: timespec(mtime),
    };
    rustix::fs::utimensat(file, c"", &times, AtFlags::EMPTY_PATH)
}

fn timespec(time: Option<SetTime>) -> Timespec {
    match time {
        None => Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        },
        Some(SetTime::Now) => Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_NOW,
        },
        Some(SetTime::At(time)) => Timespec {
            tv_sec: time.seconds,
            tv_nsec: time.nanoseconds.into(),
        },
    }
}

/// Times of last access and of last change of the content.
pub(super) fn times(stat: &Stat) -> (Timestamp, Timestamp) {
    (
        timestamp(stat.st_atime, stat.st_atime_nsec),
        timestamp(stat.st_mtime, stat.st_mtime_nsec),
    )
}

pub(super) fn timestamp(seconds: i64, nanoseconds: u64) -> Timestamp {
    Timestamp {
        seconds,
        nanoseconds: u32::try_from(nanoseconds).unwrap_or(0),
    }
}

pub(super) fn timestamp_of(time: Timespec) -> Timestamp {
    timestamp(time.tv_sec, time.tv_nsec as u64)
}

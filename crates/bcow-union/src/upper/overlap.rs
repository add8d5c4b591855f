//! Refuses an upper that contains, or lies in, the upper of another mount.
//!
//! Overlayfs refuses this too ("upperdir is in-use"). Otherwise each mount would show the other's
//! marks as files, and change files that the other relies on. For outer uppers, the check tries the
//! lock in each ancestor directory. For inner uppers, it searches the open files of all processes
//! that this user may examine. The search also finds outer uppers that no ancestor path shows, for
//! example because the upper is reached through a bind mount.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use bcow::lock::{FileLock, LockError};
use rustix::fs::{CWD, Mode, OFlags};

use super::beneath::check_regular;
use super::lock::open_lock;
use super::{META, UpperError, work};
use crate::mountinfo::Place;

/// Fails if another mount uses an upper that contains the upper at `path`, or lies in it. `path`
/// may be missing.
pub(super) fn refuse_overlap(path: &Path) -> Result<(), UpperError> {
    // The open of the upper reports all other problems with the path.
    let Some((canonical, directory)) = resolve(path) else {
        return Ok(());
    };
    for above in canonical.ancestors().skip(1) {
        if let Some(holder) = writer_of(above) {
            return Err(UpperError::Inside {
                path: path.to_owned(),
                outer: above.to_owned(),
                holder,
            });
        }
    }
    let Some(place) = place("self", directory.as_raw_fd(), &canonical) else {
        return Ok(());
    };
    for (pid, descriptor, other) in open_locks() {
        let is_here = || mount_namespace(&pid) == mount_namespace("self");
        let there = self::place(&pid, descriptor, &other);
        let (is_inside, has_inside) = match &there {
            Some(there) if *there == place => continue,
            Some(there) => (place.is_within(there), there.is_within(&place)),
            None => (false, false),
        };
        // A file system that is mounted on a directory in the upper is visible there too.
        let has_inside =
            has_inside || (other != canonical && other.starts_with(&canonical) && is_here());
        if !is_inside && !has_inside {
            continue;
        }
        let Some(holder) = open_of_process(&pid, descriptor).and_then(|lock| writer(&lock)) else {
            continue;
        };
        let path = path.to_owned();
        return Err(match is_inside {
            true => UpperError::Inside {
                path,
                outer: other,
                holder,
            },
            false => UpperError::Around {
                path,
                inner: other,
                holder,
            },
        });
    }
    Ok(())
}

/// The canonical path of the upper, and a descriptor of its directory. If the upper does not exist,
/// the descriptor is the parent's.
fn resolve(path: &Path) -> Option<(PathBuf, OwnedFd)> {
    let open = |path: &Path| {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(CWD, path, flags, Mode::empty()).ok()
    };
    if let Ok(canonical) = path.canonicalize() {
        let directory = open(&canonical)?;
        return Some((canonical, directory));
    }
    let absolute = std::path::absolute(path).ok()?;
    let parent = absolute.parent()?.canonicalize().ok()?;
    let directory = open(&parent)?;
    Some((parent.join(absolute.file_name()?), directory))
}

/// The holder of the lock of the upper at `path`; `None` if the directory is not in use as an
/// upper, or cannot be examined.
fn writer_of(path: &Path) -> Option<LockError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, path, flags, Mode::empty()).ok()?;
    let meta = work::open_directory(root.as_fd(), META.as_bytes()).ok()?;
    let lock = open_lock(meta.as_fd(), OFlags::RDONLY).ok()??;
    writer(&lock)
}

/// The process that has the lock for writing; `None` if no process has it. The test acquires a
/// shared lock, which is released when the caller closes `lock`; until then, a new writer is
/// refused.
fn writer(lock: &File) -> Option<LockError> {
    match FileLock::shared(lock) {
        Err(LockError::Io(_)) | Ok(()) => None,
        Err(holder) => Some(holder),
    }
}

/// The locks of uppers that processes have open: the process id, its descriptor, and the upper's
/// path as the process sees it.
fn open_locks() -> Vec<(String, i32, PathBuf)> {
    let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    let mut pids: Vec<&str> = locks
        .lines()
        .filter_map(|line| {
            // Fields: number, kind, advisory or mandatory, access, process id.
            let fields: Vec<&str> = line.split_whitespace().collect();
            match fields[..] {
                [_, "FLOCK", _, "WRITE", pid, ..] if pid.parse() != Ok(0) => Some(pid),
                _ => None,
            }
        })
        .collect();
    pids.sort_unstable();
    pids.dedup();
    let end = Path::new(META).join("lock");
    let mut found = Vec::new();
    for pid in pids {
        // The process belongs to another user, or has ended.
        let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
            continue;
        };
        for descriptor in descriptors.flatten() {
            if let Ok(link) = std::fs::read_link(descriptor.path())
                && link.ends_with(&end)
                && let Some(upper) = link.ancestors().nth(2)
                && let Some(number) = descriptor.file_name().to_str()
                && let Ok(number) = number.parse()
            {
                found.push((pid.to_owned(), number, upper.to_owned()));
            }
        }
    }
    found
}

/// The place of `path` on the mount that a process's descriptor refers to.
fn place(pid: &str, descriptor: i32, path: &Path) -> Option<Place> {
    let about = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}")).ok()?;
    let mount = about
        .lines()
        .find_map(|line| line.strip_prefix("mnt_id:"))?;
    let mountinfo = std::fs::read(format!("/proc/{pid}/mountinfo")).ok()?;
    Place::of(path, mount.trim().as_bytes(), &mountinfo)
}

fn mount_namespace(pid: &str) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok()
}

/// Opens a regular file that a process has open. Other types are not opened: the name alone does
/// not tell the type.
fn open_of_process(pid: &str, descriptor: i32) -> Option<File> {
    let open = |path: String, flags| rustix::fs::openat(CWD, path, flags, Mode::empty()).ok();
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = open(format!("/proc/{pid}/fd/{descriptor}"), flags)?;
    check_regular(&rustix::fs::fstat(&file).ok()?).ok()?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Some(open(path, OFlags::RDONLY | OFlags::CLOEXEC)?.into())
}

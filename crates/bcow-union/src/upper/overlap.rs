//! Uppers of other mounts that have an upper inside, or are inside it.
//!
//! As in overlayfs, neither may be: each mount would show the other's marks as files, and change
//! what the other relies on. Directories above the upper are asked for their lock. Uppers below it
//! are found among the files that processes have open, as far as this user may look; that also
//! finds those above that a bind mount hides.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use bcow::lock::{FileLock, LockError};
use rustix::fs::{CWD, Mode, OFlags};

use super::beneath::must_be_regular;
use super::instance::open_lock;
use super::{META, UpperError, work};
use crate::mountinfo::Place;

/// Fails if another mount uses an upper that the one at `path` is in, or that is in it. `path` may
/// be missing.
pub(super) fn refuse_overlap(path: &Path) -> Result<(), UpperError> {
    // Whatever else is wrong with it is for opening it to say.
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
        // What is mounted in a directory is seen in it.
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

/// Where the upper is, or would be made, and the directory there or the one that it would be made
/// in.
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

/// Who uses the directory at `path` as the upper of a mount, if it can be asked.
fn writer_of(path: &Path) -> Option<LockError> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::openat(CWD, path, flags, Mode::empty()).ok()?;
    let meta = work::open_directory(root.as_fd(), META.as_bytes()).ok()?;
    let lock = open_lock(meta.as_fd(), OFlags::RDONLY).ok()??;
    writer(&lock)
}

/// Who holds the lock for writing. Nothing is kept of asking.
fn writer(lock: &File) -> Option<LockError> {
    match FileLock::shared(lock) {
        Err(LockError::Io(_)) | Ok(()) => None,
        Err(holder) => Some(holder),
    }
}

/// Locks of uppers that processes have open: the process, its descriptor, and the upper's path as
/// the process sees it.
fn open_locks() -> Vec<(String, i32, PathBuf)> {
    let locks = std::fs::read_to_string("/proc/locks").unwrap_or_default();
    let mut pids: Vec<&str> = locks
        .lines()
        .filter_map(|line| {
            // Number, kind, mandatory or not, access, process.
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
        // Another user's, or gone.
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

/// Where `path` is, which the mount of a process's descriptor shows.
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

/// The regular file that a process has open. Nothing else is opened: its name says nothing of what
/// it is.
fn open_of_process(pid: &str, descriptor: i32) -> Option<File> {
    let open = |path: String, flags| rustix::fs::openat(CWD, path, flags, Mode::empty()).ok();
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = open(format!("/proc/{pid}/fd/{descriptor}"), flags)?;
    must_be_regular(&rustix::fs::fstat(&file).ok()?).ok()?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Some(open(path, OFlags::RDONLY | OFlags::CLOEXEC)?.into())
}

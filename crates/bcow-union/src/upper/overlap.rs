//! Refuses an upper that contains, or lies in, the upper of another mount.
//!
//! overlayfs refuses this too ("upperdir is in-use"). Otherwise each mount would show the marks of
//! the other upper as files, and change files on which the other mount relies. There are two
//! checks:
//!
//! - For outer uppers, the first check tests the lock in each ancestor directory.
//! - For inner uppers, the second check searches the open files of all processes that this user may
//!   examine. It also finds outer uppers that are not on the path, for example because the path
//!   leads through a bind mount.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use bcow::lock::{FileLock, LockError, held_locks};
use rustix::fs::{Mode, OFlags};

use super::beneath::check_regular;
use super::lock::open_lock;
use super::{META, UpperError, work};
use crate::mountinfo::DirectoryPlace;

/// Fails if another mount uses an upper that contains the upper at `path`, or an upper that lies in
/// it. The directory at `path` does not have to exist.
pub(super) fn refuse_overlap(path: &Path) -> Result<(), UpperError> {
    // If the path does not resolve, the open of the upper reports the error.
    let Some((canonical, directory)) = resolve(path) else {
        return Ok(());
    };
    for above in canonical.ancestors().skip(1) {
        if let Some(holder) = upper_lock_holder(above) {
            return Err(UpperError::Inside {
                path: path.to_owned(),
                outer: above.to_owned(),
                holder,
            });
        }
    }
    let mut tables = MountTables::default();
    let Some(place) = tables.place_of("self", directory.as_raw_fd(), &canonical) else {
        return Ok(());
    };
    for (pid, descriptor, other) in open_locks() {
        let is_below = || {
            other != canonical
                && other.starts_with(&canonical)
                && mount_namespace(&pid) == mount_namespace("self")
        };
        let is_inside = match tables.place_of(&pid, descriptor, &other) {
            // The same upper. The caller's attempt to lock it reports the conflict.
            Some(other_place) if other_place == place => continue,
            Some(other_place) if place.is_within(&other_place) => true,
            Some(other_place) if other_place.is_within(&place) => false,
            // The places of two file systems cannot be compared. If a file system is mounted on a
            // directory of this upper, an upper on it is found by its path.
            _ if is_below() => false,
            _ => continue,
        };
        let Some(holder) =
            open_of_process(&pid, descriptor).and_then(|lock| exclusive_lock_holder(&lock))
        else {
            continue;
        };
        let path = path.to_owned();
        return Err(if is_inside {
            UpperError::Inside {
                path,
                outer: other,
                holder,
            }
        } else {
            UpperError::Around {
                path,
                inner: other,
                holder,
            }
        });
    }
    Ok(())
}

/// The canonical path of the upper, and a descriptor of its directory. If the upper does not exist,
/// the descriptor is the parent's.
fn resolve(path: &Path) -> Option<(PathBuf, OwnedFd)> {
    if let Ok(canonical) = path.canonicalize() {
        let directory = open_directory(&canonical)?;
        return Some((canonical, directory));
    }
    let absolute = std::path::absolute(path).ok()?;
    let parent = absolute.parent()?.canonicalize().ok()?;
    let directory = open_directory(&parent)?;
    Some((parent.join(absolute.file_name()?), directory))
}

fn open_directory(path: &Path) -> Option<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).ok()
}

/// The process that holds the lock of the upper at `path` for writing; `None` if the directory is
/// not in use as an upper, or cannot be examined.
fn upper_lock_holder(path: &Path) -> Option<LockError> {
    let root = open_directory(path)?;
    let meta = work::open_directory(root.as_fd(), META.as_bytes()).ok()?;
    let lock = open_lock(meta.as_fd(), OFlags::RDONLY).ok()??;
    exclusive_lock_holder(&lock)
}

/// The process that holds the lock for writing; `None` if no process does, or if the lock cannot be
/// tested. The test acquires a shared lock, which is released when the caller closes `lock`. Until
/// then, another process cannot acquire the lock for writing.
fn exclusive_lock_holder(lock: &File) -> Option<LockError> {
    match FileLock::shared(lock) {
        Err(LockError::Io(_)) | Ok(()) => None,
        Err(holder) => Some(holder),
    }
}

/// The lock files of uppers that are open in processes with a write lock, one element for each
/// descriptor: the process id, the descriptor, and the path of the upper as the process sees it.
fn open_locks() -> Vec<(String, i32, PathBuf)> {
    let locks = held_locks();
    let writers = locks.iter().filter(|lock| lock.is_exclusive);
    let pids: BTreeSet<u32> = writers.map(|lock| lock.pid).collect();
    let suffix = Path::new(META).join("lock");
    let mut found = Vec::new();
    for pid in pids {
        // This fails if the process belongs to another user, or has ended.
        let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else {
            continue;
        };
        for descriptor in descriptors.flatten() {
            if let Ok(link) = std::fs::read_link(descriptor.path())
                && link.ends_with(&suffix)
                && let Some(upper) = link.ancestors().nth(2)
                && let Some(number) = descriptor.file_name().to_str()
                && let Ok(number) = number.parse()
            {
                found.push((pid.to_string(), number, upper.to_owned()));
            }
        }
    }
    found
}

/// The mount tables of processes. Each table is read once: on a machine with many mounts it is
/// long, and most processes that use uppers see the same one.
#[derive(Default)]
struct MountTables(HashMap<View, Vec<u8>>);

/// What determines the mount table that a process sees: its mount namespace, and its root
/// directory (proc_pid_mountinfo(5)).
#[derive(PartialEq, Eq, Hash)]
struct View {
    namespace: PathBuf,
    root: PathBuf,
    root_inode: (u64, u64),
}

impl View {
    fn of(pid: &str) -> Option<View> {
        let root = format!("/proc/{pid}/root");
        let stat = rustix::fs::stat(&root).ok()?;
        Some(View {
            namespace: mount_namespace(pid)?,
            root: std::fs::read_link(root).ok()?,
            root_inode: (stat.st_dev, stat.st_ino),
        })
    }
}

impl MountTables {
    /// The place of `path` on the mount to which a descriptor of the process `pid` belongs.
    fn place_of(&mut self, pid: &str, descriptor: i32, path: &Path) -> Option<DirectoryPlace> {
        let fdinfo = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}")).ok()?;
        let mount = fdinfo
            .lines()
            .find_map(|line| line.strip_prefix("mnt_id:"))?;
        let mount = mount.trim().as_bytes();
        let view = View::of(pid)?;
        let known = self
            .0
            .get(&view)
            .and_then(|table| DirectoryPlace::of(path, mount, table));
        // The mount may be newer than the table.
        known.or_else(|| {
            let table = std::fs::read(format!("/proc/{pid}/mountinfo")).ok()?;
            let place = DirectoryPlace::of(path, mount, &table);
            self.0.insert(view, table);
            place
        })
    }
}

fn mount_namespace(pid: &str) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok()
}

/// Opens the file of a descriptor of the process `pid`; `None` if it is not a regular file. The
/// type is checked first, because the open of a pipe or a device could block.
fn open_of_process(pid: &str, descriptor: i32) -> Option<File> {
    let open = |path: String, flags| rustix::fs::open(path, flags, Mode::empty()).ok();
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let file = open(format!("/proc/{pid}/fd/{descriptor}"), flags)?;
    check_regular(&rustix::fs::fstat(&file).ok()?).ok()?;
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Some(open(path, OFlags::RDONLY | OFlags::CLOEXEC)?.into())
}

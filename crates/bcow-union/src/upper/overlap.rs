//! Refuses an upper that contains, or lies in, the upper of another mount.
//!
//! overlayfs refuses this too ("upperdir is in-use"). Otherwise each mount would show the marks of
//! the other upper as files, and change files on which the other mount relies. There are two
//! checks:
//!
//! - For outer uppers, the first check tests the lock in each ancestor directory.
//! - For inner uppers, the second check searches the open files of all processes that this user may
//!   examine. It also finds outer uppers that are not on the path, for example because the path
//!   leads through a bind mount. Its duration grows with the number of mounts.
//!
//! A new upper needs only the first check, if it is on a mount of its whole file system: all
//! directories around it are then on the path, and an inner upper needs a directory in it.

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use bcow::lock::{FileLock, LockError, held_locks};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;

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
    let mut has_examined_all = true;
    for above in canonical.ancestors().skip(1) {
        match upper_lock_holder(above) {
            Ok(None) => {}
            Ok(Some(holder)) => {
                return Err(UpperError::Inside {
                    path: path.to_owned(),
                    outer: above.to_owned(),
                    holder,
                });
            }
            Err(_) => has_examined_all = false,
        }
    }
    if has_examined_all
        && has_no_directory(&canonical).unwrap_or(false)
        && shows_whole_file_system(&directory).unwrap_or(false)
    {
        return Ok(());
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
            open_of_process(&pid, descriptor).and_then(|lock| exclusive_lock_holder(&lock).ok()?)
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

/// Whether the directory of an upper has no directory except [`META`], which has none either. An
/// upper that begins in it later finds its lock. An upper that does not exist has none.
fn has_no_directory(upper: &Path) -> Result<bool, Errno> {
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    let upper = match rustix::fs::open(upper, flags, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(true),
        upper => upper?,
    };
    // First where an upper that was used has some.
    match work::open_directory(upper.as_fd(), META.as_bytes()) {
        Err(Errno::NOENT) => {}
        meta => {
            if has_directory(&meta?, b"")? {
                return Ok(false);
            }
        }
    }
    Ok(!has_directory(&upper, META.as_bytes())?)
}

/// Whether a directory has a directory with another name than `except`.
fn has_directory(directory: &OwnedFd, except: &[u8]) -> Result<bool, Errno> {
    work::set_noatime_new(directory);
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if matches!(name.to_bytes(), b"." | b"..") || name.to_bytes() == except {
            continue;
        }
        let kind = match entry.file_type() {
            FileType::Unknown => {
                let stat = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
                FileType::from_raw_mode(stat.st_mode)
            }
            kind => kind,
        };
        if kind == FileType::Directory {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether the mount of a directory shows its file system from the root. The kernel lists old
/// mounts first, and the list is read only as far as this one.
fn shows_whole_file_system(directory: &OwnedFd) -> Option<bool> {
    let mount = mount_of("self", directory.as_raw_fd())?;
    let table = BufReader::new(File::open("/proc/self/mountinfo").ok()?);
    let mut lines = table.split(b'\n').map_while(Result::ok);
    lines.find_map(|line| {
        let mut fields = line.split(|&byte| byte == b' ');
        let is_own = fields.next()? == mount.as_bytes();
        is_own.then(|| fields.nth(2) == Some(&b"/"[..]))
    })
}

/// The process that holds the lock of the upper at `path` for writing; `None` if the directory is
/// not in use as an upper.
fn upper_lock_holder(path: &Path) -> io::Result<Option<LockError>> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let root = rustix::fs::open(path, flags, Mode::empty())?;
    let meta = match work::open_directory(root.as_fd(), META.as_bytes()) {
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
        meta => meta?,
    };
    match open_lock(meta.as_fd(), OFlags::RDONLY)? {
        Some(lock) => exclusive_lock_holder(&lock),
        None => Ok(None),
    }
}

/// The process that holds the lock for writing; `None` if no process does. The test acquires a
/// shared lock, which is released when the caller closes `lock`. Until then, another process cannot
/// acquire the lock for writing.
fn exclusive_lock_holder(lock: &File) -> io::Result<Option<LockError>> {
    match FileLock::shared(lock) {
        Ok(()) => Ok(None),
        Err(LockError::Io(error)) => Err(error),
        Err(holder) => Ok(Some(holder)),
    }
}

/// The lock files of uppers that are open in processes with a write lock, one element for each
/// descriptor: the process id, the descriptor, and the path of the upper as the process sees it.
fn open_locks() -> Vec<(String, i32, PathBuf)> {
    let locks = held_locks();
    let writers = locks.iter().filter(|lock| lock.is_exclusive);
    let mut pids: BTreeSet<u32> = writers.map(|lock| lock.pid).collect();
    let has_ended = |pid: &u32| !Path::new("/proc").join(pid.to_string()).exists();
    if pids.iter().any(has_ended) {
        // The list names the process that took the lock, which may have left it to another one.
        pids = all_processes();
    }
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

fn all_processes() -> BTreeSet<u32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
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
        let mount = mount_of(pid, descriptor)?;
        let mount = mount.as_bytes();
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

/// The number of the mount to which a descriptor of the process `pid` belongs.
fn mount_of(pid: &str, descriptor: i32) -> Option<String> {
    let fdinfo = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}")).ok()?;
    let mut lines = fdinfo.lines();
    let mount = lines.find_map(|line| line.strip_prefix("mnt_id:"))?;
    Some(mount.trim().to_owned())
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

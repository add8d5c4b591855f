//! Unmounting by path, as `bcow umount` does.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use crate::error::MountError;
use crate::helper::run_unmount_helper;
use crate::mountinfo::{self, Door, MountEntry};

/// The action for a mount that is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WhenBusy {
    /// Fail and leave it mounted.
    #[default]
    Fail,
    /// Detach it from the tree now. The kernel ends it when its last user is gone.
    Detach,
}

/// A mounted BCoW image, as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedImage {
    /// The mountpoint.
    pub path: PathBuf,
    /// The source of the mount in `/proc/self/mountinfo`.
    pub source: OsString,
    /// The device number in the kernel's form, `major:minor`. No other mounted file system has the
    /// same number.
    pub device: String,
    /// Whether the mount is writable.
    pub is_writable: bool,
    /// Uid and gid of the only user who may enter the mount, without `allow_other`. The kernel
    /// refuses root too then.
    pub owner: Option<(u32, u32)>,
    /// The door.
    pub door: Door,
    /// The type of the file system, as the kernel lists it.
    pub file_system: String,
}

impl MountedImage {
    /// Whether the process of a mount at the kernel door answers the kernel. Waits for a process
    /// that hangs.
    pub fn is_served(&self) -> bool {
        bcow_mount::is_served(Path::new(&self.source))
    }
}

/// Finds the BCoW image that is mounted at `target`, without a request to the mount itself. Fails
/// if no file system is mounted at `target`, or one of another type.
pub fn mounted_image(target: &Path) -> Result<MountedImage, MountError> {
    let path = resolve(target);
    let entry = mountinfo::mounted_at(&path).map_err(|source| MountError::Process {
        action: "read /proc/self/mountinfo",
        source,
    })?;
    match entry {
        None => Err(MountError::NotMounted(target.to_owned())),
        Some(entry) => match entry.door() {
            Some(door) => Ok(MountedImage {
                path,
                ..MountedImage::of(entry, door)
            }),
            None => Err(MountError::ForeignMount {
                path: target.to_owned(),
                fs_type: entry.fs_type,
            }),
        },
    }
}

/// All BCoW images that are mounted in this mount namespace, in the kernel's order. This sends no
/// request to the mounts.
pub fn mounted_images() -> std::io::Result<Vec<MountedImage>> {
    Ok(mountinfo::mounts()?
        .into_iter()
        .filter_map(|entry| entry.door().map(|door| MountedImage::of(entry, door)))
        .collect())
}

impl MountedImage {
    fn of(entry: MountEntry, door: Door) -> Self {
        MountedImage {
            path: entry.target,
            source: entry.source,
            device: entry.device,
            file_system: entry.fs_type,
            is_writable: entry.is_writable,
            owner: match door {
                Door::Fuse => entry.owner,
                Door::Kernel(_) | Door::Direct(_) => None,
            },
            door,
        }
    }

    /// All paths where this mount namespace shows it now, bind mounts and moved mounts included.
    pub fn places(&self) -> Vec<PathBuf> {
        mountinfo::places_of(&self.device).unwrap_or_default()
    }
}

/// Unmounts the BCoW image that is mounted at `target`. Its daemon then exits by itself.
///
/// Fails if no file system is mounted at `target`, or one of another type.
pub fn unmount(target: &Path, when_busy: WhenBusy) -> Result<(), MountError> {
    let resolved = mounted_image(target)?.path;
    let (flags, arguments): (_, &[&str]) = match when_busy {
        WhenBusy::Fail => (UnmountFlags::empty(), &[]),
        WhenBusy::Detach => (UnmountFlags::DETACH, &["-z"]),
    };
    match rustix::mount::unmount(&resolved, flags | UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(()),
        Err(Errno::PERM) => run_unmount_helper(&resolved, arguments),
        Err(Errno::BUSY) => Err(MountError::Busy(target.to_owned())),
        Err(errno) => Err(MountError::Unmount {
            path: target.to_owned(),
            source: errno.into(),
        }),
    }
}

/// The path under which the kernel lists a mount at `target`.
///
/// If possible, resolves symbolic links in the parent directory only. Resolving the mountpoint
/// itself would send a request to its daemon, which may hang or be dead.
fn resolve(target: &Path) -> PathBuf {
    let lexical = std::path::absolute(target).unwrap_or_else(|_| target.to_owned());
    let by_parent = match (lexical.parent(), lexical.file_name()) {
        (Some(parent), Some(name)) => parent.canonicalize().ok().map(|parent| parent.join(name)),
        _ => None,
    };
    let candidates = [Some(lexical.clone()), by_parent.clone()];
    for candidate in candidates.into_iter().flatten() {
        if matches!(mountinfo::mounted_at(&candidate), Ok(Some(_))) {
            return candidate;
        }
    }
    lexical.canonicalize().ok().or(by_parent).unwrap_or(lexical)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_that_is_no_mount_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let error = unmount(directory.path(), WhenBusy::Fail).unwrap_err();
        assert!(matches!(error, MountError::NotMounted(_)), "{error}");
    }

    #[test]
    fn foreign_mount_is_refused_and_named() {
        let error = unmount(Path::new("/proc"), WhenBusy::Fail).unwrap_err();
        assert_eq!(
            error.to_string(),
            "/proc is a mount of type proc, not a BCoW mount"
        );
    }
}

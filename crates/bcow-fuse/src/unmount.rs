//! Unmounting by path, as `bcow umount` does, and by device number.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use serde::{Deserialize, Serialize};

use crate::error::MountError;
use crate::helper::run_unmount_helper;
use crate::mountinfo::{self, Driver, MountEntry};

/// For how long the unmount of a mount in use is tried again. Such a use is often about to end: a
/// process that has just been forked has the open files of its parent until it executes its
/// program, and a killed process has its own until it has ended.
const TRIES_WITHIN: Duration = Duration::from_millis(500);
/// The first pause between two tries. Each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(1);

/// The action for a mount that is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WhenBusy {
    /// Fail and leave it mounted, if the use does not end within half a second.
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
    pub driver: Driver,
    /// The type of the file system, as the kernel lists it.
    pub file_system: String,
}

impl MountedImage {
    /// Whether the process of a mount with the kernel driver answers the kernel. Waits for a
    /// process that hangs.
    pub fn is_served(&self) -> bool {
        bcow_mount::is_served(Path::new(&self.source))
    }
}

/// Finds the BCoW image that is mounted at `target`, without a request to the mount itself. Fails
/// if no file system is mounted at `target`, or one of another type.
pub fn mounted_image(target: &Path) -> Result<MountedImage, MountError> {
    let path = resolve(target);
    let entry =
        mountinfo::mounted_at(&path).map_err(MountError::process("read /proc/self/mountinfo"))?;
    match entry {
        None => Err(MountError::NotMounted(target.to_owned())),
        Some(entry) => match entry.driver() {
            Some(driver) => Ok(MountedImage {
                path,
                ..MountedImage::of(entry, driver)
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
        .filter_map(|entry| entry.driver().map(|driver| MountedImage::of(entry, driver)))
        .collect())
}

impl MountedImage {
    fn of(entry: MountEntry, driver: Driver) -> Self {
        MountedImage {
            path: entry.target,
            source: entry.source,
            device: entry.device,
            file_system: entry.fs_type,
            is_writable: entry.is_writable,
            owner: match driver {
                Driver::Fuse => entry.owner,
                Driver::Kernel(_) | Driver::Direct(_) => None,
            },
            driver,
        }
    }

    /// All paths where this mount namespace shows it now, bind mounts and moved mounts included.
    pub fn places(&self) -> Vec<PathBuf> {
        mountinfo::places_of(&self.device).unwrap_or_default()
    }

    /// The paths of the mounts inside this one, which keep it in use.
    pub fn mounts_inside(&self) -> Vec<PathBuf> {
        let mounts = mountinfo::mounts().unwrap_or_default();
        let targets = mounts.into_iter().map(|entry| entry.target);
        targets
            .filter(|target| *target != self.path && target.starts_with(&self.path))
            .collect()
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
    let unmounted = until_unused(TRIES_WITHIN, || {
        match rustix::mount::unmount(&resolved, flags | UnmountFlags::NOFOLLOW) {
            Ok(()) => Ok(()),
            Err(Errno::PERM) => run_unmount_helper(&resolved, arguments),
            Err(Errno::BUSY) => Err(MountError::Busy(resolved.clone())),
            Err(errno) => Err(MountError::Unmount {
                path: target.to_owned(),
                source: errno.into(),
            }),
        }
    });
    match unmounted {
        Err(MountError::Busy(_)) => Err(MountError::Busy(target.to_owned())),
        other => other,
    }
}

/// Tries to unmount, and tries again while the mount is in use, for at most `patience`.
fn until_unused(
    patience: Duration,
    mut unmount: impl FnMut() -> Result<(), MountError>,
) -> Result<(), MountError> {
    let start = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        match unmount() {
            Err(MountError::Busy(_)) if start.elapsed() < patience => {}
            other => return other,
        }
        std::thread::sleep(pause);
        pause *= 2;
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

/// The result of an unmount, ordered from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Unmounted {
    /// The mount is gone.
    Gone,
    /// The mount was in use and is detached. No program can enter it, and the kernel ends it when
    /// its last user is gone.
    Detached,
    /// The mount stays: another mount covers it, it is in another mount namespace, or the kernel
    /// refused.
    Stays,
}

impl Unmounted {
    /// The warning of a mount at `target` that the signal `name` did not end.
    pub fn warning(self, name: &str, target: &Path) -> Option<String> {
        let target = target.display();
        match self {
            Unmounted::Gone => None,
            Unmounted::Detached => Some(format!(
                "{name}: {target} is in use; detached, ends with its last user"
            )),
            Unmounted::Stays => Some(format!(
                "{name}: {target} cannot be unmounted; another signal ends its service"
            )),
        }
    }
}

/// Unmounts the file system with this device number at all its paths. If it is in use, unmounts
/// lazily.
pub(crate) fn unmount_places(device: Option<&str>) -> Unmounted {
    let places = match device {
        Some(device) => mountinfo::places_of(device).unwrap_or_default(),
        None => Vec::new(),
    };
    places
        .iter()
        .map(|place| unmount_place(place))
        .max()
        .unwrap_or(Unmounted::Stays)
}

/// Unmounts at one path. If the mount is in use there, unmounts lazily.
fn unmount_place(place: &Path) -> Unmounted {
    if rustix::mount::unmount(place, UnmountFlags::NOFOLLOW).is_ok() {
        return Unmounted::Gone;
    }
    if rustix::mount::unmount(place, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH).is_ok() {
        return Unmounted::Detached;
    }
    if run_unmount_helper(place, &[]).is_ok() {
        return Unmounted::Gone;
    }
    match run_unmount_helper(place, &["-z"]) {
        Ok(()) => Unmounted::Detached,
        Err(_) => Unmounted::Stays,
    }
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
    fn a_use_that_ends_soon_does_not_keep_a_mount() {
        let busy = || Err(MountError::Busy("/mnt".into()));
        let mut outcomes = vec![Ok(()), busy(), busy()];
        let patience = Duration::from_secs(3600);
        until_unused(patience, || outcomes.pop().unwrap()).unwrap();
        assert!(outcomes.is_empty());
        // Another failure ends the tries, and so does the end of the patience.
        let mut outcomes = vec![Ok(()), Err(MountError::NotMounted("/mnt".into())), busy()];
        let failed = until_unused(patience, || outcomes.pop().unwrap());
        assert!(
            matches!(failed, Err(MountError::NotMounted(_))),
            "{failed:?}"
        );
        let failed = until_unused(Duration::ZERO, busy);
        assert!(matches!(failed, Err(MountError::Busy(_))), "{failed:?}");
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

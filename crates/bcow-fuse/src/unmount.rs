//! Taking a mount away by its path: what `bcow umount` does.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::mount::UnmountFlags;

use crate::error::MountError;
use crate::mount::run_unmount_helper;
use crate::mountinfo::{self, FS_TYPE, MountEntry};

/// What to do about a mount that is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WhenBusy {
    /// Leave it and fail.
    #[default]
    Fail,
    /// Take it out of the tree now; it ends with its last user.
    Detach,
}

/// A BCoW image that is mounted, as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountedImage {
    /// The mountpoint.
    pub path: PathBuf,
    /// What the kernel lists as its source.
    pub source: OsString,
    /// Its device number, as the kernel writes it. No other file system of the machine has it meanwhile.
    pub device: String,
    /// Whether it can be written to.
    pub is_writable: bool,
    /// For whom it is, if it is for one user: their uid and gid. Not even root is let in then.
    pub owner: Option<(u32, u32)>,
}

/// The BCoW image that is mounted at `target`, which is not asked. Fails if nothing is mounted there, or something that is no
/// BCoW image.
pub fn mounted_image(target: &Path) -> Result<MountedImage, MountError> {
    let path = resolve(target);
    let entry = mountinfo::mounted_at(&path).map_err(|source| MountError::Process {
        action: "read /proc/self/mountinfo",
        source,
    })?;
    match entry {
        None => Err(MountError::NotMounted(target.to_owned())),
        Some(entry) if entry.fs_type != FS_TYPE => Err(MountError::ForeignMount {
            path: target.to_owned(),
            fs_type: entry.fs_type,
        }),
        Some(entry) => Ok(MountedImage {
            path,
            ..MountedImage::of(entry)
        }),
    }
}

/// All BCoW images that are mounted in this mount namespace, in the order in which the kernel lists them. None of them is asked.
pub fn mounted_images() -> std::io::Result<Vec<MountedImage>> {
    Ok(mountinfo::mounts()?
        .into_iter()
        .filter(|entry| entry.fs_type == FS_TYPE)
        .map(MountedImage::of)
        .collect())
}

impl MountedImage {
    fn of(entry: MountEntry) -> Self {
        MountedImage {
            path: entry.target,
            source: entry.source,
            device: entry.device,
            is_writable: entry.is_writable,
            owner: entry.owner,
        }
    }

    /// Where it is mounted now, as far as this mount namespace shows it: also where it was bound or moved to.
    pub fn places(&self) -> Vec<PathBuf> {
        mountinfo::places_of(&self.device).unwrap_or_default()
    }
}

/// Unmounts the BCoW image that is mounted at `target`. Its daemon then ends by itself.
///
/// Fails if nothing is mounted there, or something that is no BCoW image.
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

/// The path by which the kernel lists a mount at `target`.
///
/// Symbolic links are followed in the parent only, as far as possible: looking at the mount itself would
/// ask its daemon, which may hang or be dead.
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
            "what is mounted at /proc is no BCoW image but proc"
        );
    }
}

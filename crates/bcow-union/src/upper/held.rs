//! An upper with which another process continues.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{UpperError, set_noatime_new, work};

/// The root directory of an upper, wherever it is by now, and its lock, which stays held while no
/// process uses the upper.
#[derive(Debug)]
pub struct HeldUpper {
    root: OwnedFd,
    lock: OwnedFd,
}

impl HeldUpper {
    /// From the descriptors of another process: the root directory, and the locked file.
    pub fn from_descriptors(root: OwnedFd, lock: OwnedFd) -> Self {
        HeldUpper { root, lock }
    }

    /// Duplicates the descriptors of an open upper.
    pub(super) fn new(root: BorrowedFd<'_>, lock: &File) -> io::Result<Self> {
        Ok(HeldUpper {
            root: root.try_clone_to_owned()?,
            lock: lock.as_fd().try_clone_to_owned()?,
        })
    }

    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(HeldUpper {
            root: self.root.try_clone()?,
            lock: self.lock.try_clone()?,
        })
    }

    /// The root directory, and the locked file.
    pub fn descriptors(&self) -> [BorrowedFd<'_>; 2] {
        [self.root.as_fd(), self.lock.as_fd()]
    }

    /// The path that the directory has now; `None` if it was removed, or if no path of this process
    /// leads to it.
    pub fn path(&self) -> Option<PathBuf> {
        let path = std::fs::read_link(format!("/proc/self/fd/{}", self.root.as_raw_fd())).ok()?;
        let found = path.metadata().ok()?;
        let root = rustix::fs::fstat(&self.root).ok()?;
        ((found.dev(), found.ino()) == (root.st_dev, root.st_ino)).then_some(path)
    }

    /// Whether the directory has no name on the host any more.
    pub fn is_removed(&self) -> bool {
        is_removed(self.root.as_fd())
    }

    /// The root directory, as another open file. Errors name `path`.
    pub(super) fn open_root(&self, path: &Path) -> Result<OwnedFd, UpperError> {
        if self.is_removed() {
            return Err(UpperError::Missing(path.to_owned()));
        }
        let root = work::open_directory(self.root.as_fd(), b".")
            .map_err(|errno| UpperError::io(path, "open it", errno))?;
        set_noatime_new(&root);
        Ok(root)
    }

    /// The locked file, which has the lock already.
    pub(super) fn lock_file(&self) -> io::Result<File> {
        Ok(self.lock.try_clone()?.into())
    }
}

/// Whether the root directory of an upper has no name on the host any more.
pub(crate) fn is_removed(root: BorrowedFd<'_>) -> bool {
    rustix::fs::fstat(root).is_ok_and(|root| root.st_nlink == 0)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::instance::Before;
    use super::super::{ImageName, Instance, META};
    use super::*;

    const IMAGE: ImageName<'_> = ImageName {
        identity: [1; 32],
        name: "image",
    };

    fn again(path: &Path, held: Option<&HeldUpper>) -> Result<Instance, UpperError> {
        let kept = "kept";
        Instance::open_again(path, IMAGE, "the next", &Before { held, kept })
    }

    #[test]
    fn a_moved_upper_is_continued_and_stays_locked() {
        let directory = tempfile::tempdir().unwrap();
        let (old, new) = (directory.path().join("old"), directory.path().join("new"));
        let instance = Instance::open(&old, IMAGE, "the first").unwrap();
        let held = instance.hold().unwrap();
        drop(instance);
        fs::rename(&old, &new).unwrap();
        assert_eq!(held.path().as_deref(), Some(&*new));
        let refused = Instance::open(&new, IMAGE, "another").unwrap_err();
        assert!(refused.in_use().is_some(), "{refused}");
        // Another upper has the name.
        drop(Instance::open(&old, IMAGE, "another").unwrap());
        for _ in 0..2 {
            let instance = again(&old, Some(&held)).unwrap();
            let found = rustix::fs::fstat(instance.root()).unwrap();
            assert_eq!(found.st_ino, fs::metadata(&new).unwrap().ino());
            let refused = Instance::open(&new, IMAGE, "another").unwrap_err();
            assert!(refused.to_string().contains("the next"), "{refused}");
        }
        drop(held);
        drop(Instance::open(&new, IMAGE, "another").unwrap());
    }

    #[test]
    fn an_upper_that_is_gone_is_not_begun_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("upper");
        let held = Instance::open(&path, IMAGE, "the first").unwrap();
        let held = held.hold().unwrap();
        assert!(!held.is_removed());
        fs::remove_dir_all(path.join(META)).unwrap();
        for held in [Some(&held), None] {
            again(&path, held).unwrap_err();
            assert_eq!(fs::read_dir(&path).unwrap().count(), 0);
        }
        fs::remove_dir(&path).unwrap();
        assert!(held.is_removed());
        assert_eq!(held.path(), None);
        for held in [Some(&held), None] {
            let error = again(&path, held).unwrap_err();
            assert!(matches!(error, UpperError::Missing(_)), "{error}");
            assert!(!path.exists());
        }
    }
}

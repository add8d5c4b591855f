//! Mounts of files that hold an EROFS, which the kernel reads without any process of bcow.
//!
//! Nothing of bcow stays behind such a mount, so its source in the kernel's list has to say that
//! bcow made it: the source begins with `/./`, which leads to the same file. The kernel lets only
//! root mount an EROFS, so no other user can forge that.

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::Error;
use crate::filesystem::{self, Kind, MountSource, Settings};
use crate::loop_device::{self, Access, LoopDevice};

/// The start of the source of such a mount.
const MARK: &[u8] = b"/./";

/// Mounts the EROFS in the first of `files` on the directory `target`. The other files are its
/// further devices. All paths are absolute.
///
/// Linux 6.12 mounts a file itself. For older kernels, and for files that it cannot read that way,
/// each file gets a loop device, which ends with the mount.
pub fn mount_files(files: &[PathBuf], target: &Path, settings: Settings) -> Result<(), Error> {
    let sources: Vec<PathBuf> = files.iter().map(|file| marked(file)).collect();
    let Err(error) = mount(&sources, true, target, settings) else {
        return Ok(());
    };
    if !may_need_devices(&error) {
        return Err(error);
    }
    tracing::debug!("the kernel does not mount the file itself: {error}");
    // Dropped at the end of this function: the devices live as long as the mount then.
    let devices = files.iter().map(|file| attach(file));
    let devices = devices.collect::<Result<Vec<_>, _>>()?;
    let sources: Vec<PathBuf> = devices.iter().map(|device| marked(device.path())).collect();
    mount(&sources, false, target, settings)
}

/// Mounts the first of `sources`, which are files or loop devices, with the others as its devices.
fn mount(
    sources: &[PathBuf],
    are_files: bool,
    target: &Path,
    settings: Settings,
) -> Result<(), Error> {
    let Some((source, devices)) = sources.split_first() else {
        return Err(Error::NoFileSystem { found: "nothing" });
    };
    let source = MountSource {
        source,
        devices,
        // So that no page is cached twice. Loop devices have direct I/O of their own.
        direct_io: are_files,
    };
    filesystem::mount_source(source, Kind::Erofs, target, settings)
}

/// Whether a mount that failed so can succeed with loop devices.
fn may_need_devices(error: &Error) -> bool {
    let Error::Mount { source, .. } = error else {
        return false;
    };
    let errno = source.raw_os_error().map(Errno::from_raw_os_error);
    matches!(
        errno,
        // No such support; a file system whose files this driver cannot read, or not at this depth.
        Some(Errno::NOTBLK | Errno::INVAL | Errno::OPNOTSUPP | Errno::LOOP)
    )
}

fn attach(file: &Path) -> Result<LoopDevice, Error> {
    let failed = |source| Error::File {
        path: file.to_owned(),
        source,
    };
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let open =
        rustix::fs::open(file, flags, Mode::empty()).map_err(|errno| failed(errno.into()))?;
    LoopDevice::attach(open.as_fd(), Access::ReadOnly)
}

/// The path with the mark. `path` is absolute.
fn marked(path: &Path) -> PathBuf {
    let bytes = path.as_os_str().as_bytes();
    let rest = bytes.strip_prefix(b"/").unwrap_or(bytes);
    OsStr::from_bytes(&[MARK, rest].concat()).into()
}

/// The file that holds the EROFS of a mount, if bcow made the mount with [`mount_files`]. `source`
/// is the source of the mount in the kernel's list.
pub fn file_of_source(source: &Path) -> Option<PathBuf> {
    let rest = source.as_os_str().as_bytes().strip_prefix(MARK)?;
    let path = PathBuf::from(OsStr::from_bytes(&[b"/", rest].concat()));
    Some(loop_device::file_behind(&path).map_or(path, PathBuf::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_found_by_the_marked_source() {
        for path in ["/images/a b.bcow", "/x", "/images/../x"] {
            let source = marked(Path::new(path));
            assert_eq!(file_of_source(&source), Some(path.into()));
        }
        for other in ["/images/x.bcow", "/dev/loop0", "x", "./x", ""] {
            assert_eq!(file_of_source(Path::new(other)), None, "{other}");
        }
    }

    #[test]
    fn a_missing_file_has_no_device() {
        let error = attach(Path::new("/nonexistent/image")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/image"), "{error}");
    }
}

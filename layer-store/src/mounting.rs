//! The mount of the store itself.

use std::ffi::CString;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::error::Error;
use bcow_tool::{At, HostError};

/// The type of the file system in /proc/mounts.
const FS_TYPE: &str = "fuse.bcow-layer-store";

/// The mount of the store.
pub struct Mounted {
    path: PathBuf,
}

impl Mounted {
    /// Mounts; also returns the session that answers the requests with `files`. A mount that an
    /// earlier process has left there is removed.
    pub fn new<F: fuser::Filesystem>(
        path: &Path,
        files: F,
        config: fuser::Config,
    ) -> Result<(Self, fuser::Session<F>), Error> {
        let path = std::path::absolute(path).at("use", path)?;
        match rustix::fs::statfs(&path) {
            Err(Errno::NOTCONN | Errno::CONNABORTED) => {
                unmount(&path, UnmountFlags::DETACH).at("unmount", &path)?;
            }
            _ if is_mounted(&path)? => {
                return Err(Error::State(format!(
                    "another process serves a store at {}",
                    path.display()
                )));
            }
            _ => {}
        }
        let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .at("open", Path::new("/dev/fuse"))?;
        // Without allow_other: only the user of the store, and thus of the engine, has access.
        let data = format!(
            "fd={},rootmode=40000,user_id={},group_id={}",
            device.as_raw_fd(),
            rustix::process::geteuid().as_raw(),
            rustix::process::getegid().as_raw(),
        );
        let data = CString::new(data).map_err(|error| Error::State(error.to_string()))?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        mount("bcow-layer-store", &path, FS_TYPE, flags, data.as_c_str()).at("mount at", &path)?;
        // The kernel refuses other users.
        let session = fuser::Session::from_fd(files, device, fuser::SessionACL::All, config);
        let session = session.at("serve", &path)?;
        Ok((Mounted { path }, session))
    }

    /// Unmounts the store. The mounts of layers stay.
    pub fn end(&self) -> Result<(), HostError> {
        unmount(&self.path, UnmountFlags::DETACH).at("unmount", &self.path)
    }
}

/// Whether the uppermost mount at a path is a store.
fn is_mounted(path: &Path) -> Result<bool, Error> {
    let table = Path::new("/proc/self/mounts");
    let text = std::fs::read_to_string(table).at("read", table)?;
    let shown = path.display().to_string();
    // Blanks, which are escaped there, only prevent this message.
    let at_path = text.lines().rev().find(|line| {
        let mut words = line.split(' ');
        words.nth(1) == Some(&*shown)
    });
    Ok(at_path.is_some_and(|line| line.split(' ').nth(2) == Some(FS_TYPE)))
}

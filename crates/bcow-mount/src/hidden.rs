//! FUSE mounts that are attached to no directory.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::fs::{Mode, OFlags};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};

use crate::Error;
use crate::ioctl;

/// A detached FUSE mount. Only processes of bcow have a descriptor of it, so no other process can
/// open its files by a path of its own. The kernel ends it when the descriptor is closed and no
/// file of it is open.
#[derive(Debug)]
pub struct HiddenMount {
    mount: OwnedFd,
}

impl HiddenMount {
    /// Makes the mount, and returns it with the `/dev/fuse` descriptor that must serve it. Only the
    /// user of this process may use it.
    pub fn new() -> Result<(Self, OwnedFd), Error> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        let connection = rustix::fs::open("/dev/fuse", flags, Mode::empty())
            .map_err(|errno| Error::NoFuse(errno.into()))?;
        let failed = Error::hidden;
        let configuration =
            fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC).map_err(failed("open a configuration"))?;
        let settings = [
            ("source", "bcow".to_owned()),
            ("fd", connection.as_raw_fd().to_string()),
            ("rootmode", "40000".to_owned()),
            ("user_id", rustix::process::geteuid().as_raw().to_string()),
            ("group_id", rustix::process::getegid().as_raw().to_string()),
        ];
        for (name, value) in settings {
            fsconfig_set_string(&configuration, name, value.as_str())
                .map_err(failed("set an option"))?;
        }
        fsconfig_create(&configuration).map_err(failed("make a superblock"))?;
        let mount = fsmount(
            &configuration,
            FsMountFlags::FSMOUNT_CLOEXEC,
            MountAttrFlags::MOUNT_ATTR_NOSUID
                | MountAttrFlags::MOUNT_ATTR_NODEV
                | MountAttrFlags::MOUNT_ATTR_NOEXEC
                | MountAttrFlags::MOUNT_ATTR_NOATIME,
        )
        .map_err(failed("make a mount"))?;
        Ok((HiddenMount { mount }, connection))
    }

    /// A mount that another process made.
    pub fn of(mount: OwnedFd) -> Self {
        HiddenMount { mount }
    }

    /// Opens the file `name` in its root directory, for direct I/O.
    pub fn open(&self, name: &str, access: crate::Access) -> Result<OwnedFd, Error> {
        let flags = access.flags() | OFlags::DIRECT | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        rustix::fs::openat(&self.mount, name, flags, Mode::empty())
            .map_err(Error::hidden("open the file"))
    }

    /// Opens the file `name` in its root directory, only as a backing of other files.
    pub fn open_backing(&self, name: &str) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        Ok(rustix::fs::openat(&self.mount, name, flags, Mode::empty())?)
    }

    /// The descriptor of the mount.
    pub fn descriptor(&self) -> RawFd {
        self.mount.as_raw_fd()
    }
}

impl AsFd for HiddenMount {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.mount.as_fd()
    }
}

/// Closes the backing file with this number, which the FUSE mount at the other end of `connection`
/// has.
pub fn close_backing(connection: BorrowedFd<'_>, number: u32) -> io::Result<()> {
    Ok(ioctl::close_backing(connection, number)?)
}

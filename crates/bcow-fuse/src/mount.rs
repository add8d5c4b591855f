//! Mounts with the kernel's `mount(2)` where this process may do so, and with `fusermount3`
//! otherwise.
//!
//! fuser can mount too, but it has four disadvantages: its errors are only text; its mounts show no
//! file-system type by which `bcow umount` could recognise them; it cannot remove a mount whose
//! daemon is dead; and it cannot tell its own mount from another one.

use std::ffi::CString;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};

use crate::error::MountError;
use crate::fusermount::HELPER;
use crate::helper::{self, helper_message};
use crate::mounter::Mounter;
use crate::mountinfo::{self, Driver, FS_TYPE, MountEntry};
use crate::options::{Access, MountOptions, Permissions};
use crate::unmount::{Unmounted, WhenBusy, unmount, unmount_places};

/// A mount that this process made or took over. Dropping it unmounts; if the mount is in use, it
/// unmounts lazily.
#[derive(Debug)]
pub(crate) struct Mount {
    target: PathBuf,
    /// The device number of the mount. The kernel does not reuse it while `connection` is open.
    device: Option<String>,
    connection: OwnedFd,
    /// For a process in a sandbox.
    mounter: Option<Mounter>,
}

/// Mounts at `target`. Returns the mount and the `/dev/fuse` descriptor that serves it.
pub(crate) fn mount(target: &Path, options: &MountOptions) -> Result<(Mount, OwnedFd), MountError> {
    let target = usable_mountpoint(target)?;
    let connection = match mount_directly(&target, options)? {
        Some(connection) => {
            tracing::info!("mounted at {} by mount(2)", target.display());
            connection
        }
        None => {
            tracing::info!("mounting at {} by {HELPER}", target.display());
            mount_by_helper(&target, options)?
        }
    };
    let device = mountinfo::mounted_at(&target)
        .ok()
        .flatten()
        .filter(|entry| entry.fs_type == FS_TYPE)
        .map(|entry| entry.device);
    let mut mount = Mount {
        target,
        device,
        connection,
        mounter: None,
    };
    let for_session = mount
        .connection
        .try_clone()
        .map_err(MountError::process("duplicate the FUSE descriptor"));
    match for_session {
        Ok(session) => Ok((mount, session)),
        Err(error) => {
            mount.unmount();
            Err(error)
        }
    }
}

/// Checks that `target` is a directory on which bcow can mount, and returns its canonical path.
///
/// Unmounts a bcow mount there whose daemon is dead: no process can use it any more.
pub(crate) fn usable_mountpoint(target: &Path) -> Result<PathBuf, MountError> {
    let failed = |source: io::Error| MountError::Mountpoint {
        path: target.to_owned(),
        source,
    };
    // Resolving symbolic links sends requests only for the parents, so a dead mount at the end of
    // the path does no harm.
    let canonical = target.canonicalize().map_err(failed)?;
    refuse_root(&canonical)?;
    if let Some(entry) = mountinfo::mounted_at(&canonical).ok().flatten()
        && let Some(driver) = entry.driver()
    {
        if is_dead(&canonical, &entry, &driver) {
            unmount(&canonical, WhenBusy::Detach)?
        } else {
            return Err(MountError::AlreadyMounted(target.to_owned()));
        }
    }
    let directory = rustix::fs::open(
        &canonical,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    match directory {
        Ok(_) => Ok(canonical),
        Err(Errno::NOTDIR) => Err(MountError::NotADirectory(target.to_owned())),
        Err(errno) => Err(failed(errno.into())),
    }
}

/// Refuses the root directory as a mountpoint. A mount there cannot be undone: the paths of all
/// processes continue to lead below it.
pub fn refuse_root(target: &Path) -> Result<(), MountError> {
    match target.canonicalize() {
        Ok(canonical) if canonical == Path::new("/") => {
            Err(MountError::RootDirectory(target.to_owned()))
        }
        // A later step fails with the reason.
        _ => Ok(()),
    }
}

/// Whether the process of the bcow mount at `target` is dead.
fn is_dead(target: &Path, entry: &MountEntry, driver: &Driver) -> bool {
    match driver {
        // The kernel may answer attributes and names from its caches, but it always sends statfs to
        // the daemon.
        Driver::Fuse => matches!(
            rustix::fs::statfs(target),
            Err(Errno::NOTCONN | Errno::CONNABORTED)
        ),
        Driver::Direct(_) => false,
        Driver::Kernel(_) => !bcow_mount::is_served(Path::new(&entry.source)),
    }
}

/// Returns `None` if this process may not mount.
fn mount_directly(target: &Path, options: &MountOptions) -> Result<Option<OwnedFd>, MountError> {
    let device = match rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
    {
        Ok(device) => device,
        Err(Errno::ACCESS | Errno::PERM) if !rustix::process::geteuid().is_root() => {
            return Ok(None);
        }
        Err(errno) => return Err(MountError::NoDevice(errno.into())),
    };
    let mut data = format!(
        "fd={},rootmode=40000,user_id={},group_id={}",
        device.as_raw_fd(),
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    if options.access() == Access::Everyone {
        data.push_str(",allow_other");
    }
    if options.permissions() == Permissions::ByMode {
        data.push_str(",default_permissions");
    }
    let refused = |source: io::Error| MountError::Refused {
        path: target.to_owned(),
        source,
    };
    let data = CString::new(data).map_err(|error| refused(error.into()))?;
    match rustix::mount::mount(
        options.source(),
        target,
        FS_TYPE,
        options.flags(),
        data.as_c_str(),
    ) {
        Ok(()) => Ok(Some(device)),
        Err(Errno::PERM) if !rustix::process::geteuid().is_root() => Ok(None),
        Err(errno) => Err(refused(errno.into())),
    }
}

/// Mounts with the set-user-ID helper. The helper sends the `/dev/fuse` descriptor back over a
/// socket. The socket is the helper's standard input, so that no descriptor has to be inheritable.
fn mount_by_helper(target: &Path, options: &MountOptions) -> Result<OwnedFd, MountError> {
    let (ours, theirs) = UnixStream::pair().map_err(MountError::process("make a socket pair"))?;
    let options = options.for_helper()?;
    let arguments = ["-o".as_ref(), &*options, "--".as_ref(), target.as_os_str()];
    let ended = helper::run(&arguments, Some(theirs.into()))?;
    // The helper's end of the socket is closed, so this returns a descriptor or the end of the
    // stream.
    match receive_descriptor(&ours) {
        Ok(Some(device)) if ended.is_success => Ok(device),
        _ => Err(MountError::Helper {
            path: target.to_owned(),
            message: helper_message(&ended.message),
        }),
    }
}

fn receive_descriptor(socket: &UnixStream) -> rustix::io::Result<Option<OwnedFd>> {
    let mut byte = [0_u8; 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    loop {
        match rustix::net::recvmsg(
            socket,
            &mut [io::IoSliceMut::new(&mut byte)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Ok(_) => break,
            Err(Errno::INTR) => continue,
            Err(errno) => return Err(errno),
        }
    }
    Ok(control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    }))
}

impl Mount {
    /// A mount that another process made, and that this process takes over.
    pub(crate) fn of(target: PathBuf, device: Option<String>, connection: OwnedFd) -> Self {
        Mount {
            target,
            device,
            connection,
            mounter: None,
        }
    }

    /// Leaves the unmount to a mounter from now on, and questions about callers if there are some.
    pub(crate) fn unmount_by(
        &mut self,
        mounter: Mounter,
        asks_for_callers: bool,
    ) -> Result<(), MountError> {
        let no_device = || MountError::process("find the mount")(Errno::NODEV);
        let device = self.device.as_deref().ok_or_else(no_device)?;
        mounter.serve(device, asks_for_callers)?;
        self.mounter = Some(mounter);
        Ok(())
    }

    /// The connection to the kernel.
    pub(crate) fn connection(&self) -> BorrowedFd<'_> {
        self.connection.as_fd()
    }

    /// The canonical mountpoint.
    pub(crate) fn target(&self) -> &Path {
        &self.target
    }

    /// The device number, if the kernel lists the mount.
    pub(crate) fn device(&self) -> Option<&str> {
        self.device.as_deref()
    }

    /// Unmounts if the mount still exists. Safe to call several times.
    pub(crate) fn unmount(&mut self) -> Unmounted {
        if !self.is_connected() {
            return Unmounted::Gone;
        }
        // A user may have unmounted it lazily, covered it with another mount, moved it, or bound it
        // to other directories.
        match &self.mounter {
            Some(mounter) => mounter.unmount(),
            None => unmount_places(self.device.as_deref()),
        }
    }

    /// Lets the mounter end if the mount is gone: beside what this process still does, and not
    /// when it ends.
    pub(crate) fn let_mounter_end(&mut self) {
        if !self.is_connected() {
            self.mounter = None;
        }
    }

    /// Whether the kernel still has the file system. Afterwards it reports an error on the
    /// descriptor.
    fn is_connected(&self) -> bool {
        let mut descriptors = [PollFd::from_borrowed_fd(
            self.connection.as_fd(),
            PollFlags::empty(),
        )];
        match poll(&mut descriptors, Some(&Timespec::default())) {
            Ok(_) => !descriptors[0].revents().contains(PollFlags::ERR),
            Err(_) => true,
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.unmount();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_mountpoint_is_named() {
        let error = usable_mountpoint(Path::new("/nonexistent/mnt")).unwrap_err();
        assert_eq!(error.to_string(), "cannot use mountpoint /nonexistent/mnt");
    }

    #[test]
    fn root_directory_is_no_mountpoint() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink("/..", &link).unwrap();
        for root in [Path::new("/"), Path::new("//"), Path::new("/tmp/.."), &link] {
            let error = usable_mountpoint(root).unwrap_err();
            assert!(matches!(error, MountError::RootDirectory(_)), "{error}");
        }
        refuse_root(directory.path()).unwrap();
    }

    #[test]
    fn file_is_no_mountpoint() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = usable_mountpoint(file.path()).unwrap_err();
        assert!(matches!(error, MountError::NotADirectory(_)), "{error}");
    }
}

//! A process that unmounts for the process of a mount that is in a sandbox: Landlock refuses that
//! to a process, and fusermount3 needs new privileges.
//!
//! It has the rights of the user, and reads only the device number of the mount and single bytes.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use crate::fork::{fork, keep_only};
use crate::mountinfo::{self, FS_TYPE};
use crate::unmount::{Unmounted, unmount_places};

/// The process. It ends with this one.
#[derive(Debug)]
pub struct UnmountProcess(UnixStream);

impl UnmountProcess {
    /// Starts it. The caller has one thread, and none of the descriptors that only one process may
    /// have.
    pub fn start() -> io::Result<Self> {
        let (own, of_process) = UnixStream::pair()?;
        let serve = || {
            let kept = keep_only(&[of_process.as_raw_fd()], c"bcow-umount");
            let _ = kept.and_then(|()| serve(&of_process));
        };
        fork(serve).map(|_| UnmountProcess(own))
    }

    /// Names the mount. Only the first name counts.
    pub(crate) fn set_device(&self, device: &str) -> io::Result<()> {
        (&self.0).write_all(format!("{device}\n").as_bytes())
    }

    /// Unmounts it. If it is in use, unmounts lazily.
    pub(crate) fn unmount(&self) -> Unmounted {
        let mut answer = [0];
        let asked = (&self.0).write_all(b"u");
        match asked.and_then(|()| (&self.0).read_exact(&mut answer)) {
            Ok(()) if answer[0] == Unmounted::Gone as u8 => Unmounted::Gone,
            Ok(()) if answer[0] == Unmounted::Detached as u8 => Unmounted::Detached,
            _ => Unmounted::Stays,
        }
    }
}

/// Unmounts when the other process asks for it. Ends with that process, or when the mount is gone:
/// another mount can get its device number then.
fn serve(socket: &UnixStream) -> io::Result<()> {
    let mut requests = BufReader::new(socket);
    let mut device = String::new();
    requests.read_line(&mut device)?;
    let device = device.trim_end();
    while requests.read(&mut [0])? == 1 {
        let mounts = mountinfo::mounts()?;
        let is_own = mounts
            .iter()
            .any(|mount| mount.device == device && mount.fs_type == FS_TYPE);
        let unmounted = if is_own { unmount_places(Some(device)) } else { Unmounted::Stays };
        let mut answers = socket;
        answers.write_all(&[unmounted as u8])?;
        if !is_own || unmounted != Unmounted::Stays {
            break;
        }
    }
    Ok(())
}

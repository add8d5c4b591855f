//! A process that unmounts for the process of a mount that is in a sandbox: Landlock refuses that
//! to a process, and fusermount3 needs new privileges.
//!
//! It has the rights of the user, and reads only the device number of the mount and single bytes.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;

use rustix::fs::{Mode, OFlags};

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
        // SAFETY: the process has one thread, so the new process is a complete copy of it.
        #[allow(unsafe_code)]
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                drop(own);
                let _ = serve(&of_process);
                // Not `exit`, which would write what the caller has left in buffers.
                // SAFETY: the call takes an integer.
                #[allow(unsafe_code)]
                unsafe {
                    libc::_exit(0)
                }
            }
            _ => Ok(UnmountProcess(own)),
        }
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
    keep_only(socket)?;
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

/// Closes all descriptors but the socket: others wait for the end of pipes.
fn keep_only(socket: &UnixStream) -> io::Result<()> {
    let _ = rustix::thread::set_name(c"bcow-umount");
    rustix::process::chdir("/")?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR, Mode::empty())?;
    rustix::stdio::dup2_stdin(null.as_fd())?;
    rustix::stdio::dup2_stdout(null.as_fd())?;
    rustix::stdio::dup2_stderr(null.as_fd())?;
    let kept = socket.as_raw_fd();
    for (first, last) in [(3, kept - 1), (kept + 1, i32::MAX)] {
        // SAFETY: the call takes integers. This process uses none of these descriptors any more,
        // and drops no object that owns one.
        #[allow(unsafe_code)]
        let closed = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        if first <= last && closed != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // It is closed already.
    std::mem::forget(null);
    Ok(())
}

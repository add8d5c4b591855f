//! A process that does what the process of a mount in a sandbox cannot: it unmounts, which Landlock
//! refuses and for which fusermount3 needs new privileges; and for a mount with an upper, it reads
//! the groups and capabilities of the processes that use the mount. The process of the mount has no
//! access to the files of other processes in /proc: these files have secrets too.
//!
//! It has the rights of the user, and reads only the device number of the mount, single bytes, and
//! numbers of processes.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::thread;

use crate::callers::{self, Callers};
use crate::mountinfo::{self, FS_TYPE};
use crate::unmount::{Unmounted, unmount_places};
use bcow_sandbox::fork::{fork, keep_only};
use bcow_sandbox::{Sandbox, When};

/// The process. It ends with this one.
#[derive(Debug)]
pub struct UnmountProcess {
    unmounting: UnixStream,
    callers: Callers,
}

impl UnmountProcess {
    /// Starts it. The caller has one thread, and none of the descriptors that only one process may
    /// have.
    pub fn start(sandbox: When) -> io::Result<Self> {
        let (own, of_process) = UnixStream::pair()?;
        let (callers, of_callers) = UnixStream::pair()?;
        let serve = || {
            let kept = [of_process.as_raw_fd(), of_callers.as_raw_fd()];
            let kept = keep_only(&kept, c"bcow-umount");
            if kept.is_err() || Sandbox::of_helper(sandbox).is_err() {
                return;
            }
            // With a thread of its own: a process that uses the mount can wait for the answer while
            // the unmount waits for that process. Without the thread, the end of the socket is the
            // answer.
            let _ = thread::Builder::new().spawn(move || callers::serve(&of_callers));
            let _ = serve(&of_process);
        };
        fork(serve)?;
        Ok(UnmountProcess {
            unmounting: own,
            callers: Callers::new(callers),
        })
    }

    /// Names the mount. Only the first name counts. From now on, the process is also asked for the
    /// callers of all mounts of this process.
    pub(crate) fn set_device(&self, device: &str) -> io::Result<()> {
        (&self.unmounting).write_all(format!("{device}\n").as_bytes())?;
        self.callers.use_always();
        Ok(())
    }

    /// Unmounts it. If it is in use, unmounts lazily.
    pub(crate) fn unmount(&self) -> Unmounted {
        let mut answer = [0];
        let asked = (&self.unmounting).write_all(b"u");
        match asked.and_then(|()| (&self.unmounting).read_exact(&mut answer)) {
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

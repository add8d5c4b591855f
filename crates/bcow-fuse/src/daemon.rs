//! Going into the background: the command starts itself again, waits until that process has mounted, and ends.
//!
//! Starting anew rather than forking, because after a `fork` only async-signal-safe code may run if any
//! thread exists, and because it needs no `unsafe`. Errors need no channel of their own: until it is ready,
//! the new process still has its parent's standard error.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};

use rustix::fs::{FileType, Mode, OFlags};

use crate::error::MountError;
use bcow_union::log;

/// Set for the process that is to become the daemon. Its standard output is the pipe to its parent.
const MARK: &str = "BCOW_BECOME_DAEMON";

/// What the daemon sends when the mount can be used.
const READY: &[u8] = b"ready";

/// How the background process did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launch {
    /// It has mounted and goes on.
    Ready,
    /// It ended with this exit code, and has said why on standard error.
    Failed(u8),
}

/// Starts this command again, with the same arguments, as a daemon, and waits until it calls
/// [`Readiness::announce`] or ends.
pub fn launch() -> Result<Launch, MountError> {
    let failed = |action| move |source| MountError::Process { action, source };
    let (reader, writer) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(|errno| {
            MountError::Process {
                action: "make a pipe",
                source: errno.into(),
            }
        })?;
    keep_descriptors_from_children();
    let mut arguments = std::env::args_os();
    let mut command = Command::new("/proc/self/exe");
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    let mut child = command
        .args(arguments)
        .env(MARK, "1")
        .stdin(Stdio::null())
        .stdout(writer)
        .spawn()
        .map_err(failed("start the background process"))?;
    // It holds the writing end of the pipe, and the loop below waits for the last of those to close.
    drop(command);
    let mut said = Vec::new();
    let mut buf = [0; 16];
    let mut reader = File::from(reader);
    while said.len() < READY.len() {
        match reader.read(&mut buf) {
            Ok(0) => break,
            Ok(n) => said.extend_from_slice(&buf[..n]),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(failed("hear from the background process")(error)),
        }
    }
    if said == READY {
        return Ok(Launch::Ready);
    }
    let status = child
        .wait()
        .map_err(failed("wait for the background process"))?;
    match (status.code(), status.signal()) {
        (Some(code), _) => Ok(Launch::Failed(u8::try_from(code).unwrap_or(1).max(1))),
        (None, signal) => Err(MountError::Process {
            action: "mount in the background",
            source: std::io::Error::other(format!(
                "the process was killed by signal {}",
                signal.unwrap_or(0)
            )),
        }),
    }
}

/// In the process that [`launch`] started: the obligation to say when the mount is ready.
#[derive(Debug)]
pub struct Readiness {
    pipe: OwnedFd,
}

/// `Some` if this process was started by [`launch`]. Leaves the terminal's session, so that a key pressed
/// there no longer reaches this process.
pub fn started_by_launch() -> Option<Readiness> {
    std::env::var_os(MARK)?;
    // A variable alone may have leaked into a shell; that plus a pipe is hardly an accident.
    let stdout = std::io::stdout();
    let kind = rustix::fs::fstat(&stdout)
        .ok()
        .map(|stat| FileType::from_raw_mode(stat.st_mode));
    if kind != Some(FileType::Fifo) {
        return None;
    }
    let pipe = stdout.as_fd().try_clone_to_owned().ok()?;
    let _ = rustix::process::setsid();
    // Started as /proc/self/exe it would be called `exe` in process lists.
    let _ = rustix::thread::set_name(c"bcow");
    Some(Readiness { pipe })
}

impl Readiness {
    /// Tells the waiting command that the mount is ready, and lets go of terminal and working directory.
    ///
    /// Fails if nobody waits any more: then nobody knows of this mount, and it should not stay.
    pub fn announce(self) -> Result<(), MountError> {
        let failed = |action| move |source| MountError::Process { action, source };
        let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|errno| failed("open /dev/null")(errno.into()))?;
        rustix::process::chdir("/").map_err(|errno| failed("change to /")(errno.into()))?;
        log::use_syslog();
        rustix::stdio::dup2_stdin(&null)
            .and_then(|()| rustix::stdio::dup2_stdout(&null))
            .map_err(|errno| failed("redirect standard output")(errno.into()))?;
        File::from(self.pipe)
            .write_all(READY)
            .map_err(failed("tell that the mount is ready"))?;
        rustix::stdio::dup2_stderr(&null)
            .map_err(|errno| failed("redirect standard error")(errno.into()))
    }
}

/// Marks every descriptor but the standard ones close-on-exec, lest the daemon hold a lock or a pipe of the
/// shell that called us for as long as the mount lives.
fn keep_descriptors_from_children() {
    const CLOSE_RANGE_CLOEXEC: libc::c_int = 4;
    // SAFETY: the call takes integers only. With this flag it closes nothing, so no owner of a descriptor
    // in this process loses it; it sets a flag that std sets on its own descriptors anyway.
    // Kernels before 5.11 refuse, and then inherited descriptors stay inherited.
    #[allow(unsafe_code)]
    unsafe {
        libc::syscall(
            libc::SYS_close_range,
            3 as libc::c_uint,
            libc::c_uint::MAX,
            CLOSE_RANGE_CLOEXEC,
        );
    }
}

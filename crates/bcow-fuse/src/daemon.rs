//! Runs a mount in the background. The command starts itself again as the daemon, waits until the
//! daemon has mounted the image, and exits.
//!
//! The command executes itself instead of only forking, for two reasons: after a `fork` in a
//! process with several threads, only async-signal-safe code may run; and this way needs no
//! `unsafe` code. The daemon keeps the parent's standard error until the mount is ready, and
//! reports errors there.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::net::SocketType;
use rustix::net::sockopt::socket_type;

use crate::error::MountError;
use crate::packets;
use bcow_sandbox::fork::keep_descriptors_from_programs;
use bcow_union::log;

/// Environment variable of the process that becomes the daemon. Its standard output is the pipe to
/// its parent.
const MARK: &str = "BCOW_BECOME_DAEMON";

/// The bytes that the daemon writes to the pipe when programs can use the mount.
const READY: &[u8] = b"ready";

/// Result of starting the background process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launch {
    /// The process has mounted the image and serves it.
    Ready,
    /// The process exited with this code and has printed the reason on standard error.
    Failed(u8),
}

/// Starts this command again, with the same arguments, as a daemon, and waits until it calls
/// [`Readiness::announce`] or ends. `start_mounter` starts the process at the other end of
/// [`Readiness::mounter`], while the daemon begins.
pub fn launch(start_mounter: Option<&dyn Fn(OwnedFd)>) -> Result<Launch, MountError> {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(MountError::process("create a pipe"))?;
    let start_mounter = start_mounter
        .map(|start| packets::pair().map(|sockets| (start, sockets)))
        .transpose()
        .map_err(MountError::process("create a socket"))?;
    let (stdin, start_mounter) = match start_mounter {
        Some((start, (own, of_mounter))) => (own.into(), Some(move || start(of_mounter))),
        None => (Stdio::null(), None),
    };
    // The daemon would keep a lock or a pipe of the calling shell open as long as the mount exists.
    keep_descriptors_from_programs();
    let mut arguments = std::env::args_os();
    let mut command = Command::new("/proc/self/exe");
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    let mut child = command
        .args(arguments)
        .env(MARK, "1")
        .stdin(stdin)
        .stdout(writer)
        .spawn()
        .map_err(MountError::process("start the background process"))?;
    // The command holds the write end of the pipe. Drop it: the read below lasts until all write
    // ends are closed.
    drop(command);
    if let Some(start_mounter) = start_mounter {
        start_mounter();
    }
    let mut received = Vec::new();
    let reader = File::from(reader);
    let read = reader.take(READY.len() as u64).read_to_end(&mut received);
    read.map_err(MountError::process("read from the background process"))?;
    if received == READY {
        return Ok(Launch::Ready);
    }
    let status = child
        .wait()
        .map_err(MountError::process("wait for the background process"))?;
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

/// In the process that [`launch`] started: the pipe on which the daemon reports that the mount is
/// ready.
#[derive(Debug)]
pub struct Readiness {
    pipe: OwnedFd,
    /// The socket of a mounter that the waiting command has started.
    pub mounter: Option<OwnedFd>,
}

/// Returns `Some` if [`launch`] started this process. Starts a new session (`setsid`), so that a
/// key pressed on the terminal sends no signal to this process.
pub fn started_by_launch() -> Option<Readiness> {
    std::env::var_os(MARK)?;
    // A shell may have exported the variable by accident. Require also that standard output is a
    // pipe.
    let stdout = std::io::stdout();
    let kind = rustix::fs::fstat(&stdout)
        .ok()
        .map(|stat| FileType::from_raw_mode(stat.st_mode));
    if kind != Some(FileType::Fifo) {
        return None;
    }
    let pipe = stdout.as_fd().try_clone_to_owned().ok()?;
    let mounter = take_socket();
    let _ = rustix::process::setsid();
    // The process runs `/proc/self/exe`; without a name of its own, process lists show `exe`.
    let _ = rustix::thread::set_name(c"bcow");
    Some(Readiness { pipe, mounter })
}

/// The socket for packets that is standard input, which becomes /dev/null.
fn take_socket() -> Option<OwnedFd> {
    let stdin = std::io::stdin();
    if socket_type(&stdin) != Ok(SocketType::SEQPACKET) {
        return None;
    }
    let socket = stdin.as_fd().try_clone_to_owned().ok()?;
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    rustix::stdio::dup2_stdin(null.ok()?).ok()?;
    Some(socket)
}

impl Readiness {
    /// Reports to the waiting command that the mount is ready, and detaches the process from the
    /// terminal, the working directory and the standard streams.
    ///
    /// Fails if the waiting command is gone. The caller then unmounts, because no user knows of
    /// this mount.
    pub fn announce(self) -> Result<(), MountError> {
        let null = detach_but_errors()?;
        File::from(self.pipe)
            .write_all(READY)
            .map_err(MountError::process("report that the mount is ready"))?;
        redirect_errors(&null)
    }
}

/// Detaches the process from the terminal, the working directory and the standard streams, for a
/// process that another one than the command has started.
pub fn detach() -> Result<(), MountError> {
    redirect_errors(&detach_but_errors()?)
}

/// Returns /dev/null.
fn detach_but_errors() -> Result<OwnedFd, MountError> {
    let null = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
        .map_err(MountError::process("open /dev/null"))?;
    rustix::process::chdir("/").map_err(MountError::process("change to /"))?;
    log::use_syslog();
    rustix::stdio::dup2_stdin(&null)
        .and_then(|()| rustix::stdio::dup2_stdout(&null))
        .map_err(MountError::process("redirect standard output"))?;
    Ok(null)
}

fn redirect_errors(null: &OwnedFd) -> Result<(), MountError> {
    rustix::stdio::dup2_stderr(null).map_err(MountError::process("redirect standard error"))
}

//! The *starter*: a process that starts others for the process of a pool, whose sandbox refuses
//! that.
//!
//! It has the rights of the user, and takes three requests: run `fusermount3`, freeze a file
//! system, start the companion of the pool. A further process does each, and answers at a socket
//! that comes with the request, so that none delays the others.

use std::ffi::{CStr, OsStr, OsString};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::OnceLock;

use bcow_mount::hold_frozen;
use nix::sys::signal::SigSet;
use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::process::{Signal, WaitOptions};

use crate::error::MountError;
use crate::fusermount::{Ended, run_here};
use crate::packets;
use bcow_sandbox::fork::{fork, keep_only};
use bcow_sandbox::{Sandbox, When};

/// The first bytes of requests. Their arguments follow, each after a zero byte.
const HELPER: u8 = b'h';
const FREEZE: u8 = b'f';
const COMPANION: u8 = b'c';

/// The socket to the starter of this process.
static STARTER: OnceLock<Starter> = OnceLock::new();

#[derive(Debug)]
pub(crate) struct Starter {
    socket: OwnedFd,
    /// For the time when the process has no descriptor left: the end of a mount must not depend on
    /// that.
    spare: Mutex<Option<(UnixStream, UnixStream)>>,
}

/// Starts the starter of this process, which ends with this process. `companion` serves the
/// companion to its end. This process has one thread, and none of the descriptors that only one
/// process may have.
pub fn start(sandbox: When, companion: impl Fn(OwnedFd)) -> Result<(), MountError> {
    let started = packets::pair().and_then(|(own, of_starter)| {
        let serve = || {
            // Those to all processes of a service: the process of the pool decides when it ends.
            let _ = SigSet::all().thread_block();
            let kept = keep_only(&[of_starter.as_raw_fd()], c"bcow-starter");
            if kept.is_ok() && Sandbox::of_helper(sandbox).is_ok() {
                let _ = serve(&of_starter, companion);
            }
        };
        fork(serve).map(|_| own)
    });
    let own = started.map_err(MountError::process("start the process that starts others"))?;
    // There is no other one: a pool calls this once.
    let _ = STARTER.set(Starter::new(own));
    Ok(())
}

/// The starter of this process, if it has one.
pub(crate) fn starter() -> Option<&'static Starter> {
    STARTER.get()
}

/// Starts the companion. The one before is killed. Returns its process.
pub fn start_companion(socket: OwnedFd) -> io::Result<u32> {
    let starter = starter().ok_or(Errno::CHILD)?;
    let mut answer = String::new();
    let stream = starter.ask(COMPANION, &[], Some(socket.as_fd()))?;
    (&stream).take(16).read_to_string(&mut answer)?;
    answer.trim_end().parse().map_err(|_| Errno::CHILD.into())
}

/// Starts a process that freezes the file system at `target`, with the device number `device`, if
/// this process has a starter. Returns the connection for [`bcow_mount::while_frozen`].
pub fn start_freezer(target: &Path, device: &str) -> Option<io::Result<UnixStream>> {
    let arguments = [target.as_os_str(), OsStr::new(device)];
    Some(starter()?.ask(FREEZE, &arguments, None))
}

impl Starter {
    fn new(socket: OwnedFd) -> Self {
        Starter {
            socket,
            spare: Mutex::new(UnixStream::pair().ok()),
        }
    }

    /// Runs `fusermount3`. `socket` becomes its standard input.
    pub(crate) fn run_helper(
        &self,
        arguments: &[&OsStr],
        socket: Option<OwnedFd>,
    ) -> io::Result<Ended> {
        let mut stream = self.ask(HELPER, arguments, socket.as_ref().map(AsFd::as_fd))?;
        drop(socket);
        let mut status = [0; 4];
        stream.read_exact(&mut status)?;
        let errno = i32::from_ne_bytes(status);
        if errno > 0 {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let mut message = Vec::new();
        stream.read_to_end(&mut message)?;
        Ok(Ended {
            is_success: errno == 0,
            message,
        })
    }

    /// Sends a request. Returns the socket for the answer.
    fn ask(
        &self,
        request: u8,
        arguments: &[&OsStr],
        other: Option<BorrowedFd<'_>>,
    ) -> io::Result<UnixStream> {
        let (answer, theirs) = self.pair()?;
        let mut bytes = vec![request];
        for argument in arguments {
            bytes.push(0);
            bytes.extend_from_slice(argument.as_bytes());
        }
        let descriptors: Vec<_> = [Some(theirs.as_fd()), other]
            .into_iter()
            .flatten()
            .collect();
        packets::send(&self.socket, &bytes, &descriptors)?;
        Ok(answer)
    }

    fn pair(&self) -> io::Result<(UnixStream, UnixStream)> {
        let mut spare = self.spare.lock();
        match UnixStream::pair() {
            Ok(pair) => {
                if spare.is_none() {
                    *spare = UnixStream::pair().ok();
                }
                Ok(pair)
            }
            Err(error) => spare.take().ok_or(error),
        }
    }
}

/// A request, with its sockets.
struct Request {
    kind: u8,
    arguments: Vec<OsString>,
    answer: UnixStream,
    other: Option<OwnedFd>,
}

/// Answers requests until the other end is closed.
fn serve(socket: &OwnedFd, companion: impl Fn(OwnedFd)) -> io::Result<()> {
    let mut last_companion = None;
    while let Some(request) = receive(socket)? {
        // Processes that have ended.
        while let Ok(Some((pid, _))) = rustix::process::wait(WaitOptions::NOHANG) {
            last_companion = last_companion.filter(|last| *last != pid);
        }
        if request.kind == COMPANION
            && let Some(last) = last_companion.take()
        {
            // One of its threads may wait for a server, and not end with its socket.
            let _ = rustix::process::kill_process(last, Signal::KILL);
        }
        let kind = request.kind;
        // If it cannot be started, the socket for the answer closes.
        let started = fork(|| {
            let _ = execute(request, &companion);
        });
        if let (COMPANION, Ok(pid)) = (kind, started) {
            last_companion = Some(pid);
        }
    }
    Ok(())
}

/// `None` at the end of the socket.
fn receive(socket: &OwnedFd) -> io::Result<Option<Request>> {
    while let Some(packet) = packets::receive(socket)? {
        let mut descriptors = packet.descriptors.into_iter();
        let (answer, other) = (descriptors.next(), descriptors.next());
        let mut parts = packet.bytes.split(|&byte| byte == 0);
        if let (Some(&[kind]), Some(answer)) = (parts.next(), answer) {
            return Ok(Some(Request {
                kind,
                arguments: parts.map(|one| OsString::from_vec(one.to_vec())).collect(),
                answer: answer.into(),
                other,
            }));
        }
    }
    Ok(None)
}

/// In the process that was started for a request.
fn execute(request: Request, companion: &impl Fn(OwnedFd)) -> io::Result<()> {
    let Request {
        kind,
        arguments,
        mut answer,
        other,
    } = request;
    let descriptors = [
        Some(answer.as_raw_fd()),
        other.as_ref().map(AsRawFd::as_raw_fd),
    ];
    let kept: Vec<_> = descriptors.into_iter().flatten().collect();
    let name: &CStr = match kind {
        COMPANION => c"bcow-opener",
        FREEZE => c"bcow-freezer",
        _ => c"bcow-starter",
    };
    keep_only(&kept, name)?;
    match (kind, &arguments[..], other) {
        (HELPER, arguments, socket) => {
            let arguments: Vec<&OsStr> = arguments.iter().map(OsString::as_os_str).collect();
            let (errno, message) = match run_here(&arguments, socket) {
                Ok(ended) if ended.is_success => (0, ended.message),
                Ok(ended) => (-1, ended.message),
                Err(error) => (error.raw_os_error().unwrap_or(libc::EIO), Vec::new()),
            };
            answer.write_all(&errno.to_ne_bytes())?;
            answer.write_all(&message)
        }
        (FREEZE, [target, device], _) => {
            let device = device.to_string_lossy();
            hold_frozen(Path::new(target), &device, &answer, &answer)
        }
        (COMPANION, [], Some(socket)) => {
            writeln!(answer, "{}", std::process::id())?;
            drop(answer);
            companion(socket);
            Ok(())
        }
        _ => Err(Errno::INVAL.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_its_arguments_and_its_sockets() {
        let (own, other) = packets::pair().unwrap();
        let starter = Starter::new(own);
        let null = std::fs::File::open("/dev/null").unwrap();
        let arguments = [OsStr::new("-u"), OsStr::new(""), OsStr::new("/mnt/a b")];
        let mut answer = starter.ask(HELPER, &arguments, Some(null.as_fd())).unwrap();
        let mut request = receive(&other).unwrap().unwrap();
        assert_eq!((request.kind, request.other.is_some()), (HELPER, true));
        assert_eq!(request.arguments, arguments);
        request.answer.write_all(b"x").unwrap();
        drop(request);
        let mut text = String::new();
        answer.read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
        drop(starter);
        assert!(receive(&other).unwrap().is_none());
    }
}

//! The set-user-ID program `fusermount3`, which mounts and unmounts for ordinary users.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use rustix::io::Errno;

pub(crate) const HELPER: &str = "fusermount3";

/// How the program has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub is_success: bool,
    /// What it has written to standard error.
    pub message: Vec<u8>,
}

/// Runs the program as a child of this process.
pub(crate) fn run_here(arguments: &[&OsStr], socket: Option<OwnedFd>) -> io::Result<Ended> {
    let mut command = Command::new(HELPER);
    command.args(arguments).stdout(Stdio::null());
    match socket {
        Some(socket) => command.env("_FUSE_COMMFD", "0").stdin(socket),
        None => command.stdin(Stdio::null()),
    };
    let output = match command.stderr(Stdio::piped()).output() {
        // The pipes for its messages need descriptors, and the process may have none left. The end
        // of a mount must not depend on them.
        Err(error) if has_no_descriptor(&error) => command
            .stdin(Stdio::inherit())
            .stdout(Stdio::inherit())
            .stderr(Stdio::inherit())
            .output(),
        other => other,
    }?;
    Ok(Ended {
        is_success: output.status.success(),
        message: output.stderr,
    })
}

fn has_no_descriptor(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE))
}

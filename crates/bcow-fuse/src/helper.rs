//! Mounts and unmounts by `fusermount3`: a child of this process, or of its starter.

use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::path::Path;

use crate::error::MountError;
use crate::fusermount::{Ended, run_here};
use crate::starter::starter;

/// Runs the program, which sends the descriptor of a new mount to `socket`. In a pool, another
/// process runs it.
pub(crate) fn run(arguments: &[&OsStr], socket: Option<OwnedFd>) -> Result<Ended, MountError> {
    let ended = match starter() {
        Some(starter) => starter.run_helper(arguments, socket),
        None => run_here(arguments, socket),
    };
    ended.map_err(MountError::NoHelper)
}

/// Runs `fusermount3 -u`. Its message becomes the error.
pub(crate) fn run_unmount_helper(target: &Path, arguments: &[&str]) -> Result<(), MountError> {
    let arguments = ["-u"].iter().chain(arguments).chain(&["--"]);
    let mut arguments: Vec<&OsStr> = arguments.map(OsStr::new).collect();
    arguments.push(target.as_os_str());
    let ended = run(&arguments, None)?;
    if ended.is_success {
        return Ok(());
    }
    let message = helper_message(&ended.message);
    if message.contains("Device or resource busy") {
        return Err(MountError::Busy(target.to_owned()));
    }
    Err(MountError::Helper {
        path: target.to_owned(),
        message,
    })
}

/// The helper's message without its program name.
pub(crate) fn helper_message(stderr: &[u8]) -> String {
    let stderr = String::from_utf8_lossy(stderr);
    let lines: Vec<&str> = stderr
        .lines()
        .map(|line| line.trim().trim_start_matches("fusermount3: "))
        .filter(|line| !line.is_empty())
        .collect();
    if lines.is_empty() {
        "failed without a message".into()
    } else {
        lines.join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn helper_message_loses_its_prefix() {
        assert_eq!(
            helper_message(b"fusermount3: user has no write access to mountpoint /x\n"),
            "user has no write access to mountpoint /x"
        );
        assert_eq!(helper_message(b"\n"), "failed without a message");
    }
}

//! The set-user-ID program `fusermount3`, which mounts and unmounts for ordinary users.

use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::io::Errno;

use crate::error::MountError;

pub(crate) const HELPER: &str = "fusermount3";

/// Runs `fusermount3 -u`. Its message becomes the error.
pub(crate) fn run_unmount_helper(target: &Path, arguments: &[&str]) -> Result<(), MountError> {
    let mut command = Command::new(HELPER);
    command.arg("-u").args(arguments).arg("--").arg(target);
    let output = match command.stdin(Stdio::null()).output() {
        // The pipes for its messages need descriptors, and the process may have none left. The end
        // of a mount must not depend on them.
        Err(error) if has_no_descriptor(&error) => command
            .stdin(Stdio::inherit())
            .stdout(Stdio::inherit())
            .stderr(Stdio::inherit())
            .output(),
        other => other,
    };
    let output = output.map_err(MountError::NoHelper)?;
    if output.status.success() {
        return Ok(());
    }
    let message = helper_message(&String::from_utf8_lossy(&output.stderr));
    if message.contains("Device or resource busy") {
        return Err(MountError::Busy(target.to_owned()));
    }
    Err(MountError::Helper {
        path: target.to_owned(),
        message,
    })
}

fn has_no_descriptor(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE))
}

/// The helper's message without its program name.
pub(crate) fn helper_message(stderr: &str) -> String {
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
            helper_message("fusermount3: user has no write access to mountpoint /x\n"),
            "user has no write access to mountpoint /x"
        );
        assert_eq!(helper_message("\n"), "failed without a message");
    }
}

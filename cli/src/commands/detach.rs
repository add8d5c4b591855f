//! `bcow detach`

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::attach::NbdDevice;
use crate::error::CommandError;

/// How long the command waits until the server has closed the disk and ended.
const SERVER_EXIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Detach a block device that `bcow attach` made
///
/// The command returns when all data written to the device is durable in the disk's file and other
/// programs can use the disk. It fails if that takes more than 60 seconds. If the server of the
/// device is another program (nbd-client, qemu-nbd), the command does not wait for its end.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The device: /dev/nbdN
    #[arg(value_name = "DEVICE", value_hint = clap::ValueHint::FilePath)]
    device: PathBuf,
    /// Detach the device even if it is mounted or in use; programs that use it then get I/O errors
    #[arg(short, long)]
    force: bool,
}

/// Detaches.
pub fn run(args: &Args) -> Result<(), CommandError> {
    let device = NbdDevice::find(&args.device)?;
    let shown = args.device.display();
    let Some(server) = device.attached_by() else {
        return Err(CommandError::new(format!("{shown} is not attached")));
    };
    if !args.force
        && let Some(user) = device.in_use_by()
    {
        return Err(CommandError::new(format!("cannot detach {shown}"))
            .caused_by_text(user)
            .hint("unmount the device first, or use --force"));
    }
    device.detach()?;
    // The end of a server of another program is not waited for.
    let name = std::fs::read_to_string(format!("/proc/{server}/comm")).unwrap_or_default();
    let process = PathBuf::from(format!("/proc/{server}"));
    let is_free =
        || device.attached_by().is_none() && (name.trim() != "bcow" || !is_running(&process));
    wait_until_free(is_free, SERVER_EXIT_TIMEOUT).map_err(|Timeout| {
        CommandError::new(format!("cannot detach {shown} completely"))
            .caused_by_text(format!(
                "process {server}, which serves it, has not closed the disk within {} seconds",
                SERVER_EXIT_TIMEOUT.as_secs()
            ))
            .hint("the disk is in use until that process has ended; `bcow ps` shows its state")
    })
}

/// The device or its disk is still in use.
#[derive(Debug)]
struct Timeout;

fn wait_until_free(is_free: impl Fn() -> bool, timeout: Duration) -> Result<(), Timeout> {
    let end = Instant::now() + timeout;
    while !is_free() {
        if Instant::now() >= end {
            return Err(Timeout);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// Whether the process exists and is not a zombie.
fn is_running(process: &Path) -> bool {
    std::fs::read_to_string(process.join("stat")).is_ok_and(|stat| {
        let state = stat.rsplit_once(") ").map(|(_, rest)| rest);
        !state.is_some_and(|rest| rest.starts_with('Z'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_does_not_end_is_an_error() {
        assert!(wait_until_free(|| true, Duration::ZERO).is_ok());
        assert!(wait_until_free(|| false, Duration::ZERO).is_err());
    }

    #[test]
    fn this_process_is_running() {
        assert!(is_running(Path::new("/proc/self")));
        assert!(!is_running(Path::new("/proc/none")));
    }
}

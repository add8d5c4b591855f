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
    /// Detach the device even if it is mounted or in use, or if the flush fails; programs that use
    /// it then get I/O errors, and data that was not flushed is lost
    #[arg(short, long)]
    force: bool,
}

/// Detaches.
pub fn run(args: &Args) -> Result<(), CommandError> {
    let device = NbdDevice::find(&args.device)?;
    let shown = args.device.display();
    let Some(server) = device.attaching_pid() else {
        return Err(CommandError::new(format!("{shown} is not attached")));
    };
    let cannot = || CommandError::new(format!("cannot detach {shown}"));
    if !args.force {
        match device.in_use_by() {
            Ok(None) => {}
            Ok(Some(user)) => {
                let failure = cannot().caused_by_text(user);
                return Err(failure.hint("unmount the device first, or use --force"));
            }
            Err(error) => {
                let failure = cannot().caused_by(&error);
                return Err(failure.hint("--force does not check whether the device is in use"));
            }
        }
    }
    let flushed = device.flush();
    let unflushed = disconnect(flushed, args.force, || device.disconnect())?;
    // The end of a server of another program is not waited for.
    let name = std::fs::read_to_string(format!("/proc/{server}/comm")).unwrap_or_default();
    let process = PathBuf::from(format!("/proc/{server}"));
    let is_free =
        || device.attaching_pid().is_none() && (name.trim() != "bcow" || !is_running(&process));
    wait_until_free(is_free, SERVER_EXIT_TIMEOUT).map_err(|Timeout| {
        CommandError::new(format!("cannot detach {shown} completely"))
            .caused_by_text(format!(
                "process {server}, which serves it, has not closed the disk within {} seconds",
                SERVER_EXIT_TIMEOUT.as_secs()
            ))
            .hint("the disk is in use until that process has ended; `bcow ps` shows its state")
    })?;
    match unflushed {
        None => Ok(()),
        Some(error) => Err(error.caused_by_text("the device is detached; unwritten data is lost")),
    }
}

/// Disconnects the device after an attempt to flush it. If the flush failed, the device stays
/// attached; with `force` it is disconnected, and the result has the error of the flush.
fn disconnect(
    flushed: Result<(), CommandError>,
    force: bool,
    disconnect: impl FnOnce() -> Result<(), CommandError>,
) -> Result<Option<CommandError>, CommandError> {
    let unflushed = match flushed {
        Err(error) if !force => {
            return Err(error.hint("--force detaches the device, and loses the unwritten data"));
        }
        flushed => flushed.err(),
    };
    disconnect()?;
    Ok(unflushed)
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
    fn failed_flush_keeps_the_device_unless_forced() {
        let error = || CommandError::new("cannot flush the device");
        let run = |flushed, force| {
            let mut disconnected = false;
            let result = disconnect(flushed, force, || {
                disconnected = true;
                Ok(())
            });
            (disconnected, result)
        };
        assert!(matches!(run(Ok(()), false), (true, Ok(None))));
        assert!(matches!(run(Err(error()), false), (false, Err(_))));
        // The failure is reported all the same.
        assert!(matches!(run(Err(error()), true), (true, Ok(Some(_)))));
        let refused = disconnect(Err(error()), true, || {
            Err(CommandError::new("not permitted"))
        });
        assert_eq!(refused.unwrap_err().message(), "not permitted");
    }

    #[test]
    fn this_process_is_running() {
        assert!(is_running(Path::new("/proc/self")));
        assert!(!is_running(Path::new("/proc/none")));
    }
}

//! `bcow detach`

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::attach::NbdDevice;
use crate::error::CommandError;
use crate::ui::Ui;

/// How long the process of the device may take to make the written data durable.
const PATIENCE: Duration = Duration::from_secs(60);

/// Detach a block device that `bcow attach` made
///
/// The command returns when all data written to the device is durable in the disk's file and other
/// programs can use the disk.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The device: /dev/nbdN
    #[arg(value_name = "DEVICE", value_hint = clap::ValueHint::FilePath)]
    device: PathBuf,
    /// Detach the device even if it is mounted or in use; its users then get I/O errors
    #[arg(short, long)]
    force: bool,
}

/// Detaches.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let device = NbdDevice::find(&args.device)?;
    let shown = args.device.display();
    let Some(server) = device.attached_by() else {
        return Err(CommandError::new(format!("{shown} is not attached")));
    };
    if !args.force
        && let Some(user) = device.user()
    {
        return Err(CommandError::new(format!("cannot detach {shown}"))
            .caused_by_text(user)
            .hint("unmount the device first, or use --force"));
    }
    device.detach()?;
    if !is_gone_within(&device, server, PATIENCE) {
        ui.warning(format_args!(
            "process {server}, which served {shown}, has not ended yet"
        ));
    }
    Ok(())
}

fn is_gone_within(device: &NbdDevice, server: u32, patience: Duration) -> bool {
    let end = Instant::now() + patience;
    // The server may belong to another program, which is not waited for.
    let name = std::fs::read_to_string(format!("/proc/{server}/comm")).unwrap_or_default();
    let process = PathBuf::from(format!("/proc/{server}"));
    let is_gone =
        || device.attached_by().is_none() && (name.trim() != "bcow" || !is_running(&process));
    while !is_gone() {
        if Instant::now() > end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    true
}

/// A process that has ended still has an entry until its parent waits for it.
fn is_running(process: &Path) -> bool {
    std::fs::read_to_string(process.join("stat")).is_ok_and(|stat| {
        let state = stat.rsplit_once(") ").map(|(_, rest)| rest);
        !state.is_some_and(|rest| rest.starts_with('Z'))
    })
}

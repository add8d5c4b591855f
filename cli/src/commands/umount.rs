//! `bcow umount`

use std::path::PathBuf;
use std::time::{Duration, Instant};

use bcow_fuse::WhenBusy;
use bcow_fuse::stats::document::Process;

use crate::commands::mount::failure;
use crate::commands::stats;
use crate::error::CommandError;
use crate::ui::Ui;
use crate::upper::is_closing;

/// How long a mount may take to say who serves it. One that hangs is unmounted all the same.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);
/// How long its process may take to notice that the mount is gone. It does not if the mount goes on in another mount
/// namespace.
const NOTICES_WITHIN: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(2);

/// Unmount an image
///
/// Works on mounts of `bcow mount` only, for root and for the user who mounted. Returns when the process that
/// served the mount has ended: when what was written to a writable mount is with the upper's file system.
/// umount(8) and `fusermount3 -u` do the same but for the waiting.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The directory it is mounted on
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    directory: PathBuf,
    /// If files are in use, detach the mount now and end it with its last user
    #[arg(short = 'z', long)]
    lazy: bool,
}

/// Unmounts.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let when_busy = match args.lazy {
        true => WhenBusy::Detach,
        false => WhenBusy::Fail,
    };
    let mount = bcow_fuse::mounted_image(&args.directory).map_err(|error| failure(&error))?;
    let served_by = match mount.is_writable && !args.lazy {
        true => stats::ask(&mount.path, ANSWERS_WITHIN).map(|mount| mount.process),
        false => None,
    };
    bcow_fuse::unmount(&args.directory, when_busy).map_err(|error| failure(&error))?;
    if let Some(process) = served_by
        && !wait_for(&process)
    {
        ui.status(format_args!(
            "process {} goes on: the mount is in use in another mount namespace",
            process.pid
        ));
    }
    Ok(())
}

/// Waits for the end of a process that ends its mount; `false` if it does nothing of the kind. One that this process cannot
/// see counts as ended.
fn wait_for(process: &Process) -> bool {
    let start = Instant::now();
    while process.is_running() {
        if start.elapsed() > NOTICES_WITHIN && !is_closing(process.pid) {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
    true
}

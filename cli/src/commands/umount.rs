//! `bcow umount`

use std::path::PathBuf;
use std::time::{Duration, Instant};

use bcow_fuse::WhenBusy;
use bcow_fuse::stats::document::Process;

use crate::commands::mount::failure;
use crate::commands::stats::{self, Answer};
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
    // Also one that cannot be written to: it may have been until just now.
    let answer = match args.lazy {
        true => Answer::NotServed,
        false => stats::ask(&mount, ANSWERS_WITHIN),
    };
    bcow_fuse::unmount(&args.directory, when_busy).map_err(|error| failure(&error))?;
    match answer {
        Answer::Says(document) if document.upper.is_some() => {
            if !wait_for(&document.process) {
                ui.status(format_args!(
                    "process {} goes on: the mount is in use in another mount namespace",
                    document.process.pid
                ));
            }
        }
        Answer::Says(_) | Answer::NotServed => {}
        Answer::Nothing => ui.warning(format_args!(
            "{} did not say which process serves it; if it has an upper, that process may still be writing there",
            args.directory.display()
        )),
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

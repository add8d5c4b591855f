//! `bcow umount`

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bcow_fuse::stats::document::{Process, Upper};
use bcow_fuse::{Ended, Ending, WhenBusy};

use crate::commands::mount::failure;
use crate::commands::stats::{self, Answer};
use crate::error::CommandError;
use crate::names::printable;
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
/// served the mount has ended: when what was written to a writable mount is with the upper's file system. It
/// fails if that could not take everything; the mount is gone then all the same. umount(8) and `fusermount3 -u`
/// neither wait nor learn of it.
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
    // While its process is there.
    let ending = match &answer {
        Answer::Says(document) => document.ending(),
        Answer::NotServed | Answer::Nothing => None,
    };
    bcow_fuse::unmount(&args.directory, when_busy).map_err(|error| failure(&error))?;
    match answer {
        Answer::Says(document) => match &document.upper {
            Some(upper) if wait_for(&document.process) => {
                require_complete(&args.directory, &document.process, upper, ending, ui)?;
            }
            Some(_) => ui.status(format_args!(
                "process {} goes on: the mount is in use in another mount namespace",
                document.process.pid
            )),
            None => {}
        },
        Answer::NotServed => {}
        Answer::Nothing => ui.warning(format_args!(
            "{} did not say which process serves it; if it has an upper, that process may still be writing there",
            args.directory.display()
        )),
    }
    Ok(())
}

/// Fails unless the process, which has ended, said that all that was written is in the upper.
fn require_complete(
    directory: &Path,
    process: &Process,
    upper: &Upper,
    ending: Option<Ending>,
    ui: &Ui,
) -> Result<(), CommandError> {
    let Some(ending) = ending else {
        ui.warning(format_args!(
            "cannot learn from process {} whether all that was written is in the upper {}; if not, the system log says so",
            process.pid,
            printable(&upper.path)
        ));
        return Ok(());
    };
    let cause = match ending.hear() {
        Ended::Complete => return Ok(()),
        Ended::Incomplete(reason) => printable(&reason).into_owned(),
        Ended::Unknown => format!(
            "process {}, which served it, ended before it was done",
            process.pid
        ),
    };
    let failure = CommandError::new(format!(
        "{} is unmounted, but not all that was written is in the upper {}",
        directory.display(),
        printable(&upper.path)
    ))
    .caused_by_text(cause);
    Err(match upper.sync.as_str() {
        "volatile" => failure,
        _ => failure.hint(
            "what programs synchronised before is there, and the next mount of the upper recovers by itself",
        ),
    })
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

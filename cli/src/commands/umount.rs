//! `bcow umount`

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bcow_fuse::stats::document::{Document, Process, Upper};
use bcow_fuse::{Ended, Ending, MountedImage, WhenBusy};

use crate::ask::{self, Answer};
use crate::commands::mount::failure;
use crate::error::CommandError;
use crate::names::printable;
use crate::running::{self, Server, State};
use crate::ui::Ui;
use crate::upper::is_closing;

/// How long its process may take to notice that the mount is gone. It does not if the mount goes on in another mount
/// namespace.
const NOTICES_WITHIN: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(2);

/// Unmount an image
///
/// The command works only on mounts of `bcow mount`, for root and for the user who mounted. It
/// returns when the process of the mount has ended. All data written to a writable mount is then in
/// the file system of the upper. If that file system did not accept all data, the command fails,
/// but the mount is unmounted anyway. umount(8) and `fusermount3 -u` do not wait and do not report
/// such a failure.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The directory of the mount
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    directory: PathBuf,
    /// If files are in use, detach the mount now; it ends when its last user closes its files
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
        false => ask::ask(&mount, ask::ANSWERS_WITHIN),
    };
    let document = match &answer {
        Answer::Says(json) => ask::read(&args.directory, json).ok(),
        _ => None,
    };
    // While its process is there.
    let ending = document.as_ref().and_then(Document::ending);
    let silent = match (&answer, &document) {
        (Answer::NotServed, _) | (_, Some(_)) => None,
        _ => Some(Silent::look(&mount)),
    };
    bcow_fuse::unmount(&args.directory, when_busy).map_err(|error| failure(&error))?;
    if let Some(document) = &document
        && let Some(upper) = &document.upper
    {
        match wait_for(&document.process) {
            Waited::Ended => {
                require_complete(&args.directory, &document.process, upper, ending, ui)?;
            }
            Waited::GoesOn => ui.status(goes_on(&mount, document.process.pid)),
            Waited::Stopped => {
                let pid = document.process.pid;
                return Err(CommandError::new(format!(
                    "{} is unmounted, but process {pid}, which writes the rest to the upper {}, is stopped",
                    args.directory.display(),
                    printable(&upper.path)
                ))
                .hint(format!("`kill -CONT {pid}` lets it go on")));
            }
        }
    }
    if let Some(silent) = silent {
        silent.warn(&args.directory, ui);
    }
    Ok(())
}

/// Why the process that serves a mount goes on although the mount was taken away here.
fn goes_on(mount: &MountedImage, pid: u32) -> String {
    match mount.places().first() {
        Some(place) => format!(
            "process {pid} goes on: the image is also mounted at {}",
            place.display()
        ),
        None => {
            format!("process {pid} goes on: the mount is in use in another mount namespace")
        }
    }
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

/// A mount that does not say which process serves it.
struct Silent {
    /// The process as it shows itself to others, if it can be looked at.
    server: Option<Server>,
    why: String,
}

impl Silent {
    fn look(mount: &MountedImage) -> Self {
        Silent {
            server: running::server_of_mount(&mount.device),
            why: ask::silence(mount).0,
        }
    }

    /// To be called when it is unmounted.
    fn warn(&self, directory: &Path, ui: &Ui) {
        let upper = match &self.server {
            Some(server) => {
                let mut services = server.services.iter();
                match services.find_map(|service| service.upper.as_deref()) {
                    // What is only read has nothing to lose.
                    None => return,
                    Some(upper) => format!(
                        "process {} may still be writing to the upper {}",
                        server.pid,
                        printable(upper)
                    ),
                }
            }
            None => "if it has an upper, its process may still be writing there".to_owned(),
        };
        ui.warning(format_args!(
            "{} was unmounted without waiting, as {}; {upper}",
            directory.display(),
            self.why
        ));
    }
}

/// How waiting for a process ended.
enum Waited {
    /// It is gone, or cannot be seen.
    Ended,
    /// It does not end.
    GoesOn,
    /// It would, but a signal has stopped it.
    Stopped,
}

/// Waits for the end of a process that ends its mount. A process that is not visible counts as
/// ended.
fn wait_for(process: &Process) -> Waited {
    let start = Instant::now();
    while process.is_running() {
        if start.elapsed() > NOTICES_WITHIN {
            if running::state(process.pid) == Some(State::Stopped) {
                return Waited::Stopped;
            }
            if !is_closing(process.pid) {
                return Waited::GoesOn;
            }
        }
        std::thread::sleep(PAUSE);
    }
    Waited::Ended
}

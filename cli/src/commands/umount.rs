//! `bcow umount`

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bcow_fuse::stats::document::{Document, Process};
use bcow_fuse::{Ended, Ending, MountError, MountedImage, WhenBusy};

use crate::ask::{self, Answer};
use crate::commands::mount::failure;
use crate::error::CommandError;
use crate::mount_users;
use crate::names::printable;
use crate::pool;
use crate::pool::client::{self, Found};
use crate::running::{self, Server, Service, State};
use crate::ui::Ui;
use crate::upper::is_closing;

/// How long the process may take to notice the unmount. It does not notice the unmount if the mount
/// continues in another mount namespace.
const NOTICES_WITHIN: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(2);

/// Unmount an image or a disk
///
/// The command works only on mounts of `bcow mount`, for root and for the user who mounted. It
/// returns when the process of the mount has ended, or, in a pool, when the mount has ended. All
/// data written to a writable mount is then durable (with --sync volatile, it is in the host's file
/// system). If the host did not accept all data, or the trace of `bcow mount --record` was not
/// written, the command fails, but the mount is unmounted anyway. umount(8), `fusermount3 -u` and
/// --lazy do not wait and do not report such a failure.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The directory of the mount
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    directory: PathBuf,
    /// If files are in use, detach the mount now; the mount ends when the last open file is closed
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
    // Also for a mount that is read-only now: it may have been writable before.
    let answer = match args.lazy {
        true => Answer::NotServed,
        false => ask::ask(&mount, ask::ANSWER_TIMEOUT),
    };
    let document = match &answer {
        Answer::Statistics(json) => ask::read(&args.directory, json).ok(),
        _ => None,
    };
    // Before the process ends.
    let ending = document.as_ref().and_then(Document::ending);
    let unresponsive = match (&answer, &document) {
        (Answer::NotServed | Answer::NoProcess, _) | (_, Some(_)) => None,
        _ => Some(Unresponsive::examine(&mount)),
    };
    let trace = document.as_ref().and_then(TraceFile::of);
    bcow_fuse::unmount(&args.directory, when_busy).map_err(|error| match error {
        MountError::Busy(_) => mount_users::describe(&mount)
            .into_iter()
            .fold(failure(&error), CommandError::caused_by_text),
        _ => failure(&error),
    })?;
    if let Some(document) = &document {
        let store = Store::of(document);
        let waited = match (&store, &trace) {
            (None, None) => None,
            _ => Some(match (&document.pool, &ending) {
                // Its process continues.
                (Some(pool), Some(ending)) => {
                    wait_for_mount(ending, &document.process, pool, &mount)
                }
                (Some(_), None) => Waited::Ended,
                (None, _) => wait_for(&document.process),
            }),
        };
        match waited {
            // Nothing is lost if the process continues, but the next mount may need its sockets.
            None if document.pool.is_none() => wait_briefly(&document.process),
            None => {}
            Some(Waited::Ended) => {
                if let Some(store) = &store {
                    require_complete(&args.directory, &document.process, store, ending, ui)?;
                }
                if let Some(trace) = &trace {
                    trace.require_new(&args.directory)?;
                }
            }
            Some(Waited::Continues) => ui.status(why_it_continues(&mount, document.process.pid)),
            Some(Waited::Stopped) => {
                let pid = document.process.pid;
                let remaining = match &store {
                    Some(store) => format!("the remaining data to {}", store.name),
                    None => "a trace".to_owned(),
                };
                return Err(CommandError::new(format!(
                    "{} is unmounted, but process {pid}, which writes {remaining}, is stopped by \
                     a signal",
                    args.directory.display(),
                ))
                .hint(format!("`kill -CONT {pid}` resumes the process")));
            }
        }
    }
    if let Some(unresponsive) = unresponsive {
        unresponsive.warn(&args.directory, ui);
    }
    Ok(())
}

/// The upper or disk of a mount, for messages.
struct Store {
    /// `the upper PATH` or `the disk PATH`.
    name: String,
    /// Whether only the end of the mount makes data durable.
    is_volatile: bool,
    /// The hint about data that programs synchronized.
    recovers: &'static str,
}

impl Store {
    /// `None` for a mount without an upper and without a disk. The disk of a mount at the kernel
    /// door may be read-only.
    fn of(document: &Document) -> Option<Self> {
        match (&document.upper, &document.disk) {
            (Some(upper), _) => Some(Store {
                name: format!("the upper {}", printable(&upper.path)),
                is_volatile: upper.sync == "volatile",
                recovers: "data that programs synchronized is in the upper; the next mount of the \
                           upper recovers by itself",
            }),
            (None, Some(disk)) => Some(Store {
                name: match &disk.upper {
                    Some(upper) => format!("the upper {}", printable(upper)),
                    None => format!("the disk {}", printable(&disk.path)),
                },
                is_volatile: disk.sync == "volatile",
                recovers: "data that programs synchronized is on the disk; the next mount of the \
                           disk recovers by itself",
            }),
            (None, None) => None,
        }
    }
}

/// The trace of `bcow mount --record`, which the process writes after the unmount.
struct TraceFile<'d> {
    path: &'d Path,
    /// Device and inode of an older file there, which the trace replaces.
    before: Option<(u64, u64)>,
}

impl<'d> TraceFile<'d> {
    fn of(document: &'d Document) -> Option<Self> {
        let path = Path::new(document.trace.as_ref()?);
        Some(TraceFile {
            path,
            before: file_at(path),
        })
    }

    /// Fails unless the process, which has ended, wrote the trace.
    fn require_new(&self, directory: &Path) -> Result<(), CommandError> {
        match file_at(self.path) {
            now @ Some(_) if now != self.before => Ok(()),
            _ => Err(CommandError::new(format!(
                "{} is unmounted, but the trace {} was not written",
                directory.display(),
                printable(&self.path.to_string_lossy())
            ))
            .hint("the system log, or the file of `bcow mount --log-file`, has the error")),
        }
    }
}

fn file_at(path: &Path) -> Option<(u64, u64)> {
    let metadata = path.metadata().ok()?;
    Some((metadata.dev(), metadata.ino()))
}

/// The reason why the process of a mount continues after the unmount here.
fn why_it_continues(mount: &MountedImage, pid: u32) -> String {
    match mount.places().first() {
        Some(place) => format!(
            "process {pid} continues: the image is also mounted at {}",
            place.display()
        ),
        None => {
            format!("process {pid} continues: the mount is in use in another mount namespace")
        }
    }
}

/// Fails unless the process, which has ended, reported that all written data is stored.
fn require_complete(
    directory: &Path,
    process: &Process,
    store: &Store,
    ending: Option<Ending>,
    ui: &Ui,
) -> Result<(), CommandError> {
    let Some(ending) = ending else {
        ui.warning(format_args!(
            "process {} did not report whether all written data is in {}; if not, the system log \
             has an error",
            process.pid, store.name
        ));
        return Ok(());
    };
    let cause = match ending.read() {
        Ended::Complete => return Ok(()),
        Ended::Incomplete(reason) => printable(&reason).into_owned(),
        Ended::HandedOver => {
            ui.warning(format_args!(
                "another process of the pool has ended the mount; the log of the pool has an error \
                 if not all written data is in {}",
                store.name
            ));
            return Ok(());
        }
        Ended::Unknown => format!(
            "process {} of the mount ended before all data was written",
            process.pid
        ),
    };
    let failure = CommandError::new(format!(
        "{} is unmounted, but not all written data is in {}",
        directory.display(),
        store.name
    ))
    .caused_by_text(cause);
    Err(match store.is_volatile {
        true => failure,
        false => failure.hint(store.recovers),
    })
}

/// A mount whose statistics cannot be read.
struct Unresponsive {
    /// The process of the mount, if it can be examined.
    server: Option<Server>,
    why: String,
}

impl Unresponsive {
    fn examine(mount: &MountedImage) -> Self {
        Unresponsive {
            server: running::server_of_mount(mount),
            why: ask::explain_timeout(mount).0,
        }
    }

    /// Warns after the unmount.
    fn warn(&self, directory: &Path, ui: &Ui) {
        let upper = match &self.server {
            Some(server) => {
                let mut services = server.services.iter();
                match services.find_map(|service| service.upper.as_deref()) {
                    // The mount is read-only, or its data is in a disk, which is not named here.
                    None => return,
                    Some(upper) => format!(
                        "process {} may still be writing to the upper {}",
                        server.pid,
                        printable(upper)
                    ),
                }
            }
            None => "if the mount has an upper, its process may still be writing to the upper"
                .to_owned(),
        };
        ui.warning(format_args!(
            "{} was unmounted without waiting, because {}; {upper}",
            directory.display(),
            self.why
        ));
    }
}

/// The result of a wait for the end of a process, or of its mount.
enum Waited {
    /// The process has ended, or is not visible.
    Ended,
    /// The process does not end.
    Continues,
    /// A signal has stopped the process.
    Stopped,
}

/// Waits until the process of a pool has released the upper or the disk of this mount. If the
/// process has handed the mount over to the next process, waits for that process.
fn wait_for_mount(ending: &Ending, process: &Process, pool: &str, mount: &MountedImage) -> Waited {
    match wait_for_release(ending, process) {
        Waited::Ended if !process.is_running() => {}
        waited => return waited,
    }
    // The next process answers when it has taken over all mounts.
    let found = pool::parse_name(pool).ok().and_then(|name| {
        let directory = pool::Directory::find().ok()??;
        client::find(&directory.socket(&name)).ok()
    });
    if let Some(Found::Running(connection)) = found {
        drop(connection);
        while is_listed(mount) && bcow_fuse::mounted_image(&mount.path).is_err() {
            std::thread::sleep(PAUSE);
        }
    }
    Waited::Ended
}

/// Whether a process still lists the mount, even if the kernel has ended it.
fn is_listed(mount: &MountedImage) -> bool {
    let is_it = |service: &Service| {
        service.device.as_deref() == Some(&*mount.device)
            && service.at.iter().any(|at| Path::new(at) == mount.path)
    };
    let servers = running::servers();
    servers
        .iter()
        .any(|server| server.services.iter().any(is_it))
}

fn wait_for_release(ending: &Ending, process: &Process) -> Waited {
    while !ending.wait(NOTICES_WITHIN) {
        if running::state(process.pid) == Some(State::Stopped) {
            return Waited::Stopped;
        }
        if !is_closing(process.pid) {
            return Waited::Continues;
        }
    }
    Waited::Ended
}

/// Waits a limited time for the end of a process that has no data to store. The process may
/// continue, for a mount at another place.
fn wait_briefly(process: &Process) {
    let start = Instant::now();
    while process.is_running() && start.elapsed() < NOTICES_WITHIN {
        std::thread::sleep(PAUSE);
    }
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
                return Waited::Continues;
            }
        }
        std::thread::sleep(PAUSE);
    }
    Waited::Ended
}

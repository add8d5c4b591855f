//! The end of a mount, as its user asks for it: unmounts, and waits until all data is stored.

use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use bcow_fuse::stats::document::{Document, Process};
use bcow_fuse::{Driver, Ended, Ending, MountError, MountedImage, WhenBusy};
use bcow_images::error::CommandError;
use bcow_images::names::printable;
use bcow_images::running::{self, ProcessState, Server};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::ask::{self, Answer};
use crate::error::failure;
use crate::mount_users;
use crate::named_mount::mount_at;
use crate::pool_name::PoolName;
use bcow_images::image::Messages;
use bcow_images::upper::is_closing;

/// How long the process may take to notice the unmount. It does not notice the unmount if the mount
/// continues in another mount namespace.
const NOTICES_WITHIN: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(2);

/// Unmounts the mount at `directory`. If files are in use, a lazy unmount detaches the mount, and
/// waits for nothing.
///
/// `answers` waits until the process of a pool takes requests, and returns whether it does.
pub fn unmount(
    directory: &Path,
    is_lazy: bool,
    answers: fn(&PoolName) -> bool,
    ui: &dyn Messages,
) -> Result<(), CommandError> {
    let when_busy = if is_lazy { WhenBusy::Detach } else { WhenBusy::Fail };
    let mount = mount_at(directory, "umount")?;
    // Also for a mount that is read-only now: it may have been writable before.
    let mut answer = if is_lazy { Answer::NotServed } else { ask_when_published(&mount) };
    if let (Driver::Kernel(_), Answer::Timeout) = (&mount.driver, &answer) {
        refuse_stopped(directory, &mount)?;
    }
    // Before the process ends.
    let mut answered = None;
    let (document, unread, ending) = loop {
        let document = match read(directory, &mount, &answer) {
            Ok(Some(document)) => document,
            Ok(None) => break (None, None, None),
            Err(why) => break (None, Some(Unread::examine(&mount, why)), None),
        };
        let ending = document.ending();
        let pid = document.process.pid;
        if ending.is_some() || document.process.is_running() || answered == Some(pid) {
            break (Some(document), None, ending);
        }
        // It has ended since its answer. In a pool, another process serves the mount now.
        answered = Some(pid);
        answer = ask_when_published(&mount);
    };
    let trace = document.as_ref().and_then(TraceFile::of);
    bcow_fuse::unmount(directory, when_busy).map_err(|error| match error {
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
                    wait_for_mount(ending, &document.process, pool, answers, &mount)
                }
                (Some(_), None) => Waited::Ended,
                (None, _) => wait_for(document.process.pid, || !document.process.is_running()),
            }),
        };
        match waited {
            // Nothing is lost if the process continues, but the next mount may need its sockets.
            None if document.pool.is_none() => wait_briefly(&document.process),
            None => {}
            Some(Waited::Ended) => {
                if let Some(store) = &store {
                    require_complete(directory, &document.process, store, ending)?;
                }
                if let Some(trace) = &trace {
                    trace.require_new(directory)?;
                }
            }
            Some(Waited::Continues) => ui.status(&why_it_continues(&mount, document.process.pid)),
            Some(Waited::Stopped) => {
                let pid = document.process.pid;
                let remaining = match &store {
                    Some(store) => format!("the remaining data to {}", store.name),
                    None => "a trace".to_owned(),
                };
                return Err(CommandError::new(format!(
                    "{} is unmounted, but process {pid}, which writes {remaining}, is stopped by \
                     a signal",
                    directory.display(),
                ))
                .hint(format!("`kill -CONT {pid}` resumes the process")));
            }
        }
    }
    if let Some(unread) = unread {
        unread.require_nothing_written(directory, &mount, ui)?;
    }
    if is_lazy || !mount.is_writable || !matches!(answer, Answer::NotServed) {
        Ok(())
    } else {
        Err(CommandError::new(format!(
            "{} is unmounted, but its process had been killed: changes that programs did not \
         synchronize may be lost",
            directory.display()
        ))
        .hint("a new mount with the same upper or disk recovers what programs synchronized"))
    }
}

/// Requests the statistics of a mount. Waits until the process of a new mount with the kernel
/// driver has published by which descriptor its statistics can be read.
fn ask_when_published(mount: &MountedImage) -> Answer {
    let start = Instant::now();
    loop {
        match ask::ask(mount, ask::ANSWER_TIMEOUT) {
            Answer::Refused(Errno::ACCESS)
                if matches!(mount.driver, Driver::Kernel(_))
                    && start.elapsed() < NOTICES_WITHIN => {}
            answer => return answer,
        }
        std::thread::sleep(PAUSE);
    }
}

/// Fails if a signal has stopped the process of a mount with the kernel driver: the kernel could
/// not write its pages back, and the unmount would block.
fn refuse_stopped(directory: &Path, mount: &MountedImage) -> Result<(), CommandError> {
    match running::server_of_mount(&mount.device, &mount.path) {
        Some(Server {
            pid,
            state: ProcessState::Stopped,
            ..
        }) => Err(
            CommandError::new(format!("cannot unmount {}", directory.display()))
                .caused_by_text(format!("its process {pid} is stopped by a signal"))
                .hint(format!("`kill -CONT {pid}` resumes the process")),
        ),
        _ => Ok(()),
    }
}

/// The statistics in an answer; `None` if no process serves the mount. Otherwise the reason why
/// they cannot be read, and a hint.
fn read(
    directory: &Path,
    mount: &MountedImage,
    answer: &Answer,
) -> Result<Option<Document>, (String, Option<String>)> {
    match answer {
        Answer::Statistics(json) => match ask::read(directory, json) {
            Ok(document) => Ok(Some(document)),
            Err(error) => Err((error.in_one_line(), None)),
        },
        Answer::NotServed | Answer::NoProcess => Ok(None),
        Answer::Refused(errno) => {
            let refused = CommandError::new("its statistics cannot be read")
                .caused_by_text(ask::explain_refusal(*errno));
            Err((refused.in_one_line(), None))
        }
        Answer::Timeout => Err(ask::explain_timeout(mount)),
    }
}

/// The upper or disk of a mount, for messages.
struct Store {
    /// `the upper PATH` or `the disk PATH`.
    name: String,
    /// Whether only the end of the mount makes data durable.
    is_volatile: bool,
}

impl Store {
    /// `None` for a mount without an upper and without a disk. The disk of a mount with the kernel
    /// driver may be read-only.
    fn of(document: &Document) -> Option<Self> {
        let (kind, path, sync) = match (&document.upper, &document.disk) {
            (Some(upper), _) => ("upper", &upper.path, &upper.sync),
            (None, Some(disk)) => match &disk.upper {
                Some(upper) => ("upper", upper, &disk.sync),
                None => ("disk", &disk.path, &disk.sync),
            },
            (None, None) => return None,
        };
        Some(Store {
            name: format!("the {kind} {}", printable(path)),
            is_volatile: sync == "volatile",
        })
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

/// Device and inode of a file.
pub(crate) fn file_at(path: &Path) -> Option<(u64, u64)> {
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
) -> Result<(), CommandError> {
    let cause = match ending.map(|ending| ending.read()) {
        Some(Ended::Complete) => return Ok(()),
        Some(Ended::Incomplete(reason)) => printable(&reason).into_owned(),
        Some(Ended::Removed) => {
            return Err(CommandError::new(format!(
                "{} is unmounted, but {} was removed while it was mounted: all its changes are \
                 lost",
                directory.display(),
                store.name
            )));
        }
        Some(Ended::Unknown) => format!(
            "process {} of the mount ended before all data was written",
            process.pid
        ),
        None => {
            return Err(unknown_end(directory, &store.name)
                .caused_by_text(format!("process {} did not report it", process.pid))
                .hint("the system log has an error if not all data was written"));
        }
    };
    let failure = CommandError::new(format!(
        "{} is unmounted, but not all written data is in {}",
        directory.display(),
        store.name
    ))
    .caused_by_text(cause);
    let recovers = format!(
        "data that programs synchronized is in {}, whose next mount recovers by itself",
        store.name
    );
    Err(failure.hint_if((!store.is_volatile).then_some(recovers)))
}

/// The failure of an unmount after which nothing says that all data is stored.
fn unknown_end(directory: &Path, store: &str) -> CommandError {
    CommandError::new(format!(
        "{} is unmounted, but it is not known whether all written data is in {store}",
        directory.display()
    ))
}

/// A mount whose statistics cannot be read.
struct Unread {
    why: String,
    hint: Option<String>,
    /// What its process may still write to; `None` for a read-only mount.
    store: Option<String>,
}

impl Unread {
    fn examine(mount: &MountedImage, (why, hint): (String, Option<String>)) -> Self {
        let store = match running::server_of_mount(&mount.device, &mount.path) {
            Some(server) => store_of(&server, mount),
            None if mount.is_writable => Some("its upper or disk".to_owned()),
            None => None,
        };
        Unread { why, hint, store }
    }

    /// Fails if the process of the mount, which is unmounted here, may still write for it.
    fn require_nothing_written(
        self,
        directory: &Path,
        mount: &MountedImage,
        ui: &dyn Messages,
    ) -> Result<(), CommandError> {
        let Some(store) = &self.store else {
            return Ok(());
        };
        if let Some(place) = mount.places().first() {
            ui.status(&format_args!(
                "the image is also mounted at {}",
                place.display()
            ));
            return Ok(());
        }
        let failure = unknown_end(directory, store).caused_by_text(self.why);
        Err(failure.hint_if(self.hint))
    }
}

/// The upper or disk to which the process of a mount may still write; `None` if it writes nothing
/// for this mount.
fn store_of(server: &Server, mount: &MountedImage) -> Option<String> {
    let service = server.mount(&mount.device, &mount.path)?;
    match (&service.upper, service.mode.as_str()) {
        (Some(upper), _) => Some(format!("the upper {}", printable(upper))),
        (None, "rw") => Some(format!("the disk {}", printable(&service.image))),
        (None, _) => None,
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

/// Waits until the process of a pool has released the upper or the disk of this mount. If it ends
/// before, the next one continues, and writes the outcome to the same pipe.
fn wait_for_mount(
    ending: &Ending,
    process: &Process,
    pool: &str,
    answers: fn(&PoolName) -> bool,
    mount: &MountedImage,
) -> Waited {
    let is_released = || ending.wait(Duration::ZERO);
    let mut pid = process.pid;
    loop {
        match wait_for(pid, || is_released() || running::state(pid).is_none()) {
            Waited::Ended if !is_released() => {}
            waited => return waited,
        }
        // The next process answers when it has taken over all mounts.
        let has_next = pool.parse().is_ok_and(|name| answers(&name));
        let next = running::server_of_mount(&mount.device, &mount.path);
        match next.filter(|next| has_next && next.pid != pid) {
            Some(next) => pid = next.pid,
            None => {
                // The supervisor has the pipe open for a moment more.
                ending.wait(NOTICES_WITHIN);
                return Waited::Ended;
            }
        }
    }
}

/// Waits a limited time for the end of a process that has no data to store. The process may
/// continue, for a mount at another place.
fn wait_briefly(process: &Process) {
    let (start, watched) = (Instant::now(), Watched::new(process.pid));
    while process.is_running() && start.elapsed() < NOTICES_WITHIN {
        watched.pause();
    }
}

/// A process whose end is waited for.
struct Watched(Option<OwnedFd>);

impl Watched {
    /// Whether the process is the expected one must be asked afterwards.
    fn new(pid: u32) -> Self {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        Watched(pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()))
    }

    /// Pauses until the process has ended, or for [`PAUSE`].
    fn pause(&self) {
        let timeout = Timespec::try_from(PAUSE).ok();
        let polled = self.0.as_ref().map(|process| {
            let mut events = [PollFd::new(process, PollFlags::IN)];
            rustix::event::poll(&mut events, timeout.as_ref())
        });
        // Linux 5.3 and later have such a descriptor.
        if !matches!(polled, Some(Ok(_))) {
            std::thread::sleep(PAUSE);
        }
    }
}

/// Waits until a process has ended its mount, or has ended. A process that is not visible counts as
/// ended.
fn wait_for(pid: u32, has_ended: impl Fn() -> bool) -> Waited {
    let (start, watched) = (Instant::now(), Watched::new(pid));
    while !has_ended() {
        if start.elapsed() > NOTICES_WITHIN {
            if running::state(pid) == Some(ProcessState::Stopped) {
                return Waited::Stopped;
            }
            if !is_closing(pid) {
                return Waited::Continues;
            }
        }
        watched.pause();
    }
    Waited::Ended
}

#[cfg(test)]
mod tests {
    use bcow_images::running::Service;

    use super::*;

    fn mount(path: &str, device: &str) -> MountedImage {
        MountedImage {
            path: path.into(),
            source: "image.bcow".into(),
            device: device.to_owned(),
            is_writable: true,
            owner: None,
            driver: Driver::Fuse,
            file_system: "fuse.bcow".to_owned(),
        }
    }

    fn service(at: &str, device: &str, upper: Option<&str>, mode: &str) -> Service {
        Service {
            kind: "mount".to_owned(),
            image: format!("{at}.bcow"),
            upper: upper.map(str::to_owned),
            at: vec![at.to_owned()],
            mode: mode.to_owned(),
            since: 7,
            device: Some(device.to_owned()),
            pool: Some("pool".to_owned()),
            ..Service::default()
        }
    }

    #[test]
    fn store_is_what_this_mount_may_still_write_to() {
        let server = Server {
            pid: 7,
            uid: 0,
            state: ProcessState::Stopped,
            is_in_other_namespace: false,
            services: vec![
                service("/m1", "0:1", Some("/up"), "rw"),
                service("/m2", "0:2", None, "ro"),
                service("/m3", "0:3", None, "rw"),
            ],
        };
        let store = |path, device| store_of(&server, &mount(path, device));
        assert_eq!(store("/m1", "0:1").as_deref(), Some("the upper /up"));
        assert_eq!(store("/m2", "0:2"), None);
        assert_eq!(store("/m3", "0:3").as_deref(), Some("the disk /m3.bcow"));
    }

    #[test]
    fn statistics_that_cannot_be_read_are_no_timeout() {
        let mount = mount("/m", "0:1");
        let why = |answer| {
            read(Path::new("m"), &mount, &answer)
                .err()
                .map(|(why, _)| why)
        };
        assert_eq!(
            why(Answer::Refused(Errno::PERM)).as_deref(),
            Some("its statistics cannot be read: Operation not permitted")
        );
        let invalid = why(Answer::Statistics(b"{}".to_vec())).unwrap();
        assert!(
            invalid.starts_with("the statistics of m are invalid: "),
            "{invalid}"
        );
        assert_eq!(why(Answer::NotServed), None);
        let silent = why(Answer::Timeout).unwrap();
        assert!(silent.contains("does not answer"), "{silent}");
    }
}

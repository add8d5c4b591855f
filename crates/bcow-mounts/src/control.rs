//! Requests of other commands to a process that serves disks or mounts.
//!
//! The process listens on one abstract Unix socket. It publishes the name with its services, and
//! only its own user and root can make requests.

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime};

use bcow::operation::{LiveDisk, Monitor, RemoveError, Removed, SnapshotError};
use bcow_fuse::kernel::{DiskFiles, DiskSnapshots};
use bcow_fuse::session::Snapshotter;
use bcow_fuse::{AnySession, MountError};
use bcow_images::disks::lock_note;
use bcow_images::error::{CommandError, Context};
use bcow_images::requests::{
    MAX_REQUEST_BYTES, SnapshotAnswer, SnapshotRequest, cannot_remove, cannot_snapshot,
};
use bcow_images::running::LOCK_IN_UPPER;
use bcow_images::upper::{cannot_use, note};
use bcow_union::log::{self, Severity};

use bcow_mount::Freezer;
pub use bcow_mount::hold_frozen;

use rustix::event::{PollFd, PollFlags, Timespec};

use crate::disk_ledger::new_ledger;
use crate::mount::fuse::Mounted;

/// How long a client may take to send its request, and to receive the answer.
const PATIENCE: Duration = Duration::from_secs(5);
const INVALID: &str = "invalid request for a snapshot";
/// Pause after a failure.
const PAUSE: Duration = Duration::from_millis(100);

/// Something that takes requests while it is in use.
pub trait Live: Send + Sync {
    /// Whether it is still in use.
    fn is_open(&self) -> bool;
    /// Whether a request with these numbers is for it: see [`SnapshotRequest`].
    fn is_at(&self, device: u64, inode: u64) -> bool;
    /// Takes the snapshot `name`.
    fn snapshot(&self, name: &str) -> Result<(), CommandError>;
    /// Takes the snapshot `name` as a copy, which no disk is over.
    fn copy(&self, name: &str) -> Result<(), CommandError>;
    /// Removes the snapshot `name`.
    fn remove(&self, name: &str, monitor: &dyn Monitor) -> Result<Removed, CommandError>;
}

/// What takes requests in this process. The lock is not held during a request.
static LIVE: Mutex<Registry> = Mutex::new(Registry {
    prepared: None,
    socket: None,
    live: Vec::new(),
});

struct Registry {
    /// A socket on which the process does not listen yet, and its name.
    prepared: Option<(UnixListener, String)>,
    /// The name of the socket, if the process listens.
    socket: Option<String>,
    live: Vec<Arc<dyn Live>>,
}

fn registry() -> MutexGuard<'static, Registry> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Answers requests for `live` from now on. Returns the name of the socket. `command` names this
/// process in it.
pub fn register(live: Arc<dyn Live>, command: &str) -> Option<String> {
    let mut registry = registry();
    registry.live.retain(|live| live.is_open());
    if registry.socket.is_none() {
        let prepared = registry.prepared.take().map_or_else(|| bind(command), Ok);
        let listening = prepared.and_then(|(listener, name)| listen(listener).map(|()| name));
        registry.socket = Some(or_warn(listening)?);
    }
    registry.live.push(live);
    registry.socket.clone()
}

/// Makes the socket now, because the process can make none later.
fn prepare(command: &str) {
    let mut registry = registry();
    if registry.socket.is_none() {
        registry.prepared = or_warn(bind(command));
    }
}

fn or_warn<T>(result: Result<T, CommandError>) -> Option<T> {
    let result = result.inspect_err(|error| log::log(Severity::Warning, &error.in_one_line()));
    result.ok()
}

fn cannot_listen() -> &'static str {
    "cannot listen for requests of other commands"
}

/// A new socket, and its name.
fn bind(command: &str) -> Result<(UnixListener, String), CommandError> {
    // Processes of several process namespaces can have one number.
    let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let name = format!("bcow-{command}-{}-{}", std::process::id(), since.as_nanos());
    let address = SocketAddr::from_abstract_name(&name).context(cannot_listen)?;
    let listener = UnixListener::bind_addr(&address).context(cannot_listen)?;
    Ok((listener, name))
}

/// Answers requests in a thread, as long as the process runs.
fn listen(listener: UnixListener) -> Result<(), CommandError> {
    let threads = || std::thread::Builder::new().name("requests".into());
    threads()
        .spawn(move || {
            loop {
                let started = listener.accept().and_then(|(stream, _)| {
                    // Before anything is read: another user must not keep a thread waiting.
                    match require_same_user(&stream) {
                        Ok(()) => threads().spawn(move || answer(&stream)).map(drop),
                        Err(error) => send(&stream, &SnapshotAnswer::Failed(error)),
                    }
                });
                if let Err(error) = started {
                    tracing::info!("a request of another command: {error}");
                    // The process may have no descriptor left, and accept(2) then fails at once.
                    std::thread::sleep(PAUSE);
                }
            }
        })
        .map(drop)
        .context(cannot_listen)
}

fn answer(stream: &UnixStream) {
    let line = read_line(stream, MAX_REQUEST_BYTES, Some(PATIENCE));
    let executed = line
        .context(|| INVALID)
        .and_then(|line| execute(&line, &Client::new(stream)));
    let answer = executed.unwrap_or_else(SnapshotAnswer::Failed);
    if let Err(error) = send(stream, &answer) {
        tracing::info!("a request of another command: {error}");
    }
}

fn send(mut stream: &UnixStream, answer: &SnapshotAnswer) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Fails if the client is neither of the user of this process nor root.
fn require_same_user(stream: &UnixStream) -> Result<(), CommandError> {
    let peer = rustix::net::sockopt::socket_peercred(stream)
        .map_err(io::Error::from)
        .context(|| INVALID)?;
    if peer.uid == rustix::process::geteuid() || peer.uid.is_root() {
        Ok(())
    } else {
        Err(CommandError::new("the process belongs to another user"))
    }
}

/// A client, which ends a removal when it closes its connection.
struct Client<'s> {
    stream: &'s UnixStream,
    /// When the kernel was last asked about it: steps can be short.
    asked: Cell<Option<Instant>>,
}

impl<'s> Client<'s> {
    fn new(stream: &'s UnixStream) -> Self {
        Client {
            stream,
            asked: Cell::new(None),
        }
    }
}

/// How often the kernel is asked whether a client has ended.
const ASKED_EACH: Duration = Duration::from_millis(10);

impl Monitor for Client<'_> {
    fn is_cancelled(&self) -> bool {
        let asked = self.asked.get();
        if asked.is_some_and(|asked| asked.elapsed() < ASKED_EACH) {
            return false;
        }
        self.asked.set(Some(Instant::now()));
        // The kernel reports this end without being asked. A client that only sends nothing more
        // still waits for the answer.
        let mut end = [PollFd::new(self.stream, PollFlags::empty())];
        let ready = rustix::event::poll(&mut end, Some(&Timespec::default()));
        ready.is_ok() && end[0].revents().contains(PollFlags::HUP)
    }
}

fn execute(line: &[u8], client: &Client<'_>) -> Result<SnapshotAnswer, CommandError> {
    let request: SnapshotRequest = serde_json::from_slice(line).context(|| INVALID)?;
    let live = registry().live.clone();
    let is_meant = |live: &&Arc<dyn Live>| live.is_at(request.device, request.inode);
    let live = live.iter().find(is_meant).ok_or_else(has_ended)?;
    let name = &request.snapshot;
    match (request.remove, request.copy) {
        (true, _) => {
            let Removed { into, bytes } = live.remove(name, client)?;
            return Ok(SnapshotAnswer::Removed { into, bytes });
        }
        (false, true) => live.copy(name),
        (false, false) => live.snapshot(name),
    }?;
    Ok(SnapshotAnswer::Done)
}

/// Notes a removal in the log, or makes its error.
fn removed(
    shown: &str,
    name: &str,
    removed: Result<Removed, RemoveError>,
) -> Result<Removed, CommandError> {
    let removed = removed.map_err(|error| cannot_remove(shown, name, &error))?;
    tracing::info!("{shown}: snapshot {name} removed");
    Ok(removed)
}

/// The error of a request that arrives too late.
fn has_ended() -> CommandError {
    CommandError::new("the process does not use this for writing any more")
}

/// A disk that clients of this process write to.
pub struct ServedDisk {
    /// Its name for the user.
    pub name: String,
    pub disk: Weak<LiveDisk>,
    /// The command of this process.
    pub command: &'static str,
}

impl Live for ServedDisk {
    fn is_open(&self) -> bool {
        self.disk.strong_count() > 0
    }

    fn is_at(&self, device: u64, inode: u64) -> bool {
        let disk = self.disk.upgrade();
        disk.is_some_and(|disk| disk.is_at(device, inode))
    }

    fn snapshot(&self, name: &str) -> Result<(), CommandError> {
        let note = lock_note(self.command);
        self.take(|disk| {
            let taken = disk.snapshot(name, &note, None, |_| ())?;
            Ok(taken.path.clone())
        })
    }

    fn copy(&self, name: &str) -> Result<(), CommandError> {
        self.take(|disk| disk.copy(name))
    }

    fn remove(&self, name: &str, monitor: &dyn Monitor) -> Result<Removed, CommandError> {
        let disk = self.disk.upgrade().ok_or_else(has_ended)?;
        let note = lock_note(self.command);
        removed(&self.name, name, disk.remove(name, &note, monitor))
    }
}

impl ServedDisk {
    fn take(
        &self,
        take: impl FnOnce(&LiveDisk) -> Result<PathBuf, SnapshotError>,
    ) -> Result<(), CommandError> {
        let disk = self.disk.upgrade().ok_or_else(has_ended)?;
        let taken = disk.prepare().map_err(SnapshotError::Disk);
        let taken = taken.and_then(|()| take(&disk));
        let path = taken.map_err(|error| cannot_snapshot(&self.name, &error))?;
        tracing::info!(
            "{}: its content is the snapshot {}",
            self.name,
            path.display()
        );
        Ok(())
    }
}

/// A mount with the kernel driver.
struct KernelMount<F> {
    /// The directory.
    at: String,
    snapshots: DiskSnapshots,
    /// The device number and the inode number of the lock of its upper.
    lock: Option<(u64, u64)>,
    /// The note in the locks of its files.
    note: String,
    /// Gets what another process needs to continue.
    is_replaced: F,
}

impl<F: Fn(&DiskFiles) + Send + Sync> Live for KernelMount<F> {
    fn is_open(&self) -> bool {
        self.snapshots.is_open()
    }

    fn is_at(&self, device: u64, inode: u64) -> bool {
        match self.lock {
            Some(lock) => self.is_open() && lock == (device, inode),
            None => self.snapshots.is_at(device, inode),
        }
    }

    fn snapshot(&self, name: &str) -> Result<(), CommandError> {
        let (note, is_replaced) = (&self.note, &self.is_replaced);
        let taken = self
            .snapshots
            .take(name, note, freezer, new_ledger, is_replaced);
        self.taken(taken)
    }

    fn copy(&self, name: &str) -> Result<(), CommandError> {
        self.taken(self.snapshots.copy(name, freezer))
    }

    fn remove(&self, name: &str, monitor: &dyn Monitor) -> Result<Removed, CommandError> {
        match self.snapshots.remove(name, &self.note, monitor) {
            Ok(done) => removed(&self.at, name, Ok(done)),
            Err(MountError::RemoveSnapshot(error)) => removed(&self.at, name, Err(error)),
            Err(error) => {
                let failure = CommandError::new(format!("cannot remove {}@{name}", self.at));
                Err(failure.caused_by(&error).hint_if(error.hint()))
            }
        }
    }
}

impl<F> KernelMount<F> {
    fn taken(&self, taken: Result<PathBuf, MountError>) -> Result<(), CommandError> {
        let path = taken.map_err(|error| match &error {
            MountError::Snapshot(error) => cannot_snapshot(&self.at, error),
            error => CommandError::new(format!("cannot take a snapshot of {}", self.at))
                .caused_by(error)
                .hint_if(error.hint()),
        })?;
        tracing::info!(
            "{}: its content is the snapshot {}",
            self.at,
            path.display()
        );
        Ok(())
    }
}

/// Another process, which freezes the file system at `target`.
fn freezer(target: &Path, device: &str) -> io::Result<Freezer> {
    if let Some(connection) = bcow_fuse::starter::start_freezer(target, device) {
        return connection.map(Freezer::from);
    }
    let mut command = Command::new("/proc/self/exe");
    let arguments = ["snapshot", "--freeze", "--"];
    command.args(arguments).arg(target).arg(device);
    Freezer::start(command)
}

/// A mount with the FUSE driver.
struct FuseMount {
    snapshots: Snapshotter,
    upper: PathBuf,
    /// The device number and the inode number of the lock of its upper.
    lock: (u64, u64),
}

impl Live for FuseMount {
    fn is_open(&self) -> bool {
        self.snapshots.is_open()
    }

    fn is_at(&self, device: u64, inode: u64) -> bool {
        self.is_open() && self.lock == (device, inode)
    }

    fn snapshot(&self, name: &str) -> Result<(), CommandError> {
        let taken = self.snapshots.take(name).ok_or_else(has_ended)?;
        taken.map_err(|error| cannot_use(&error))
    }

    fn copy(&self, name: &str) -> Result<(), CommandError> {
        self.snapshot(name)
    }

    fn remove(&self, name: &str, _: &dyn Monitor) -> Result<Removed, CommandError> {
        let removed = bcow_union::remove_snapshot(&self.upper, name, &lock_note("mount"));
        removed.map_err(|error| cannot_use(&error))?;
        Ok(Removed {
            into: None,
            bytes: 0,
        })
    }
}

impl Mounted {
    /// Makes the socket for requests to a mount with the FUSE driver. The process may be unable to
    /// make one when it takes them.
    pub fn prepare_requests(&self) {
        if let (AnySession::Fuse(_), Some(_)) = (&self.session, &self.service.upper) {
            prepare("mount");
        }
    }

    /// Takes requests of other commands from now on. `is_replaced` gets what another process needs
    /// to continue with a disk, whenever that changes.
    pub fn take_requests(&mut self, is_replaced: impl Fn(&DiskFiles) + Send + Sync + 'static) {
        let at = self.service.at.join(", ");
        // The process changes its directory afterwards.
        let absolute = |upper: &String| Path::new(upper).canonicalize().unwrap_or_default();
        let upper = self.service.upper.as_ref().map(absolute);
        let lock = upper.as_ref().map(|upper| {
            let lock = std::fs::metadata(upper.join(LOCK_IN_UPPER));
            lock.map_or((0, 0), |lock| (lock.dev(), lock.ino()))
        });
        let live: Arc<dyn Live> = match (&self.session, lock) {
            (AnySession::Fuse(session), Some(lock)) => match session.snapshotter() {
                Some(snapshots) => Arc::new(FuseMount {
                    snapshots,
                    upper: upper.unwrap_or_default(),
                    lock,
                }),
                None => return,
            },
            (AnySession::Fuse(_), None) => return,
            (AnySession::Kernel(session), lock) => match session.snapshots() {
                Some(snapshots) => Arc::new(KernelMount {
                    note: note(Path::new(&at)),
                    at,
                    snapshots,
                    lock,
                    is_replaced,
                }),
                None => return,
            },
        };
        self.service.control = register(live, "mount");
    }
}

/// Reads a line of at most `most` bytes, without its newline. Without `timeout`, waits for ever.
///
/// The other side sends nothing after the line until it has an answer, so that this reads nothing
/// of a next line.
pub fn read_line(
    mut stream: &UnixStream,
    most: usize,
    timeout: Option<Duration>,
) -> io::Result<Vec<u8>> {
    let deadline = timeout.map(|timeout| Instant::now() + timeout);
    let mut line = Vec::new();
    let mut piece = [0; 4096];
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left == Some(Duration::ZERO) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(left)?;
        let count = match stream.read(&mut piece) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                return Err(io::ErrorKind::TimedOut.into());
            }
            Err(error) => return Err(error),
        };
        line.extend_from_slice(&piece[..count]);
        if line.len() > most {
            let text = format!("the line has more than {most} bytes");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        if line.last() == Some(&b'\n') {
            line.pop();
            return Ok(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_a_limit_of_length_and_of_time() {
        let read = |bytes: &[u8], timeout| {
            let (mut ours, theirs) = UnixStream::pair().unwrap();
            ours.write_all(bytes).unwrap();
            let line = read_line(&theirs, 8, timeout);
            drop(ours);
            line.map_err(|error| error.kind())
        };
        let short = Some(Duration::from_millis(1));
        assert_eq!(read(b"1234567\n", None), Ok(b"1234567".to_vec()));
        assert_eq!(read(b"12345678\n", None), Err(io::ErrorKind::InvalidData));
        assert_eq!(read(b"1234", short), Err(io::ErrorKind::TimedOut));
    }
}

//! Requests of other commands to a process that serves disks.
//!
//! The process listens on an abstract Unix socket. It publishes the name with its services, and
//! only its own user and root can make requests.

use std::io::{self, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use bcow::operation::LiveDisk;
use bcow_convert::{MAX_REQUEST_BYTES, SnapshotAnswer, SnapshotRequest, cannot_snapshot};
use bcow_pool::protocol::read_line;

use crate::disks::lock_note;
use crate::error::{CommandError, Context};

/// How long a client may take to send its request, and to receive the answer.
const PATIENCE: Duration = Duration::from_secs(5);
const INVALID: &str = "invalid request for a snapshot";
/// Pause after a failure.
const PAUSE: Duration = Duration::from_millis(100);

/// Answers requests for these disks in a thread, as long as the process runs. Returns the name of
/// the socket. `command` names this process to writers.
pub fn listen(
    disks: Vec<(String, Weak<LiveDisk>)>,
    command: &'static str,
) -> Result<String, CommandError> {
    let cannot = || "cannot listen for requests of other commands";
    // Processes of several process namespaces can have one number.
    let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    let name = format!("bcow-{command}-{}-{}", std::process::id(), since.as_nanos());
    let address = SocketAddr::from_abstract_name(&name).context(cannot)?;
    let listener = UnixListener::bind_addr(&address).context(cannot)?;
    std::thread::Builder::new()
        .name("requests".into())
        .spawn(move || {
            loop {
                let accepted = listener.accept();
                let answered = accepted.and_then(|(stream, _)| answer(&stream, &disks, command));
                if let Err(error) = answered {
                    tracing::info!("a request of another command: {error}");
                    // The process may have no descriptor left, and accept(2) then fails at once.
                    std::thread::sleep(PAUSE);
                }
            }
        })
        .context(cannot)?;
    Ok(name)
}

fn answer(
    mut stream: &UnixStream,
    disks: &[(String, Weak<LiveDisk>)],
    command: &str,
) -> io::Result<()> {
    stream.set_write_timeout(Some(PATIENCE))?;
    // Before anything is read: another user must not keep this thread waiting.
    let answer = match require_same_user(stream).and_then(|()| {
        let line = read_line(stream, MAX_REQUEST_BYTES, Some(PATIENCE));
        execute(&line.context(|| INVALID)?, disks, command)
    }) {
        Ok(()) => SnapshotAnswer::Done,
        Err(error) => SnapshotAnswer::Failed(error),
    };
    let mut line = serde_json::to_vec(&answer)?;
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
        Err(CommandError::new("the disk is served by another user"))
    }
}

fn execute(
    line: &[u8],
    disks: &[(String, Weak<LiveDisk>)],
    command: &str,
) -> Result<(), CommandError> {
    let request: SnapshotRequest = serde_json::from_slice(line).context(|| INVALID)?;
    let found = disks.iter().find_map(|(name, disk)| {
        let disk = disk.upgrade()?;
        disk.is_at(request.device, request.inode)
            .then_some((name, disk))
    });
    let (name, disk): (&String, Arc<LiveDisk>) = found.ok_or_else(|| {
        CommandError::new("the process does not serve the disk for writing any more")
    })?;
    let taken = disk.snapshot(&request.snapshot, &lock_note(command));
    let path = taken.map_err(|error| cannot_snapshot(name, &error))?;
    tracing::info!("{name}: its content is the snapshot {}", path.display());
    Ok(())
}

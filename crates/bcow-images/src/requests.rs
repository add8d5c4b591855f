//! Requests for snapshots to the processes that serve disks and mounts.

use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bcow::operation::{RemoveError, Removed, SnapshotError};
use serde::{Deserialize, Serialize};

use crate::error::{CommandError, Context, exit};
use crate::running::{LOCK_IN_UPPER, Service, service_with_control};

/// Longest request to a process that serves a disk or a mount, in bytes, with its newline.
pub const MAX_REQUEST_BYTES: usize = 4096;
/// Longest answer, in bytes.
const MAX_ANSWER_BYTES: u64 = 64 << 10;
/// How long such a process may take. A flush of a busy disk can take long.
const ANSWERS_WITHIN: Duration = Duration::from_secs(600);

/// A request: a line with a JSON document, on the socket that the process publishes.
#[derive(Debug, Serialize, Deserialize)]
pub struct SnapshotRequest {
    /// The device number and the inode number of the disk's file, or of the lock of an upper.
    pub device: u64,
    pub inode: u64,
    /// The name of the snapshot.
    pub snapshot: String,
    /// Whether the snapshot is a copy, which no disk is over.
    #[serde(default)]
    pub copy: bool,
    /// Whether the snapshot is removed, and not taken.
    #[serde(default)]
    pub remove: bool,
}

/// The answer, also a line.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotAnswer {
    Done,
    Removed {
        /// The path of the disk or snapshot that took the data.
        into: Option<PathBuf>,
        /// Number of bytes that were written or zeroed there.
        bytes: u64,
    },
    Failed(CommandError),
}

/// What a process is asked to do with a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    Take,
    Copy,
    Remove,
}

/// Asks the process that serves the disk at `path`, or the upper whose lock is at `path`, for a
/// snapshot of it. `shown` is its name for the user. Returns false if no process takes requests for
/// it.
pub fn ask(path: &Path, shown: impl fmt::Display, name: &str) -> Result<bool, CommandError> {
    Ok(request(path, shown, name, Asked::Take)?.is_some())
}

/// As [`ask`], for a copy of the disk or the upper: see [`SnapshotRequest`].
pub fn ask_for_copy(
    path: &Path,
    shown: impl fmt::Display,
    name: &str,
) -> Result<bool, CommandError> {
    Ok(request(path, shown, name, Asked::Copy)?.is_some())
}

/// As [`ask`], for the removal of a snapshot. Returns `None` if no process takes requests for it.
pub fn ask_to_remove(
    path: &Path,
    shown: impl fmt::Display,
    name: &str,
) -> Result<Option<Removed>, CommandError> {
    let answer = request(path, &shown, name, Asked::Remove)?;
    let removed = answer.map(|answer| match answer {
        SnapshotAnswer::Removed { into, bytes } => Ok(Removed { into, bytes }),
        SnapshotAnswer::Failed(error) => Err(error),
        SnapshotAnswer::Done => Err(CommandError::new(format!(
            "the process that serves {shown} cannot remove snapshots"
        ))),
    });
    removed.transpose()
}

fn request(
    path: &Path,
    shown: impl fmt::Display,
    name: &str,
    asked: Asked,
) -> Result<Option<SnapshotAnswer>, CommandError> {
    let Some(service) = service_with_control(path, |uid| is_trusted(uid, path)) else {
        return Ok(None);
    };
    let cannot = || format!("cannot ask the process that serves {shown}");
    let file = path.metadata().context(cannot)?;
    let request = SnapshotRequest {
        device: file.dev(),
        inode: file.ino(),
        snapshot: name.to_owned(),
        copy: asked == Asked::Copy,
        remove: asked == Asked::Remove,
    };
    // The process of a mount with the FUSE driver cannot do this: the kernel sends it what programs
    // wrote to maps. With the kernel driver, the process that freezes the file system does.
    let is_fuse = service.kind == "mount" && service.descriptor.is_none();
    let has_changes = is_fuse && asked != Asked::Remove;
    for mountpoint in service.at.iter().filter(|_| has_changes) {
        File::open(mountpoint)
            .and_then(|root| Ok(rustix::fs::syncfs(root)?))
            .context(|| format!("cannot synchronize {mountpoint}"))?;
    }
    match exchange(&service, path, &request).context(cannot)? {
        SnapshotAnswer::Failed(error) => Err(error),
        answer => Ok(Some(answer)),
    }
}

/// The mount of the upper at `upper`, if a process has one.
pub fn mount_of(upper: &Path) -> Option<Service> {
    let lock = upper.join(LOCK_IN_UPPER);
    service_with_control(&lock, |uid| is_trusted(uid, &lock))
}

fn exchange(
    service: &Service,
    path: &Path,
    request: &SnapshotRequest,
) -> io::Result<SnapshotAnswer> {
    let control = service.control.as_deref().unwrap_or_default();
    let mut stream = UnixStream::connect_addr(&SocketAddr::from_abstract_name(control)?)?;
    let peer = rustix::net::sockopt::socket_peercred(&stream)?;
    if !is_trusted(peer.uid.as_raw(), path) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    // A removal copies data. If this client ends, the process ends the removal.
    let timeout = (!request.remove).then_some(ANSWERS_WITHIN);
    stream.set_read_timeout(timeout)?;
    let sent = stream.write_all(format!("{}\n", serde_json::to_string(request)?).as_bytes());
    let mut line = String::new();
    let read = BufReader::new(stream.take(MAX_ANSWER_BYTES)).read_line(&mut line);
    // A process that refuses this client closes the connection before it reads the request; its
    // answer is there all the same.
    if line.is_empty() {
        sent.and(read)?;
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(serde_json::from_str(&line)?)
}

/// Whether a process of this user may act for the disk, or the upper with the lock, at `path`. Any
/// process can claim to use it.
fn is_trusted(uid: u32, path: &Path) -> bool {
    let own = rustix::process::geteuid().as_raw();
    uid == 0 || uid == own || path.metadata().is_ok_and(|file| file.uid() == uid)
}

/// The error of a disk of which there is no snapshot.
pub fn cannot_snapshot(disk: impl fmt::Display, error: &SnapshotError) -> CommandError {
    let failure = CommandError::new(format!("cannot take a snapshot of {disk}")).caused_by(error);
    match error {
        SnapshotError::Name => failure.exit_with(exit::USAGE),
        SnapshotError::Exists(_) => {
            failure.hint(format!("`bcow snapshot list {disk}` lists its snapshots"))
        }
        SnapshotError::TooDeep => {
            failure.hint("`bcow snapshot rm` merges a snapshot into the disk over it")
        }
        SnapshotError::Exchange(_) => {
            failure.hint("move the disk to a file system that can, such as ext4, xfs or btrfs")
        }
        _ => failure,
    }
}

/// The error of a snapshot that was not removed.
pub fn cannot_remove(disk: impl fmt::Display, name: &str, error: &RemoveError) -> CommandError {
    let failure = CommandError::new(format!("cannot remove {disk}@{name}")).caused_by(error);
    match error {
        RemoveError::Name(SnapshotError::Name) => failure.exit_with(exit::USAGE),
        RemoveError::Several(..) => failure.hint(
            "`bcow rebase` gives a disk another backing, and `bcow snapshot rm` removes a snapshot",
        ),
        RemoveError::Shared(_) => {
            failure.hint("first remove the forks, or the later snapshots that they have")
        }
        RemoveError::Changed => failure.hint("run the command again"),
        _ => failure,
    }
}

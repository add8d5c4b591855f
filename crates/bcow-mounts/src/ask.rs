//! Requests the statistics of a mount, and does not wait for a mount that does not answer.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bcow_fuse::stats::document::{Document, SCHEMA};
use bcow_fuse::stats::{MAX_XATTR_BYTES, STATS_XATTR};
use bcow_fuse::{Driver, MountedImage};
use bcow_images::error::{CommandError, Context};
use bcow_images::running::{self, ProcessState};
use rustix::io::Errno;

/// How long a mount may take to return its statistics.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the next process of a pool may take to publish a mount that it has taken over.
const PUBLISHES_WITHIN: Duration = Duration::from_secs(2);

/// The answer of a mount.
#[derive(Debug)]
pub enum Answer {
    /// The statistics, as JSON.
    Statistics(Vec<u8>),
    /// The process of the mount is dead.
    NotServed,
    /// The mount has no process: the kernel reads the image by itself.
    NoProcess,
    /// This user may not read the statistics, or the mount has none.
    Refused(Errno),
    /// The mount does not answer in time.
    Timeout,
}

/// Requests the statistics of a mount. Waits for the answer for at most `timeout`, and then for the
/// end of the requesting process for at most as long again.
///
/// Another process sends the request: a request to a mount that hangs keeps the mount in use, and
/// only the end of the requesting process cancels the request. For root, that process runs as the
/// only user who may access the mount.
pub fn ask(mount: &MountedImage, timeout: Duration) -> Answer {
    if let Driver::Direct(_) = mount.driver {
        return Answer::NoProcess;
    }
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["stats", "--direct", "--"])
        .arg(&mount.path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    if let Some((user, group)) = mount.owner
        && rustix::process::geteuid().is_root()
    {
        command.uid(user).gid(group);
    }
    let Ok(mut child) = command.spawn() else {
        return Answer::Timeout;
    };
    let (sender, receiver) = std::sync::mpsc::channel();
    if let Some(mut stdout) = child.stdout.take() {
        // Without the thread, the channel has no sender, so no answer arrives.
        let _ = std::thread::Builder::new().spawn(move || {
            let mut json = Vec::new();
            let read = stdout.read_to_end(&mut json);
            let _ = sender.send(read.map(|_| json));
        });
    }
    let answer = receiver.recv_timeout(timeout);
    if answer.is_err() {
        let _ = child.kill();
    }
    // It cannot be killed while the process of the mount handles its request.
    let start = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(None) if start.elapsed() < timeout => {
                std::thread::sleep(Duration::from_millis(1));
            }
            status => break status.ok().flatten(),
        }
    };
    match (answer, status.and_then(|status| status.code())) {
        (Ok(Ok(json)), Some(0)) => Answer::Statistics(json),
        (Ok(Ok(_)), Some(code)) => match Errno::from_raw_os_error(code) {
            Errno::NOTCONN | Errno::CONNABORTED => Answer::NotServed,
            errno => Answer::Refused(errno),
        },
        _ => Answer::Timeout,
    }
}

/// Runs in the process that [`ask`] starts: requests the statistics and prints them, without
/// a limit on time. The exit status is the error number.
pub fn print_statistics(directory: &Path) -> ! {
    let mut json = vec![0; MAX_XATTR_BYTES];
    let start = Instant::now();
    let read = loop {
        let place = place_of_statistics(directory);
        match place.and_then(|place| rustix::fs::getxattr(place, STATS_XATTR, &mut json)) {
            // The process has ended meanwhile. In a pool, the next one publishes a descriptor.
            Err(Errno::NOENT | Errno::SRCH) if start.elapsed() < PUBLISHES_WITHIN => {
                std::thread::sleep(Duration::from_millis(2));
            }
            read => break read,
        }
    };
    let printed = read.and_then(|length| {
        let mut out = std::io::stdout();
        let written = out.write_all(&json[..length]).and_then(|()| out.flush());
        written.map_err(|_| Errno::PIPE)
    });
    std::process::exit(printed.err().map_or(0, Errno::raw_os_error))
}

/// The path with the statistics of the mount at `directory`: the mount itself, or the hidden mount
/// behind it.
fn place_of_statistics(directory: &Path) -> Result<PathBuf, Errno> {
    match bcow_fuse::mounted_image(directory) {
        Ok(mount) if matches!(mount.driver, Driver::Kernel(_)) => hidden_mount(&mount),
        _ => Ok(directory.to_owned()),
    }
}

/// The hidden mount behind a mount with the kernel driver: the descriptor of its process, for root
/// only.
pub fn hidden_mount(mount: &MountedImage) -> Result<PathBuf, Errno> {
    if let Some(server) = running::server_of_mount(&mount.device, &mount.path)
        // Root must not follow the descriptor of another user, who could publish any number.
        && server.uid == 0
    {
        let service = server.mount(&mount.device, &mount.path);
        if let Some(descriptor) = service.and_then(|service| service.descriptor) {
            return Ok(format!("/proc/{}/fd/{descriptor}", server.pid).into());
        }
    }
    if mount.is_served() { Err(Errno::ACCESS) } else { Err(Errno::NOTCONN) }
}

/// The reason why a mount does not answer, and a hint.
pub fn explain_timeout(mount: &MountedImage) -> (String, Option<String>) {
    let Some(server) = running::server_of_mount(&mount.device, &mount.path) else {
        return (
            "the mount does not answer, and its process cannot be examined".to_owned(),
            Some("`bcow ps` as root lists the process".to_owned()),
        );
    };
    let pid = server.pid;
    let where_it_is = || {
        Some(format!(
            "`cat /proc/{pid}/task/*/stack` as root shows where"
        ))
    };
    let (does, hint) = match server.state {
        ProcessState::Stopped => (
            "is stopped by a signal",
            Some(format!("`kill -CONT {pid}` resumes the process")),
        ),
        ProcessState::Blocked => ("waits for a disk or another file system", where_it_is()),
        ProcessState::Ending => ("is ending", None),
        ProcessState::Running => ("is busy or hangs", where_it_is()),
    };
    let why = format!("the mount does not answer: its process {pid} {does}");
    (why, hint)
}

/// The reason why a mount returns no statistics.
pub fn explain_refusal(errno: Errno) -> String {
    match errno {
        Errno::NODATA => {
            "only the root directory of a mount has statistics; this one shows another \
                          directory, or another version of bcow serves it"
                .to_owned()
        }
        errno => std::io::Error::from(errno).to_string(),
    }
}

/// The statistics of the mount at `directory`, as JSON; waits for at most `timeout`.
pub fn statistics(
    directory: &Path,
    mount: &MountedImage,
    timeout: Duration,
) -> Result<Vec<u8>, CommandError> {
    let cannot = || {
        let shown = directory.display();
        CommandError::new(format!("cannot read the statistics of {shown}"))
    };
    match ask(mount, timeout) {
        Answer::Statistics(json) => Ok(json),
        Answer::NotServed => Err(cannot()
            .caused_by_text("the process of the mount is dead")
            .hint(
                "`bcow umount` removes the mount; a new mount with the same upper recovers the \
                 changes",
            )),
        Answer::NoProcess => {
            Err(cannot().caused_by_text("the kernel reads the image without a process"))
        }
        Answer::Refused(errno) => Err(cannot().caused_by_text(explain_refusal(errno))),
        Answer::Timeout => {
            let (cause, hint) = explain_timeout(mount);
            Err(cannot().caused_by_text(cause).hint_if(hint))
        }
    }
}

/// Decodes the statistics of a mount.
pub fn read(directory: &Path, json: &[u8]) -> Result<Document, CommandError> {
    let damaged = || format!("the statistics of {} are invalid", directory.display());
    let document: Document = serde_json::from_slice(json).context(damaged)?;
    if document.schema == SCHEMA {
        Ok(document)
    } else {
        Err(CommandError::new(damaged())
            .caused_by_text(format!("unknown schema {:?}", document.schema)))
    }
}

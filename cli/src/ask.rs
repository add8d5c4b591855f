//! Asking a mount what it knows of itself, without waiting for one that does not answer.

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bcow_fuse::MountedImage;
use bcow_fuse::stats::document::{Document, SCHEMA};
use bcow_fuse::stats::{MOST_XATTR_BYTES, STATS_XATTR};
use rustix::io::Errno;

use crate::error::{CommandError, Context};
use crate::running::{self, State};

/// How long a mount may take to say what it knows of itself.
pub const ANSWERS_WITHIN: Duration = Duration::from_secs(5);

/// What a mount answers.
#[derive(Debug)]
pub enum Answer {
    /// This is what it says of itself, as JSON.
    Says(Vec<u8>),
    /// It is not served any more.
    NotServed,
    /// This user may not read the answer, or the mount gives none.
    Refused(Errno),
    /// It does not answer.
    Nothing,
}

/// What a mount says of itself, without waiting for one that does not answer.
///
/// Another process asks: only its end takes back a question to a mount that hangs, and the question keeps the mount in use. For root
/// it asks as the user whom alone the mount lets in.
pub fn ask(mount: &MountedImage, patience: Duration) -> Answer {
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
        return Answer::Nothing;
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
    let answer = receiver.recv_timeout(patience);
    if answer.is_err() {
        let _ = child.kill();
    }
    // It cannot be killed while the mount's process has its question in hand.
    let start = Instant::now();
    let status = loop {
        match child.try_wait() {
            Ok(None) if start.elapsed() < patience => {
                std::thread::sleep(Duration::from_millis(1));
            }
            status => break status.ok().flatten(),
        }
    };
    match (answer, status.and_then(|status| status.code())) {
        (Ok(Ok(json)), Some(0)) => Answer::Says(json),
        (Ok(Ok(_)), Some(code)) => match Errno::from_raw_os_error(code) {
            Errno::NOTCONN | Errno::CONNABORTED => Answer::NotServed,
            errno => Answer::Refused(errno),
        },
        _ => Answer::Nothing,
    }
}

/// Runs in the process that [`ask`] starts: asks the mount, however long the mount takes. The exit
/// status is the error number.
pub fn tell(directory: &Path) -> ! {
    let mut json = vec![0; MOST_XATTR_BYTES];
    let told = rustix::fs::getxattr(directory, STATS_XATTR, &mut json).and_then(|length| {
        let mut out = std::io::stdout();
        let written = out.write_all(&json[..length]).and_then(|()| out.flush());
        written.map_err(|_| Errno::PIPE)
    });
    std::process::exit(told.err().map_or(0, Errno::raw_os_error))
}

/// Why a mount that is there does not answer, and what can be done.
pub fn silence(mount: &MountedImage) -> (String, Option<String>) {
    let Some(server) = running::server_of_mount(&mount.device) else {
        return (
            "it does not answer, and its process cannot be looked at".to_owned(),
            Some("`bcow ps` as root lists the process".to_owned()),
        );
    };
    let pid = server.pid;
    match server.state {
        State::Stopped => (
            format!("it does not answer: process {pid}, which serves it, is stopped"),
            Some(format!("`kill -CONT {pid}` lets it go on")),
        ),
        State::Blocked => (
            format!(
                "it does not answer: process {pid}, which serves it, waits for a disk or another file system"
            ),
            Some(format!(
                "`cat /proc/{pid}/task/*/stack` as root shows where"
            )),
        ),
        State::Ending => (
            format!("it does not answer: process {pid} is ending it"),
            None,
        ),
        State::Running => (
            format!("it does not answer: process {pid}, which serves it, is busy or hangs"),
            Some(format!(
                "`cat /proc/{pid}/task/*/stack` as root shows where"
            )),
        ),
    }
}

/// What a mount said.
pub fn read(directory: &Path, json: &[u8]) -> Result<Document, CommandError> {
    let damaged = || format!("what {} says of itself makes no sense", directory.display());
    let document: Document = serde_json::from_slice(json).context(damaged)?;
    match document.schema == SCHEMA {
        true => Ok(document),
        false => Err(CommandError::new(damaged())
            .caused_by_text(format!("its schema is {:?}", document.schema))),
    }
}

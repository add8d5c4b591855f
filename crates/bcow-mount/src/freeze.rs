//! A mounted file system that makes no changes for a while.
//!
//! Another process freezes it. A freeze outlives the process that asked for it, so that process
//! watches the one that serves the disk, and thaws when that one ends. A thread would not do: if
//! the process is killed, a thread that waits for the disk ends only when the disk is served again,
//! and in a pool the next process begins when all threads of this one have ended.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};

use rustix::io::Errno;

use crate::apart::run_apart;
use crate::ioctl;

/// What the other process writes when the file system is frozen, and when it is thawed again.
/// Otherwise it writes the error.
const FROZEN: &str = "frozen";
const THAWED: &str = "thawed";

/// A process that runs [`hold_frozen`].
#[derive(Debug)]
pub struct Freezer {
    /// Its standard input and output.
    connection: UnixStream,
    child: Option<Child>,
}

impl Freezer {
    /// Starts `command`.
    pub fn start(mut command: Command) -> io::Result<Self> {
        let (connection, theirs) = UnixStream::pair()?;
        let theirs = OwnedFd::from(theirs);
        let command = command.stdin(theirs.try_clone()?).stdout(theirs);
        // A signal of the terminal is not for it.
        let child = Some(command.process_group(0).spawn()?);
        Ok(Freezer { connection, child })
    }
}

/// Of a process that is no child of this one.
impl From<UnixStream> for Freezer {
    fn from(connection: UnixStream) -> Self {
        Freezer {
            connection,
            child: None,
        }
    }
}

/// Runs `work` while the file system at `target` is frozen: all that programs have written is on
/// its device, without a log to replay, and writers wait.
pub fn while_frozen<T>(target: &Path, freezer: Freezer, work: impl FnOnce() -> T) -> io::Result<T> {
    let mut answers = BufReader::new(&freezer.connection);
    let mut answer = || {
        let mut line = String::new();
        answers
            .read_line(&mut line)
            .map(|_| line.trim_end().to_owned())
    };
    let result = match &*answer()? {
        FROZEN => Ok(work()),
        error => Err(io::Error::other(error.to_owned())),
    };
    // It reads the end of its input. If it has ended, there is nothing to shut down.
    let _ = freezer.connection.shutdown(Shutdown::Write);
    let is_thawed = answer().is_ok_and(|line| line == THAWED);
    if let Some(mut child) = freezer.child {
        let _ = child.wait();
    }
    if result.is_ok() && !is_thawed {
        tracing::warn!("the process that froze {} was killed", target.display());
        run_apart(|| File::open(target).is_ok_and(|directory| ioctl::thaw(directory).is_ok()));
    }
    result
}

/// In a process of its own: freezes the file system at `target`, with the device number `device`,
/// writes a line, and thaws it at the end of `input`. A file system that another program has frozen
/// stays frozen.
pub fn hold_frozen(
    target: &Path,
    device: &str,
    mut input: impl Read,
    mut output: impl Write,
) -> io::Result<()> {
    let frozen = open(target, device).and_then(freeze);
    match &frozen {
        Ok(_) => writeln!(output, "{FROZEN}")?,
        Err(error) => writeln!(output, "{error}")?,
    }
    let frozen = frozen?;
    input.read_to_end(&mut Vec::new())?;
    drop(frozen);
    writeln!(output, "{THAWED}")
}

/// Opens the root of the file system.
fn open(target: &Path, device: &str) -> io::Result<File> {
    let directory = File::open(target)?;
    let number = directory.metadata()?.dev();
    let number = format!(
        "{}:{}",
        rustix::fs::major(number),
        rustix::fs::minor(number)
    );
    if device == number { Ok(directory) } else { Err(Errno::NODEV.into()) }
}

/// A frozen file system. Dropping this thaws it, unless another program has frozen it.
struct Frozen {
    directory: File,
    is_own: bool,
}

fn freeze(directory: File) -> io::Result<Frozen> {
    // Most data is written before programs have to wait.
    rustix::fs::syncfs(&directory)?;
    let is_own = match ioctl::freeze(&directory) {
        Ok(()) => true,
        Err(Errno::BUSY) => false,
        Err(errno) => return Err(errno.into()),
    };
    Ok(Frozen { directory, is_own })
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if self.is_own {
            // Nothing is left to do if that fails.
            let _ = ioctl::thaw(&self.directory);
        }
    }
}

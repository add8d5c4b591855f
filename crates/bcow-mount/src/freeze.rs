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

use crate::ioctl;

/// What the other process writes when most data is written, when the file system is frozen, and
/// when it is thawed again. Otherwise it writes the error.
const SYNCHRONIZED: &str = "synchronized";
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

/// Runs `work` while the file system of `freezer` is frozen: all that programs have written is on
/// its device, without a log to replay, and writers wait. `prepare` runs before that, when most of
/// what they have written is on the device. If it fails, nothing is frozen. `thaw` has to thaw the
/// file system, whose freezer was killed.
pub fn while_frozen<T, E>(
    freezer: Freezer,
    prepare: impl FnOnce() -> Result<(), E>,
    work: impl FnOnce() -> Result<T, E>,
    thaw: impl FnOnce(),
) -> io::Result<Result<T, E>> {
    let mut answers = BufReader::new(&freezer.connection);
    let mut expect = |expected: &str| {
        let mut line = String::new();
        answers.read_line(&mut line)?;
        match line.trim_end() {
            found if found == expected => Ok(()),
            "" => Err(io::ErrorKind::UnexpectedEof.into()),
            error => Err(io::Error::other(error.to_owned())),
        }
    };
    let mut is_frozen = false;
    let result = expect(SYNCHRONIZED).and_then(|()| match prepare() {
        Ok(()) => {
            (&freezer.connection).write_all(b"\n")?;
            let frozen = expect(FROZEN);
            // If it was killed, that can have been after the freeze.
            is_frozen = frozen.as_ref().err().is_none_or(is_end);
            frozen.map(|()| work())
        }
        Err(error) => Ok(Err(error)),
    });
    // It reads the end of its input. If it has ended, there is nothing to shut down.
    let _ = freezer.connection.shutdown(Shutdown::Write);
    let is_thawed = !is_frozen || expect(THAWED).is_ok();
    if let Some(mut child) = freezer.child {
        let _ = child.wait();
    }
    if !is_thawed {
        thaw();
    }
    result
}

fn is_end(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::UnexpectedEof
}

/// In a process of its own, for [`while_frozen`]: synchronizes the file system at `target`, with
/// the device number `device`, writes a line, freezes it after a byte of `input`, writes another
/// line, and thaws it at the end of `input`. A file system that another program has frozen stays
/// frozen.
pub fn hold_frozen(
    target: &Path,
    device: &str,
    mut input: impl Read,
    mut output: impl Write,
) -> io::Result<()> {
    let held = hold(target, device, &mut input, &mut output);
    if let Err(error) = &held {
        writeln!(output, "{error}")?;
    }
    held
}

fn hold(
    target: &Path,
    device: &str,
    mut input: impl Read,
    mut output: impl Write,
) -> io::Result<()> {
    let directory = open(target, device)?;
    // Most data is written before programs have to wait.
    rustix::fs::syncfs(&directory)?;
    writeln!(output, "{SYNCHRONIZED}")?;
    input.read_exact(&mut [0])?;
    let frozen = freeze(directory)?;
    writeln!(output, "{FROZEN}")?;
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

/// Thaws the file system at `target`, with the device number `device`.
pub fn thaw(target: &Path, device: &str) -> io::Result<()> {
    Ok(ioctl::thaw(open(target, device)?)?)
}

/// A frozen file system. Dropping this thaws it, unless another program has frozen it.
struct Frozen {
    directory: File,
    is_own: bool,
}

fn freeze(directory: File) -> io::Result<Frozen> {
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

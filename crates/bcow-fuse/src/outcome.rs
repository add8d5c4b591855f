//! The result of closing an upper, for the process that unmounts it.
//!
//! The process of a mount still writes to the upper after the mount is gone, and only its parent
//! gets its exit status. The process therefore writes the result into a pipe of its own. `bcow
//! umount` opens this pipe through `/proc/PID/fd` before it unmounts, and reads it when the process
//! has ended.
//!
//! A pipe needs no disk, which may be the part that failed. Only root and the user of the process
//! may open its descriptors; they are also the users who may unmount. The kernel removes the pipe
//! with the process, however the process ends. A process that takes the mount over continues with
//! the same pipe.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;

use crate::error::MountError;
use crate::takeover::duplicate;

/// The line for a complete upper.
const COMPLETE: &str = "complete";
/// The start of the line for an incomplete upper; the reason follows.
const INCOMPLETE: &str = "incomplete: ";
/// The line for an upper or a disk that has no name any more.
const REMOVED: &str = "removed";
/// Most bytes read from the pipe. No reason is longer.
const MAX_BYTES: u64 = 4096;

/// In the process of the mount: the pipe into which the process writes its result.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// This process does not read it. Other processes open it through `/proc`.
    reader: OwnedFd,
    writer: File,
}

impl Outcome {
    pub(crate) fn new() -> Result<Self, MountError> {
        // A write must not block when no other process reads the pipe.
        let flags = PipeFlags::CLOEXEC | PipeFlags::NONBLOCK;
        let (reader, writer) =
            rustix::pipe::pipe_with(flags).map_err(MountError::process("create a pipe"))?;
        Ok(Outcome {
            reader,
            writer: writer.into(),
        })
    }

    /// The pipe of a process that has ended, of which this process takes a mount over; a new one if
    /// that process had none, or was of an earlier version.
    pub(crate) fn of(writer: Option<OwnedFd>) -> Result<Self, MountError> {
        let taken = writer.and_then(|writer| {
            let reader = open_for_reading(&writer).ok()?;
            let writer = writer.into();
            Some(Outcome { reader, writer })
        });
        taken.map_or_else(Outcome::new, Ok)
    }

    /// Another descriptor of the pipe, for a process that takes the mount over.
    pub(crate) fn hand_over(&self) -> Result<OwnedFd, MountError> {
        duplicate(self.writer.as_fd())
    }

    /// The descriptor that other processes open through `/proc`.
    pub(crate) fn descriptor(&self) -> RawFd {
        self.reader.as_raw_fd()
    }

    /// Writes the result. Readers use only the first result.
    pub(crate) fn report(&self, ended: Result<(), Errno>) {
        let line = match ended {
            Ok(()) => format!("{COMPLETE}\n"),
            Err(errno) => format!("{INCOMPLETE}{}\n", io::Error::from(errno)),
        };
        self.write(&line);
    }

    /// Writes that the upper or the disk was removed while it was mounted.
    pub(crate) fn report_removed(&self) {
        self.write(&format!("{REMOVED}\n"));
    }

    fn write(&self, line: &str) {
        // The pipe is full only if another process filled it; the result is lost then.
        let _ = (&self.writer).write_all(line.as_bytes());
    }
}

/// How the process of a mount closed its upper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The upper holds all written data, durable as far as the mount's options require it.
    Complete,
    /// The upper does not hold all written data. The string is the reason.
    Incomplete(String),
    /// The upper or the disk was removed while it was mounted.
    Removed,
    /// The process wrote no result: it was killed, or is still running.
    Unknown,
}

/// In another process: the pipe from which it reads the result of a mount's process.
#[derive(Debug)]
pub struct Ending(File);

impl Ending {
    /// Opens the pipe of process `pid`. The caller must check afterwards that `pid` is still the
    /// process of the mount.
    pub(crate) fn open(pid: u32, descriptor: RawFd) -> io::Result<Self> {
        // The descriptor number comes from the other process, and this process may be root. Open
        // the file only if it is a pipe.
        let path = rustix::fs::open(
            format!("/proc/{pid}/fd/{descriptor}"),
            OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&path)?.st_mode);
        if kind != FileType::Fifo {
            return Err(Errno::INVAL.into());
        }
        Ok(Ending(open_for_reading(&path)?.into()))
    }

    /// Waits until the process has closed the upper and released it, or has ended without a
    /// successor. Returns whether that was within `patience`.
    pub fn wait(&self, patience: Duration) -> bool {
        // The process writes the result, and closes the pipe when it has released the upper.
        let mut pipe = [PollFd::new(&self.0, PollFlags::empty())];
        let limit = Timespec::try_from(patience).ok();
        match poll(&mut pipe, limit.as_ref()) {
            Ok(_) => pipe[0].revents().contains(PollFlags::HUP),
            Err(_) => false,
        }
    }

    /// The result that the process has written so far. Call this when the process has ended.
    pub fn read(&self) -> Ended {
        let mut text = Vec::new();
        // A running process keeps the pipe open. The read then fails with EAGAIN after the bytes
        // that are in the pipe.
        let _ = (&self.0).take(MAX_BYTES).read_to_end(&mut text);
        let text = String::from_utf8_lossy(&text);
        let Some((line, _)) = text.split_once('\n') else {
            return Ended::Unknown;
        };
        match line.strip_prefix(INCOMPLETE) {
            Some(reason) => Ended::Incomplete(reason.to_owned()),
            None if line == COMPLETE => Ended::Complete,
            None if line == REMOVED => Ended::Removed,
            None => Ended::Unknown,
        }
    }
}

/// Opens a pipe again.
fn open_for_reading(pipe: &OwnedFd) -> rustix::io::Result<OwnedFd> {
    rustix::fs::open(
        format!("/proc/self/fd/{}", pipe.as_raw_fd()),
        OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_ends_when_the_process_has_released_the_upper() {
        let outcome = Outcome::new().unwrap();
        let ending = Ending::open(std::process::id(), outcome.descriptor()).unwrap();
        outcome.report(Ok(()));
        assert!(!ending.wait(Duration::ZERO));
        drop(outcome);
        assert!(ending.wait(Duration::ZERO));
        assert_eq!(ending.read(), Ended::Complete);
    }

    #[test]
    fn the_result_of_a_process_that_takes_over_is_read_from_the_same_pipe() {
        let first = Outcome::new().unwrap();
        let ending = Ending::open(std::process::id(), first.descriptor()).unwrap();
        let kept = first.hand_over().unwrap();
        drop(first);
        assert!(!ending.wait(Duration::ZERO));
        let next = Outcome::of(Some(kept)).unwrap();
        let later = Ending::open(std::process::id(), next.descriptor()).unwrap();
        next.report(Err(Errno::NOSPC));
        drop(next);
        assert!(ending.wait(Duration::ZERO));
        assert!(matches!(ending.read(), Ended::Incomplete(_)));
        // Another unmount has read it.
        assert_eq!(later.read(), Ended::Unknown);
    }

    #[test]
    fn the_first_result_is_read_after_the_end() {
        let read = |report: &dyn Fn(&Outcome)| {
            let outcome = Outcome::new().unwrap();
            let ending = Ending::open(std::process::id(), outcome.descriptor()).unwrap();
            report(&outcome);
            drop(outcome);
            ending.read()
        };
        assert_eq!(read(&|_| {}), Ended::Unknown);
        assert_eq!(read(&|outcome| outcome.report(Ok(()))), Ended::Complete);
        let failed = read(&|outcome| {
            outcome.report(Err(Errno::NOSPC));
            outcome.report(Ok(()));
        });
        let reason = io::Error::from(Errno::NOSPC).to_string();
        assert_eq!(failed, Ended::Incomplete(reason));
    }

    #[test]
    fn reading_does_not_wait_for_a_running_process() {
        let outcome = Outcome::new().unwrap();
        let ending = Ending::open(std::process::id(), outcome.descriptor()).unwrap();
        assert_eq!(ending.read(), Ended::Unknown);
        // A write does not wait for a reader either.
        for _ in 0..100_000 {
            outcome.report(Ok(()));
        }
        assert_eq!(ending.read(), Ended::Complete);
    }

    #[test]
    fn only_a_pipe_is_opened() {
        let file = tempfile::tempfile().unwrap();
        let error = Ending::open(std::process::id(), file.as_raw_fd()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::INVAL.raw_os_error()));
        Ending::open(std::process::id(), 1 << 30).unwrap_err();
    }
}

//! How the use of an upper ended, for who unmounts it.
//!
//! The mount's process writes last after the mount is gone, and its exit status is told to its parent only. So it says into a pipe of its
//! own how that went. `bcow umount` opens the pipe before it unmounts, as one of the process's descriptors in /proc, and reads it when the
//! process has ended. Nothing of this lies on a disk, which may be what failed; who may look at a process's descriptors is its user and root,
//! who are those that may unmount; and the pipe ends with the process, whatever ends that.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::pipe::PipeFlags;

use crate::error::MountError;

/// What is said when everything is where it belongs.
const COMPLETE: &str = "complete";
/// What is said before the reason when it is not.
const INCOMPLETE: &str = "incomplete: ";
/// More than any reason has.
const MOST_BYTES: u64 = 4096;

/// In the mount's process: where it says how it ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// Nobody reads it here, but it is what others open.
    reader: OwnedFd,
    writer: File,
}

impl Outcome {
    pub(crate) fn new() -> Result<Self, MountError> {
        // Whoever it is for may not be there: that must stop nobody.
        let flags = PipeFlags::CLOEXEC | PipeFlags::NONBLOCK;
        let (reader, writer) =
            rustix::pipe::pipe_with(flags).map_err(|errno| MountError::Process {
                action: "make a pipe",
                source: errno.into(),
            })?;
        Ok(Outcome {
            reader,
            writer: writer.into(),
        })
    }

    /// The descriptor by which others find it.
    pub(crate) fn descriptor(&self) -> RawFd {
        self.reader.as_raw_fd()
    }

    /// Says how it ended. What is said first counts.
    pub(crate) fn tell(&self, ended: Result<(), Errno>) {
        let line = match ended {
            Ok(()) => format!("{COMPLETE}\n"),
            Err(errno) => format!("{INCOMPLETE}{}\n", io::Error::from(errno)),
        };
        // A pipe without room is one that somebody else filled.
        let _ = (&self.writer).write_all(line.as_bytes());
    }
}

/// How a mount's process ended the use of its upper.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// All that was written is there, and durable as far as the mount's options want it.
    Complete,
    /// Not all of it, for this reason.
    Incomplete(String),
    /// It did not say: it was killed, or still runs.
    Unknown,
}

/// In another process: hears from a mount's process how it ended.
#[derive(Debug)]
pub struct Ending(File);

impl Ending {
    /// Opens the pipe of a process. Whether that is still the process that it is taken for, the caller looks at afterwards.
    pub(crate) fn open(pid: u32, descriptor: RawFd) -> io::Result<Self> {
        // A process says what it likes, and this may be root: nothing but a pipe is opened.
        let path = rustix::fs::open(
            format!("/proc/{pid}/fd/{descriptor}"),
            OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&path)?.st_mode);
        if kind != FileType::Fifo {
            return Err(Errno::INVAL.into());
        }
        let pipe = rustix::fs::open(
            format!("/proc/self/fd/{}", path.as_raw_fd()),
            OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        Ok(Ending(pipe.into()))
    }

    /// What was said until now: to be called when the process has ended.
    pub fn hear(&self) -> Ended {
        let mut said = Vec::new();
        // A process that goes on keeps the pipe open, and what is in it comes before that error.
        let _ = (&self.0).take(MOST_BYTES).read_to_end(&mut said);
        let said = String::from_utf8_lossy(&said);
        let Some((line, _)) = said.split_once('\n') else {
            return Ended::Unknown;
        };
        match line.strip_prefix(INCOMPLETE) {
            Some(reason) => Ended::Incomplete(reason.to_owned()),
            None if line == COMPLETE => Ended::Complete,
            None => Ended::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_said_first_is_heard_after_the_end() {
        let heard = |tell: &dyn Fn(&Outcome)| {
            let outcome = Outcome::new().unwrap();
            let ending = Ending::open(std::process::id(), outcome.descriptor()).unwrap();
            tell(&outcome);
            drop(outcome);
            ending.hear()
        };
        assert_eq!(heard(&|_| {}), Ended::Unknown);
        assert_eq!(heard(&|outcome| outcome.tell(Ok(()))), Ended::Complete);
        let failed = heard(&|outcome| {
            outcome.tell(Err(Errno::NOSPC));
            outcome.tell(Ok(()));
        });
        let reason = io::Error::from(Errno::NOSPC).to_string();
        assert_eq!(failed, Ended::Incomplete(reason));
    }

    #[test]
    fn process_that_goes_on_is_not_waited_for() {
        let outcome = Outcome::new().unwrap();
        let ending = Ending::open(std::process::id(), outcome.descriptor()).unwrap();
        assert_eq!(ending.hear(), Ended::Unknown);
        // Nor does it wait for those who listen.
        for _ in 0..100_000 {
            outcome.tell(Ok(()));
        }
        assert_eq!(ending.hear(), Ended::Complete);
    }

    #[test]
    fn nothing_but_a_pipe_is_opened() {
        let file = tempfile::tempfile().unwrap();
        let error = Ending::open(std::process::id(), file.as_raw_fd()).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(Errno::INVAL.raw_os_error()));
        Ending::open(std::process::id(), 1 << 30).unwrap_err();
    }
}

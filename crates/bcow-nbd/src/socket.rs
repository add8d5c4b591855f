//! A connected stream socket: received by one thread at a time, sent to by several, one message after the other.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, Shutdown, recv, sendmsg, shutdown};

/// Whether to wait for bytes that are not there yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// As long as it takes.
    Forever,
    /// Not at all: then [`io::ErrorKind::WouldBlock`].
    No,
    /// So long: then [`io::ErrorKind::TimedOut`].
    Until(Instant),
}

/// A connection.
pub(crate) struct Socket {
    fd: OwnedFd,
    /// Held while a message is sent, so that messages do not mix.
    sending: Mutex<()>,
}

impl Socket {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Socket {
            fd,
            sending: Mutex::new(()),
        }
    }

    /// Receives at least one byte; 0 at the end of the stream.
    pub(crate) fn receive(&self, buf: &mut [u8], wait: Wait) -> io::Result<usize> {
        let flags = match wait {
            Wait::Forever => RecvFlags::empty(),
            Wait::No => RecvFlags::DONTWAIT,
            Wait::Until(deadline) => {
                wait_for(&self.fd, PollFlags::IN, deadline)?;
                RecvFlags::empty()
            }
        };
        loop {
            match recv(&self.fd, &mut *buf, flags) {
                Ok((count, _)) => return Ok(count),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends all the pieces as one message. The other side gets `patience` to take each part of it.
    pub(crate) fn send(&self, pieces: &mut [IoSlice<'_>], patience: Patience) -> io::Result<()> {
        let guard = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = self.send_now(pieces, patience);
        drop(guard);
        sent
    }

    fn send_now(&self, mut pieces: &mut [IoSlice<'_>], patience: Patience) -> io::Result<()> {
        IoSlice::advance_slices(&mut pieces, 0);
        // The common case, that all fits into the socket's buffer, is one system call.
        let mut flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        if patience.0.is_none() {
            flags = SendFlags::NOSIGNAL;
        }
        while !pieces.is_empty() {
            match sendmsg(&self.fd, pieces, &mut SendAncillaryBuffer::default(), flags) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => IoSlice::advance_slices(&mut pieces, count),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => match patience.0 {
                    Some(patience) => {
                        wait_for(&self.fd, PollFlags::OUT, Instant::now() + patience)?;
                    }
                    None => wait_forever(&self.fd, PollFlags::OUT)?,
                },
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Whoever waits to receive finds the end of the stream.
    pub(crate) fn stop_receiving(&self) {
        // Fails if the other side is gone, and then there is nothing to stop.
        let _ = shutdown(&self.fd, Shutdown::Read);
    }

    /// Nothing goes either way any more.
    pub(crate) fn cut(&self) {
        let _ = shutdown(&self.fd, Shutdown::Both);
    }
}

/// How long the other side may take none of what it is sent; `None` is for ever.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience(pub(crate) Option<Duration>);

fn wait_for(fd: impl AsFd, events: PollFlags, deadline: Instant) -> io::Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).map_err(|_| io::ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::new(&fd, events)], Some(&left)) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn wait_forever(fd: impl AsFd, events: PollFlags) -> io::Result<()> {
    loop {
        match poll(&mut [PollFd::new(&fd, events)], None) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

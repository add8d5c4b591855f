//! A connected stream socket. One thread receives at a time; several threads send, one message at a
//! time.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, getpeername, recv, send, shutdown};

use crate::sync::{Mutex, lock};
use crate::tls::{Layer, Tls};

/// How long the client may accept no bytes of TLS's own messages.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);

/// How long to wait for bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Without a limit.
    Forever,
    /// Do not wait; returns [`io::ErrorKind::WouldBlock`].
    No,
    /// Until a deadline; then [`io::ErrorKind::TimedOut`].
    Until(Instant),
}

/// A connection.
pub(crate) struct Socket {
    fd: OwnedFd,
    /// Locked while a message is sent, so that messages are not mixed. The buffer holds the
    /// ciphertext of the message.
    sending: Mutex<Vec<u8>>,
    tls: OnceLock<Layer>,
}

impl Socket {
    pub(crate) fn new(fd: OwnedFd) -> Self {
        Socket {
            fd,
            sending: Mutex::default(),
            tls: OnceLock::new(),
        }
    }

    /// Starts TLS. No bytes may have been received ahead.
    pub(crate) fn start_tls(&self, tls: &Tls, deadline: Option<Instant>) -> io::Result<()> {
        let layer = Layer::new(tls.connection()?);
        let wait = deadline.map_or(Wait::Forever, Wait::Until);
        layer.handshake(
            |buf| self.receive_plain(buf, wait),
            |bytes| self.send_plain(bytes, Patience::until(deadline)),
        )?;
        // Only the handshake starts TLS, and only once.
        self.tls
            .set(layer)
            .map_err(|_| io::Error::other("TLS was begun twice"))
    }

    pub(crate) fn is_tls(&self) -> bool {
        self.tls.get().is_some()
    }

    /// The address of the client, for messages.
    pub(crate) fn peer(&self) -> String {
        let address = getpeername(&self.fd).ok().flatten();
        match address.and_then(|address| SocketAddr::try_from(address).ok()) {
            Some(address) => address.to_string(),
            None => "this machine".into(),
        }
    }

    /// Receives at least one byte; returns 0 at the end of the stream.
    pub(crate) fn receive(&self, buf: &mut [u8], wait: Wait) -> io::Result<usize> {
        match self.tls.get() {
            None => self.receive_plain(buf, wait),
            Some(layer) => {
                let answer = |layer: &Layer| {
                    let mut out = lock(&self.sending);
                    out.clear();
                    layer.encrypt(&[], &mut out)?;
                    // Only a few bytes. If they do not fit, the client does not read and makes no
                    // progress.
                    self.send_plain(&out, Patience(Some(ANSWER_PATIENCE)))
                };
                layer.receive(buf, |buf| self.receive_plain(buf, wait), answer)
            }
        }
    }

    fn receive_plain(&self, buf: &mut [u8], wait: Wait) -> io::Result<usize> {
        let flags = match wait {
            Wait::Forever => RecvFlags::empty(),
            Wait::No => RecvFlags::DONTWAIT,
            Wait::Until(deadline) => {
                wait_for(&self.fd, PollFlags::IN, Some(deadline))?;
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

    /// Sends a message. The client gets `patience` for each part.
    pub(crate) fn send(&self, bytes: &[u8], patience: Patience) -> io::Result<()> {
        let mut out = lock(&self.sending);
        match self.tls.get() {
            None => self.send_plain(bytes, patience),
            Some(layer) => {
                let mut rest = bytes;
                while !rest.is_empty() {
                    out.clear();
                    let count = layer.encrypt(rest, &mut out)?;
                    rest = &rest[count..];
                    self.send_plain(&out, patience)?;
                }
                Ok(())
            }
        }
    }

    fn send_plain(&self, mut bytes: &[u8], patience: Patience) -> io::Result<()> {
        while !bytes.is_empty() {
            // Usually the whole message fits into the socket's buffer; this takes one system call.
            match send(&self.fd, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(count) => bytes = &bytes[count..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let deadline = patience.0.map(|patience| Instant::now() + patience);
                    wait_for(&self.fd, PollFlags::OUT, deadline)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Sends the close message of TLS, if TLS is used, and shuts down both directions.
    pub(crate) fn close(&self) {
        if let Some(layer) = self.tls.get() {
            let mut out = lock(&self.sending);
            out.clear();
            if layer.close(&mut out).is_ok() {
                let _ = self.send_plain(&out, Patience(Some(Duration::ZERO)));
            }
        }
        self.cut();
    }

    /// Shuts down the receiving direction. A thread that waits to receive gets the end of the
    /// stream.
    pub(crate) fn stop_receiving(&self) {
        // An error means that the client has disconnected already.
        let _ = shutdown(&self.fd, Shutdown::Read);
    }

    /// Shuts down both directions.
    pub(crate) fn cut(&self) {
        let _ = shutdown(&self.fd, Shutdown::Both);
    }
}

/// How long the other side may accept no bytes; `None` for no limit.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience(pub(crate) Option<Duration>);

impl Patience {
    pub(crate) fn until(deadline: Option<Instant>) -> Self {
        Patience(deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())))
    }
}

fn wait_for(fd: impl AsFd, events: PollFlags, deadline: Option<Instant>) -> io::Result<()> {
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let left = left.map(Timespec::try_from).transpose();
        let left = left.map_err(|_| io::ErrorKind::InvalidInput)?;
        match poll(&mut [PollFd::new(&fd, events)], left.as_ref()) {
            Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

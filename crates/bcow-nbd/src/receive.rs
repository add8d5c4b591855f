//! Buffered reception from a socket. Reads ahead, so that several small requests need only one
//! system call.

use std::io;
use std::time::{Duration, Instant};

use crate::error::SessionEnd;
use crate::socket::{Socket, Wait};
use crate::sync::thread;

/// Size of the buffer in bytes. A short payload can be used from here without a copy.
const BUFFER_BYTES: usize = 256 << 10;

/// The timeout starts again each time this many bytes of a payload have arrived.
const PACE_BYTES: usize = 64 << 10;

/// How long a thread polls before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// The receiving side of a connection.
pub(crate) struct Receiver {
    buf: Box<[u8]>,
    start: usize,
    end: usize,
    /// Timeout for the next part of a message that has started; `None` for no limit.
    patience: Option<Duration>,
    spin: Spin,
}

impl Receiver {
    pub(crate) fn new(patience: Option<Duration>) -> Self {
        Receiver {
            buf: vec![0; BUFFER_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            patience,
            spin: Spin::new(),
        }
    }

    /// Largest `count` for [`Receiver::fill`].
    pub(crate) fn room(&self) -> usize {
        self.buf.len()
    }

    /// Bytes that have arrived and are not consumed.
    pub(crate) fn available(&self) -> &[u8] {
        &self.buf[self.start..self.end]
    }

    /// Removes the first `count` bytes.
    pub(crate) fn consume(&mut self, count: usize) {
        self.start = (self.start + count).min(self.end);
        if self.start == self.end {
            self.start = 0;
            self.end = 0;
        }
    }

    /// Waits without a limit for the start of a message; `false` at the end of the stream.
    pub(crate) fn wait(&mut self, socket: &Socket) -> Result<bool, SessionEnd> {
        if self.start < self.end {
            return Ok(true);
        }
        let begin = Instant::now();
        let received = if self.spin.worth_it() {
            self.spin_for_more(socket, begin)?
        } else {
            self.receive(socket, Wait::Forever)?
        };
        self.spin.note(begin.elapsed());
        Ok(received > 0)
    }

    fn spin_for_more(&mut self, socket: &Socket, begin: Instant) -> Result<usize, SessionEnd> {
        loop {
            match self.receive(socket, Wait::No) {
                Err(SessionEnd::Io(error)) if error.kind() == io::ErrorKind::WouldBlock => {}
                other => return other,
            }
            if begin.elapsed() > SPIN {
                return self.receive(socket, Wait::Forever);
            }
            // Let other threads of a busy machine run.
            thread::yield_now();
        }
    }

    /// Waits until the first `count` bytes of a message have arrived; `count` is at most
    /// [`Receiver::room`].
    pub(crate) fn fill(&mut self, socket: &Socket, count: usize) -> Result<(), SessionEnd> {
        let deadline = self.deadline();
        self.fill_until(socket, count, deadline)
    }

    /// Like [`Receiver::fill`], with a given deadline.
    pub(crate) fn fill_until(
        &mut self,
        socket: &Socket,
        count: usize,
        deadline: Option<Instant>,
    ) -> Result<(), SessionEnd> {
        if self.buf.len() - self.start < count {
            self.buf.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        while self.end - self.start < count {
            let wait = deadline.map_or(Wait::Forever, Wait::Until);
            if self.receive(socket, wait)? == 0 {
                return Err(SessionEnd::Io(io::ErrorKind::UnexpectedEof.into()));
            }
        }
        Ok(())
    }

    /// Fills `into` with the next bytes of a message.
    pub(crate) fn read_exact(
        &mut self,
        socket: &Socket,
        into: &mut [u8],
    ) -> Result<(), SessionEnd> {
        let ahead = self.available().len().min(into.len());
        into[..ahead].copy_from_slice(&self.available()[..ahead]);
        self.consume(ahead);
        let mut rest = &mut into[ahead..];
        let mut deadline = self.deadline();
        let mut since = 0;
        while !rest.is_empty() {
            let wait = deadline.map_or(Wait::Forever, Wait::Until);
            let count = match socket.receive(rest, wait) {
                Ok(0) => return Err(SessionEnd::Io(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => count,
                Err(error) => return Err(timed_out(error)),
            };
            rest = &mut rest[count..];
            since += count;
            if since >= PACE_BYTES {
                since = 0;
                deadline = self.deadline();
            }
        }
        Ok(())
    }

    /// Discards the next `count` bytes of a message.
    pub(crate) fn skip(&mut self, socket: &Socket, count: u64) -> Result<(), SessionEnd> {
        let mut left = count;
        while left > 0 {
            let n = left.min(PACE_BYTES as u64) as usize;
            self.fill(socket, n)?;
            self.consume(n);
            left -= n as u64;
        }
        Ok(())
    }

    fn deadline(&self) -> Option<Instant> {
        self.patience.map(|patience| Instant::now() + patience)
    }

    fn receive(&mut self, socket: &Socket, wait: Wait) -> Result<usize, SessionEnd> {
        let received = socket
            .receive(&mut self.buf[self.end..], wait)
            .map_err(timed_out)?;
        self.end += received;
        Ok(received)
    }
}

fn timed_out(error: io::Error) -> SessionEnd {
    match error.kind() {
        io::ErrorKind::TimedOut => SessionEnd::TimedOut,
        _ => SessionEnd::Io(error),
    }
}

/// Decides whether the thread polls before it sleeps. It polls if recent requests arrived sooner
/// than a sleeping thread would wake up.
struct Spin {
    allowed: bool,
    /// Moving average of the wait for a request, in ns.
    gap: u64,
}

impl Spin {
    fn new() -> Self {
        Spin {
            // With one CPU, polling would keep the client from running.
            allowed: std::thread::available_parallelism().is_ok_and(|cpus| cpus.get() > 1),
            gap: u64::MAX / 16,
        }
    }

    fn worth_it(&self) -> bool {
        self.allowed && self.gap < SPIN.as_nanos() as u64
    }

    fn note(&mut self, waited: Duration) {
        // One wait of a few hundred microseconds stops the polling. About ten short waits start it.
        let waited = waited.as_nanos().min(1 << 20) as u64;
        self.gap = self.gap.min(1 << 20);
        self.gap = self.gap - self.gap / 4 + waited / 4;
    }
}

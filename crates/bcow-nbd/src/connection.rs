//! The transmission phase of one connection.
//!
//! The worker that holds the [`Turn`] receives a request. If requests of its kind were fast
//! recently, the worker executes it immediately and keeps the turn. No other thread wakes up, data
//! goes from the receive buffer to the device and from the device to the send buffer without a
//! copy, and replies to requests that arrived together are sent together. If requests of its kind
//! were slow (they wait for a disk), the worker first passes the turn to another worker, so that
//! the next requests need not wait.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::context::Contexts;
use crate::errno::Failure;
use crate::error::SessionEnd;
use crate::execute;
use crate::export::Export;
use crate::limits::Rate;
use crate::proto::{Command, Errno, Framing, MAX_PAYLOAD_BYTES, Request, command_flag};
use crate::receive::Receiver;
use crate::reply::Replies;
use crate::server::Shared;
use crate::socket::{Patience, Socket};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::thread;
use crate::turn::{Next, Turn};

/// Largest payload in bytes that is used directly from the receive buffer.
const LENT_BYTES: usize = 128 << 10;
/// Bytes that a worker may keep without a reservation from the server's memory.
const SMALL_BYTES: usize = 64 << 10;
/// Large requests execute in pieces of this size, if there is memory for it.
const LARGE_BYTES: usize = 1 << 20;
/// Number of waiting replies at which they are sent.
const BATCH: usize = 8;
/// Bytes of waiting replies at which they are sent.
const BATCH_BYTES: usize = 64 << 10;
/// Kinds of requests that are slower than this pass the turn to another worker. To wake a worker
/// costs 5 to 10 us.
const SLOW_NS: u64 = 40_000;
/// How long a large read with a simple reply waits for memory.
const MEMORY_PATIENCE: Duration = Duration::from_secs(5);

/// The result of the handshake.
#[derive(Clone)]
pub(crate) struct Agreed {
    pub(crate) export: Arc<Export>,
    pub(crate) framing: Framing,
    pub(crate) contexts: Contexts,
}

/// A connection in the transmission phase.
pub(crate) struct Connection {
    pub(crate) agreed: Agreed,
    pub(crate) shared: Arc<Shared>,
    socket: Arc<Socket>,
    turn: Turn,
    costs: Costs,
    rate: Option<Rate>,
}

impl Connection {
    /// Serves until the client disconnects, the connection fails or the server stops. Sends all
    /// replies before it returns.
    pub(crate) fn serve(
        shared: Arc<Shared>,
        socket: Arc<Socket>,
        receiver: Receiver,
        agreed: Agreed,
    ) -> Result<(), SessionEnd> {
        let options = &shared.options;
        let connection = Arc::new(Connection {
            agreed,
            socket,
            turn: Turn::new(options.in_flight),
            costs: Costs::default(),
            rate: options.rate.map(Rate::new),
            shared: shared.clone(),
        });
        let ended = Worker::new(&connection).work(Box::new(receiver));
        connection.turn.wait_for_all();
        ended
    }

    pub(crate) fn send(&self, replies: &mut Replies) -> Result<(), SessionEnd> {
        if !replies.bytes().is_empty() {
            let sent = self.socket.send(
                replies.bytes(),
                Patience(self.shared.options.request_timeout),
            );
            replies.clear();
            if let Err(error) = sent {
                // Half a reply may have been sent, so no further reply can follow.
                self.socket.cut();
                return Err(error.into());
            }
        }
        Ok(())
    }

    fn add_worker(self: &Arc<Self>) {
        let connection = self.clone();
        let started = thread::Builder::new()
            .name("nbd-worker".into())
            .stack_size(crate::server::STACK_BYTES)
            .spawn(move || {
                if let Some(receiver) = connection.turn.take() {
                    // The thread that started the session reports how it ended.
                    let _ = Worker::new(&connection).work(receiver);
                }
            });
        if started.is_err() {
            // Continue with fewer workers: this worker takes the turn again.
            self.turn.not_added();
        }
    }
}

/// One thread of a connection.
struct Worker<'a> {
    connection: &'a Arc<Connection>,
    replies: Replies,
    payload: Vec<u8>,
    /// Bytes of the server's memory that this worker has reserved.
    held: u64,
}

/// Whether the worker still has the turn.
enum Turned {
    Kept(Box<Receiver>),
    Given,
}

impl<'a> Worker<'a> {
    fn new(connection: &'a Arc<Connection>) -> Self {
        Worker {
            connection,
            replies: Replies::new(connection.agreed.framing),
            payload: Vec::new(),
            held: 0,
        }
    }

    /// Runs the worker, which starts with the turn.
    fn work(mut self, mut receiver: Box<Receiver>) -> Result<(), SessionEnd> {
        loop {
            match self.step(receiver) {
                Ok(Some(Turned::Kept(kept))) => receiver = kept,
                Ok(Some(Turned::Given)) => match self.connection.turn.take() {
                    Some(taken) => receiver = taken,
                    None => return Ok(()),
                },
                Ok(None) => {
                    let sent = self.connection.send(&mut self.replies);
                    self.connection.turn.close();
                    return sent;
                }
                Err(error) => {
                    let _ = self.connection.send(&mut self.replies);
                    self.connection.turn.close();
                    return Err(error);
                }
            }
        }
    }

    /// Receives and executes one request. Returns `None` after the last request.
    fn step(&mut self, mut receiver: Box<Receiver>) -> Result<Option<Turned>, SessionEnd> {
        let connection = self.connection;
        let socket = &*connection.socket;
        let header_bytes = connection.agreed.framing.request_bytes();
        if !self.is_complete(&receiver) {
            // Send the waiting replies before this thread blocks for the next request.
            connection.send(&mut self.replies)?;
        }
        if !receiver.wait(socket)? {
            return Ok(None);
        }
        receiver.fill(socket, header_bytes)?;
        let request = Request::decode(connection.agreed.framing, receiver.available()).ok_or(
            SessionEnd::Protocol("a request does not begin with the magic"),
        )?;
        if request.command == Command::Disconnect {
            return Ok(None);
        }
        let payload_bytes = payload_bytes(connection.agreed.framing, &request)?;
        if let Err(failure) = self.admit(&request) {
            receiver.consume(header_bytes);
            receiver.skip(socket, payload_bytes as u64)?;
            let replies = &mut self.replies;
            replies.failed(request.cookie, request.offset, &failure);
            return Ok(Some(Turned::Kept(receiver)));
        }
        self.hold_to_rate(&request);
        let kind = Kind::of(&request);
        let quick = connection.costs.is_quick(kind);

        let lent = payload_bytes <= LENT_BYTES && header_bytes + payload_bytes <= receiver.room();
        if lent {
            receiver.fill(socket, header_bytes + payload_bytes)?;
        }
        if quick && lent {
            let content = &receiver.available()[header_bytes..header_bytes + payload_bytes];
            self.carry_out(&request, content, kind)?;
            receiver.consume(header_bytes + payload_bytes);
            if self.replies.count() >= BATCH || self.replies.bytes().len() >= BATCH_BYTES {
                connection.send(&mut self.replies)?;
            }
            return Ok(Some(Turned::Kept(receiver)));
        }
        // Waiting replies must not wait for a slow request.
        connection.send(&mut self.replies)?;
        if !lent && !self.payload_fits(payload_bytes) {
            receiver.consume(header_bytes);
            let piece = self.piece_bytes();
            let mut buf = std::mem::take(&mut self.payload);
            buf.resize(buf.len().max(piece), 0);
            let begin = Instant::now();
            let done = execute::write_in_pieces(
                self.connection,
                &request,
                &mut buf[..piece],
                |into| receiver.read_exact(socket, into),
                &mut self.replies,
            );
            connection.costs.note(kind, begin.elapsed());
            self.payload = buf;
            done?;
            connection.send(&mut self.replies)?;
            return Ok(Some(Turned::Kept(receiver)));
        }
        let mut payload = std::mem::take(&mut self.payload);
        if payload.len() < payload_bytes {
            payload.resize(payload_bytes, 0);
        }
        if lent {
            let content = &receiver.available()[header_bytes..header_bytes + payload_bytes];
            payload[..payload_bytes].copy_from_slice(content);
            receiver.consume(header_bytes + payload_bytes);
        } else {
            receiver.consume(header_bytes);
            receiver.read_exact(socket, &mut payload[..payload_bytes])?;
        }
        let turned = match quick {
            true => Turned::Kept(receiver),
            false => {
                if connection.turn.give(receiver) == Next::AddWorker {
                    connection.add_worker();
                }
                Turned::Given
            }
        };
        let done = self.carry_out(&request, &payload[..payload_bytes], kind);
        self.payload = payload;
        let sent = done.and_then(|()| connection.send(&mut self.replies));
        match (turned, sent) {
            (Turned::Kept(_), Err(error)) => Err(error),
            // The worker that has the turn now will find that the connection is gone.
            (turned, _) => {
                self.release_what_is_rarely_needed();
                Ok(Some(turned))
            }
        }
    }

    /// Whether the next request has arrived with its whole payload.
    fn is_complete(&self, receiver: &Receiver) -> bool {
        let framing = self.connection.agreed.framing;
        let available = receiver.available();
        Request::decode(framing, available).is_some_and(|request| {
            let payload = match request.command {
                Command::Write => request.length,
                _ => 0,
            };
            payload <= (available.len() - framing.request_bytes()) as u64
        })
    }

    /// Rejects an invalid request, and every request while the server is stopping.
    fn admit(&self, request: &Request) -> Result<(), Failure> {
        if self.connection.shared.is_stopping() {
            return Err(Failure::new(Errno::Shutdown, "the server is ending"));
        }
        execute::check(&self.connection.agreed, request)
    }

    fn hold_to_rate(&self, request: &Request) {
        if let Some(rate) = &self.connection.rate
            && matches!(request.command, Command::Read | Command::Write)
        {
            let end = Instant::now() + rate.delay(request.length);
            // Sleep in short steps, so that a stopping server need not wait.
            while !self.connection.shared.is_stopping() {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                thread::sleep(left.min(Duration::from_millis(100)));
            }
        }
    }

    fn carry_out(
        &mut self,
        request: &Request,
        payload: &[u8],
        kind: Kind,
    ) -> Result<(), SessionEnd> {
        let begin = Instant::now();
        let piece = match request.command {
            Command::Read if request.length > SMALL_BYTES as u64 => self.piece_bytes(),
            _ => SMALL_BYTES,
        };
        let connection = self.connection;
        let done = if self.needs_whole_buffer(request, piece) {
            let bytes = request.length;
            match connection.shared.memory.take(bytes, MEMORY_PATIENCE) {
                true => {
                    // Release the memory also after an error.
                    let sent = connection.send(&mut self.replies);
                    let done = sent.and_then(|()| {
                        let replies = &mut self.replies;
                        execute::run(connection, request, payload, bytes as usize, replies)?;
                        connection.send(replies)
                    });
                    self.replies.release();
                    connection.shared.memory.give(bytes);
                    done
                }
                false => {
                    let failure =
                        Failure::new(Errno::NoMemory, "the server has no memory for it now");
                    let replies = &mut self.replies;
                    replies.failed(request.cookie, request.offset, &failure);
                    Ok(())
                }
            }
        } else {
            execute::run(connection, request, payload, piece, &mut self.replies)
        };
        connection.costs.note(kind, begin.elapsed());
        done
    }

    /// Whether the whole content must be read before the reply: a simple reply starts with its
    /// error number, and an unfragmented reply has only one chunk.
    fn needs_whole_buffer(&self, request: &Request, piece: usize) -> bool {
        let whole = self.replies.framing() == Framing::Simple || request.has(command_flag::DF);
        whole && request.command == Command::Read && request.length > piece as u64
    }

    /// Whether the worker can receive a payload of this size as a whole.
    fn payload_fits(&mut self, bytes: usize) -> bool {
        bytes <= self.piece_bytes()
    }

    /// Size of the pieces of a large request, in bytes.
    fn piece_bytes(&mut self) -> usize {
        // One piece to receive and one to send.
        const BOTH: u64 = 2 * LARGE_BYTES as u64;
        if self.held == 0 && self.connection.shared.memory.take(BOTH, Duration::ZERO) {
            self.held = BOTH;
        }
        match self.held {
            0 => SMALL_BYTES,
            _ => LARGE_BYTES,
        }
    }

    fn release_what_is_rarely_needed(&mut self) {
        if self.held == 0 && self.replies.capacity() > 2 * SMALL_BYTES {
            self.replies.release();
        }
    }
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        self.connection.shared.memory.give(self.held);
    }
}

/// Bytes of payload that follow the header of a request.
fn payload_bytes(framing: Framing, request: &Request) -> Result<usize, SessionEnd> {
    let announced = framing == Framing::Extended && request.has(command_flag::PAYLOAD_LEN);
    if request.command != Command::Write && !announced {
        return Ok(0);
    }
    if request.length > u64::from(MAX_PAYLOAD_BYTES) {
        return Err(SessionEnd::Protocol("a payload is larger than 32 MiB"));
    }
    Ok(request.length as usize)
}

/// Kinds of requests with about equal latency.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Read,
    LargeRead,
    Write,
    LargeWrite,
    Flush,
    Other,
}

impl Kind {
    fn of(request: &Request) -> Self {
        let large = request.length > SMALL_BYTES as u64;
        match (request.command, large) {
            _ if request.has(command_flag::FUA) => Kind::Flush,
            (Command::Flush, _) => Kind::Flush,
            (Command::Read, false) => Kind::Read,
            (Command::Read, true) => Kind::LargeRead,
            (Command::Write, false) => Kind::Write,
            (Command::Write, true) => Kind::LargeWrite,
            _ => Kind::Other,
        }
    }
}

/// Recent latency of each kind of request: a moving average in ns. A lost update does no harm.
#[derive(Default)]
struct Costs([AtomicU64; 6]);

impl Costs {
    fn is_quick(&self, kind: Kind) -> bool {
        #[cfg(feature = "shuttle")]
        if crate::sync::by_chance() {
            return false;
        }
        self.0[kind as usize].load(Ordering::Relaxed) < SLOW_NS
    }

    fn note(&self, kind: Kind, took: Duration) {
        // Limit the weight of one very slow request, so that thousands of fast ones after it are
        // not treated as slow.
        let took = took.as_nanos().min(1 << 20) as u64;
        let cost = &self.0[kind as usize];
        let before = cost.load(Ordering::Relaxed);
        cost.store(before - before / 8 + took / 8, Ordering::Relaxed);
    }
}

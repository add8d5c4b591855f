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

use crate::client::Client;
use crate::errno::Failure;
use crate::error::SessionEnd;
use crate::execute;
use crate::limits::Rate;
use crate::proto::{Command, Errno, Framing, MAX_PAYLOAD_BYTES, Request, command_flag};
use crate::receive::Receiver;
use crate::reply::Replies;
use crate::shared::STACK_BYTES;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::thread;
use crate::turn::{Next, Turn};

/// Largest payload in bytes that is used directly from the receive buffer.
const BORROWED_BYTES: usize = 128 << 10;
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
const MEMORY_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection in the transmission phase.
pub(crate) struct Connection {
    client: Client,
    turn: Turn,
    costs: Costs,
    rate: Option<Rate>,
}

impl Connection {
    /// Serves until the client disconnects, the connection fails or the server stops. Sends all
    /// replies before it returns.
    pub(crate) fn serve(client: Client, receiver: Receiver) -> Result<(), SessionEnd> {
        let options = &client.shared.options;
        let connection = Arc::new(Connection {
            turn: Turn::new(options.in_flight),
            costs: Costs::default(),
            rate: options.rate.map(Rate::new),
            client,
        });
        let ended = Worker::new(&connection).work(Box::new(receiver));
        connection.turn.wait_for_all();
        ended
    }

    fn add_worker(self: &Arc<Self>) {
        let connection = self.clone();
        let started = thread::Builder::new()
            .name("nbd-worker".into())
            .stack_size(STACK_BYTES)
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
    reserved: u64,
}

/// Whether the worker still has the turn.
enum Turned {
    Kept(Box<Receiver>),
    Passed,
}

impl<'a> Worker<'a> {
    fn new(connection: &'a Arc<Connection>) -> Self {
        Worker {
            connection,
            replies: Replies::new(connection.client.selection.framing),
            payload: Vec::new(),
            reserved: 0,
        }
    }

    /// Runs the worker, which starts with the turn.
    fn work(mut self, mut receiver: Box<Receiver>) -> Result<(), SessionEnd> {
        loop {
            receiver = match self.step(receiver) {
                Ok(Some(Turned::Kept(kept))) => kept,
                Ok(Some(Turned::Passed)) => match self.connection.turn.take() {
                    Some(taken) => taken,
                    None => return Ok(()),
                },
                ended => {
                    let sent = self.connection.client.send(&mut self.replies);
                    self.connection.turn.close();
                    return ended.and(sent);
                }
            }
        }
    }

    /// Receives and executes one request. Returns `None` after the last request.
    fn step(&mut self, mut receiver: Box<Receiver>) -> Result<Option<Turned>, SessionEnd> {
        let connection = self.connection;
        let client = &connection.client;
        let socket = &*client.socket;
        let header_bytes = client.selection.framing.request_bytes();
        if !self.is_complete(&receiver) {
            // Send the waiting replies before this thread blocks for the next request.
            client.send(&mut self.replies)?;
        }
        if !receiver.wait(socket)? {
            return Ok(None);
        }
        receiver.fill(socket, header_bytes)?;
        let request = Request::decode(client.selection.framing, receiver.available()).ok_or(
            SessionEnd::Protocol("a request does not begin with the magic"),
        )?;
        if request.command == Command::Disconnect {
            return Ok(None);
        }
        let payload_bytes = payload_bytes(client.selection.framing, &request)?;
        if let Err(failure) = self.admit(&request) {
            receiver.consume(header_bytes);
            receiver.skip(socket, payload_bytes as u64)?;
            self.fail(&request, &failure);
            return Ok(Some(Turned::Kept(receiver)));
        }
        self.limit_rate(&request);
        let kind = Kind::of(&request);
        let fast = connection.costs.is_fast(kind);

        let borrowed =
            payload_bytes <= BORROWED_BYTES && header_bytes + payload_bytes <= receiver.room();
        if borrowed {
            receiver.fill(socket, header_bytes + payload_bytes)?;
        }
        if fast && borrowed {
            let content = &receiver.available()[header_bytes..header_bytes + payload_bytes];
            self.execute(&request, content, kind)?;
            receiver.consume(header_bytes + payload_bytes);
            if self.replies.count() >= BATCH || self.replies.bytes().len() >= BATCH_BYTES {
                client.send(&mut self.replies)?;
            }
            return Ok(Some(Turned::Kept(receiver)));
        }
        // Waiting replies must not wait for a slow request.
        client.send(&mut self.replies)?;
        if !borrowed && payload_bytes > self.piece_bytes() {
            receiver.consume(header_bytes);
            let piece = self.piece_bytes();
            let mut buf = std::mem::take(&mut self.payload);
            buf.resize(buf.len().max(piece), 0);
            let begin = Instant::now();
            let done = execute::write_in_pieces(
                client,
                &request,
                &mut buf[..piece],
                |into| receiver.read_exact(socket, into),
                &mut self.replies,
            );
            connection.costs.record(kind, begin.elapsed());
            self.payload = buf;
            done?;
            client.send(&mut self.replies)?;
            return Ok(Some(Turned::Kept(receiver)));
        }
        let mut payload = std::mem::take(&mut self.payload);
        payload.resize(payload.len().max(payload_bytes), 0);
        if borrowed {
            let content = &receiver.available()[header_bytes..header_bytes + payload_bytes];
            payload[..payload_bytes].copy_from_slice(content);
            receiver.consume(header_bytes + payload_bytes);
        } else {
            receiver.consume(header_bytes);
            receiver.read_exact(socket, &mut payload[..payload_bytes])?;
        }
        let turned = if fast {
            Turned::Kept(receiver)
        } else {
            if connection.turn.pass(receiver) == Next::AddWorker {
                connection.add_worker();
            }
            Turned::Passed
        };
        let done = self.execute(&request, &payload[..payload_bytes], kind);
        self.payload = payload;
        let sent = done.and_then(|()| client.send(&mut self.replies));
        match (turned, sent) {
            (Turned::Kept(_), Err(error)) => Err(error),
            // The worker that has the turn now will find that the connection is gone.
            (turned, _) => {
                self.release_large_buffer();
                Ok(Some(turned))
            }
        }
    }

    /// Whether the next request has arrived with its whole payload.
    fn is_complete(&self, receiver: &Receiver) -> bool {
        let framing = self.connection.client.selection.framing;
        let available = receiver.available();
        Request::decode(framing, available).is_some_and(|request| {
            let payload = match request.command {
                Command::Write => request.length,
                _ => 0,
            };
            payload <= (available.len() - framing.request_bytes()) as u64
        })
    }

    fn fail(&mut self, request: &Request, failure: &Failure) {
        let replies = &mut self.replies;
        replies.failed(request.cookie, request.offset, failure, None);
    }

    /// Rejects an invalid request, and every request while the server is stopping.
    fn admit(&self, request: &Request) -> Result<(), Failure> {
        if self.connection.client.shared.is_stopping() {
            return Err(Failure::new(Errno::Shutdown, "the server is shutting down"));
        }
        execute::check(&self.connection.client.selection, request)
    }

    fn limit_rate(&self, request: &Request) {
        if let Some(rate) = &self.connection.rate
            && matches!(request.command, Command::Read | Command::Write)
        {
            let end = Instant::now() + rate.delay(request.length);
            // Sleep in short steps, so that a stopping server need not wait.
            while !self.connection.client.shared.is_stopping() {
                let left = end.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    break;
                }
                thread::sleep(left.min(Duration::from_millis(100)));
            }
        }
    }

    fn execute(&mut self, request: &Request, payload: &[u8], kind: Kind) -> Result<(), SessionEnd> {
        let begin = Instant::now();
        let piece = match request.command {
            Command::Read if request.length > SMALL_BYTES as u64 => self.piece_bytes(),
            _ => SMALL_BYTES,
        };
        let client = &self.connection.client;
        let done = if self.needs_whole_buffer(request, piece) {
            let bytes = request.length;
            if client.shared.memory.reserve(bytes, MEMORY_TIMEOUT) {
                // Release the memory also after an error.
                let sent = client.send(&mut self.replies);
                let done = sent.and_then(|()| {
                    let replies = &mut self.replies;
                    execute::run(client, request, payload, bytes as usize, replies)?;
                    client.send(replies)
                });
                self.replies.release();
                client.shared.memory.release(bytes);
                done
            } else {
                let message = "the server has no free memory for this request";
                self.fail(request, &Failure::new(Errno::NoMemory, message));
                Ok(())
            }
        } else {
            execute::run(client, request, payload, piece, &mut self.replies)
        };
        self.connection.costs.record(kind, begin.elapsed());
        done
    }

    /// Whether the whole content must be read before the reply: a simple reply starts with its
    /// error number, and an unfragmented reply has only one chunk.
    fn needs_whole_buffer(&self, request: &Request, piece: usize) -> bool {
        let whole = self.replies.framing() == Framing::Simple || request.has(command_flag::DF);
        whole && request.command == Command::Read && request.length > piece as u64
    }

    /// Size of the pieces of a large request, in bytes.
    fn piece_bytes(&mut self) -> usize {
        // One piece to receive and one to send.
        const BOTH: u64 = 2 * LARGE_BYTES as u64;
        let memory = &self.connection.client.shared.memory;
        if self.reserved == 0 && memory.reserve(BOTH, Duration::ZERO) {
            self.reserved = BOTH;
        }
        match self.reserved {
            0 => SMALL_BYTES,
            _ => LARGE_BYTES,
        }
    }

    fn release_large_buffer(&mut self) {
        if self.reserved == 0 && self.replies.capacity() > 2 * SMALL_BYTES {
            self.replies.release();
        }
    }
}

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        self.connection.client.shared.memory.release(self.reserved);
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
    fn is_fast(&self, kind: Kind) -> bool {
        #[cfg(feature = "shuttle")]
        if crate::sync::by_chance() {
            return false;
        }
        self.0[kind as usize].load(Ordering::Relaxed) < SLOW_NS
    }

    fn record(&self, kind: Kind, took: Duration) {
        // Limit the weight of one very slow request, so that thousands of fast ones after it are
        // not treated as slow.
        let took = took.as_nanos().min(1 << 20) as u64;
        let cost = &self.0[kind as usize];
        let before = cost.load(Ordering::Relaxed);
        cost.store(before - before / 8 + took / 8, Ordering::Relaxed);
    }
}

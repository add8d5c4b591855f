//! The server: listens, accepts clients, and stops on request.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use crate::connection::{Agreed, Connection};
use crate::context::Contexts;
use crate::error::{Error, SessionEnd};
use crate::export::Exports;
use crate::failures::{FailureLog, FailureReport, RefusalLog};
use crate::handshake::{Handshake, Outcome, Refusal};
use crate::limits::Memory;
use crate::listen::Listener;
use crate::proto::Framing;
use crate::receive::Receiver;
use crate::socket::Socket;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard, thread};
use crate::tls::Tls;

/// Stack size of a thread in bytes. Small, because a server may have a thousand threads.
pub(crate) const STACK_BYTES: usize = 512 << 10;
/// Clients beyond the limit that get an error reply, at a time. Further clients are disconnected
/// without a reply.
const REFUSED_AT_ONCE: usize = 16;
/// How long clients may take to receive their last replies when the server stops.
const GRACE: Duration = Duration::from_secs(5);

/// Options of a server.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Limit of the clients at a time.
    pub max_clients: usize,
    /// Limit of the requests of one client that execute at a time.
    pub in_flight: u32,
    /// Limit of bytes per second for each connection, reads and writes together; `None` for no
    /// limit.
    pub rate: Option<u64>,
    /// Memory for large requests of all clients together, in bytes.
    pub memory_bytes: u64,
    /// How long a client may take to select an export; `None` for no limit.
    pub handshake_timeout: Option<Duration>,
    /// How long a client may pause in the middle of a request, or accept no byte of a reply; `None`
    /// for no limit.
    pub request_timeout: Option<Duration>,
    /// Stop after this time without a client; `None` for never.
    pub exit_on_idle: Option<Duration>,
    /// TLS configuration; `None` for no TLS.
    pub tls: Option<Tls>,
    /// Receives reports of requests that failed at the device.
    pub failures: FailureReport,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            max_clients: 256,
            in_flight: 16,
            rate: None,
            memory_bytes: 256 << 20,
            handshake_timeout: Some(Duration::from_secs(10)),
            request_timeout: Some(Duration::from_secs(60)),
            exit_on_idle: None,
            tls: None,
            failures: FailureReport::default(),
        }
    }
}

/// State that all connections of a server share.
pub(crate) struct Shared {
    pub(crate) exports: Exports,
    pub(crate) options: ServerOptions,
    pub(crate) memory: Memory,
    pub(crate) failures: FailureLog,
    refusals: RefusalLog,
    stopping: AtomicBool,
    wake: OwnedFd,
    clients: Mutex<Clients>,
    left: Condvar,
    next_client: AtomicU64,
}

#[derive(Default)]
struct Clients {
    sockets: HashMap<u64, Arc<Socket>>,
    /// When the last client left, or the server started.
    idle_since: Option<Instant>,
}

impl Shared {
    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    fn clients(&self) -> MutexGuard<'_, Clients> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A server of exports.
pub struct Server {
    shared: Arc<Shared>,
}

/// Stops a server, from any thread.
#[derive(Clone)]
pub struct Stopper(Arc<Shared>);

impl Stopper {
    /// Stops the server: it accepts no more clients, completes and answers the requests in flight,
    /// and then [`Server::serve`] returns.
    pub fn stop(&self) {
        self.0.stopping.store(true, Ordering::SeqCst);
        // The counter cannot overflow, so an error cannot leave the server asleep.
        let _ = rustix::io::write(&self.0.wake, &1u64.to_ne_bytes());
        for socket in self.0.clients().sockets.values() {
            socket.stop_receiving();
        }
    }
}

impl Server {
    /// Creates a server for these exports, without a client.
    pub fn new(exports: Exports, options: ServerOptions) -> Result<Self, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::host("make an event descriptor", errno))?;
        Ok(Server {
            shared: Arc::new(Shared {
                exports,
                memory: Memory::new(options.memory_bytes),
                failures: FailureLog::new(options.failures.clone()),
                options,
                refusals: RefusalLog::default(),
                stopping: AtomicBool::new(false),
                wake,
                clients: Mutex::default(),
                left: Condvar::new(),
                next_client: AtomicU64::new(0),
            }),
        })
    }

    /// A handle that stops [`Server::serve`].
    pub fn stopper(&self) -> Stopper {
        Stopper(self.shared.clone())
    }

    /// Accepts clients from all listeners until the server is stopped, or was idle for too long.
    /// Then it closes all connections and flushes all exports. Returns the first error.
    pub fn serve(&self, listeners: &[Listener]) -> Result<(), Error> {
        self.shared.clients().idle_since = Some(Instant::now());
        let served = self.take_clients(listeners);
        self.stopper().stop();
        self.wait_for_clients();
        let flushed = self.flush();
        served.and(flushed)
    }

    /// Serves one client on a connected stream socket, from the greeting until the client
    /// disconnects.
    pub fn serve_client(&self, socket: OwnedFd) {
        let id = self.register(Arc::new(Socket::new(socket)));
        converse(&self.shared, id, None);
    }

    /// Serves the first export on connected stream sockets for the kernel's driver: without a
    /// handshake and with simple replies. Returns when all sockets are closed or [`Stopper::stop`]
    /// was called, and flushes the written data first.
    pub fn serve_attached(&self, sockets: Vec<OwnedFd>) -> Result<(), Error> {
        let export = self.shared.exports.iter().next().ok_or(Error::NoExport)?;
        thread::scope(|scope| {
            for socket in sockets {
                let socket = Arc::new(Socket::new(socket));
                let id = self.register(socket.clone());
                let agreed = Agreed {
                    export: export.clone(),
                    framing: Framing::Simple,
                    contexts: Contexts::default(),
                };
                scope.spawn(move || {
                    let receiver = Receiver::new(self.shared.options.request_timeout);
                    let ended =
                        Connection::serve(self.shared.clone(), socket.clone(), receiver, agreed);
                    if let Err(error) = ended {
                        tracing::info!("connection {id} ended: {error}");
                    }
                    socket.close();
                    self.shared.clients().leave(id);
                });
            }
        });
        self.flush()
    }

    /// Flushes the data that clients wrote.
    fn flush(&self) -> Result<(), Error> {
        let mut result = Ok(());
        for export in self.shared.exports.iter() {
            if let Some(device) = export.device.writer()
                && let Err(error) = device.flush()
            {
                let action = format!("make durable what was written to {:?}", export.name);
                result = Err(Error::host(action, std::io::Error::other(error)));
            }
        }
        result
    }

    fn take_clients(&self, listeners: &[Listener]) -> Result<(), Error> {
        let mut fds: Vec<PollFd<'_>> = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        for listener in listeners {
            fds.push(PollFd::new(listener, PollFlags::IN));
        }
        while !self.shared.is_stopping() {
            let timeout = match self.idle_left() {
                Some(Duration::ZERO) => return Ok(()),
                // A timeout that does not fit the type is treated as no timeout.
                Some(left) => Timespec::try_from(left).ok(),
                None => None,
            };
            match poll(&mut fds, timeout.as_ref()) {
                Ok(_) => {}
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(Error::host("wait for clients", errno)),
            }
            for (fd, listener) in fds[1..].iter().zip(listeners) {
                if !fd.revents().is_empty() {
                    self.accept(listener);
                }
            }
        }
        Ok(())
    }

    fn accept(&self, listener: &Listener) {
        match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(socket) => {
                listener.prepare(&socket);
                self.start(socket);
            }
            Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                tracing::warn!("no client can be taken now: too many open files, or no memory");
                // The client is still in the queue, so `accept` would fail again at once.
                thread::sleep(Duration::from_millis(100));
            }
            // The client has disconnected, or another process accepted it.
            Err(errno) => tracing::debug!("a client could not be taken: {errno}"),
        }
    }

    fn start(&self, socket: OwnedFd) {
        let most = self.shared.options.max_clients;
        let clients = self.shared.clients().sockets.len();
        let refusal = (clients >= most).then_some(Refusal::TooManyClients);
        if refusal.is_some() {
            tracing::warn!("a client is refused: there are {most} already");
        }
        if clients >= most.saturating_add(REFUSED_AT_ONCE) {
            return;
        }
        let id = self.register(Arc::new(Socket::new(socket)));
        let shared = self.shared.clone();
        let started = thread::Builder::new()
            .name(format!("nbd-{id}"))
            .stack_size(STACK_BYTES)
            .spawn(move || converse(&shared, id, refusal));
        if let Err(error) = started {
            tracing::warn!("a client is refused: {error}");
            self.shared.clients().leave(id);
        }
    }

    fn register(&self, socket: Arc<Socket>) -> u64 {
        let id = self.shared.next_client.fetch_add(1, Ordering::Relaxed);
        let mut clients = self.shared.clients();
        clients.idle_since = None;
        clients.sockets.insert(id, socket.clone());
        drop(clients);
        // A client that registered while the server was being stopped was not notified.
        if self.shared.is_stopping() {
            socket.stop_receiving();
        }
        id
    }

    /// Time that may still pass without a client; `None` if there are clients, or if there is no
    /// limit.
    fn idle_left(&self) -> Option<Duration> {
        let most = self.shared.options.exit_on_idle?;
        let since = self.shared.clients().idle_since?;
        Some(most.saturating_sub(since.elapsed()))
    }

    fn wait_for_clients(&self) {
        let clients = self.shared.clients();
        let waited = self
            .shared
            .left
            .wait_timeout_while(clients, GRACE, |clients| !clients.sockets.is_empty());
        let (mut clients, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        if timeout.timed_out() {
            for socket in clients.sockets.values() {
                socket.cut();
            }
        }
        // Requests in flight at the device have no time limit.
        while !clients.sockets.is_empty() {
            clients = self
                .shared
                .left
                .wait(clients)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Clients {
    fn leave(&mut self, id: u64) {
        self.sockets.remove(&id);
        if self.sockets.is_empty() {
            self.idle_since = Some(Instant::now());
        }
    }
}

/// Serves one client from the greeting to the end.
fn converse(shared: &Arc<Shared>, id: u64, refusal: Option<Refusal>) {
    let socket = shared.clients().sockets.get(&id).cloned();
    if let Some(socket) = socket {
        tracing::debug!("client {id} comes");
        match session(shared, id, &socket, refusal) {
            Ok(()) => tracing::debug!("client {id} leaves"),
            Err(error) => tracing::info!("client {id} is disconnected: {error}"),
        }
        socket.close();
    }
    shared.clients().leave(id);
    shared.left.notify_all();
    if shared.options.exit_on_idle.is_some() {
        // Wake the server: its idle time starts now.
        let _ = rustix::io::write(&shared.wake, &1u64.to_ne_bytes());
    }
}

fn session(
    shared: &Arc<Shared>,
    id: u64,
    socket: &Arc<Socket>,
    refusal: Option<Refusal>,
) -> Result<(), SessionEnd> {
    let mut receiver = Receiver::new(shared.options.request_timeout);
    // The address is no longer available after the client has disconnected.
    let peer = socket.peer();
    let mut handshake = Handshake {
        shared,
        socket,
        receiver: &mut receiver,
        deadline: shared
            .options
            .handshake_timeout
            .map(|timeout| Instant::now() + timeout),
        refusal,
        wants_tls: false,
    };
    let outcome = handshake.run();
    match &outcome {
        Err(error) if error.is_refusal() => {
            shared.refusals.report(id, &peer, error);
        }
        Ok(Outcome::Agreed(_)) => {}
        _ if handshake.wants_tls => {
            let why = "it began no TLS, which this server requires";
            shared.refusals.report(id, &peer, &why);
        }
        _ => {}
    }
    match outcome? {
        Outcome::Agreed(agreed) => {
            Connection::serve(shared.clone(), socket.clone(), receiver, agreed)
        }
        Outcome::Left => Ok(()),
    }
}

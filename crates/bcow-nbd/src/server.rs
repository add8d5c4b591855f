//! The server: listens, accepts clients, and stops on request.

use std::os::fd::OwnedFd;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use bcow_listen::Listener;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use crate::client::Client;
use crate::connection::Connection;
use crate::context::Contexts;
use crate::error::{Error, SessionEnd};
use crate::export::{Exports, Selection};
use crate::handshake::{Handshake, Negotiated, Outcome};
use crate::proto::Framing;
use crate::receive::Receiver;
use crate::shared::{STACK_BYTES, ServerOptions, Shared};
use crate::socket::Socket;
use crate::sync::{start, thread, wait};

/// Clients beyond the limit that get an error reply, at a time. Further clients are disconnected
/// without a reply.
const REFUSED_AT_ONCE: usize = 16;
/// How long clients may take to receive their last replies when the server stops.
const GRACE: Duration = Duration::from_secs(5);

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
        self.0.stop();
    }
}

impl Server {
    /// Creates a server for these exports, without a client.
    pub fn new(exports: Exports, options: ServerOptions) -> Result<Self, Error> {
        let shared = Arc::new(Shared::new(exports, options)?);
        Ok(Server { shared })
    }

    /// A handle that stops [`Server::serve`].
    pub fn stopper(&self) -> Stopper {
        Stopper(self.shared.clone())
    }

    /// Accepts clients from all listeners until the server is stopped, or was idle for too long.
    /// Then it closes all connections and flushes all exports. Returns the first error.
    pub fn serve(&self, listeners: &[Listener]) -> Result<(), Error> {
        self.shared.clients().idle_since = Some(Instant::now());
        let served = self.accept_clients(listeners);
        self.shared.stop();
        self.wait_for_clients();
        let flushed = self.flush();
        served.and(flushed)
    }

    /// Serves one client on a connected stream socket, from the greeting until the client
    /// disconnects.
    pub fn serve_client(&self, socket: OwnedFd) {
        let id = self.shared.register(Arc::new(Socket::new(socket)));
        serve_socket(&self.shared, id, false);
    }

    /// Serves the first export on connected stream sockets for the kernel's driver: without a
    /// handshake and with simple replies. Returns when all sockets are closed or [`Stopper::stop`]
    /// was called, and flushes the written data first.
    pub fn serve_attached(&self, sockets: Vec<OwnedFd>) -> Result<(), Error> {
        let export = self.shared.exports.iter().next().ok_or(Error::NoExport)?;
        let mut started = Vec::new();
        let served = thread::scope(|scope| {
            let mut serve_one = |socket| {
                let socket = Arc::new(Socket::new(socket));
                let id = self.shared.register(socket.clone());
                let client = Client {
                    shared: self.shared.clone(),
                    socket: socket.clone(),
                    selection: Selection {
                        export: export.clone(),
                        framing: Framing::Simple,
                        contexts: Contexts::default(),
                    },
                };
                started.push(socket.clone());
                let serve = move || {
                    let receiver = Receiver::new(self.shared.options.request_timeout);
                    let ended = Connection::serve(client, receiver);
                    if let Err(error) = ended {
                        tracing::info!("connection {id} ended: {error}");
                    }
                    socket.close();
                    self.shared.clients().leave(id);
                };
                if start(scope, serve) { Ok(()) } else { Err(Errno::AGAIN) }
            };
            let served = sockets.into_iter().try_for_each(&mut serve_one);
            if served.is_err() {
                started
                    .iter()
                    .for_each(|socket: &Arc<Socket>| socket.close());
            }
            served
        });
        let flushed = self.flush();
        served.map_err(|error| Error::host("start a thread", error))?;
        flushed
    }

    /// Flushes the data that clients wrote.
    fn flush(&self) -> Result<(), Error> {
        let mut result = Ok(());
        for export in self.shared.exports.iter() {
            if let Some(device) = export.device.writer()
                && let Err(error) = device.flush()
            {
                let action = format!("flush export {:?}", export.name);
                result = Err(Error::host(action, std::io::Error::other(error)));
            }
        }
        result
    }

    fn accept_clients(&self, listeners: &[Listener]) -> Result<(), Error> {
        let mut fds: Vec<PollFd<'_>> = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        let listening = listeners.iter();
        fds.extend(listening.map(|listener| PollFd::new(listener, PollFlags::IN)));
        while !self.shared.is_stopping() {
            let left = self.idle_left();
            if left == Some(Duration::ZERO) {
                return Ok(());
            }
            // A timeout that does not fit the type is treated as no timeout.
            let timeout = left.and_then(|left| Timespec::try_from(left).ok());
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
                tracing::warn!("cannot accept clients: too many open files, or out of memory");
                // The client is still in the queue, so `accept` would fail again at once.
                thread::sleep(Duration::from_millis(100));
            }
            // The client has disconnected, or another process accepted it.
            Err(errno) => tracing::debug!("cannot accept a client: {errno}"),
        }
    }

    fn start(&self, socket: OwnedFd) {
        let most = self.shared.options.max_clients;
        let clients = self.shared.clients().sockets.len();
        let is_full = clients >= most;
        if is_full {
            tracing::warn!("a client is refused: the limit of {most} clients is reached");
        }
        if clients >= most.saturating_add(REFUSED_AT_ONCE) {
            return;
        }
        let id = self.shared.register(Arc::new(Socket::new(socket)));
        let shared = self.shared.clone();
        let started = thread::Builder::new()
            .name(format!("nbd-{id}"))
            .stack_size(STACK_BYTES)
            .spawn(move || serve_socket(&shared, id, is_full));
        if let Err(error) = started {
            tracing::warn!("a client is refused: {error}");
            self.shared.clients().leave(id);
        }
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
            clients = wait(&self.shared.left, clients);
        }
    }
}

/// Serves one client from the greeting to the end.
fn serve_socket(shared: &Arc<Shared>, id: u64, is_full: bool) {
    let socket = shared.clients().sockets.get(&id).cloned();
    if let Some(socket) = socket {
        tracing::debug!("client {id} connects");
        match session(shared, id, &socket, is_full) {
            Ok(()) => tracing::debug!("client {id} disconnects"),
            Err(error) => tracing::info!("client {id} is disconnected: {error}"),
        }
        socket.close();
    }
    shared.clients().leave(id);
    shared.left.notify_all();
    if shared.options.exit_on_idle.is_some() {
        // Wake the server: its idle time starts now.
        shared.wake();
    }
}

fn session(
    shared: &Arc<Shared>,
    id: u64,
    socket: &Arc<Socket>,
    is_full: bool,
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
        is_full,
        wants_tls: false,
        no_zeroes: false,
        negotiated: Negotiated::default(),
    };
    let outcome = handshake.run();
    match &outcome {
        Err(error) if error.is_refusal() => {
            shared.refusals.report(id, &peer, error);
        }
        Ok(Outcome::Selected(_)) => {}
        _ if handshake.wants_tls => {
            let why = "it did not start TLS, which this server requires";
            shared.refusals.report(id, &peer, &why);
        }
        _ => {}
    }
    match outcome? {
        Outcome::Selected(selection) => {
            let client = Client {
                shared: shared.clone(),
                socket: socket.clone(),
                selection,
            };
            Connection::serve(client, receiver)
        }
        Outcome::Left => Ok(()),
    }
}

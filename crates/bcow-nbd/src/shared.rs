//! The options of a server, and the state that its connections share.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::error::Error;
use crate::export::Exports;
use crate::failures::{FailureCount, FailureReport, RefusalLog};
use crate::limits::Memory;
use crate::socket::Socket;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Condvar, Mutex, MutexGuard, lock};
use crate::tls::Tls;

/// Stack size of a thread in bytes. Small, because a server may have a thousand threads.
pub(crate) const STACK_BYTES: usize = 512 << 10;

#[derive(Clone)]
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
    pub(crate) failures: FailureCount,
    pub(crate) refusals: RefusalLog,
    stopping: AtomicBool,
    /// Wakes the thread that accepts clients.
    pub(crate) wake: OwnedFd,
    clients: Mutex<Clients>,
    /// Notified after a client has left.
    pub(crate) left: Condvar,
    next_client: AtomicU64,
}

/// The connected clients.
#[derive(Default)]
pub(crate) struct Clients {
    pub(crate) sockets: HashMap<u64, Arc<Socket>>,
    /// When the last client left, or the server started.
    pub(crate) idle_since: Option<Instant>,
}

impl Shared {
    pub(crate) fn new(exports: Exports, options: ServerOptions) -> Result<Self, Error> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::host("create an event descriptor", errno))?;
        Ok(Shared {
            exports,
            memory: Memory::new(options.memory_bytes),
            failures: FailureCount::default(),
            options,
            refusals: RefusalLog::default(),
            stopping: AtomicBool::new(false),
            wake,
            clients: Mutex::default(),
            left: Condvar::new(),
            next_client: AtomicU64::new(0),
        })
    }

    /// Ends reception from all clients, and wakes the server.
    pub(crate) fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        self.wake();
        for socket in self.clients().sockets.values() {
            socket.stop_receiving();
        }
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Wakes the thread that accepts clients.
    pub(crate) fn wake(&self) {
        // The counter cannot overflow, so an error cannot leave the server asleep.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Adds a client, and returns its number.
    pub(crate) fn register(&self, socket: Arc<Socket>) -> u64 {
        let id = self.next_client.fetch_add(1, Ordering::Relaxed);
        let mut clients = self.clients();
        clients.idle_since = None;
        clients.sockets.insert(id, socket.clone());
        drop(clients);
        // A client that registered while the server was being stopped was not notified.
        if self.is_stopping() {
            socket.stop_receiving();
        }
        id
    }

    pub(crate) fn clients(&self) -> MutexGuard<'_, Clients> {
        lock(&self.clients)
    }
}

impl Clients {
    /// Removes the client `id`.
    pub(crate) fn leave(&mut self, id: u64) {
        self.sockets.remove(&id);
        if self.sockets.is_empty() {
            self.idle_since = Some(Instant::now());
        }
    }
}

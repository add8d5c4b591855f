//! How the threads of a session get their memory before they receive requests.
//!
//! fuser gives each thread a buffer without pages, and the thread then waits for a request. So the
//! session first reads from a socket in the place of the connection to the kernel. Each thread
//! receives one message there: FORGET of a node that does not exist, which has no answer. When all
//! threads have received theirs, the connection takes its place, and each thread makes its buffer
//! present ([`crate::buffers`]) before it reads again.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use fuser::INodeNo;
use parking_lot::{Condvar, Mutex};
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};

/// Two ends of a socket that keeps the limits of messages, as the connection to the kernel does.
pub(crate) fn socket() -> io::Result<(OwnedFd, OwnedFd)> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(rustix::net::socketpair(
        family,
        kind,
        SocketFlags::CLOEXEC,
        None,
    )?)
}

/// Makes `descriptor` refer to what `other` refers to.
pub(crate) fn replace(descriptor: RawFd, other: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: both descriptors are open, and stay open. The owner of `descriptor` uses it for reads
    // and writes only, and does so only later.
    #[allow(unsafe_code)]
    let replaced = unsafe { libc::dup3(other.as_raw_fd(), descriptor, libc::O_CLOEXEC) };
    match replaced {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Waits until each thread of a session has received its first message.
#[derive(Debug, Default)]
pub(crate) struct FirstMessages {
    /// Held by each thread once, when it starts. No other lock is acquired inside.
    state: Mutex<State>,
    all_are_there: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The number of threads that have not received their message.
    missing: usize,
    /// `None` if the session reads from the connection to the kernel.
    link: Option<Link>,
}

#[derive(Debug)]
struct Link {
    /// The end of the socket from which the messages come.
    messages: OwnedFd,
    /// The connection to the kernel.
    connection: OwnedFd,
    /// The descriptor of the session, which is open as long as the session has a thread.
    session: RawFd,
}

impl Link {
    fn send_one(&self) -> io::Result<()> {
        rustix::net::send(&self.messages, &forget_nothing(), SendFlags::NOSIGNAL)?;
        Ok(())
    }
}

/// Whether a request to forget this node is a first message. The kernel has no such node.
pub(crate) fn is_first(node: INodeNo) -> bool {
    node.0 == 0
}

impl FirstMessages {
    /// Begins: the session with this descriptor has `threads` threads, which will read from the
    /// other end of `messages`. `connection` is its connection to the kernel.
    pub(crate) fn begin(
        &self,
        session: BorrowedFd<'_>,
        threads: usize,
        messages: OwnedFd,
        connection: OwnedFd,
    ) -> io::Result<()> {
        let link = Link {
            messages,
            connection,
            session: session.as_fd().as_raw_fd(),
        };
        link.send_one()?;
        *self.state.lock() = State {
            missing: threads,
            link: Some(link),
        };
        Ok(())
    }

    /// This thread has received its message. Waits for the others.
    pub(crate) fn arrive(&self) {
        let mut state = self.state.lock();
        state.missing = state.missing.saturating_sub(1);
        let Some(link) = &state.link else { return };
        let went_well = if state.missing > 0 {
            // One after the other, because a socket keeps few messages.
            link.send_one().map(|()| true)
        } else {
            replace(link.session, link.connection.as_fd()).map(|()| false)
        };
        if went_well.unwrap_or(false) {
            while state.link.is_some() {
                self.all_are_there.wait(&mut state);
            }
        } else {
            drop(state);
            self.end();
        }
    }

    /// No thread waits any more. Threads that read from the socket see its end, which ends them.
    pub(crate) fn end(&self) {
        self.state.lock().link = None;
        self.all_are_there.notify_all();
    }
}

/// The request FORGET for node 0 (fuse_in_header and fuse_forget_in of linux/fuse.h).
fn forget_nothing() -> [u8; 48] {
    const OPERATION: u32 = 2;
    let mut message = [0; 48];
    message[..4].copy_from_slice(&48_u32.to_ne_bytes());
    message[4..8].copy_from_slice(&OPERATION.to_ne_bytes());
    message
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::takeover;

    const THREADS: usize = 40;

    #[derive(Default)]
    struct Seen {
        first: FirstMessages,
        arrived: AtomicUsize,
        requests: AtomicUsize,
    }

    struct Adapter(Arc<Seen>);

    impl fuser::Filesystem for Adapter {
        fn forget(&self, _: &fuser::Request, ino: INodeNo, _: u64) {
            if is_first(ino) {
                self.0.arrived.fetch_add(1, Ordering::SeqCst);
                self.0.first.arrive();
            } else {
                assert_eq!(self.0.arrived.load(Ordering::SeqCst), THREADS);
                self.0.requests.fetch_add(1, Ordering::SeqCst);
            }
        }
    }

    fn forget(node: u64) -> [u8; 48] {
        let mut message = forget_nothing();
        message[16..24].copy_from_slice(&node.to_ne_bytes());
        message
    }

    #[test]
    fn no_request_is_received_before_all_threads_are_there() {
        let (kernel, connection) = socket().unwrap();
        let seen = Arc::new(Seen::default());
        let mut config = fuser::Config::default();
        config.n_threads = Some(THREADS);
        // A request that has waited since the process before.
        rustix::net::send(&kernel, &forget(7), SendFlags::NOSIGNAL).unwrap();
        let adapter = Adapter(Arc::clone(&seen));
        let first = Some(&seen.first);
        let session = takeover::session(adapter, connection, Some(0), config, first).unwrap();
        let served = std::thread::spawn(|| session.run());
        for node in 8..20 {
            rustix::net::send(&kernel, &forget(node), SendFlags::NOSIGNAL).unwrap();
        }
        while seen.requests.load(Ordering::SeqCst) < 13 {
            std::thread::yield_now();
        }
        // The end of the connection ends the threads: none reads from the socket any more.
        drop(kernel);
        let _ = served.join().unwrap();
        assert_eq!(seen.arrived.load(Ordering::SeqCst), THREADS);
    }

    #[test]
    fn threads_end_if_one_is_missing() {
        let (_kernel, connection) = socket().unwrap();
        let seen = Arc::new(Seen::default());
        let mut config = fuser::Config::default();
        config.n_threads = Some(3);
        let (adapter, first) = (Adapter(Arc::clone(&seen)), Some(&seen.first));
        let session = takeover::session(adapter, connection, Some(0), config, first).unwrap();
        // As if a fourth could not be started.
        seen.first.state.lock().missing = 4;
        let served = std::thread::spawn(|| session.run());
        while seen.arrived.load(Ordering::SeqCst) < 3 {
            std::thread::yield_now();
        }
        seen.first.end();
        served.join().unwrap().unwrap_err();
    }
}

//! The requests of the clients of a pool.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use bcow_images::error::{CommandError, Context};
use bcow_images::image::Messages;
use bcow_images::running;
use bcow_mounts::control::read_line;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::Pid;
use serde::Serialize;

use super::{Collected, MountInProgress, Pool};
use crate::asked::OwnDirectory;
use crate::link::AGAIN;
use crate::protocol::{self, Answer, MAX_REQUEST_BYTES, Outcome, Request, View};
use crate::stats::Document;

/// Requests at a time. Further clients are refused.
const AT_ONCE: usize = 64;
/// How long a client may take to send its request.
const ASKS_WITHIN: Duration = Duration::from_secs(10);

/// What a request returns to the client.
#[derive(Serialize)]
#[serde(untagged)]
enum Done {
    Mounted {
        #[serde(skip)]
        number: u64,
    },
    Statistics(Box<Document>),
    Stopped {
        /// Mounts that are in use.
        in_use: u64,
    },
    Restarted {
        /// Mounts that no process takes over.
        unmounted: u64,
    },
}

/// A connected client. Counts until it is dropped.
pub(super) struct Client {
    pool: Arc<Pool>,
    is_one_too_many: bool,
    /// Whether its request is being read or was read.
    has_asked: bool,
}

impl Client {
    pub(super) fn new(pool: &Arc<Pool>) -> Self {
        let before = pool.clients.fetch_add(1, Ordering::Relaxed);
        Client {
            pool: Arc::clone(pool),
            is_one_too_many: before >= AT_ONCE,
            has_asked: false,
        }
    }

    /// Answers one request. Errors of the connection concern only the client.
    pub(super) fn serve(mut self, connection: &UnixStream) {
        let hello = protocol::line(&self.pool.hello()).unwrap_or_default();
        if send(connection, &hello).is_err() {
            return;
        }
        let messages = Collected::default();
        let result = match self.answer(connection, &messages) {
            Ok(None) => return,
            Ok(Some(outcome)) => outcome,
            Err(error) => Outcome::Failed(error),
        };
        let messages = messages.0.into_inner();
        let answer = Answer { messages, result };
        let sent = protocol::line(&answer)
            .map_err(io::Error::from)
            .and_then(|line| send(connection, &line));
        match answer.result {
            Outcome::Done(Done::Mounted { number }) if sent.is_err() => self.pool.unmount(number),
            Outcome::Done(Done::Restarted { .. }) => {
                self.pool.wait_for_answers();
                std::process::exit(AGAIN.into());
            }
            Outcome::Done(Done::Stopped { .. }) => {
                self.pool.state().unanswered -= 1;
                self.pool.changed.notify_all();
                // The client waits until the process has ended and the connection is closed.
                self.pool.wait_for_end();
                thread::park();
            }
            _ => {}
        }
    }

    /// Reads the request of the client, which counts from before the first byte is read.
    fn read_request(&mut self, connection: &UnixStream) -> io::Result<Vec<u8>> {
        let mut readable = [PollFd::new(connection, PollFlags::IN)];
        let timeout = Timespec::try_from(ASKS_WITHIN).map_err(io::Error::other)?;
        if retry_on_intr(|| poll(&mut readable, Some(&timeout)))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        {
            let mut state = self.pool.state();
            if state.reads_no_more {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            state.answering += 1;
        }
        self.has_asked = true;
        read_line(connection, MAX_REQUEST_BYTES, Some(ASKS_WITHIN))
    }

    /// `None` if the client has left without a request, or another process is to read it.
    fn answer(
        &mut self,
        connection: &UnixStream,
        ui: &dyn Messages,
    ) -> Result<Option<Outcome<Done>>, CommandError> {
        let name = self.pool.name.clone();
        let cannot = || CommandError::new(format!("cannot use the pool {name}"));
        if self.is_one_too_many {
            return Err(cannot().caused_by_text(format!("it answers {AT_ONCE} other requests")));
        }
        let peer = rustix::net::sockopt::socket_peercred(connection)
            .map_err(|errno| cannot().caused_by(&io::Error::from(errno)))?;
        let line = match self.read_request(connection) {
            Ok(line) => line,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
            Err(error) => return Err(cannot().caused_by(&error)),
        };
        let request = protocol::decode_request(&line)?;
        let is_owner = peer.uid == rustix::process::geteuid();
        // Root may look at and end the pools of others, as with every process.
        if !is_owner && (!peer.uid.is_root() || matches!(request, Request::Mount { .. })) {
            return Err(cannot().caused_by_text(format!(
                "it belongs to {}",
                running::user_name(rustix::process::geteuid().as_raw())
            )));
        }
        log_request(&request, peer.pid);
        Ok(Some(Outcome::Done(match request {
            Request::Stats => Done::Statistics(Box::new(self.pool.statistics())),
            Request::Stop { force } => Done::Stopped {
                in_use: self.pool.stop(force)?,
            },
            Request::Restart { force } => Done::Restarted {
                unmounted: self.pool.restart(force)?,
            },
            Request::Mount { asked, view } => {
                if view != View::own().context(|| cannot().message().to_owned())? {
                    return Err(cannot()
                        .caused_by_text(
                            "it runs in another mount or user namespace, or with another root \
                             directory, and opens the files of its mounts there",
                        )
                        .hint("start a pool in this namespace, or leave --pool out"));
                }
                // Before the directory, which can be inside a mount of the pool.
                let Some(mount) = MountInProgress::new(&self.pool)? else {
                    return Ok(Some(Outcome::Again));
                };
                let place = OwnDirectory::enter(asked.directory.clone(), Some(peer.pid))?;
                let number = self.pool.mount(mount, asked, ui)?;
                drop(place);
                Done::Mounted { number }
            }
        })))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.pool.clients.fetch_sub(1, Ordering::Relaxed);
        if self.has_asked {
            self.pool.state().answering -= 1;
            self.pool.changed.notify_all();
        }
    }
}

fn send(mut connection: &UnixStream, line: &[u8]) -> io::Result<()> {
    connection.set_write_timeout(Some(ASKS_WITHIN))?;
    connection.write_all(line)
}

fn log_request(request: &Request, client: Pid) {
    let name = match request {
        Request::Mount { .. } => "a mount",
        Request::Stats => "the statistics",
        Request::Stop { .. } => "the end of the pool",
        Request::Restart { .. } => "another process",
    };
    tracing::info!("process {} asks for {name}", client.as_raw_nonzero());
}

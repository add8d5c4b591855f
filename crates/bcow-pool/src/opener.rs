//! The opener: a process that opens files of the hidden mount for the process of a pool.
//!
//! The process of the pool serves the hidden mount itself. If it waited for a file there and were
//! killed, its waiting thread could not end before the request is answered, and no other process
//! could take over and answer it. The opener waits in its place: the next process of the pool
//! answers the request, and the opener ends.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bcow_fuse::shared::Workers;
use bcow_fuse::starter;
use bcow_images::running;
use bcow_mount::HiddenMount;
use bcow_sandbox::{Attributes, CapabilitySet, Sandbox, SandboxError, Sockets, When};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use crate::link::{Link, Packet, Wait};

/// After this time without an answer, the process of the pool looks whether the opener has ended.
const LOOKS_AFTER: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// An opener, which is started when it is needed.
#[derive(Default)]
pub struct Opener(Mutex<Option<Arc<Connection>>>);

/// The socket to an opener, and the number of its process.
struct Connection {
    link: Link,
    opener: u32,
}

impl Opener {
    /// Opens the file `name` in the root directory of a hidden mount, as a backing.
    pub fn open(&self, hidden: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
        let (connection, is_new) = self.started()?;
        match ask(&connection, hidden, name) {
            Err(Problem::Gone(error)) => {
                self.end(&connection);
                if is_new {
                    return Err(error);
                }
                // It was ended, for example by a signal to all processes of a service.
                let (connection, _) = self.started()?;
                ask(&connection, hidden, name)
            }
            other => other,
        }
        .map_err(io::Error::from)
    }

    /// The opener, and whether it was started now.
    fn started(&self) -> io::Result<(Arc<Connection>, bool)> {
        let mut running = self.running();
        let is_new = running.is_none();
        let running = match &mut *running {
            Some(running) => running,
            none => none.insert(Arc::new(start()?)),
        };
        Ok((Arc::clone(running), is_new))
    }

    fn running(&self) -> MutexGuard<'_, Option<Arc<Connection>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the use of an opener. The next one that is started kills it.
    fn end(&self, connection: &Arc<Connection>) {
        self.running()
            .take_if(|running| Arc::ptr_eq(running, connection));
    }
}

/// Why a file was not opened.
enum Problem {
    /// The opener does not answer.
    Gone(io::Error),
    /// The file cannot be opened.
    Failed(io::Error),
}

impl From<Problem> for io::Error {
    fn from(problem: Problem) -> Self {
        match problem {
            Problem::Gone(error) | Problem::Failed(error) => error,
        }
    }
}

fn start() -> io::Result<Connection> {
    let (link, theirs) = Link::pair()?;
    let opener = starter::start_companion(theirs.into())?;
    Ok(Connection { link, opener })
}

/// Each request has a socket of its own for the answer, so an answer that takes long delays no
/// other. If the opener ends, it closes the socket.
fn ask(connection: &Connection, hidden: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, Problem> {
    let (answer, theirs) = Link::pair().map_err(Problem::Failed)?;
    let name = name.to_owned();
    let packet = Packet::Open { name };
    connection
        .link
        .send(&packet, &[hidden, theirs.as_fd()])
        .map_err(Problem::Gone)?;
    drop(theirs);
    let (packet, descriptors) = wait_for(&answer, connection.opener)
        .and_then(|()| answer.receive(Wait::Yes))
        .and_then(|received| received.ok_or_else(|| io::ErrorKind::UnexpectedEof.into()))
        .map_err(Problem::Gone)?;
    match (packet, descriptors.into_iter().next()) {
        (Packet::Opened { errno: 0 }, Some(file)) => Ok(file),
        (Packet::Opened { errno }, None) if errno != 0 => {
            Err(Problem::Failed(io::Error::from_raw_os_error(errno)))
        }
        _ => Err(Problem::Gone(io::ErrorKind::InvalidData.into())),
    }
}

/// Waits until there is an answer. Fails if the opener was killed: its threads share its sockets,
/// so one of them that waits for a server keeps all open.
fn wait_for(answer: &Link, opener: u32) -> io::Result<()> {
    loop {
        match poll(
            &mut [PollFd::new(answer, PollFlags::IN)],
            Some(&LOOKS_AFTER),
        ) {
            Ok(0) if running::state(opener).is_none() => {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// In the process of an opener: serves it, in a sandbox.
pub fn run(link: &Link, sandbox: When) {
    // The process of the pool sees the end of an opener, and logs what that prevents.
    let _ = confine(sandbox)
        .map_err(io::Error::other)
        .and_then(|()| serve(link));
}

/// Gives up everything: to open a file as a backing, a path below a descriptor is enough.
fn confine(when: When) -> Result<(), SandboxError> {
    let mut sandbox = Sandbox::begin(when, Attributes::Refused, Sockets::Messages, None)?;
    sandbox.confine(&[], CapabilitySet::empty())?;
    sandbox.finish(Attributes::Refused)
}

/// Opens files until the process of the pool has ended. An image whose files wait for a server does
/// not delay the others.
fn serve(link: &Link) -> io::Result<()> {
    let mut workers: HashMap<String, Arc<Workers>> = HashMap::new();
    while let Some((packet, descriptors)) = link.receive(Wait::Yes)? {
        let (Packet::Open { name }, Ok([hidden, answer])) =
            (packet, <[OwnedFd; 2]>::try_from(descriptors))
        else {
            continue;
        };
        let image = name.split('-').next().unwrap_or_default();
        let workers = workers.entry(image.to_owned()).or_default();
        workers.run(move || open(&HiddenMount::of(hidden), &name, &answer.into()));
    }
    Ok(())
}

fn open(hidden: &HiddenMount, name: &str, answer: &Link) {
    // If the process of the pool has ended meanwhile, the next one asks again.
    let _ = match hidden.open_backing(name) {
        Ok(file) => answer.send(&Packet::Opened { errno: 0 }, &[file.as_fd()]),
        Err(error) => {
            let errno = error.raw_os_error();
            let errno = errno.unwrap_or(Errno::IO.raw_os_error());
            answer.send(&Packet::Opened { errno }, &[])
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connected(opener: u32) -> (Connection, Link) {
        let (link, other) = Link::pair().unwrap();
        (Connection { link, opener }, other)
    }

    #[test]
    fn an_opener_that_has_ended_is_an_error() {
        let (connection, other) = connected(std::process::id());
        drop(other);
        let root = std::fs::File::open("/").unwrap();
        let problem = ask(&connection, root.as_fd(), "file").err();
        assert!(matches!(problem, Some(Problem::Gone(_))));
    }

    #[test]
    fn a_killed_opener_is_an_error_although_a_thread_of_it_waits() {
        let mut ended = std::process::Command::new("true").spawn().unwrap();
        // The thread has this socket open.
        let (connection, _other) = connected(ended.id());
        let root = std::fs::File::open("/").unwrap();
        let problem = ask(&connection, root.as_fd(), "file").err();
        assert!(matches!(problem, Some(Problem::Gone(_))));
        ended.wait().unwrap();
    }

    #[test]
    fn files_are_opened_by_their_names() {
        let hidden = std::fs::File::open(env!("CARGO_MANIFEST_DIR")).unwrap();
        let (connection, other) = connected(std::process::id());
        let opener = std::thread::spawn(move || serve(&other));
        let file = ask(&connection, hidden.as_fd(), "Cargo.toml");
        let Ok(file) = file else {
            panic!("the file was not opened")
        };
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.contains("bcow-pool"), "{text}");
        let problem = ask(&connection, hidden.as_fd(), "other").err();
        let Some(Problem::Failed(error)) = problem else {
            panic!("it is another problem")
        };
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        drop(connection);
        opener.join().unwrap().unwrap();
    }
}

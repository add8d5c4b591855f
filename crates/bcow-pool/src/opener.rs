//! The opener: a process that opens files of the hidden mount for the process of a pool.
//!
//! The process of the pool serves the hidden mount itself. If it waited for a file there and were
//! killed, its waiting thread could not end before the request is answered, and no other process
//! could take over and answer it. The opener waits in its place: the next process of the pool
//! answers the request, and the opener ends.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use bcow_mount::HiddenMount;
use rustix::io::Errno;

use crate::link::{Link, MARK, Packet, Wait};

/// Environment variable of an opener, beside [`MARK`].
const OPENER: &str = "BCOW_POOL_OPENS_FILES";

/// An opener, which is started when it is needed.
#[derive(Default)]
pub struct Opener(Mutex<Option<Running>>);

struct Running {
    child: Child,
    link: Link,
}

impl Opener {
    /// Opens the file `name` in the root directory of a hidden mount, as a backing.
    pub fn open(&self, hidden: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = running.is_none();
        let opened = ask(started(&mut running)?, hidden, name);
        match opened {
            // It was ended, for example by a signal to all processes of a service.
            Err(Problem::Gone(_)) if !is_new => {
                end(&mut running);
                ask(started(&mut running)?, hidden, name)
            }
            other => other,
        }
        .map_err(|problem| {
            if let Problem::Gone(_) = problem {
                end(&mut running);
            }
            problem.into()
        })
    }
}

/// Why a file was not opened.
enum Problem {
    /// The opener does not answer.
    Gone(io::Error),
    /// The kernel refuses.
    Refused(Errno),
}

impl From<Problem> for io::Error {
    fn from(problem: Problem) -> Self {
        match problem {
            Problem::Gone(error) => error,
            Problem::Refused(errno) => errno.into(),
        }
    }
}

fn started(running: &mut Option<Running>) -> io::Result<&Link> {
    let running = match running {
        Some(running) => running,
        none => none.insert(start()?),
    };
    Ok(&running.link)
}

fn start() -> io::Result<Running> {
    let (link, theirs) = Link::pair()?;
    let mut arguments = std::env::args_os();
    // Its file may be gone.
    let mut command = Command::new("/proc/self/exe");
    if let Some(name) = arguments.next() {
        command.arg0(name);
    }
    let child = command
        .args(arguments)
        .env(MARK, "1")
        .env(OPENER, "1")
        .stdin(OwnedFd::from(theirs))
        .stdout(Stdio::null())
        .spawn()?;
    Ok(Running { child, link })
}

fn end(running: &mut Option<Running>) {
    if let Some(Running { mut child, link }) = running.take() {
        // It ends when the socket is closed.
        drop(link);
        let _ = child.wait();
    }
}

fn ask(link: &Link, hidden: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, Problem> {
    let name = name.to_owned();
    link.send(&Packet::Open { name }, &[hidden])
        .map_err(Problem::Gone)?;
    let (packet, descriptors) = link
        .receive(Wait::Yes)
        .and_then(|received| received.ok_or_else(|| io::ErrorKind::UnexpectedEof.into()))
        .map_err(Problem::Gone)?;
    match (packet, descriptors.into_iter().next()) {
        (Packet::Opened { errno: 0 }, Some(file)) => Ok(file),
        (Packet::Opened { errno }, None) if errno != 0 => {
            Err(Problem::Refused(Errno::from_raw_os_error(errno)))
        }
        _ => Err(Problem::Gone(io::ErrorKind::InvalidData.into())),
    }
}

/// Whether this process is an opener.
pub fn is_opener() -> bool {
    std::env::var_os(OPENER).is_some()
}

/// Opens files until the process of the pool has ended.
pub fn serve(link: &Link) -> io::Result<()> {
    let _ = rustix::thread::set_name(c"bcow-opener");
    while let Some((packet, descriptors)) = link.receive(Wait::Yes)? {
        let Packet::Open { name } = packet else {
            continue;
        };
        let hidden = descriptors.into_iter().next();
        let opened = match hidden {
            Some(hidden) => HiddenMount::of(hidden).open_backing(&name),
            None => Err(Errno::BADF.into()),
        };
        let sent = match &opened {
            Ok(file) => link.send(&Packet::Opened { errno: 0 }, &[file.as_fd()]),
            Err(error) => {
                let errno = error.raw_os_error();
                let errno = errno.unwrap_or(Errno::IO.raw_os_error());
                link.send(&Packet::Opened { errno }, &[])
            }
        };
        // The process of the pool has ended meanwhile.
        if sent.is_err() {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_opener_that_has_ended_is_an_error() {
        let (link, other) = Link::pair().unwrap();
        drop(other);
        let root = std::fs::File::open("/").unwrap();
        let problem = ask(&link, root.as_fd(), "file").err();
        assert!(matches!(problem, Some(Problem::Gone(_))));
    }

    #[test]
    fn files_are_opened_by_their_names() {
        let hidden = std::fs::File::open(env!("CARGO_MANIFEST_DIR")).unwrap();
        let (link, other) = Link::pair().unwrap();
        let opener = std::thread::spawn(move || serve(&other));
        let file = ask(&link, hidden.as_fd(), "Cargo.toml");
        let Ok(file) = file else {
            panic!("the file was not opened")
        };
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        let text = std::fs::read_to_string(path).unwrap();
        assert!(text.contains("bcow-pool"), "{text}");
        let problem = ask(&link, hidden.as_fd(), "other").err();
        assert!(matches!(problem, Some(Problem::Refused(Errno::NOENT))));
        drop(link);
        opener.join().unwrap().unwrap();
    }
}

//! The opener: a process that opens files of the hidden mount for the process of a pool.
//!
//! The process of the pool serves the hidden mount itself. If it waited for a file there and were
//! killed, its waiting thread could not end before the request is answered, and no other process
//! could take over and answer it. The opener waits in its place: the next process of the pool
//! answers the request, and the opener ends.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use bcow_fuse::shared::Workers;
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
    link: Arc<Link>,
}

impl Opener {
    /// Opens the file `name` in the root directory of a hidden mount, as a backing.
    pub fn open(&self, hidden: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
        let (link, is_new) = self.started()?;
        match ask(&link, hidden, name) {
            Err(Problem::Gone(error)) => {
                self.end(&link);
                if is_new {
                    return Err(error);
                }
                // It was ended, for example by a signal to all processes of a service.
                let (link, _) = self.started()?;
                ask(&link, hidden, name)
            }
            other => other,
        }
        .map_err(io::Error::from)
    }

    /// The socket to the opener, and whether the opener was started now.
    fn started(&self) -> io::Result<(Arc<Link>, bool)> {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_new = running.is_none();
        let running = match &mut *running {
            Some(running) => running,
            none => none.insert(start()?),
        };
        Ok((Arc::clone(&running.link), is_new))
    }

    /// Ends the opener at the other end of `link`, if it is still in use.
    fn end(&self, link: &Arc<Link>) {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Running { mut child, .. }) =
            running.take_if(|running| Arc::ptr_eq(&running.link, link))
        {
            let _ = child.kill();
            let _ = child.wait();
        }
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
    let link = Arc::new(link);
    Ok(Running { child, link })
}

/// Each request has a socket of its own for the answer, so an answer that takes long delays no
/// other. If the opener ends, it closes the socket.
fn ask(link: &Link, hidden: BorrowedFd<'_>, name: &str) -> Result<OwnedFd, Problem> {
    let (answer, theirs) = Link::pair().map_err(Problem::Failed)?;
    let name = name.to_owned();
    link.send(&Packet::Open { name }, &[hidden, theirs.as_fd()])
        .map_err(Problem::Gone)?;
    drop(theirs);
    let (packet, descriptors) = answer
        .receive(Wait::Yes)
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

/// Whether this process is an opener.
pub fn is_opener() -> bool {
    std::env::var_os(OPENER).is_some()
}

/// Opens files until the process of the pool has ended. An image whose files wait for a server does
/// not delay the others.
pub fn serve(link: &Link) -> io::Result<()> {
    let _ = rustix::thread::set_name(c"bcow-opener");
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
        let Some(Problem::Failed(error)) = problem else {
            panic!("it is another problem")
        };
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
        drop(link);
        opener.join().unwrap().unwrap();
    }
}

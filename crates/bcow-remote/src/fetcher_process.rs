//! The process of the fetcher: it has the connections, and the credentials for them.

use std::collections::HashMap;
use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::address::Address;
use crate::auth::{Auth, Keychain};
use crate::client::AnswerBody;
use crate::error::{Fault, Problem};
use crate::fetcher::Sockets;
use crate::fetcher::messages::{
    self, AccessTo, Answer, ClientName, MOST_PIECE_BYTES, Request, Time, Wanted,
};
use crate::lock::lock;
use crate::retry_budget::RetryBudget;
use crate::s3::S3;
use crate::shared::{Options, Shared};
use crate::source::{Access, RangeAnswer, Source};

/// Most files and documents that are open at one time.
const MOST_SOURCES: usize = 1 << 16;

/// Most clients of the other process.
const MOST_CLIENTS: usize = 256;

/// The credentials that the fetcher has.
pub struct Setup {
    /// Those for registries: in this file, or the usual ones ([`Options::keys`]).
    pub keychain: Box<dyn Fn(Option<PathBuf>) -> Arc<dyn Keychain> + Send + Sync>,
    /// The S3 server with its credentials. The error is for the user.
    pub s3: fn() -> Result<S3, String>,
}

struct Process {
    setup: Setup,
    /// The lock is held for a lookup, or to make a client, which needs no connection.
    clients: Mutex<HashMap<ClientName, Arc<Shared>>>,
    sources: Mutex<Sources>,
    is_sealed: AtomicBool,
}

/// What is open. The lock is held for a lookup or a change, never during a request.
#[derive(Default)]
struct Sources {
    open: HashMap<u32, Served>,
    next: u32,
}

/// A file or a document that is open, and the client that reads it.
#[derive(Clone)]
struct Served {
    source: Arc<Source>,
    shared: Arc<Shared>,
}

impl Sockets {
    /// Answers requests until the other process has ended.
    pub fn serve(self, setup: Setup) -> Result<(), Problem> {
        let process = Arc::new(Process {
            setup,
            clients: Mutex::default(),
            sources: Mutex::default(),
            is_sealed: AtomicBool::new(false),
        });
        let Sockets {
            mut control,
            mut channels,
            life,
        } = self;
        loop {
            let sockets = [&life, &control].into_iter().chain(&channels);
            let mut waiting: Vec<_> = sockets
                .map(|socket| PollFd::new(socket, PollFlags::IN))
                .collect();
            match poll(&mut waiting, None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(Problem::Connection(errno.to_string())),
            }
            let events: Vec<_> = waiting.iter().map(|socket| socket.revents()).collect();
            if events.iter().any(|events| events.contains(PollFlags::HUP)) {
                return Ok(());
            }
            if !events[1].is_empty() && !matches!(process.answer(&mut control), Ok(true)) {
                return Ok(());
            }
            let ready = events[2..].iter().map(|events| !events.is_empty());
            let ready: Vec<bool> = ready.collect();
            for at in (0..channels.len()).rev().filter(|at| ready[*at]) {
                // It gets its thread with its first request, and keeps it.
                let socket = channels.swap_remove(at);
                if let Err(socket) = start(&process, socket) {
                    channels.push(socket);
                }
            }
        }
    }
}

/// Starts the thread of a socket. If the system refuses it, the request fails, and this returns the
/// socket.
fn start(process: &Arc<Process>, socket: UnixStream) -> Result<(), UnixStream> {
    let copy = socket.try_clone();
    let process = Arc::clone(process);
    let work = move || {
        let mut socket = socket;
        while let Ok(true) = process.answer(&mut socket) {}
    };
    let started = thread::Builder::new().spawn(work);
    match (started, copy) {
        (Err(error), Ok(mut socket)) => {
            let why = Problem::Connection(format!("no thread for the request: {error}"));
            let answer = Answer::Failed(why.transient());
            if let Ok(Some(_)) = messages::receive::<Request>(&mut socket) {
                let _ = messages::send(&mut socket, &answer);
            }
            Err(socket)
        }
        _ => Ok(()),
    }
}

impl Process {
    /// Answers a request. `false`: the other end is closed.
    fn answer(&self, socket: &mut UnixStream) -> io::Result<bool> {
        let Some(request) = messages::receive(socket)? else {
            return Ok(false);
        };
        match self.execute(request) {
            Ok((answer, Behind::Nothing)) => messages::send(socket, &answer)?,
            Ok((answer, Behind::Bytes(bytes))) => {
                messages::send(socket, &answer)?;
                socket.write_all(&bytes)?;
            }
            Ok((answer, Behind::Body(body))) => {
                messages::send(socket, &answer)?;
                send_body(socket, *body)?;
            }
            Err(fault) => messages::send(socket, &Answer::Failed(fault))?,
        }
        Ok(true)
    }

    fn execute(&self, request: Request) -> Result<(Answer, Behind), Fault> {
        let is_sealed = self.is_sealed.load(Ordering::Acquire);
        let answer = match request {
            Request::Range {
                source,
                start,
                end,
                time,
            } => {
                let served = self.served(source)?;
                if start >= end {
                    return Err(refused());
                }
                let answer = served.source.range(start, end, &served.budget(time))?;
                return Ok(match answer {
                    RangeAnswer::Part {
                        bytes,
                        total,
                        has_changed,
                        body,
                    } => {
                        let left = body.left();
                        let answer = Answer::Part {
                            bytes,
                            total,
                            has_changed,
                            left,
                        };
                        (answer, Behind::Body(Box::new(body)))
                    }
                    RangeAnswer::Whole { length, body } => whole(length, body),
                });
            }
            Request::Whole { source, time } => {
                let served = self.served(source)?;
                let (length, body) = served.source.whole(&served.budget(time))?;
                return Ok(whole(length, body));
            }
            Request::Figures(client) => Answer::Figures(self.client(client)?.figures()),
            Request::Seal => {
                self.is_sealed.store(true, Ordering::Release);
                // No file is named relative to the working directory any more, which the process
                // would keep busy.
                let _ = rustix::process::chdir("/");
                Answer::Done
            }
            _ if is_sealed => return Err(refused()),
            Request::Open {
                client,
                address,
                access,
                closed,
            } => {
                let served = self.make(client, &address, access)?;
                Answer::Opened(lock(&self.sources).add(served, &closed)?)
            }
            Request::Document(asked) => {
                let served = self.served(asked.source)?;
                let (headers, budget) = (borrowed(&asked.headers), served.budget(asked.time));
                let bytes = served.source.document(&headers, asked.max_bytes, &budget)?;
                return Ok((Answer::Document(bytes.len() as u64), Behind::Bytes(bytes)));
            }
            Request::Page(asked) => {
                let served = self.served(asked.source)?;
                let (headers, budget) = (borrowed(&asked.headers), served.budget(asked.time));
                let page = served.source.page(&headers, asked.max_bytes, &budget)?;
                let Some(page) = page else {
                    return Ok((Answer::NoPage, Behind::Nothing));
                };
                let answer = Answer::Page {
                    bytes: page.bytes.len() as u64,
                    is_json: page.is_json,
                    next: page.next.map(|next| next.with_secrets()),
                };
                return Ok((answer, Behind::Bytes(page.bytes)));
            }
        };
        Ok((answer, Behind::Nothing))
    }

    fn make(&self, client: ClientName, address: &str, access: AccessTo) -> Result<Served, Fault> {
        let address = Address::parse(address).map_err(Problem::permanent)?;
        let keys = client.keys.clone();
        let shared = self.client(client)?;
        let access = match access {
            AccessTo::Open => Access::Open,
            AccessTo::Registry { server, repository } => {
                let make = || {
                    let keychain = (self.setup.keychain)(keys);
                    Auth::new(&shared.client, &server, &repository, &keychain)
                };
                Access::Registry(shared.access(&server, &repository, make))
            }
            AccessTo::S3 => match (self.setup.s3)() {
                Ok(server) => Access::S3(server.signer()),
                Err(why) => return Err(Problem::denied(403, why).permanent()),
            },
        };
        let source = Source::new(Arc::clone(&shared.client), address, access);
        let source = Arc::new(source);
        Ok(Served { source, shared })
    }

    fn client(&self, name: ClientName) -> Result<Arc<Shared>, Fault> {
        let mut clients = lock(&self.clients);
        if let Some(known) = clients.get(&name) {
            return Ok(Arc::clone(known));
        }
        if clients.len() >= MOST_CLIENTS {
            clients.retain(|_, client| Arc::strong_count(client) > 1);
        }
        if clients.len() >= MOST_CLIENTS {
            return Err(refused());
        }
        let options = Options {
            insecure: name.insecure,
            ..Options::default()
        };
        let client = Arc::new(Shared::new(options).map_err(Problem::permanent)?);
        clients.insert(name, Arc::clone(&client));
        Ok(client)
    }

    fn served(&self, number: u32) -> Result<Served, Fault> {
        let found = lock(&self.sources).open.get(&number).cloned();
        found.ok_or_else(refused)
    }
}

impl Served {
    fn budget(&self, time: Time) -> RetryBudget {
        RetryBudget::of_request(time.timeout, time.left, &self.shared.client.counters)
    }
}

impl Sources {
    fn add(&mut self, served: Served, closed: &[u32]) -> Result<u32, Fault> {
        for number in closed {
            self.open.remove(number);
        }
        if self.open.len() >= MOST_SOURCES {
            return Err(refused());
        }
        let number = self.next;
        self.next = number.checked_add(1).ok_or_else(refused)?;
        self.open.insert(number, served);
        Ok(number)
    }
}

/// What follows an answer.
enum Behind {
    Nothing,
    Bytes(Vec<u8>),
    Body(Box<AnswerBody>),
}

fn whole(length: Option<u64>, body: AnswerBody) -> (Answer, Behind) {
    let left = body.left();
    (Answer::Whole { length, left }, Behind::Body(Box::new(body)))
}

/// Sends the pieces of a body that the other process asks for.
fn send_body(socket: &mut UnixStream, mut body: AnswerBody) -> io::Result<()> {
    // The length comes first.
    let mut piece = vec![0; 4 + MOST_PIECE_BYTES];
    loop {
        match Wanted::receive(socket)? {
            Wanted::Piece { time } => {
                body.extend(time);
                match body.read(&mut piece[4..]) {
                    Ok(count) => messages::send_piece(socket, &mut piece, count)?,
                    Err(fault) => messages::send_failure(socket, &fault)?,
                }
            }
            Wanted::Reuse => {
                body.release();
                return Ok(());
            }
            Wanted::Close => return Ok(()),
        }
    }
}

/// The fault of a request that no process of bcow makes, or that comes too late.
fn refused() -> Fault {
    Problem::Connection("the process that makes the connections refuses the request".into())
        .permanent()
}

fn borrowed(headers: &[(String, String)]) -> Vec<(&str, &str)> {
    let headers = headers.iter();
    headers
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect()
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::time::Duration;

    use super::*;
    use crate::fetcher::messages::Document;

    struct NoKeys;

    impl Keychain for NoKeys {
        fn credentials(&self, _: &str) -> Result<Option<crate::Credentials>, String> {
            Ok(None)
        }
    }

    fn process() -> Process {
        Process {
            setup: Setup {
                keychain: Box::new(|_| Arc::new(NoKeys)),
                s3: || Err("no S3".to_owned()),
            },
            clients: Mutex::default(),
            sources: Mutex::default(),
            is_sealed: AtomicBool::new(false),
        }
    }

    fn client(keys: Option<PathBuf>) -> ClientName {
        ClientName {
            insecure: true,
            keys,
        }
    }

    fn opens(process: &Process, address: &str, access: AccessTo) -> Result<u32, Fault> {
        let request = Request::Open {
            client: client(None),
            address: address.to_owned(),
            access,
            closed: Vec::new(),
        };
        match process.execute(request)?.0 {
            Answer::Opened(number) => Ok(number),
            _ => panic!("another answer"),
        }
    }

    #[test]
    fn requests_that_no_process_of_bcow_makes_are_refused() {
        let process = process();
        let time = Time {
            timeout: Duration::MAX,
            left: Duration::MAX,
        };
        let source = opens(&process, "http://localhost:1/x", AccessTo::Open).expect("opened");
        opens(&process, "file:///etc/passwd", AccessTo::Open).expect_err("no server");
        opens(&process, "http://localhost:1/x", AccessTo::S3).expect_err("no keys");
        let range = |source, start, end| Request::Range {
            source,
            start,
            end,
            time,
        };
        let document = || {
            Request::Document(Document {
                source,
                headers: vec![("x\r\ny".to_owned(), "z\r\n".to_owned())],
                max_bytes: u64::MAX,
                time,
            })
        };
        for request in [range(source, 7, 7), range(source + 1, 0, 7), document()] {
            assert!(process.execute(request).is_err());
        }
        assert!(process.execute(Request::Seal).is_ok());
        assert!(process.execute(document()).is_err());
        opens(&process, "http://localhost:1/x", AccessTo::Open).expect_err("sealed");
    }

    #[test]
    fn clients_and_files_are_bounded() {
        let process = process();
        for n in 0..MOST_CLIENTS * 2 {
            let name = client(Some(n.to_string().into()));
            process.client(name).expect("those without files go");
        }
        assert!(lock(&process.clients).len() <= MOST_CLIENTS);
        let held: Vec<_> = (0..MOST_CLIENTS)
            .map_while(|n| {
                process
                    .client(client(Some(format!("held {n}").into())))
                    .ok()
            })
            .collect();
        assert_eq!(held.len(), MOST_CLIENTS);
        assert!(process.client(client(None)).is_err());
    }

    #[test]
    fn messages_that_are_none_end_their_socket() {
        let process = process();
        let long = u32::MAX.to_le_bytes();
        for bytes in [
            &long[..],
            b"\x02\0\0\0{}",
            b"\x04\0\0\0null",
            b"\x09\0\0\0\"Seal\"",
            b"\x01",
        ] {
            let (mut own, mut other) = UnixStream::pair().expect("sockets");
            own.write_all(bytes).expect("sent");
            own.shutdown(std::net::Shutdown::Write).expect("the end");
            assert!(!process.answer(&mut other).unwrap_or(false), "{bytes:?}");
            drop(other);
            assert_eq!(own.read(&mut [0]).expect("the end"), 0);
        }
    }
}

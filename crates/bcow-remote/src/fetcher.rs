//! The *fetcher*: a process that makes the connections for another one, which decodes what
//! strangers wrote and therefore has no sockets and no credentials.
//!
//! The other process says which file or document it needs, and gets its bytes; it checks them as if
//! they came from the server itself. [`Fetcher::seal`] ends that choice: from then on, only the
//! bytes of files that are open can be asked for. Names, connections, TLS, redirects, tokens and
//! signatures are the work of the fetcher alone ([`crate::fetcher_process`]). It decodes no image.

pub(crate) mod messages;

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::address::Address;
use crate::error::{Fault, Problem};
use crate::figures::Figures;
use crate::lock::lock;
use crate::retry_budget::RetryBudget;
use crate::servers::Permit;
pub(crate) use messages::{AccessTo, ClientName, Page};
use messages::{Answer, Document, Request, Time, Wanted};

/// Requests at one time, to all servers. One more socket is for requests that need no server, and
/// another one shows the end of the other process.
const CHANNELS: usize = 64;

/// The fetcher of this process.
#[derive(Debug)]
pub struct Fetcher {
    /// For requests that need no server, so that they never wait for one. The lock is held for a
    /// request and its answer; no other lock is taken meanwhile.
    control: Mutex<UnixStream>,
    /// The sockets without a request. The lock is held to take one or to put one back.
    idle: Mutex<Vec<UnixStream>>,
    is_freed: Condvar,
    /// Files that are not needed any more, which the next request to open one tells. The lock is
    /// held to add to the list, or to take it.
    closed: Mutex<Vec<u32>>,
    /// Its end is the end of the fetcher.
    life: UnixStream,
}

/// The fetcher's ends of the sockets.
pub struct Sockets {
    /// For requests that need no server.
    pub(crate) control: UnixStream,
    pub(crate) channels: Vec<UnixStream>,
    /// Its end is the end of the other process.
    pub(crate) life: UnixStream,
}

impl Sockets {
    /// The descriptors that the fetcher keeps.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let all = self.channels.iter().chain([&self.control, &self.life]);
        all.map(AsRawFd::as_raw_fd).collect()
    }
}

/// A file or a document that the fetcher reads.
pub(crate) struct Opened {
    fetcher: Arc<Fetcher>,
    /// Its number there, or why it has none.
    number: Result<u32, Fault>,
}

/// The body of an answer. Its socket is used again when this is dropped.
pub(crate) struct Body {
    channel: Channel,
    /// What has arrived, from `at` on not read yet: most reads are of one chunk, and each piece of
    /// the fetcher is a wait for it.
    piece: Vec<u8>,
    at: usize,
    _permit: Permit,
}

/// The head of an answer to a request for bytes of a file.
pub(crate) enum Head {
    Part {
        bytes: u64,
        total: Option<u64>,
        has_changed: bool,
    },
    Whole {
        length: Option<u64>,
    },
}

/// A socket with a request.
struct Channel {
    fetcher: Arc<Fetcher>,
    /// `None` when it has been put back.
    socket: Option<UnixStream>,
    is_broken: bool,
}

impl Fetcher {
    /// The sockets between this process and its fetcher, which is started with the second part.
    pub fn pair() -> io::Result<(Fetcher, Sockets)> {
        let (own_life, life) = UnixStream::pair()?;
        let (mut idle, mut channels) = (Vec::new(), Vec::new());
        let (own_control, control) = UnixStream::pair()?;
        for _ in 0..CHANNELS {
            let (own, of_fetcher) = UnixStream::pair()?;
            idle.push(own);
            channels.push(of_fetcher);
        }
        let fetcher = Fetcher {
            control: Mutex::new(own_control),
            idle: Mutex::new(idle),
            is_freed: Condvar::new(),
            closed: Mutex::default(),
            life: own_life,
        };
        let sockets = Sockets {
            control,
            channels,
            life,
        };
        Ok((fetcher, sockets))
    }

    /// Waits for the end of the fetcher.
    pub fn wait_for_end(&self) {
        // It sends nothing.
        let _ = (&self.life).read(&mut [0]);
    }

    /// The fetcher reads no file any more but those that are open.
    pub fn seal(&self) -> Result<(), Problem> {
        match self.control(&Request::Seal) {
            Ok(Answer::Done) => Ok(()),
            Ok(_) => Err(ended()),
            Err(fault) => Err(fault.problem),
        }
    }

    /// The counters of the connections of a client.
    pub(crate) fn figures(&self, client: &ClientName) -> Option<Figures> {
        match self.control(&Request::Figures(client.clone())).ok()? {
            Answer::Figures(figures) => Some(figures),
            _ => None,
        }
    }

    /// Names a file or a document. No connection is made.
    pub(crate) fn open(
        self: &Arc<Self>,
        client: &ClientName,
        address: &Address,
        access: AccessTo,
    ) -> Opened {
        let request = Request::Open {
            client: client.clone(),
            address: address.with_secrets(),
            access,
            closed: std::mem::take(&mut *lock(&self.closed)),
        };
        let number = self.control(&request).and_then(|answer| match answer {
            Answer::Opened(number) => Ok(number),
            _ => Err(ended().permanent()),
        });
        Opened {
            fetcher: Arc::clone(self),
            number,
        }
    }

    fn control(&self, request: &Request) -> Result<Answer, Fault> {
        let mut socket = lock(&self.control);
        on_socket(&mut socket, |socket| ask(socket, request))?
    }

    /// Waits for a socket, until a time.
    fn channel(self: &Arc<Self>, until: Instant) -> Option<Channel> {
        let left = until.saturating_duration_since(Instant::now());
        let waited = self
            .is_freed
            .wait_timeout_while(lock(&self.idle), left, |idle| idle.is_empty());
        let (mut idle, _) = waited.unwrap_or_else(PoisonError::into_inner);
        // The one that was used last: the fetcher has a thread for each that was ever used.
        let socket = idle.pop()?;
        Some(Channel {
            fetcher: Arc::clone(self),
            socket: Some(socket),
            is_broken: false,
        })
    }
}

impl Opened {
    /// Requests the bytes `start..end`, at least one.
    pub(crate) fn range(
        &self,
        start: u64,
        end: u64,
        permit: Permit,
        budget: &RetryBudget,
    ) -> Result<(Head, Option<u64>, Body), Fault> {
        let source = self.number()?;
        let request = |time| Request::Range {
            source,
            start,
            end,
            time,
        };
        self.begin(request, permit, budget)
    }

    /// Requests the whole file.
    pub(crate) fn whole(
        &self,
        permit: Permit,
        budget: &RetryBudget,
    ) -> Result<(Head, Option<u64>, Body), Fault> {
        let source = self.number()?;
        self.begin(|time| Request::Whole { source, time }, permit, budget)
    }

    /// Requests a document of at most `max_bytes` bytes.
    pub(crate) fn document(
        &self,
        headers: &[(&str, &str)],
        max_bytes: u64,
        budget: &RetryBudget,
    ) -> Result<Vec<u8>, Fault> {
        let mut channel = self.channel(budget)?;
        let request = Request::Document(self.named(headers, max_bytes, budget)?);
        match channel.ask(&request)? {
            Answer::Document(bytes) => channel.bytes(bytes, max_bytes),
            _ => Err(channel.broken()),
        }
    }

    /// Requests a page of a list; `None` if the server does not know the list.
    pub(crate) fn page(
        &self,
        headers: &[(&str, &str)],
        max_bytes: u64,
        budget: &RetryBudget,
    ) -> Result<Option<Page>, Fault> {
        let mut channel = self.channel(budget)?;
        let request = Request::Page(self.named(headers, max_bytes, budget)?);
        match channel.ask(&request)? {
            Answer::NoPage => Ok(None),
            Answer::Page {
                bytes,
                is_json,
                next,
            } => Ok(Some(Page {
                bytes: channel.bytes(bytes, max_bytes)?,
                is_json,
                next: next
                    .map(|next| Address::parse(&next))
                    .transpose()
                    .map_err(Problem::permanent)?,
            })),
            _ => Err(channel.broken()),
        }
    }

    fn named(
        &self,
        headers: &[(&str, &str)],
        max_bytes: u64,
        budget: &RetryBudget,
    ) -> Result<Document, Fault> {
        let headers = headers.iter();
        let headers = headers.map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Ok(Document {
            source: self.number()?,
            headers: headers.collect(),
            max_bytes,
            time: Time::of(budget),
        })
    }

    fn number(&self) -> Result<u32, Fault> {
        self.number.clone()
    }

    /// `request` gets the time that is left when there is a socket for it.
    fn begin(
        &self,
        request: impl FnOnce(Time) -> Request,
        permit: Permit,
        budget: &RetryBudget,
    ) -> Result<(Head, Option<u64>, Body), Fault> {
        let mut channel = self.channel(budget)?;
        let (head, left) = match channel.ask(&request(Time::of(budget)))? {
            Answer::Part {
                bytes,
                total,
                has_changed,
                left,
            } => {
                let head = Head::Part {
                    bytes,
                    total,
                    has_changed,
                };
                (head, left)
            }
            Answer::Whole { length, left } => (Head::Whole { length }, left),
            _ => return Err(channel.broken()),
        };
        let body = Body {
            channel,
            piece: Vec::new(),
            at: 0,
            _permit: permit,
        };
        Ok((head, left, body))
    }

    fn channel(&self, budget: &RetryBudget) -> Result<Channel, Fault> {
        let channel = self.fetcher.channel(budget.deadline());
        channel.ok_or_else(|| Problem::Timeout(budget.longest_silence()).permanent())
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Ok(number) = self.number {
            lock(&self.fetcher.closed).push(number);
        }
    }
}

impl Body {
    /// Reads some bytes within `time`; 0 at the end.
    pub(crate) fn read(&mut self, buf: &mut [u8], time: Duration) -> Result<usize, Fault> {
        if self.at == self.piece.len() {
            self.receive(time)?;
        }
        let rest = &self.piece[self.at..];
        let count = rest.len().min(buf.len());
        buf[..count].copy_from_slice(&rest[..count]);
        self.at += count;
        Ok(count)
    }

    /// Waits for the next piece, which is empty at the end.
    fn receive(&mut self, time: Duration) -> Result<(), Fault> {
        self.at = 0;
        let piece = &mut self.piece;
        let received = self.channel.on_socket(|socket| {
            socket.write_all(&Wanted::Piece { time }.encode())?;
            messages::receive_piece(socket, piece)
        });
        if !matches!(received, Ok(Ok(()))) {
            self.piece.clear();
        }
        received?.map_err(|fault| *fault)
    }

    /// Ends the body, all of whose bytes are here, so that its connection is used again.
    pub(crate) fn release(self) {
        self.end(Wanted::Reuse);
    }

    fn end(mut self, wanted: Wanted) {
        self.tell(wanted);
        // The drop of the body has nothing to tell then.
        self.channel.put_back();
    }

    fn tell(&mut self, wanted: Wanted) {
        let sent = self
            .channel
            .on_socket(|socket| socket.write_all(&wanted.encode()));
        // The next request on this socket fails then.
        drop(sent);
    }
}

impl Drop for Body {
    fn drop(&mut self) {
        if self.channel.socket.is_some() {
            self.tell(Wanted::Close);
        }
    }
}

impl Channel {
    fn ask(&mut self, request: &Request) -> Result<Answer, Fault> {
        self.on_socket(|socket| ask(socket, request))?
    }

    /// The bytes behind an answer, at most as many as were asked for.
    fn bytes(&mut self, count: u64, most: u64) -> Result<Vec<u8>, Fault> {
        if count > most {
            return Err(self.broken());
        }
        self.on_socket(|socket| {
            let mut bytes = vec![0; count as usize];
            socket.read_exact(&mut bytes)?;
            Ok(bytes)
        })
    }

    fn on_socket<T>(
        &mut self,
        work: impl FnOnce(&mut UnixStream) -> io::Result<T>,
    ) -> Result<T, Fault> {
        let done = match &mut self.socket {
            Some(socket) => on_socket(socket, work),
            None => Err(ended().permanent()),
        };
        self.is_broken |= done.is_err();
        done
    }

    /// The fetcher has sent something else than was asked for.
    fn broken(&mut self) -> Fault {
        let unexpected = |_: &mut UnixStream| Err(io::ErrorKind::InvalidData.into());
        match self.on_socket(unexpected) {
            Ok(()) => ended().permanent(),
            Err(fault) => fault,
        }
    }

    fn put_back(&mut self) {
        if let Some(socket) = self.socket.take() {
            let mut idle = lock(&self.fetcher.idle);
            // One on which every request fails is taken when there is no other one.
            let place = if self.is_broken { 0 } else { idle.len() };
            idle.insert(place, socket);
            drop(idle);
            self.fetcher.is_freed.notify_one();
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.put_back();
    }
}

/// Sends a request, and waits for the answer. A failure that the fetcher reports is an error.
fn ask(socket: &mut UnixStream, request: &Request) -> io::Result<Result<Answer, Fault>> {
    messages::send(socket, request)?;
    Ok(match messages::receive(socket)? {
        Some(Answer::Failed(fault)) => Err(fault),
        Some(answer) => Ok(answer),
        None => return Err(io::ErrorKind::UnexpectedEof.into()),
    })
}

/// Does something on a socket. After a failure, every later request on it fails.
fn on_socket<T>(
    socket: &mut UnixStream,
    work: impl FnOnce(&mut UnixStream) -> io::Result<T>,
) -> Result<T, Fault> {
    work(socket).map_err(|error| {
        tracing::debug!("no answer of the fetcher: {error}");
        let _ = socket.shutdown(std::net::Shutdown::Both);
        ended().permanent()
    })
}

/// The fetcher does not answer.
fn ended() -> Problem {
    Problem::Connection("the process that makes the connections has ended".into())
}

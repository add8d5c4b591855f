//! The messages between a process and its fetcher, on a stream socket for each request at a time.
//!
//! A message is JSON behind its length (32 bits). Bytes of documents follow their message. The
//! bytes of a file are asked for piece by piece ([`Wanted`]), and each piece comes behind its
//! length.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::address::Address;
use crate::error::Fault;
use crate::figures::Figures;
use crate::retry_budget::RetryBudget;

/// Largest message: an address, headers, or the text of a server.
const MOST_MESSAGE_BYTES: usize = 1 << 20;
/// Largest piece of a file: about what arrives while the one before is checked.
pub(crate) const MOST_PIECE_BYTES: usize = 128 << 10;
/// The length of a piece in whose place a [`Fault`] follows.
const FAILED: u32 = u32::MAX;

#[derive(Serialize, Deserialize)]
pub(crate) enum Request {
    /// Names a file or a document, and those that are not needed any more.
    Open {
        client: ClientName,
        /// With its query.
        address: String,
        access: AccessTo,
        closed: Vec<u32>,
    },
    Range {
        source: u32,
        start: u64,
        end: u64,
        time: Time,
    },
    Whole {
        source: u32,
        time: Time,
    },
    Document(Document),
    Page(Document),
    /// From now on, only [`Request::Range`], [`Request::Whole`] and [`Request::Figures`] are
    /// answered.
    Seal,
    /// Of a client.
    Figures(ClientName),
}

/// What distinguishes the clients of a process: each has connections and tokens of its own.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct ClientName {
    pub(crate) insecure: bool,
    /// The file with the credentials; `None`: the usual ones.
    pub(crate) keys: Option<PathBuf>,
}

/// A request for a document, or for a page of a list.
#[derive(Serialize, Deserialize)]
pub(crate) struct Document {
    pub(crate) source: u32,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) max_bytes: u64,
    pub(crate) time: Time,
}

#[derive(Serialize, Deserialize)]
pub(crate) enum Answer {
    Opened(u32),
    /// The pieces of a range are asked for next. `left`: the bytes of the body, if the server says
    /// how many there are.
    Part {
        bytes: u64,
        total: Option<u64>,
        has_changed: bool,
        left: Option<u64>,
    },
    /// The same of a whole file.
    Whole {
        length: Option<u64>,
        left: Option<u64>,
    },
    /// As many bytes follow.
    Document(u64),
    /// As many bytes follow.
    Page {
        bytes: u64,
        is_json: bool,
        next: Option<String>,
    },
    NoPage,
    Figures(Figures),
    Done,
    Failed(Fault),
}

/// The authorization of requests. The fetcher has what it consists of.
#[derive(Serialize, Deserialize)]
pub(crate) enum AccessTo {
    Open,
    /// A repository of a registry.
    Registry {
        /// The registry's name in credentials.
        server: String,
        repository: String,
    },
    S3,
}

/// A page of a list.
pub(crate) struct Page {
    pub(crate) bytes: Vec<u8>,
    /// Whether the server says that it is JSON, or does not say what it is.
    pub(crate) is_json: bool,
    /// The address of the next page.
    pub(crate) next: Option<Address>,
}

/// The time that a request has.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(crate) struct Time {
    pub(crate) timeout: Duration,
    pub(crate) left: Duration,
}

impl Time {
    pub(crate) fn of(budget: &RetryBudget) -> Self {
        Time {
            timeout: budget.timeout(),
            left: budget.left(),
        }
    }
}

/// What a process wants of the body of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// The next piece, within this time. It is empty at the end.
    Piece { time: Duration },
    /// Nothing more: all bytes have arrived, and the connection can be used again.
    Reuse,
    /// Nothing more.
    Close,
}

/// Bytes of an encoded [`Wanted`].
const WANTED_BYTES: usize = 9;

impl Wanted {
    pub(crate) fn encode(self) -> [u8; WANTED_BYTES] {
        let (tag, time) = match self {
            Wanted::Piece { time } => (0, time),
            Wanted::Reuse => (1, Duration::ZERO),
            Wanted::Close => (2, Duration::ZERO),
        };
        let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let mut bytes = [tag; WANTED_BYTES];
        bytes[1..].copy_from_slice(&millis.to_le_bytes());
        bytes
    }

    pub(crate) fn receive(socket: &mut UnixStream) -> io::Result<Self> {
        let mut bytes = [0; WANTED_BYTES];
        socket.read_exact(&mut bytes)?;
        let [tag, millis @ ..] = bytes;
        Ok(match tag {
            0 => Wanted::Piece {
                time: Duration::from_millis(u64::from_le_bytes(millis)),
            },
            1 => Wanted::Reuse,
            2 => Wanted::Close,
            _ => return Err(io::ErrorKind::InvalidData.into()),
        })
    }
}

pub(crate) fn send(socket: &mut UnixStream, message: &impl Serialize) -> io::Result<()> {
    socket.write_all(&framed(message)?)
}

fn framed(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, message)?;
    let length = bytes.len() - 4;
    if length > MOST_MESSAGE_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    bytes[..4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(bytes)
}

/// Waits for a message; `None` when the other end is closed.
pub(crate) fn receive<T: DeserializeOwned>(socket: &mut UnixStream) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match socket.read_exact(&mut length) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let length = u32::from_le_bytes(length) as usize;
    if length > MOST_MESSAGE_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut bytes = vec![0; length];
    socket.read_exact(&mut bytes)?;
    Ok(Some(serde_json::from_slice(&bytes)?))
}

/// Sends a piece: the first `count` bytes of what is behind the first four bytes of `piece`.
pub(crate) fn send_piece(
    socket: &mut UnixStream,
    piece: &mut [u8],
    count: usize,
) -> io::Result<()> {
    piece[..4].copy_from_slice(&(count as u32).to_le_bytes());
    socket.write_all(&piece[..4 + count])
}

pub(crate) fn send_failure(socket: &mut UnixStream, fault: &Fault) -> io::Result<()> {
    let mut bytes = FAILED.to_le_bytes().to_vec();
    bytes.append(&mut framed(fault)?);
    socket.write_all(&bytes)
}

/// Receives a piece, or the failure of the server in its place.
pub(crate) fn receive_piece(
    socket: &mut UnixStream,
    piece: &mut Vec<u8>,
) -> io::Result<Result<(), Box<Fault>>> {
    let mut count = [0; 4];
    socket.read_exact(&mut count)?;
    let count = u32::from_le_bytes(count);
    if count == FAILED {
        let fault = receive(socket)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        return Ok(Err(Box::new(fault)));
    }
    if count as usize > MOST_PIECE_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    piece.resize(count as usize, 0);
    socket.read_exact(piece)?;
    Ok(Ok(()))
}

//! Connections under a model checker, which tries thousands of schedules of the threads that
//! receive, execute and send.
//!
//! The client sends all its bytes before the server starts, so that only the threads of the server
//! decide what happens. In every schedule, each request must get one reply with the right content,
//! and the session must end.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use bcow::sync::atomic::{AtomicU64, Ordering};
use bcow::sync::thread;
use bcow::{BlockDevice, Error, Space, WritableDevice};
use bcow_nbd::proto::{OPTION_MAGIC, REQUEST_MAGIC, SIMPLE_REPLY_MAGIC, client_flag, option};
use bcow_nbd::{Device, Export, Exports, Server, ServerOptions};
use bcow_testkit::explore;

const DISK_BYTES: usize = 1 << 20;
const READ: u16 = 0;
const WRITE: u16 = 1;
const DISCONNECT: u16 = 2;
const FLUSH: u16 = 3;
const EIO: u32 = 5;
const ESHUTDOWN: u32 = 108;
/// More bytes than a worker uses directly from the receive buffer.
const LARGE: usize = 130 << 10;

/// Number of schedules of each model in one run.
const SCHEDULES: usize = 300;

/// A disk that lets other threads run before and after each request.
struct Disk {
    bytes: Mutex<Vec<u8>>,
    point: AtomicU64,
    /// Reads at or after this offset fail.
    bad_from: usize,
}

impl Disk {
    fn pause(&self) {
        self.point.load(Ordering::SeqCst);
    }

    fn with<T>(&self, work: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        self.pause();
        let done = work(&mut self.bytes.lock().unwrap());
        self.pause();
        done
    }
}

impl BlockDevice for Disk {
    fn size(&self) -> u64 {
        DISK_BYTES as u64
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        let start = offset as usize;
        if start + buf.len() > self.bad_from {
            return Err(Error::Io {
                action: "read",
                offset,
                source: std::io::ErrorKind::Other.into(),
            });
        }
        self.with(|bytes| buf.copy_from_slice(&bytes[start..start + buf.len()]));
        Ok(())
    }
}

impl WritableDevice for Disk {
    fn write_at(&self, offset: u64, new: &[u8]) -> Result<(), Error> {
        let start = offset as usize;
        self.with(|bytes| bytes[start..start + new.len()].copy_from_slice(new));
        Ok(())
    }
    fn write_zeroes(&self, _: u64, _: u64, _: Space) -> Result<(), Error> {
        Ok(())
    }
    fn discard(&self, _: u64, _: u64) -> Result<(), Error> {
        Ok(())
    }
    fn flush(&self) -> Result<(), Error> {
        self.pause();
        Ok(())
    }
}

/// A request with its offset and its length in bytes.
#[derive(Debug, Clone, Copy)]
struct Ask {
    command: u16,
    offset: usize,
    length: usize,
}

fn ask(command: u16, offset: usize, length: usize) -> Ask {
    Ask {
        command,
        offset,
        length,
    }
}

/// The byte that request `number` writes.
fn tag(number: usize) -> u8 {
    100 + number as u8
}

/// The initial content of the disk.
fn below(at: usize) -> u8 {
    (at / 512 % 91) as u8
}

impl Ask {
    fn encode(&self, cookie: usize, into: &mut Vec<u8>) {
        into.extend(REQUEST_MAGIC.to_be_bytes());
        into.extend(0u16.to_be_bytes());
        into.extend(self.command.to_be_bytes());
        into.extend((cookie as u64).to_be_bytes());
        into.extend((self.offset as u64).to_be_bytes());
        into.extend((self.length as u32).to_be_bytes());
        if self.command == WRITE {
            into.resize(into.len() + self.length, tag(cookie));
        }
    }
}

/// The client's end of a connection: the thread that sends all its bytes, and the thread that
/// receives all replies.
struct Client {
    said: std::thread::JoinHandle<()>,
    heard: std::thread::JoinHandle<Vec<u8>>,
}

impl Client {
    /// Starts the client with threads of the host, which run independently of the model checker's
    /// scheduler.
    fn begin(says: Vec<u8>) -> (Client, OwnedFd) {
        let (server, mut client) = UnixStream::pair().unwrap();
        let mut ears = client.try_clone().unwrap();
        let said = std::thread::spawn(move || {
            // The server may have stopped before it has received all bytes.
            let _ = client.write_all(&says);
            let _ = client.shutdown(std::net::Shutdown::Write);
        });
        let heard = std::thread::spawn(move || {
            let mut heard = Vec::new();
            let _ = ears.read_to_end(&mut heard);
            heard
        });
        (Client { said, heard }, server.into())
    }

    fn end(self) -> Vec<u8> {
        self.said.join().unwrap();
        self.heard.join().unwrap()
    }
}

/// Replies by cookie: the error number and the content.
fn replies(asks: &[Ask], mut heard: &[u8]) -> BTreeMap<usize, (u32, Vec<u8>)> {
    fn take<'a>(heard: &mut &'a [u8], count: usize) -> &'a [u8] {
        heard.split_off(..count).expect("a reply is cut off")
    }
    let mut replies = BTreeMap::new();
    while !heard.is_empty() {
        let magic = u32::from_be_bytes(take(&mut heard, 4).try_into().unwrap());
        assert_eq!(magic, SIMPLE_REPLY_MAGIC);
        let errno = u32::from_be_bytes(take(&mut heard, 4).try_into().unwrap());
        let cookie = u64::from_be_bytes(take(&mut heard, 8).try_into().unwrap()) as usize;
        let content = match asks[cookie].command {
            READ if errno == 0 => take(&mut heard, asks[cookie].length).to_vec(),
            _ => Vec::new(),
        };
        let before = replies.insert(cookie, (errno, content));
        assert!(before.is_none(), "two replies to request {cookie}");
    }
    replies
}

/// The requests of the client and the configuration of the server.
#[derive(Debug, Clone)]
struct Model {
    asks: Vec<Ask>,
    in_flight: u32,
    memory_bytes: u64,
    /// Whether the test stops the server during the session.
    stopped: bool,
    /// Whether the client selects the export in a handshake, or the connection is one for the
    /// kernel's driver.
    handshake: bool,
}

impl Model {
    fn of(asks: &[Ask]) -> Self {
        Model {
            asks: asks.to_vec(),
            in_flight: 3,
            memory_bytes: 64 << 20,
            stopped: false,
            handshake: false,
        }
    }

    fn check(self) {
        explore(SCHEDULES, move || self.carry_out());
    }

    fn says(&self) -> Vec<u8> {
        let mut says = Vec::new();
        if self.handshake {
            let flags = client_flag::FIXED_NEWSTYLE | client_flag::NO_ZEROES;
            says.extend(flags.to_be_bytes());
            says.extend(OPTION_MAGIC.to_be_bytes());
            says.extend(option::EXPORT_NAME.to_be_bytes());
            says.extend(4u32.to_be_bytes());
            says.extend(b"disk");
        }
        for (cookie, ask) in self.asks.iter().enumerate() {
            ask.encode(cookie, &mut says);
        }
        says
    }

    fn carry_out(&self) {
        let disk = Arc::new(Disk {
            bytes: Mutex::new((0..DISK_BYTES).map(below).collect()),
            point: AtomicU64::new(0),
            bad_from: DISK_BYTES - 4096,
        });
        let export = Export {
            name: "disk".into(),
            description: String::new(),
            device: Device::Writable(disk.clone()),
        };
        let options = ServerOptions {
            in_flight: self.in_flight,
            memory_bytes: self.memory_bytes,
            handshake_timeout: None,
            request_timeout: None,
            ..ServerOptions::default()
        };
        let server = Server::new(Exports::new(vec![export]).unwrap(), options).unwrap();
        let (client, socket) = Client::begin(self.says());
        let stopper = server.stopper();
        let stop = self.stopped.then(|| thread::spawn(move || stopper.stop()));
        if self.handshake {
            server.serve_client(socket)
        } else {
            server.serve_attached(vec![socket]).unwrap()
        }
        if let Some(stop) = stop {
            stop.join().unwrap();
        }
        let heard = client.end();
        let greeting = if self.handshake { 18 + 10 } else { 0 };
        let heard = if self.stopped {
            heard.get(greeting..).unwrap_or(&[])
        } else {
            &heard[greeting..]
        };
        self.judge(&replies(&self.asks, heard), &disk.bytes.lock().unwrap());
    }

    fn judge(&self, replies: &BTreeMap<usize, (u32, Vec<u8>)>, disk: &[u8]) {
        let ends = self.asks.iter().position(|ask| ask.command == DISCONNECT);
        let asks = &self.asks[..ends.unwrap_or(self.asks.len())];
        assert!(replies.keys().all(|cookie| *cookie < asks.len()));
        for (cookie, ask) in asks.iter().enumerate() {
            let range = ask.offset..ask.offset + ask.length;
            let is_bad = ask.command == READ && range.end > DISK_BYTES - 4096;
            let Some((errno, content)) = replies.get(&cookie) else {
                assert!(self.stopped, "no reply to request {cookie} of {self:?}");
                continue;
            };
            if self.stopped && *errno == ESHUTDOWN {
                continue;
            }
            assert_eq!(*errno, if is_bad { EIO } else { 0 }, "request {cookie}");
            match ask.command {
                READ => assert!(is_bad || content.iter().copied().eq(range.map(below))),
                WRITE => assert!(disk[range].iter().all(|byte| *byte == tag(cookie))),
                _ => {}
            }
        }
    }
}

#[test]
fn each_request_gets_its_reply_whoever_has_the_turn() {
    let asks = [
        ask(WRITE, 0, 512),
        ask(READ, 8192, 512),
        ask(FLUSH, 0, 0),
        ask(WRITE, 4096, 1000),
        ask(READ, 16384, 4096),
    ];
    for in_flight in [2, 4] {
        let model = Model {
            in_flight,
            ..Model::of(&asks)
        };
        model.check();
    }
    let with_handshake = Model {
        handshake: true,
        ..Model::of(&asks)
    };
    with_handshake.check();
}

#[test]
fn a_disconnect_waits_for_what_others_carry_out() {
    let asks = [
        ask(READ, 8192, 512),
        ask(WRITE, 0, 512),
        ask(READ, DISK_BYTES - 512, 512),
        ask(DISCONNECT, 0, 0),
        ask(READ, 0, 512),
    ];
    Model::of(&asks).check();
}

#[test]
fn large_requests_keep_or_pass_the_turn_with_memory_and_without() {
    let asks = [
        ask(READ, 0, 512),
        ask(WRITE, 0x40000, LARGE),
        ask(READ, 1024, LARGE),
        ask(READ, 2048, 512),
        ask(WRITE, 0x80000, LARGE),
    ];
    for memory_bytes in [64 << 20, LARGE as u64] {
        let model = Model {
            memory_bytes,
            ..Model::of(&asks)
        };
        explore(SCHEDULES / 3, move || model.carry_out());
    }
}

#[test]
fn a_server_that_is_stopped_answers_what_it_began() {
    let asks = [
        ask(WRITE, 0, 512),
        ask(READ, 8192, 512),
        ask(WRITE, 4096, 512),
        ask(READ, 8192, 512),
    ];
    for handshake in [false, true] {
        let model = Model {
            stopped: true,
            handshake,
            ..Model::of(&asks)
        };
        model.check();
    }
}

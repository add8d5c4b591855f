//! A client whose bytes a test controls, and a disk in memory.
#![allow(dead_code)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use bcow::{BlockDevice, Error, Space, Status, WritableDevice};
use bcow_nbd::proto::{self, Framing, option, option_reply};
use bcow_nbd::{Device, Export, Exports, Listener, Server, ServerOptions, Stopper};

pub const DISK_BYTES: u64 = 8 << 20;

/// A disk in memory with blocks of 4096 bytes, each stored or not.
pub struct MemoryDisk {
    bytes: RwLock<Vec<u8>>,
    /// Whether each block is stored.
    stored: RwLock<Vec<bool>>,
    pub flushes: AtomicUsize,
    /// Reads and writes at or after this offset fail.
    pub bad_from: u64,
    /// Called at the start of each read; the read waits until it returns.
    pub on_read: Box<dyn Fn() + Send + Sync>,
}

impl MemoryDisk {
    pub fn new() -> Self {
        MemoryDisk {
            bytes: RwLock::new(vec![0; DISK_BYTES as usize]),
            stored: RwLock::new(vec![false; (DISK_BYTES / 4096) as usize]),
            flushes: AtomicUsize::new(0),
            bad_from: u64::MAX,
            on_read: Box::new(|| ()),
        }
    }

    fn check(&self, offset: u64, length: u64) -> Result<std::ops::Range<usize>, Error> {
        let end = offset.checked_add(length).filter(|&end| end <= DISK_BYTES);
        let end = end.ok_or(Error::OutOfRange {
            offset,
            length,
            size: DISK_BYTES,
        })?;
        if end > self.bad_from && length > 0 {
            return Err(Error::Io {
                action: "read",
                offset: self.bad_from,
                source: std::io::Error::from_raw_os_error(5),
            });
        }
        Ok(offset as usize..end as usize)
    }

    /// Marks blocks as stored or not stored.
    pub fn mark(&self, range: &std::ops::Range<usize>, stored: bool) {
        let mut map = self.stored.write().unwrap();
        let blocks = if stored {
            range.start / 4096..range.end.div_ceil(4096)
        } else {
            range.start.div_ceil(4096)..range.end / 4096
        };
        for block in blocks {
            map[block] = stored;
        }
    }
}

impl BlockDevice for MemoryDisk {
    fn size(&self) -> u64 {
        DISK_BYTES
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        (self.on_read)();
        let range = self.check(offset, buf.len() as u64)?;
        buf.copy_from_slice(&self.bytes.read().unwrap()[range]);
        Ok(())
    }
    fn status(&self, offset: u64, length: u64) -> Result<Status, Error> {
        let end = offset + length;
        let map = self.stored.read().unwrap();
        let first = map[(offset / 4096) as usize];
        let same = (offset / 4096..end.div_ceil(4096))
            .take_while(|&block| map[block as usize] == first)
            .last()
            .unwrap();
        let length = ((same + 1) * 4096).min(end) - offset;
        Ok(if first { Status::data(length) } else { Status::hole(length) })
    }
}

impl WritableDevice for MemoryDisk {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let range = self.check(offset, bytes.len() as u64)?;
        self.mark(&range, true);
        self.bytes.write().unwrap()[range].copy_from_slice(bytes);
        Ok(())
    }
    fn write_zeroes(&self, offset: u64, length: u64, space: Space) -> Result<(), Error> {
        let range = self.check(offset, length)?;
        self.mark(&range, space == Space::Keep);
        self.bytes.write().unwrap()[range].fill(0);
        Ok(())
    }
    fn discard(&self, offset: u64, length: u64) -> Result<(), Error> {
        self.write_zeroes(offset, length, Space::Free)
    }
    fn flush(&self) -> Result<(), Error> {
        self.flushes.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }
}

/// A server on its own socket, with the exports "disk" (a [`MemoryDisk`]) and "image" (read-only, 3
/// MiB of counting bytes). It stops with the test.
pub struct Running {
    pub disk: Arc<MemoryDisk>,
    pub directory: tempfile::TempDir,
    stopper: Stopper,
    thread: Option<JoinHandle<Result<(), bcow_nbd::Error>>>,
}

pub fn counting(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at / 512 + at) as u8).collect()
}

impl Running {
    pub fn start() -> Self {
        Running::with(MemoryDisk::new(), ServerOptions::default())
    }

    pub fn with(disk: MemoryDisk, options: ServerOptions) -> Self {
        Running::with_first(disk, options, |_| ()).0
    }

    /// The same; `before` is called with the path of the socket before the server accepts clients.
    pub fn with_first<T>(
        disk: MemoryDisk,
        options: ServerOptions,
        before: impl FnOnce(&Path) -> T,
    ) -> (Self, T) {
        let disk = Arc::new(disk);
        let exports = Exports::new(vec![
            Export {
                name: "disk".into(),
                description: "in memory".into(),
                device: Device::Writable(disk.clone()),
            },
            Export {
                name: "image".into(),
                description: String::new(),
                device: Device::ReadOnly(Arc::new(counting(3 << 20))),
            },
        ])
        .unwrap();
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        let listener = Listener::unix(&socket).unwrap();
        let made = before(&socket);
        let server = Server::new(exports, options).unwrap();
        let stopper = server.stopper();
        let thread = std::thread::spawn(move || server.serve(&[listener]));
        let running = Running {
            disk,
            directory,
            stopper,
            thread: Some(thread),
        };
        (running, made)
    }

    /// A connection on which the client has sent no bytes.
    pub fn connect(&self) -> Client {
        Client::connect(&self.directory.path().join("socket"))
    }

    /// A connection in the transmission phase.
    pub fn client(&self, export: &str, framing: Framing) -> Client {
        self.connect().negotiated(export, framing)
    }

    /// Like [`Running::client`], with both metadata contexts selected.
    pub fn client_with_contexts(&self, export: &str, framing: Framing) -> Client {
        let mut client = self.connect();
        client.greet();
        client.negotiate(framing);
        let contexts = client.contexts(
            option::SET_META_CONTEXT,
            export,
            &["base:allocation", "qemu:allocation-depth"],
        );
        assert_eq!(
            contexts,
            [
                (1, "base:allocation".to_owned()),
                (2, "qemu:allocation-depth".to_owned())
            ]
        );
        client.go(export);
        client
    }

    /// Requests the server to stop, and does not wait for it.
    pub fn begin_stop(&self) {
        self.stopper.stop();
    }

    pub fn stop(&mut self) -> Result<(), bcow_nbd::Error> {
        self.stopper.stop();
        self.thread.take().unwrap().join().unwrap()
    }

    /// Asserts that the server still serves a regular client.
    pub fn assert_serves(&self) {
        let mut client = self.client("image", Framing::Structured);
        assert_eq!(client.read(4096, 512).unwrap(), counting(8192)[4096..4608]);
        client.disconnect();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.thread.is_some() {
            let ended = self.stop();
            if !std::thread::panicking() {
                ended.unwrap();
            }
        }
    }
}

/// A client on a connection.
pub struct Client {
    pub stream: UnixStream,
    pub framing: Framing,
    pub cookie: u64,
}

/// A chunk of a reply. A simple reply is decoded as a chunk without a payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    pub done: bool,
    pub kind: u16,
    pub cookie: u64,
    pub errno: u32,
    pub payload: Vec<u8>,
}

impl Client {
    /// A connection to a server's socket on which the client has sent no bytes.
    pub fn connect(socket: &Path) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .unwrap();
        Client {
            stream,
            framing: Framing::Simple,
            cookie: 0,
        }
    }

    /// The connection in the transmission phase.
    pub fn negotiated(mut self, export: &str, framing: Framing) -> Self {
        self.greet();
        self.negotiate(framing);
        self.go(export);
        self
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn receive(&mut self, count: usize) -> Vec<u8> {
        let mut bytes = vec![0; count];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.receive(2).try_into().unwrap())
    }
    pub fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.receive(4).try_into().unwrap())
    }
    pub fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.receive(8).try_into().unwrap())
    }

    /// Whether the server has closed the connection. Ignores bytes that it sent before.
    pub fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    pub fn greet(&mut self) {
        assert_eq!(self.u64(), proto::INIT_MAGIC);
        assert_eq!(self.u64(), proto::OPTION_MAGIC);
        assert_eq!(self.u16(), 3);
        self.send(&3u32.to_be_bytes());
    }

    pub fn option(&mut self, option: u32, data: &[u8]) {
        let mut bytes = proto::OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.send(&bytes);
    }

    /// The next reply to an option: its type and data.
    pub fn option_reply(&mut self, option: u32) -> (u32, Vec<u8>) {
        assert_eq!(self.u64(), proto::OPTION_REPLY_MAGIC);
        assert_eq!(self.u32(), option);
        let kind = self.u32();
        let length = self.u32();
        (kind, self.receive(length as usize))
    }

    pub fn negotiate(&mut self, framing: Framing) {
        let option = match framing {
            Framing::Simple => return,
            Framing::Structured => option::STRUCTURED_REPLY,
            Framing::Extended => option::EXTENDED_HEADERS,
        };
        self.option(option, &[]);
        assert_eq!(self.option_reply(option), (option_reply::ACK, vec![]));
        self.framing = framing;
    }

    /// Type and data of each reply to INFO or GO.
    pub fn info(&mut self, option: u32, export: &str, wanted: &[u16]) -> Vec<(u32, Vec<u8>)> {
        let mut data = string(export);
        data.extend((wanted.len() as u16).to_be_bytes());
        for kind in wanted {
            data.extend(kind.to_be_bytes());
        }
        self.option(option, &data);
        let mut replies = Vec::new();
        loop {
            let reply = self.option_reply(option);
            let more = reply.0 == option_reply::INFO;
            replies.push(reply);
            if !more {
                return replies;
            }
        }
    }

    pub fn go(&mut self, export: &str) {
        let replies = self.info(option::GO, export, &[]);
        assert_eq!(replies.last().unwrap().0, option_reply::ACK, "{replies:?}");
    }

    pub fn contexts(&mut self, option: u32, export: &str, queries: &[&str]) -> Vec<(u32, String)> {
        let mut data = string(export);
        data.extend((queries.len() as u32).to_be_bytes());
        for query in queries {
            data.extend(string(query));
        }
        self.option(option, &data);
        let mut contexts = Vec::new();
        loop {
            let (kind, data) = self.option_reply(option);
            if kind == option_reply::ACK {
                return contexts;
            }
            assert_eq!(kind, option_reply::META_CONTEXT);
            let id = u32::from_be_bytes(data[..4].try_into().unwrap());
            contexts.push((id, String::from_utf8(data[4..].to_vec()).unwrap()));
        }
    }

    /// Encodes the header of a request.
    pub fn request(&mut self, command: u16, flags: u16, offset: u64, length: u64) -> Vec<u8> {
        self.cookie += 1;
        let magic = match self.framing {
            Framing::Extended => proto::EXTENDED_REQUEST_MAGIC,
            _ => proto::REQUEST_MAGIC,
        };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(self.cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        match self.framing {
            Framing::Extended => bytes.extend(length.to_be_bytes()),
            _ => bytes.extend(u32::try_from(length).unwrap().to_be_bytes()),
        }
        bytes
    }

    /// Receives the next chunk. `read` is the number of bytes that follow a successful simple
    /// reply.
    pub fn chunk(&mut self, read: usize) -> Chunk {
        let magic = self.u32();
        if self.framing == Framing::Simple {
            assert_eq!(magic, proto::SIMPLE_REPLY_MAGIC);
            let errno = self.u32();
            let cookie = self.u64();
            let payload = self.receive(if errno == 0 { read } else { 0 });
            let (done, kind) = (true, 0);
            return Chunk {
                done,
                kind,
                cookie,
                errno,
                payload,
            };
        }
        let flags = self.u16();
        let kind = self.u16();
        let cookie = self.u64();
        let length = match self.framing {
            Framing::Extended => {
                assert_eq!(magic, proto::EXTENDED_REPLY_MAGIC);
                self.u64();
                self.u64()
            }
            _ => {
                assert_eq!(magic, proto::STRUCTURED_REPLY_MAGIC);
                self.u32().into()
            }
        };
        let payload = self.receive(length as usize);
        let errno = match kind & (1 << 15) {
            0 => 0,
            _ => u32::from_be_bytes(payload[..4].try_into().unwrap()),
        };
        Chunk {
            done: flags == 1,
            kind,
            cookie,
            errno,
            payload,
        }
    }

    /// Sends a request.
    pub fn begin(&mut self, command: u16, flags: u16, offset: u64, length: u64) {
        let request = self.request(command, flags, offset, length);
        self.send(&request);
    }

    /// Sends a request and receives all chunks of its reply.
    pub fn ask(&mut self, command: u16, flags: u16, offset: u64, length: u64) -> Vec<Chunk> {
        self.begin(command, flags, offset, length);
        self.replies(if command == 0 { length as usize } else { 0 })
    }

    pub fn replies(&mut self, read: usize) -> Vec<Chunk> {
        let mut chunks = Vec::new();
        loop {
            let chunk = self.chunk(read);
            assert_eq!(chunk.cookie, self.cookie);
            let done = chunk.done;
            chunks.push(chunk);
            if done {
                return chunks;
            }
        }
    }

    /// The error number of a request without a payload; 0 if it succeeds.
    pub fn errno(&mut self, command: u16, flags: u16, offset: u64, length: u64) -> u32 {
        self.ask(command, flags, offset, length)
            .iter()
            .map(|chunk| chunk.errno)
            .max()
            .unwrap()
    }

    pub fn write(&mut self, flags: u16, offset: u64, bytes: &[u8]) -> u32 {
        let flags = match self.framing {
            Framing::Extended => flags | proto::command_flag::PAYLOAD_LEN,
            _ => flags,
        };
        let mut message = self.request(1, flags, offset, bytes.len() as u64);
        message.extend(bytes);
        self.send(&message);
        self.replies(0)[0].errno
    }

    /// Reads a range and assembles its chunks. Returns the error number on failure.
    pub fn read(&mut self, offset: u64, length: usize) -> Result<Vec<u8>, u32> {
        let chunks = self.ask(0, 0, offset, length as u64);
        assemble(self.framing, &chunks, offset, length)
    }

    pub fn disconnect(mut self) {
        let request = self.request(2, 0, 0, 0);
        self.send(&request);
        assert!(self.is_closed());
    }
}

/// Assembles the content of a read from its chunks.
pub fn assemble(
    framing: Framing,
    chunks: &[Chunk],
    offset: u64,
    length: usize,
) -> Result<Vec<u8>, u32> {
    if let Some(failed) = chunks.iter().find(|chunk| chunk.errno != 0) {
        return Err(failed.errno);
    }
    if framing == Framing::Simple {
        return Ok(chunks[0].payload.clone());
    }
    let mut bytes = vec![0; length];
    let mut covered = 0;
    for chunk in chunks {
        if chunk.kind == proto::chunk::NONE {
            continue;
        }
        let at = u64::from_be_bytes(chunk.payload[..8].try_into().unwrap()) - offset;
        let rest = &chunk.payload[8..];
        covered += match chunk.kind {
            proto::chunk::OFFSET_DATA => {
                bytes[at as usize..][..rest.len()].copy_from_slice(rest);
                rest.len()
            }
            proto::chunk::OFFSET_HOLE => u32::from_be_bytes(rest.try_into().unwrap()) as usize,
            other => panic!("chunk of type {other}"),
        };
    }
    assert_eq!(covered, length);
    Ok(bytes)
}

pub fn string(text: &str) -> Vec<u8> {
    let mut bytes = (text.len() as u32).to_be_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes
}

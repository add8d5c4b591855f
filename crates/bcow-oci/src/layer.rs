//! Reads one layer. A thread of its own reads the blob, hashes it, decompresses it, hashes the
//! result, and sends chunks of the tar archive to the parser.

use std::cell::{Cell, RefCell};
use std::io::{self, BufRead, Read};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use crate::blob::{Blob, BlobReader, read_error};
use crate::cancel::Cancel;
use crate::digest::{Algorithm, DiffId, Digest, Hasher};
use crate::error::{ConvertError, LimitKind, TarPlace, check_digest, check_limit, check_size};
use crate::options::{Limits, Progress};
use crate::stream::{CHUNK_BYTES, ChunkSource, ChunkStream};

/// Chunks in flight between the thread and the parser: enough to hash a large file without a stall,
/// few enough to bound memory.
const QUEUE: usize = 6;
/// Compressed bytes per read.
const INPUT_BYTES: usize = 256 << 10;
/// zstd windows up to 128 MiB, the default limit of `zstd -d`.
const MAX_WINDOW_LOG: u32 = 27;
/// Padding that may be missing at the end of a tar archive, in blocks of 512 bytes: GNU tar pads to
/// a multiple of 20, `tar -b 128` to a multiple of 128.
const MAX_PADDING_BLOCKS: usize = 128;
/// The ratio limit applies beyond this many decompressed bytes.
const RATIO_FREE_BYTES: u64 = 4 << 30;

/// A layer of a source.
#[derive(Debug, Clone)]
pub(crate) struct LayerInput {
    /// The name in messages.
    pub name: String,
    pub blob: Blob,
    /// Digest and size of the blob, to check it against.
    pub digest: Option<Digest>,
    pub size: Option<u64>,
    /// Digest of the uncompressed tar archive, to check it against.
    pub diff_id: Option<DiffId>,
    pub media_type: Option<String>,
}

/// The options and counters that all layers share.
pub(crate) struct Reading<'r> {
    pub limits: &'r Limits,
    pub progress: &'r dyn Progress,
    pub cancel: Cancel<'r>,
    /// Whether to compute the diffID of a layer that has none recorded.
    pub find_diff_id: bool,
    /// Uncompressed bytes of all layers so far, holes included.
    pub bytes: &'r AtomicU64,
}

impl<'r> Reading<'r> {
    /// Counts decompressed bytes of the input, or bytes of holes, which an archive does not store.
    pub(crate) fn count(
        &self,
        bytes: u64,
        place: impl FnOnce() -> TarPlace,
    ) -> Result<(), ConvertError> {
        let before = self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let value = before.saturating_add(bytes);
        check_limit(LimitKind::Bytes, value, self.limits.max_bytes)
            .map_err(|exceeded| exceeded.at(place()))
    }

    /// For a second reading of a layer: its bytes are counted in `bytes`, not in the totals.
    pub(crate) fn uncounted(&self, bytes: &'r AtomicU64) -> Reading<'r> {
        Reading {
            limits: self.limits,
            progress: &(),
            cancel: self.cancel,
            find_diff_id: false,
            bytes,
        }
    }
}

impl LayerInput {
    /// A blob of which no digest is known.
    pub(crate) fn unverified(blob: Blob) -> LayerInput {
        LayerInput {
            name: blob.name.clone(),
            blob,
            digest: None,
            size: None,
            diff_id: None,
            media_type: None,
        }
    }

    /// Whether a digest covers the whole layer, so that its archive needs no end-of-archive marker.
    pub(crate) fn has_digest(&self) -> bool {
        self.digest.is_some() || self.diff_id.is_some()
    }
}

/// Byte counts and digest of a layer that was read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LayerBytes {
    /// Stored (compressed) bytes.
    pub stored: u64,
    /// Decompressed bytes.
    pub tar: u64,
    /// Digest of the decompressed bytes, if it was computed.
    pub diff_id: Option<DiffId>,
}

/// Reads the layer through `parse` to its last byte, and checks its size and digests.
pub(crate) fn read_layer<R>(
    input: &LayerInput,
    reading: &Reading<'_>,
    parse: impl FnOnce(ChunkStream<'_>) -> Result<R, ConvertError>,
) -> Result<(R, LayerBytes), ConvertError> {
    if let (Some(expected), Some(found)) = (input.size, input.blob.length()) {
        check_size(&input.name, expected, found)?;
    }
    let (chunks, received) = sync_channel(QUEUE);
    let (used, reusable) = channel();
    let total = Rc::new(RefCell::new(LayerBytes::default()));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut output = Output::new(input, reading, chunks, reusable);
            let message = match produce(input, reading, &mut output) {
                Ok(bytes) => Message::End(bytes),
                Err(Stop::Failed(error)) => Message::Failed(*error),
                // The receiver is gone.
                Err(Stop::Dropped) => return,
            };
            let _ = output.chunks.send(message);
        });
        let stream = ChunkStream::new(Box::new(ThreadSource {
            received,
            used,
            total: total.clone(),
        }));
        parse(stream)
    })
    .map(|result| (result, total.take()))
}

enum Message {
    Chunk(Vec<u8>),
    End(LayerBytes),
    Failed(ConvertError),
}

/// The parser's end of the channel.
struct ThreadSource {
    received: Receiver<Message>,
    used: Sender<Vec<u8>>,
    total: Rc<RefCell<LayerBytes>>,
}

impl ChunkSource for ThreadSource {
    fn next_chunk(&mut self, used: Option<Vec<u8>>) -> Result<Option<Vec<u8>>, ConvertError> {
        if let Some(used) = used {
            // The thread may have ended already.
            let _ = self.used.send(used);
        }
        match self.received.recv() {
            Ok(Message::Chunk(chunk)) => Ok(Some(chunk)),
            Ok(Message::End(total)) => {
                self.total.replace(total);
                Ok(None)
            }
            Ok(Message::Failed(error)) => Err(error),
            Err(_) => Err(ConvertError::Interrupted),
        }
    }
}

/// The reason why the reading thread stops before the end.
enum Stop {
    Failed(Box<ConvertError>),
    /// The parser has stopped because of an error of its own.
    Dropped,
}

impl From<ConvertError> for Stop {
    fn from(error: ConvertError) -> Self {
        Stop::Failed(error.into())
    }
}

/// The format of a stream, from its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Plain,
    Gzip,
    Zstd,
    /// A known format that bcow does not support.
    Other(&'static str),
}

impl Format {
    /// The format that a layer's media type names.
    fn of_media_type(media_type: &str) -> Format {
        match media_type {
            t if t.ends_with("+gzip") || t.ends_with(".gzip") => Format::Gzip,
            t if t.ends_with("+zstd") || t.ends_with(".zstd") => Format::Zstd,
            _ => Format::Plain,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Format::Plain => "uncompressed",
            Format::Gzip => "gzip",
            Format::Zstd => "zstd",
            Format::Other(name) => name,
        }
    }

    pub(crate) fn of(start: &[u8]) -> Format {
        match start {
            [0x1f, 0x8b, ..] => Format::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Format::Zstd,
            // A skippable frame.
            [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Format::Zstd,
            [b'B', b'Z', b'h', b'1'..=b'9', ..] => Format::Other("bzip2"),
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Format::Other("xz"),
            [0x04, 0x22, 0x4d, 0x18, ..] => Format::Other("lz4"),
            _ => Format::Plain,
        }
    }
}

fn produce(
    input: &LayerInput,
    reading: &Reading<'_>,
    output: &mut Output<'_>,
) -> Result<LayerBytes, Stop> {
    let mut raw = RawReader::new(input, reading);
    let shared = raw.shared.clone();
    let decoded = decode(&mut raw, output);
    let decoded = match (decoded, shared.failed.take()) {
        (_, Some(error)) => return Err(error.into()),
        (Err(Stop::Failed(error)), None) => Err(*error),
        (Err(stop), None) => return Err(stop),
        (Ok(()), None) => Ok(()),
    };
    if matches!(&decoded, Err(error) if !matches!(error, ConvertError::Decompress { .. })) {
        return decoded.map(|()| LayerBytes::default()).map_err(Stop::from);
    }
    // Read to the last byte: the digest also covers the padding behind the compressed data. If the
    // data does not decompress, a digest error is more precise than the decoder's error.
    io::copy(&mut raw, &mut io::sink()).map_err(|e| {
        shared
            .failed
            .take()
            .unwrap_or_else(|| read_error("read", &input.name, e))
    })?;
    let stored = shared.count.get();
    if let Some(expected) = input.size {
        check_size(&input.name, expected, stored)?;
    }
    let found = raw.hasher.take().map(Hasher::finish);
    if let (Some(expected), Some(found)) = (&input.digest, found) {
        check_digest(&input.name, "digest", expected, &found)?;
    }
    decoded?;
    output.flush()?;
    let found = match (output.hasher.take(), &input.diff_id) {
        (Some(hasher), Some(expected)) => Some(check_diff_id(output, hasher, &expected.0)?),
        (hasher, _) => hasher.map(Hasher::finish),
    };
    Ok(LayerBytes {
        stored,
        tar: output.total,
        diff_id: found.map(DiffId),
    })
}

/// Checks the diffID of the decompressed bytes.
///
/// The writer of zstd:chunked in containers/storage before 1.52 (used by skopeo 1.9 of Debian 12)
/// ends the layer after the two blocks of the end-of-archive marker and omits the padding behind
/// them, up to 10 KiB with GNU tar. The diffID covers that padding. podman accepts such layers. If
/// adding zeros makes the digest match, then zeros are the bytes that are missing, and the archive
/// has the same meaning without them.
fn check_diff_id(
    output: &Output<'_>,
    hasher: Hasher,
    expected: &Digest,
) -> Result<Digest, ConvertError> {
    const ZEROS: [u8; 512] = [0; 512];
    let found = hasher.clone().finish();
    if found != *expected && output.total.is_multiple_of(512) {
        let mut padded = hasher;
        for blocks in 1..=MAX_PADDING_BLOCKS {
            padded.update(&ZEROS);
            if padded.clone().finish() == *expected {
                output.reading.progress.warning(&format!(
                    "{}: the compressed layer lacks the last {} bytes of the archive's \
                     padding; with them, its diffID matches",
                    output.name,
                    blocks * ZEROS.len()
                ));
                return Ok(expected.clone());
            }
        }
    }
    check_digest(output.name, "diffID", expected, &found)?;
    Ok(found)
}

fn decode(raw: &mut RawReader<'_>, output: &mut Output<'_>) -> Result<(), Stop> {
    let name = output.name;
    let start = raw.peek(8).map_err(|e| read_error("read", name, e))?;
    let format = Format::of(start);
    // Some engines use the media type and others the first bytes. bcow refuses a layer where the
    // two differ, because engines read it differently.
    if let Some(media_type) = output.media_type {
        let expected = Format::of_media_type(media_type);
        if expected != format && !matches!(format, Format::Other(_)) {
            return Err(Stop::from(ConvertError::Decompress {
                place: name.to_owned(),
                format: expected.name(),
                problem: format!("it is {} (the media type is {media_type})", format.name()),
            }));
        }
    }
    match format {
        Format::Plain => output.fill("tar", raw),
        Format::Gzip => gunzip(raw, output),
        Format::Zstd => {
            let mut decoder = zstd::stream::read::Decoder::with_buffer(raw)
                .and_then(|mut decoder| decoder.window_log_max(MAX_WINDOW_LOG).map(|()| decoder))
                .map_err(|e| read_error("decompress", name, e))?;
            output.fill("zstd", &mut decoder)
        }
        Format::Other(compression) => Err(Stop::from(ConvertError::Compression {
            place: name.to_owned(),
            compression,
        })),
    }
}

/// Decompresses all members of a gzip stream.
fn gunzip(raw: &mut RawReader<'_>, output: &mut Output<'_>) -> Result<(), Stop> {
    loop {
        let mut decoder = flate2::bufread::GzDecoder::new(&mut *raw);
        output.fill("gzip", &mut decoder)?;
        let next = raw
            .fill_buf()
            .map_err(|e| read_error("read", output.name, e))?;
        match next.first() {
            None => return Ok(()),
            Some(0x1f) => {}
            // Trailing zeros are padding, as in gzip; other trailing bytes are an error.
            Some(0) => return trailing_zeros(raw, output.name),
            Some(_) => return Err(trailing_garbage(output.name)),
        }
    }
}

fn trailing_zeros(raw: &mut RawReader<'_>, name: &str) -> Result<(), Stop> {
    loop {
        let bytes = raw.fill_buf().map_err(|e| read_error("read", name, e))?;
        if bytes.is_empty() {
            return Ok(());
        }
        if bytes.iter().any(|&b| b != 0) {
            return Err(trailing_garbage(name));
        }
        let length = bytes.len();
        raw.consume(length);
    }
}

fn trailing_garbage(name: &str) -> Stop {
    Stop::from(ConvertError::Decompress {
        place: name.to_owned(),
        format: "gzip",
        problem: "unexpected data after its end".to_owned(),
    })
}

/// The blob's bytes, hashed and counted.
struct RawReader<'r> {
    reader: BlobReader<'r>,
    name: &'r str,
    progress: &'r dyn Progress,
    hasher: Option<Hasher>,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    shared: Rc<Shared>,
}

/// State of the raw reader that is needed while a decoder owns the reader.
#[derive(Default)]
struct Shared {
    count: Cell<u64>,
    /// A read error, kept here because a decoder would wrap it in an error of its own.
    failed: RefCell<Option<ConvertError>>,
}

impl<'r> RawReader<'r> {
    fn new(input: &'r LayerInput, reading: &Reading<'r>) -> Self {
        RawReader {
            reader: BlobReader::new(&input.blob, reading.cancel),
            name: &input.name,
            progress: reading.progress,
            hasher: input.digest.as_ref().map(|d| Hasher::new(d.algorithm())),
            buffer: vec![0; INPUT_BYTES].into(),
            start: 0,
            end: 0,
            shared: Rc::default(),
        }
    }

    fn read_raw(&mut self, to_buffer: Option<&mut [u8]>) -> io::Result<usize> {
        let own = to_buffer.is_none();
        let target = to_buffer.unwrap_or(&mut self.buffer);
        let read = loop {
            match self.reader.read(target) {
                Ok(read) => break read,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    *self.shared.failed.borrow_mut() = Some(read_error("read", self.name, e));
                    return Err(io::Error::other("the input cannot be read"));
                }
            }
        };
        if let Some(hasher) = &mut self.hasher {
            hasher.update(&target[..read]);
        }
        self.shared.count.set(self.shared.count.get() + read as u64);
        self.progress.advance(read as u64);
        if own {
            (self.start, self.end) = (0, read);
        }
        Ok(read)
    }

    /// The first bytes of the stream, up to `bytes` of them. Valid only before any byte is
    /// consumed.
    fn peek(&mut self, bytes: usize) -> io::Result<&[u8]> {
        while self.end < bytes {
            let mut rest = [0; 8];
            let wanted = (bytes - self.end).min(rest.len());
            let read = self.read_raw(Some(&mut rest[..wanted]))?;
            if read == 0 {
                break;
            }
            self.buffer[self.end..self.end + read].copy_from_slice(&rest[..read]);
            self.end += read;
        }
        Ok(&self.buffer[..self.end])
    }
}

impl BufRead for RawReader<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if self.start == self.end {
            self.read_raw(None)?;
        }
        Ok(&self.buffer[self.start..self.end])
    }

    fn consume(&mut self, amount: usize) {
        self.start += amount;
    }
}

impl Read for RawReader<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.start == self.end && buf.len() >= self.buffer.len() {
            return self.read_raw(Some(buf));
        }
        let available = self.fill_buf()?;
        let count = available.len().min(buf.len());
        buf[..count].copy_from_slice(&available[..count]);
        self.consume(count);
        Ok(count)
    }
}

/// Decompressed bytes, hashed, counted and cut into chunks.
struct Output<'r> {
    name: &'r str,
    media_type: Option<&'r str>,
    reading: &'r Reading<'r>,
    chunks: SyncSender<Message>,
    reusable: Receiver<Vec<u8>>,
    hasher: Option<Hasher>,
    chunk: Vec<u8>,
    filled: usize,
    total: u64,
}

impl<'r> Output<'r> {
    fn new(
        input: &'r LayerInput,
        reading: &'r Reading<'r>,
        chunks: SyncSender<Message>,
        reusable: Receiver<Vec<u8>>,
    ) -> Self {
        let recorded = input.diff_id.as_ref().map(|id| id.0.algorithm());
        let algorithm = recorded.or(reading.find_diff_id.then_some(Algorithm::Sha256));
        Output {
            name: &input.name,
            media_type: input.media_type.as_deref(),
            reading,
            chunks,
            reusable,
            hasher: algorithm.map(|algorithm: Algorithm| Hasher::new(algorithm)),
            chunk: vec![0; CHUNK_BYTES],
            filled: 0,
            total: 0,
        }
    }

    /// Reads the decoder to its end.
    fn fill(&mut self, format: &'static str, decoder: &mut impl Decoder) -> Result<(), Stop> {
        loop {
            let read = match decoder.read(&mut self.chunk[self.filled..]) {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(self.decoder_error(format, e).into()),
            };
            self.filled += read;
            self.total += read as u64;
            self.check_limits(decoder.stored(), read as u64)?;
            if self.filled == CHUNK_BYTES {
                self.flush()?;
            }
        }
    }

    /// Sends the chunk to the parser.
    fn flush(&mut self) -> Result<(), Stop> {
        if self.filled == 0 {
            return Ok(());
        }
        let mut next = self.reusable.try_recv().unwrap_or_default();
        next.resize(CHUNK_BYTES, 0);
        let mut chunk = std::mem::replace(&mut self.chunk, next);
        chunk.truncate(self.filled);
        self.filled = 0;
        if let Some(hasher) = &mut self.hasher {
            hasher.update(&chunk);
        }
        self.chunks
            .send(Message::Chunk(chunk))
            .map_err(|_| Stop::Dropped)
    }

    fn check_limits(&self, stored: u64, read: u64) -> Result<(), ConvertError> {
        self.reading.count(read, || TarPlace::layer(self.name))?;
        let ratio = self.total / stored.max(1);
        let allowed = self.reading.limits.max_ratio;
        if self.total > RATIO_FREE_BYTES {
            check_limit(LimitKind::Ratio, ratio, allowed)
                .map_err(|exceeded| exceeded.at(TarPlace::layer(self.name)))?;
        }
        Ok(())
    }

    fn decoder_error(&self, format: &'static str, error: io::Error) -> ConvertError {
        let text = error.to_string();
        if text.contains("requires too much memory") {
            return ConvertError::Limit {
                place: TarPlace::layer(self.name),
                kind: LimitKind::Window,
                value: None,
                allowed: 1 << MAX_WINDOW_LOG,
            };
        }
        ConvertError::Decompress {
            place: self.name.to_owned(),
            format,
            problem: match error.kind() {
                io::ErrorKind::UnexpectedEof => "unexpected end".to_owned(),
                _ => match text.strip_prefix("corrupt gzip stream") {
                    Some(what) => format!("it{what}"),
                    None => text,
                },
            },
        }
    }
}

/// A decoder over a [`RawReader`].
trait Decoder: Read {
    /// Compressed bytes read so far.
    fn stored(&self) -> u64;
}

impl Decoder for RawReader<'_> {
    fn stored(&self) -> u64 {
        self.shared.count.get()
    }
}

impl Decoder for flate2::bufread::GzDecoder<&mut RawReader<'_>> {
    fn stored(&self) -> u64 {
        self.get_ref().stored()
    }
}

impl Decoder for zstd::stream::read::Decoder<'_, &mut RawReader<'_>> {
    fn stored(&self) -> u64 {
        self.get_ref().stored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_recognized_by_their_first_bytes() {
        assert_eq!(Format::of(b""), Format::Plain);
        assert_eq!(Format::of(&[0x1f]), Format::Plain);
        assert_eq!(Format::of(&[0x1f, 0x8b, 8]), Format::Gzip);
        assert_eq!(Format::of(&[0x28, 0xb5, 0x2f, 0xfd]), Format::Zstd);
        assert_eq!(Format::of(&[0x5a, 0x2a, 0x4d, 0x18]), Format::Zstd);
        assert_eq!(Format::of(b"BZh9"), Format::Other("bzip2"));
        assert_eq!(Format::of(b"\xfd7zXZ\0"), Format::Other("xz"));
    }

    /// Whether this many decompressed and compressed bytes pass the ratio limit.
    fn passes(tar: u64, stored: u64) -> bool {
        let limits = Limits {
            max_ratio: 2000,
            max_bytes: 1 << 40,
            ..Limits::default()
        };
        let bytes = AtomicU64::new(tar);
        let reading = Reading {
            limits: &limits,
            progress: &(),
            cancel: Cancel::default(),
            find_diff_id: false,
            bytes: &bytes,
        };
        let (chunks, _received) = sync_channel(1);
        let (_used, reusable) = channel();
        let output = Output {
            name: "layer",
            media_type: None,
            reading: &reading,
            chunks,
            reusable,
            hasher: None,
            chunk: Vec::new(),
            filled: 0,
            total: tar,
        };
        output.check_limits(stored, 0).is_ok()
    }

    #[test]
    fn a_bomb_is_stopped_by_its_ratio_past_the_first_gigabytes() {
        let gib = 1 << 30;
        assert!(passes(4 * gib, 1000));
        assert!(!passes(4 * gib + 1, 1000));
        assert!(passes(8 * gib, 8 * gib / 2000));
        assert!(!passes(9 * gib, 4 * gib / 1000));
        assert!(!passes((1 << 40) + 1, 1 << 40));
    }
}

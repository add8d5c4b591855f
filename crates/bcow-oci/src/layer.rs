//! Reads one layer. A thread of its own reads the blob, hashes it, decompresses it, hashes the
//! result, and sends chunks of the tar archive to the parser.

use std::cell::{Cell, RefCell};
use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;

use crate::blob::{Blob, BlobReader, read_error};
use crate::cancel::Cancel;
use crate::digest::{Algorithm, DiffId, Digest, Hasher};
use crate::error::{ConvertError, LimitKind, TarPlace, check_equal, check_limit, check_size};
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
    pub bytes: AtomicU64,
}

impl<'r> Reading<'r> {
    /// Starts to count at 0. No diffID is computed that is not recorded.
    pub(crate) fn new(limits: &'r Limits, progress: &'r dyn Progress, cancel: Cancel<'r>) -> Self {
        Reading {
            limits,
            progress,
            cancel,
            find_diff_id: false,
            bytes: AtomicU64::new(0),
        }
    }

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

    /// For a second reading of a layer: its bytes are not counted in the totals.
    pub(crate) fn uncounted(&self) -> Reading<'r> {
        Reading::new(self.limits, &(), self.cancel)
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
    thread::scope(|scope| {
        let read = move || {
            let mut output = Output::new(input, reading, chunks, reusable);
            produce(input, reading, &mut output).unwrap_or_else(|error| {
                // The parser may have stopped because of an error of its own.
                let _ = output.chunks.send(Err(error));
                LayerBytes::default()
            })
        };
        let reader = thread::Builder::new().spawn_scoped(scope, read);
        let reader = reader.map_err(|error| read_error("read", &input.name, error))?;
        let result = parse(ChunkStream::new(Box::new(ThreadSource { received, used })))?;
        match reader.join() {
            Ok(bytes) => Ok((result, bytes)),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// What the reading thread sends: a chunk, or an error after which it ends.
type Message = Result<Vec<u8>, ConvertError>;

/// The parser's end of the channel. The thread closes it at the end of the layer.
struct ThreadSource {
    received: Receiver<Message>,
    used: Sender<Vec<u8>>,
}

impl ChunkSource for ThreadSource {
    fn next_chunk(&mut self, used: Option<Vec<u8>>) -> Result<Option<Vec<u8>>, ConvertError> {
        if let Some(used) = used {
            // The thread may have ended already.
            let _ = self.used.send(used);
        }
        self.received.recv().ok().transpose()
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
) -> Result<LayerBytes, ConvertError> {
    let shared = output.shared.clone();
    let mut source = RawReader {
        reader: BlobReader::new(&input.blob, reading.cancel),
        name: &input.name,
        progress: reading.progress,
        shared: shared.clone(),
    };
    let unreadable = |error: io::Error| {
        let known = shared.failed.take();
        known.unwrap_or_else(|| read_error("read", &input.name, error))
    };
    let mut start = Vec::new();
    let first_bytes = source.by_ref().take(8).read_to_end(&mut start);
    first_bytes.map_err(unreadable)?;
    let format = Format::of(&start);
    let mut raw = BufReader::with_capacity(INPUT_BYTES, Cursor::new(start).chain(source));
    let decoded = decode(&mut raw, format, output);
    if let Some(error) = shared.failed.take() {
        return Err(error);
    }
    if matches!(&decoded, Err(error) if !matches!(error, ConvertError::Decompress { .. })) {
        return decoded.map(|()| LayerBytes::default());
    }
    // Read to the last byte: the digest also covers the padding behind the compressed data. If the
    // data does not decompress, a digest error is more precise than the decoder's error.
    io::copy(&mut raw, &mut io::sink()).map_err(unreadable)?;
    let stored = shared.count.get();
    if let Some(expected) = input.size {
        check_size(&input.name, expected, stored)?;
    }
    let found = shared.hasher.take().map(Hasher::finish);
    if let (Some(expected), Some(found)) = (&input.digest, found) {
        check_equal(&input.name, "digest", expected, &found)?;
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
    check_equal(output.name, "diffID", expected, &found)?;
    Ok(found)
}

fn decode(
    raw: &mut impl BufRead,
    format: Format,
    output: &mut Output<'_>,
) -> Result<(), ConvertError> {
    let name = output.name;
    // Some engines use the media type and others the first bytes. bcow refuses a layer where the
    // two differ, because engines read it differently.
    if let Some(media_type) = output.media_type {
        let expected = Format::of_media_type(media_type);
        if expected != format && !matches!(format, Format::Other(_)) {
            return Err(ConvertError::Decompress {
                place: name.to_owned(),
                format: expected.name(),
                problem: format!("it is {} (the media type is {media_type})", format.name()),
            });
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
        Format::Other(compression) => Err(ConvertError::refused(
            format!("{name}: {compression} compression is not supported"),
            "decompress it, or compress it with gzip or zstd",
        )),
    }
}

/// Decompresses all members of a gzip stream.
fn gunzip(raw: &mut impl BufRead, output: &mut Output<'_>) -> Result<(), ConvertError> {
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

fn trailing_zeros(raw: &mut impl BufRead, name: &str) -> Result<(), ConvertError> {
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

fn trailing_garbage(name: &str) -> ConvertError {
    ConvertError::Decompress {
        place: name.to_owned(),
        format: "gzip",
        problem: "unexpected data after its end".to_owned(),
    }
}

/// The blob's bytes, hashed and counted.
struct RawReader<'r> {
    reader: BlobReader<'r>,
    name: &'r str,
    progress: &'r dyn Progress,
    shared: Rc<Shared>,
}

/// State of the raw reader that is needed while a decoder owns the reader.
#[derive(Default)]
struct Shared {
    count: Cell<u64>,
    hasher: RefCell<Option<Hasher>>,
    /// A read error, kept here because a decoder would wrap it in an error of its own.
    failed: RefCell<Option<ConvertError>>,
}

impl Read for RawReader<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let read = loop {
            match self.reader.read(buf) {
                Ok(read) => break read,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => {
                    let error = read_error("read", self.name, e);
                    self.shared.failed.replace(Some(error));
                    return Err(io::Error::other("the input cannot be read"));
                }
            }
        };
        if let Some(hasher) = &mut *self.shared.hasher.borrow_mut() {
            hasher.update(&buf[..read]);
        }
        self.shared.count.set(self.shared.count.get() + read as u64);
        self.progress.advance(read as u64);
        Ok(read)
    }
}

/// Decompressed bytes, hashed, counted and cut into chunks.
struct Output<'r> {
    name: &'r str,
    media_type: Option<&'r str>,
    reading: &'r Reading<'r>,
    chunks: SyncSender<Message>,
    reusable: Receiver<Vec<u8>>,
    /// Computes the diffID.
    hasher: Option<Hasher>,
    chunk: Vec<u8>,
    filled: usize,
    total: u64,
    shared: Rc<Shared>,
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
        let stored = input.digest.as_ref().map(Digest::algorithm);
        Output {
            name: &input.name,
            media_type: input.media_type.as_deref(),
            reading,
            chunks,
            reusable,
            hasher: algorithm.map(Hasher::new),
            chunk: vec![0; CHUNK_BYTES],
            filled: 0,
            total: 0,
            shared: Rc::new(Shared {
                hasher: RefCell::new(stored.map(Hasher::new)),
                ..Shared::default()
            }),
        }
    }

    /// Reads the decoder to its end.
    fn fill(&mut self, format: &'static str, decoder: &mut impl Read) -> Result<(), ConvertError> {
        loop {
            let read = match decoder.read(&mut self.chunk[self.filled..]) {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(self.decoder_error(format, e)),
            };
            self.filled += read;
            self.total += read as u64;
            self.check_limits(read as u64)?;
            if self.filled == CHUNK_BYTES {
                self.flush()?;
            }
        }
    }

    /// Sends the chunk to the parser.
    fn flush(&mut self) -> Result<(), ConvertError> {
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
        let sent = self.chunks.send(Ok(chunk));
        sent.map_err(|_| ConvertError::Interrupted)
    }

    fn check_limits(&self, read: u64) -> Result<(), ConvertError> {
        self.reading.count(read, || TarPlace::layer(self.name))?;
        let ratio = self.total / self.shared.count.get().max(1);
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
        let mut reading = Reading::new(&limits, &(), Cancel::default());
        reading.bytes = AtomicU64::new(tar);
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
            shared: Rc::new(Shared {
                count: Cell::new(stored),
                ..Shared::default()
            }),
        };
        output.check_limits(0).is_ok()
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

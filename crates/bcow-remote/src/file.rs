//! A remote file: every byte is checked against its Merkle tree before use.

mod ahead;
mod cached;
mod claim;
mod failures;
mod head;
mod opening;
mod warm;
mod whole;

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::thread;

use bcow::format::{HASH_BYTES, HEADER_AREA_BYTES, Header, choose_header};
use bcow::{Storage, Version};

use crate::cache::CacheFile;
use crate::error::{Fault, Problem, RemoteError};
use crate::figures::Waiting;
use crate::in_flight::{Claim, InFlight, Until};
use crate::lock::lock;
use crate::mirrors::Sources;
use crate::retry_budget::RetryBudget;
use crate::shared::{MemoryKey, Shared};
use crate::source::{RangeAnswer, Source};
use crate::tree::{self, Chunk, Chunks, Expected, Hash, HashPlace, Root};
use claim::Claimed;
use failures::Failures;
use head::Head;
use opening::Early;

pub(crate) use ahead::Pace;
pub use warm::Warm;

/// Bytes of a request for a place that no earlier request led to. A smaller request would take
/// nearly the same time.
const FEWEST_BYTES: u64 = 64 << 10;
/// Bytes of a request in a sequence of adjacent requests, at most.
const MAX_BYTES: u64 = 2 << 20;
/// Number of sequences of reads that are recognised at one time.
const STREAMS: usize = 8;
/// Attempts at a chunk whose bytes are wrong. A second attempt helps if the network damaged them.
const ATTEMPTS_AT_WRONG_BYTES: u32 = 2;

/// Why chunks are loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// A read needs them. If reads follow each other, more is fetched than is needed.
    Read,
    /// Reads will probably need them soon.
    Ahead,
    /// The cache shall be complete. Memory is for chunks that are read.
    Complete,
}

/// A file on a server, open for reading.
pub struct RemoteFile {
    shared: Arc<Shared>,
    sources: Arc<Sources>,
    /// Distinguishes the file in the shared memory.
    number: u64,
    file_bytes: u64,
    root: Hash,
    /// The header slots as the server, or the cache, had them when the file was opened. Their
    /// fields are checked against the root, as a part of the first chunk.
    slots: [u8; HEADER_AREA_BYTES],
    canonical: [u8; HEADER_AREA_BYTES],
    chunks: Chunks,
    cached: Option<CacheFile>,
    in_flight: InFlight,
    /// Where the last requests ended. The lock is held for a lookup before a request, never during
    /// one.
    streams: Mutex<Streams>,
    failures: Failures,
    /// Locked by the thread that fetches the whole file into the cache, from a server that does not
    /// send ranges. Threads that need other parts of it wait.
    whole: Mutex<()>,
}

/// How much of a file is on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Presence {
    /// Length of the file.
    pub file_bytes: u64,
    /// Bytes that the cache file takes up on the disk, at most as many as the file has.
    pub held_bytes: u64,
}

#[derive(Default)]
struct Streams {
    recent: [Stream; STREAMS],
    oldest: usize,
}

#[derive(Clone, Copy, Default)]
struct Stream {
    end: u64,
    bytes: u64,
}

impl RemoteFile {
    pub(crate) fn open(
        shared: &Arc<Shared>,
        sources: &Arc<Sources>,
        expected: Option<Expected>,
    ) -> Result<Self, RemoteError> {
        let Some(expected) = expected else {
            return RemoteFile::open_from_server(shared, sources, None);
        };
        let root = expected.root.0;
        if let Some(file) = RemoteFile::open_cached(shared, sources, &root) {
            return Ok(file);
        }
        // Another process may fetch the beginning now; then the cache has it after the wait.
        let cache = shared.options.cache.as_ref();
        let beginning = cache.and_then(|cache| cache.file(&root));
        let longest = shared.longest_claim();
        let held = beginning
            .as_ref()
            .and_then(|file| file.claim_beginning(longest));
        if held.is_some()
            && let Some(file) = RemoteFile::open_cached(shared, sources, &root)
        {
            return Ok(file);
        }
        let (from_mirror, fetched) = thread::scope(|scope| {
            let fetch = || opening::fetch_early(shared, sources, &expected);
            let early = thread::Builder::new().spawn_scoped(scope, fetch);
            let of_mirror = head::of_mirrors(shared, sources, root);
            let from_mirror = of_mirror.is_some();
            let head = of_mirror.map_or_else(|| head::of_server(shared, sources, Some(root)), Ok);
            (
                from_mirror,
                head.map(|head| {
                    let early = early.ok().and_then(|early| early.join().ok());
                    (head, early.unwrap_or_default())
                }),
            )
        });
        let (head, early) = fetched?;
        match RemoteFile::with_head(shared, sources, head, Some(early)) {
            Err(error) if from_mirror => {
                tracing::warn!("what a mirror sent as the header is wrong: {error}");
                RemoteFile::open_from_server(shared, sources, Some(root))
            }
            opened => opened,
        }
    }

    /// Opens a file by the beginning of its cache file. `None` if that is missing or damaged.
    pub(crate) fn open_cached(
        shared: &Arc<Shared>,
        sources: &Arc<Sources>,
        root: &Hash,
    ) -> Option<Self> {
        let cached = shared.options.cache.as_ref()?.file(root)?;
        let mut slots = [0; HEADER_AREA_BYTES];
        if !cached.read(0, &mut slots) {
            return None;
        }
        let header = choose_header(&slots).ok()?;
        header.merkle.as_ref().filter(|tree| tree.root == *root)?;
        let file = RemoteFile::with_header(shared, sources, &header, slots, Some(cached)).ok()?;
        match file.check_first_chunk() {
            Ok(()) => Some(file),
            Err(error) => {
                tracing::debug!("the cache does not have the header: {error}");
                None
            }
        }
    }

    fn open_from_server(
        shared: &Arc<Shared>,
        sources: &Arc<Sources>,
        pin: Option<Hash>,
    ) -> Result<Self, RemoteError> {
        let head = head::of_server(shared, sources, pin)?;
        let early = pin.map(|_| Vec::new());
        RemoteFile::with_head(shared, sources, head, early)
    }

    /// Opens a file by its beginning, which may be wrong. With `early`, the root was known before,
    /// and no other process with this cache fetches the parts that opening an image reads; those in
    /// `early` have arrived.
    fn with_head(
        shared: &Arc<Shared>,
        sources: &Arc<Sources>,
        head: Head,
        early: Option<Vec<Early>>,
    ) -> Result<Self, RemoteError> {
        let Head {
            bytes,
            header,
            slots,
            rest,
        } = head;
        let failed = |problem: Problem| problem.at(sources.address().to_string());
        if rest.is_some() {
            whole::require_room(&shared.options, header.file_bytes).map_err(failed)?;
        }
        let root = header.merkle.as_ref().map(|tree| tree.root);
        let cached = root.and_then(|root| shared.options.cache.as_ref()?.file(&root));
        let file =
            RemoteFile::with_header(shared, sources, &header, slots, cached).map_err(failed)?;
        match (rest, early) {
            (Some(rest), _) => file.keep_whole(&bytes, rest).map_err(failed)?,
            (None, Some(early)) => file.fetch_opening(early),
            (None, None) => {}
        }
        file.keep_head(&bytes)?;
        file.check_first_chunk()?;
        if let Some(cached) = &file.cached {
            cached.record_origin(&file.name());
            cached.enforce_limit();
        }
        Ok(file)
    }

    fn with_header(
        shared: &Arc<Shared>,
        sources: &Arc<Sources>,
        header: &Header,
        slots: [u8; HEADER_AREA_BYTES],
        cached: Option<CacheFile>,
    ) -> Result<Self, Problem> {
        let tree = header.merkle.as_ref().ok_or(Problem::NoTree)?;
        Ok(RemoteFile {
            number: shared.file_number(),
            file_bytes: header.file_bytes,
            root: tree.root,
            slots,
            canonical: header.canonical(),
            chunks: Chunks::new(tree),
            cached,
            in_flight: InFlight::default(),
            streams: Mutex::default(),
            failures: Failures::default(),
            whole: Mutex::default(),
            sources: Arc::clone(sources),
            shared: Arc::clone(shared),
        })
    }

    /// The root hash of the file.
    pub fn root(&self) -> Root {
        Root(self.root)
    }

    /// How much of the file is in the cache.
    pub fn presence(&self) -> Presence {
        let held = self.cached.as_ref().map_or(0, CacheFile::held_bytes);
        Presence {
            file_bytes: self.file_bytes,
            held_bytes: held.min(self.file_bytes),
        }
    }

    /// The address, without its query.
    pub fn name(&self) -> String {
        self.sources.address().to_string()
    }

    /// As [`Storage::read_at`] inside the file, with an error of this crate.
    pub(crate) fn read_checked(&self, offset: u64, buf: &mut [u8]) -> Result<(), RemoteError> {
        let end = offset + buf.len() as u64;
        let mut at = offset;
        while at < end {
            let Some(chunk) = self.chunks.at(at) else {
                let skip = (at - self.chunks.root_offset()) as usize;
                let rest = &mut buf[(at - offset) as usize..];
                rest.copy_from_slice(&self.chunks.root()[skip..skip + rest.len()]);
                break;
            };
            let start = self.chunks.start(chunk);
            let rest = &mut buf[(at - offset) as usize..];
            let cached = self.read_cached(chunk, (at - start) as usize, rest)?;
            if cached > 0 {
                at += cached as u64;
                continue;
            }
            let wanted = (end - start).div_ceil(self.chunks.chunk_bytes());
            let mut reached = at;
            self.load(chunk, wanted, Purpose::Read, &mut |loaded, bytes| {
                let start = self.chunks.start(loaded);
                if start >= end {
                    return;
                }
                let skip = at.saturating_sub(start) as usize;
                let from = start + skip as u64;
                let take = (bytes.len() - skip).min((end - from) as usize);
                let place = (from - offset) as usize;
                buf[place..place + take].copy_from_slice(&bytes[skip..skip + take]);
                reached = from + take as u64;
            })?;
            at = reached;
        }
        Ok(())
    }

    /// Checks the chunk that contains the header. Until then, what the header says is a claim of
    /// the server.
    fn check_first_chunk(&self) -> Result<(), RemoteError> {
        self.load(Chunk::FIRST, 1, Purpose::Read, &mut |_, _| {})?;
        if let Some(cached) = &self.cached {
            // So a complete cache file has the bytes of the file.
            cached.write(self.chunks.root_offset(), self.chunks.root());
        }
        Ok(())
    }

    /// Keeps the whole chunks among the first bytes of the file, if they are right.
    fn keep_head(&self, bytes: &[u8]) -> Result<(), RemoteError> {
        let mut chunk = Chunk::FIRST;
        let mut rest = bytes;
        while self.chunks.start(chunk) < self.chunks.root_offset() {
            let length = self.chunks.length(chunk);
            let Some((first, behind)) = rest.split_at_checked(length) else {
                break;
            };
            let hash = self.hash(chunk)?;
            if self.matches(chunk, first, &hash) {
                self.keep(chunk, first.into(), Purpose::Read);
            }
            if self.chunks.siblings(chunk) == 1 {
                break;
            }
            rest = behind;
            chunk = chunk.after(1);
        }
        Ok(())
    }

    /// The hash of a chunk, from the level above, which is itself checked.
    fn hash(&self, chunk: Chunk) -> Result<Hash, RemoteError> {
        match self.chunks.hash_place(chunk) {
            HashPlace::Root => Ok(*self.chunks.root()),
            HashPlace::In(parent, at) => {
                let parent = self.chunk(parent)?;
                let mut hash = Hash::default();
                hash.copy_from_slice(&parent[at..at + HASH_BYTES as usize]);
                Ok(hash)
            }
        }
    }

    /// A chunk, from anywhere.
    fn chunk(&self, chunk: Chunk) -> Result<Arc<[u8]>, RemoteError> {
        if let Some(bytes) = self.shared.memory.get(&self.key(chunk)) {
            return Ok(bytes);
        }
        let mut found = None;
        self.load(chunk, 1, Purpose::Read, &mut |loaded, bytes| {
            if loaded == chunk {
                found = Some(Arc::clone(bytes));
            }
        })?;
        found.ok_or_else(|| {
            let problem = Problem::Answer("the chunk is missing".into());
            problem.at(self.place(chunk, 1))
        })
    }

    /// Loads `chunk`, and if it must be fetched, those of the `wanted` chunks from it on that are
    /// missing too; calls `sink` for each. Returns the number of chunks: at least 1, in most cases
    /// fewer than wanted, and more if the server sent more than was wanted.
    fn load(
        &self,
        chunk: Chunk,
        wanted: u64,
        purpose: Purpose,
        sink: &mut dyn FnMut(Chunk, &Arc<[u8]>),
    ) -> Result<u64, RemoteError> {
        // The hashes are known before a fetch is claimed: a thread that has claimed one never waits
        // for another.
        let hash = self.hash(chunk)?;
        let mut budget = match purpose {
            Purpose::Read => self.shared.reading(),
            Purpose::Ahead | Purpose::Complete => self.shared.in_background(),
        };
        let mut until = Until::Arrival;
        loop {
            if let Some(bytes) = self.present(chunk, &hash) {
                sink(chunk, &bytes);
                return Ok(1);
            }
            if purpose == Purpose::Read
                && let Some(error) = self.failures.repeated(chunk)
            {
                return Err(error);
            }
            let count = match purpose {
                Purpose::Read => self.request_length(chunk, wanted),
                Purpose::Ahead | Purpose::Complete => self.exact_length(chunk, wanted),
            };
            let hashes = (0..count)
                .map(|n| self.hash(chunk.after(n)))
                .collect::<Result<Vec<_>, _>>()?;
            let (flight, end) = match self.in_flight.claim(chunk, chunk.after(count)) {
                Claim::Mine(flight, end) => (flight, end),
                Claim::Other(wait) => {
                    let _waiting = self.counted_wait(purpose);
                    wait.wait(until, self.shared.options.timeout)?;
                    // A chunk that has arrived may be evicted at once.
                    until = Until::End;
                    continue;
                }
            };
            // Another thread may have fetched the chunk between the look and the claim, and another
            // process may fetch it now.
            let (mut held, end) = match self.claim(chunk, end, &hash, purpose) {
                Claimed::Mine(held, end) => (held, end),
                Claimed::Present(bytes) => {
                    flight.land(Ok(()));
                    sink(chunk, &bytes);
                    return Ok(1);
                }
            };
            let mut count = 1;
            while chunk.after(count) < end
                && self
                    .present(chunk.after(count), &hashes[count as usize])
                    .is_none()
            {
                count += 1;
            }
            let waiting = self.counted_wait(purpose);
            let demand = (purpose == Purpose::Read).then(|| self.shared.demand.enter());
            // What waited for others may be late.
            budget.leave_an_attempt();
            let run = Run {
                first: chunk,
                hashes: &hashes[..count as usize],
                wanted: wanted.min(count),
                purpose,
                done: 0,
                sink: &mut |chunk, bytes| {
                    flight.arrived(chunk.after(1));
                    if let Some(held) = &mut held {
                        held.arrived(self.chunks.start(chunk) + bytes.len() as u64);
                    }
                    sink(chunk, bytes);
                },
            };
            let result = self.fetch(run, &mut budget);
            drop((waiting, demand, held));
            if let (Purpose::Read, Err(error)) = (purpose, &result) {
                self.failures.add(chunk..chunk.after(count), error);
            }
            flight.land(match purpose {
                Purpose::Read => result.clone().map(drop),
                // A read that waits tries it itself, for as long as a read may.
                Purpose::Ahead | Purpose::Complete => Ok(()),
            });
            if let Some(cached) = &self.cached {
                cached.enforce_limit();
            }
            return result;
        }
    }

    /// The number of chunks of a request that begins with `chunk`, of which `wanted` are needed.
    fn request_length(&self, chunk: Chunk, wanted: u64) -> u64 {
        let start = self.chunks.start(chunk);
        let mut streams = lock(&self.streams);
        let known = streams
            .recent
            .iter()
            .position(|s| s.end == start && s.bytes > 0);
        let (place, ahead) = match known {
            Some(place) => {
                let bytes = streams.recent[place].bytes * 2;
                (place, bytes.min(MAX_BYTES))
            }
            None => {
                let place = streams.oldest;
                streams.oldest = (place + 1) % STREAMS;
                (place, FEWEST_BYTES)
            }
        };
        let chunk_bytes = self.chunks.chunk_bytes();
        let most = (MAX_BYTES / chunk_bytes).max(1);
        let count = wanted
            .max(ahead / chunk_bytes)
            .clamp(1, most)
            .min(self.chunks.siblings(chunk));
        streams.recent[place] = Stream {
            end: start + count * chunk_bytes,
            bytes: ahead,
        };
        count
    }

    /// Counts a wait of a read.
    fn counted_wait(&self, purpose: Purpose) -> Option<Waiting<'_>> {
        (purpose == Purpose::Read).then(|| self.shared.client.counters.wait())
    }

    /// The number of chunks of a request for `wanted` chunks from `chunk` on, and no others.
    fn exact_length(&self, chunk: Chunk, wanted: u64) -> u64 {
        let most = (MAX_BYTES / self.chunks.chunk_bytes()).max(1);
        wanted.clamp(1, most).min(self.chunks.siblings(chunk))
    }

    /// The chunk, if memory or the cache has it.
    fn present(&self, chunk: Chunk, hash: &Hash) -> Option<Arc<[u8]>> {
        if let Some(bytes) = self.shared.memory.get(&self.key(chunk)) {
            return Some(bytes);
        }
        let bytes = self.cached_chunk(chunk, hash)?;
        let counter = &self.shared.cached_bytes;
        counter.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        Some(self.remember(chunk, bytes, Purpose::Read))
    }

    /// The chunk as the cache has it, if it is right there.
    fn cached_chunk(&self, chunk: Chunk, hash: &Hash) -> Option<Arc<[u8]>> {
        let cached = self.cached.as_ref()?;
        let mut bytes = new_chunk(self.chunks.length(chunk));
        let is_read = cached.read(self.chunks.start(chunk), Arc::get_mut(&mut bytes)?);
        (is_read && self.matches(chunk, &bytes, hash)).then_some(bytes)
    }

    fn matches(&self, chunk: Chunk, bytes: &[u8], hash: &Hash) -> bool {
        tree::matches(chunk, bytes, hash, &self.canonical)
    }

    /// Keeps a checked chunk in memory, if it is for reads.
    fn remember(&self, chunk: Chunk, mut bytes: Arc<[u8]>, purpose: Purpose) -> Arc<[u8]> {
        if chunk == Chunk::FIRST {
            // The tree does not cover every byte of the slots; these are the ones that were read
            // when the file was opened.
            Arc::make_mut(&mut bytes)[..HEADER_AREA_BYTES].copy_from_slice(&self.slots);
        }
        if purpose != Purpose::Complete {
            let memory = &self.shared.memory;
            memory.insert(self.key(chunk), Arc::clone(&bytes));
        }
        bytes
    }

    /// Keeps a fetched and checked chunk in memory and in the cache.
    fn keep(&self, chunk: Chunk, bytes: Arc<[u8]>, purpose: Purpose) -> Arc<[u8]> {
        let counter = &self.shared.fetched_bytes;
        counter.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        let bytes = self.remember(chunk, bytes, purpose);
        if let Some(cached) = &self.cached {
            cached.write(self.chunks.start(chunk), &bytes);
        }
        bytes
    }

    fn key(&self, chunk: Chunk) -> MemoryKey {
        MemoryKey {
            file: self.number,
            chunk,
        }
    }

    /// `bytes A..B of ADDRESS`.
    fn place(&self, first: Chunk, count: u64) -> String {
        let range = self.range(first, count);
        format!("bytes {range} of {}", self.sources.address())
    }

    /// `A..B`
    fn range(&self, first: Chunk, count: u64) -> String {
        let start = self.chunks.start(first);
        let last = first.after(count.saturating_sub(1));
        let end = self.chunks.start(last) + self.chunks.length(last) as u64;
        format!("{start}..{end}")
    }

    /// Fetches a run of chunks. Returns the number that arrived: all that are wanted, or more.
    fn fetch(&self, mut run: Run<'_>, budget: &mut RetryBudget) -> Result<u64, RemoteError> {
        let mut wrong = 0;
        while run.left() > 0 {
            let before = run.done;
            let Err(mut fault) = self.request(&mut run, budget) else {
                budget.progress();
                continue;
            };
            if run.done >= run.wanted {
                tracing::debug!("{}: not read ahead: {}", self.name(), fault.problem);
                break;
            }
            if run.done > before {
                budget.progress();
                wrong = 0;
            }
            if matches!(fault.problem, Problem::WrongBytes | Problem::Changed) {
                wrong += 1;
                if wrong >= ATTEMPTS_AT_WRONG_BYTES {
                    fault = fault.problem.permanent();
                }
            }
            budget
                .wait(fault)
                .map_err(|problem| problem.at(self.place(run.next(), run.left())))?;
        }
        Ok(run.done)
    }

    /// Requests what is left of a run: once from each mirror, then once from the server.
    fn request(&self, run: &mut Run<'_>, budget: &RetryBudget) -> Result<(), Fault> {
        for copy in self.sources.usable() {
            let of_mirror = self.shared.of_mirror();
            let Err(fault) = self.request_from(&copy.source, run, &of_mirror) else {
                return Ok(());
            };
            of_mirror.give_up(&fault.problem);
            let range = self.range(run.next(), run.left());
            copy.failed(
                &fault.problem,
                &format!("bytes {range} of {}", copy.source.address()),
            );
        }
        self.request_from(&self.sources.origin, run, budget)
    }

    /// Sends one request for what is left of a run.
    fn request_from(
        &self,
        source: &Source,
        run: &mut Run<'_>,
        budget: &RetryBudget,
    ) -> Result<(), Fault> {
        let last = run.first.after(run.hashes.len() as u64 - 1);
        let start = self.chunks.start(run.next());
        let end = self.chunks.start(last) + self.chunks.length(last) as u64;
        tracing::debug!("{}: fetching {start}..{end}", self.name());
        let (mut left, has_changed, mut body) = match source.range(start, end, budget) {
            Ok(RangeAnswer::Part {
                bytes,
                has_changed,
                body,
                ..
            }) => (bytes, has_changed, body),
            Ok(RangeAnswer::Whole { body, .. }) => {
                return if std::ptr::eq(source, &self.sources.origin) {
                    self.take_from_whole(body, run)
                } else {
                    Err(Problem::NoRanges("it is a mirror".to_owned()).permanent())
                };
            }
            // When the file was opened, it was long enough.
            Err(fault) if matches!(fault.problem, Problem::OutOfRange) => {
                return Err(Problem::Changed.permanent());
            }
            Err(fault) => return Err(fault),
        };
        let first = run.done;
        while run.left() > 0 {
            let length = self.chunks.length(run.next());
            if left < length as u64 {
                break;
            }
            let mut bytes = vec![0; length];
            body.read_exact(&mut bytes)?;
            left -= length as u64;
            if !self.take(run, bytes) {
                return Err(if has_changed {
                    Problem::Changed.transient()
                } else {
                    Problem::WrongBytes.transient()
                });
            }
        }
        if left == 0 {
            body.release();
        }
        if run.done > first {
            Ok(())
        } else {
            Err(Problem::Answer("it is shorter than a chunk".into()).transient())
        }
    }

    /// Keeps the next chunk of a run; `false` if these are not its bytes.
    fn take(&self, run: &mut Run<'_>, bytes: Vec<u8>) -> bool {
        let chunk = run.next();
        let is_right = self.matches(chunk, &bytes, &run.hashes[run.done as usize]);
        if is_right {
            run.arrived(&self.keep(chunk, bytes.into(), run.purpose));
        }
        is_right
    }
}

/// Chunks to fetch in one request.
struct Run<'r> {
    first: Chunk,
    /// One for each chunk.
    hashes: &'r [Hash],
    /// The number of chunks that a read needs; the others are read ahead.
    wanted: u64,
    purpose: Purpose,
    /// The number of chunks that have arrived and are right.
    done: u64,
    /// Gets each of them.
    sink: &'r mut dyn FnMut(Chunk, &Arc<[u8]>),
}

impl Run<'_> {
    /// The first chunk that is missing.
    fn next(&self) -> Chunk {
        self.first.after(self.done)
    }

    /// The number of chunks that are missing.
    fn left(&self) -> u64 {
        self.hashes.len() as u64 - self.done
    }

    fn arrived(&mut self, bytes: &Arc<[u8]>) {
        let chunk = self.next();
        (self.sink)(chunk, bytes);
        self.done += 1;
    }
}

/// Room for a chunk, without a second owner.
fn new_chunk(length: usize) -> Arc<[u8]> {
    std::iter::repeat_n(0, length).collect()
}

fn read_only() -> io::Error {
    io::Error::new(
        io::ErrorKind::ReadOnlyFilesystem,
        "a remote file is read-only",
    )
}

impl Storage for RemoteFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.file_bytes)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        offset
            .checked_add(buf.len() as u64)
            .filter(|&end| end <= self.file_bytes)
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(self.read_checked(offset, buf)?)
    }

    fn write_at(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Err(read_only())
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn version(&self) -> Option<Version> {
        Some(Version::Checked(self.root))
    }
}

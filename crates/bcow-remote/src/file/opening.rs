//! The parts of a file that opening an image reads, requested at the same time.
//!
//! Read one after the other, each part leads to the next: the upper levels of the Merkle tree (spec
//! section 9) to the hashes of the first and the last chunks, and these to the header and to the
//! metadata of the image, which is at the end of the file. Far from the server, each of these
//! steps takes the time of a request.
//!
//! If the length of the file is known before it is opened, the places of the parts follow from
//! it, and the parts are requested together with the header. Parts that then turn out not to be
//! those are not used.

use std::ops::Range;
use std::thread;

use super::head::HEAD_BYTES;
use super::{FEWEST_BYTES, Purpose, RemoteFile};
use crate::mirrors::Sources;
use crate::shared::Shared;
use crate::source::RangeAnswer;
use crate::tree::{Chunk, Chunks, Expected, HashPlace};

/// The tables, the metadata and the root table are at the end of what the tree covers. They take
/// about this part of the file, within these bounds.
const END_PART: u64 = 1536;
const FEWEST_END_BYTES: u64 = 64 << 10;
const MOST_END_BYTES: u64 = 512 << 10;

/// Bytes of the file, which are not checked.
pub(super) struct Early {
    start: u64,
    bytes: Vec<u8>,
}

impl Early {
    fn range(&self) -> Range<u64> {
        self.start..self.start + self.bytes.len() as u64
    }
}

/// Fetches the parts of a file that is not open yet, as far as the places are known.
pub(super) fn fetch_early(shared: &Shared, sources: &Sources, expected: &Expected) -> Vec<Early> {
    match expected.chunks() {
        Some(chunks) => fetch(shared, sources, &ranges(&chunks)),
        None => Vec::new(),
    }
}

/// Fetches ranges of a file at the same time, each with one request, as far as that succeeds.
fn fetch(shared: &Shared, sources: &Sources, ranges: &[Range<u64>]) -> Vec<Early> {
    thread::scope(|scope| {
        let fetch_once = |range| move || fetch_once(shared, sources, range);
        let threads: Vec<_> = ranges
            .iter()
            .filter_map(|range| {
                let thread = thread::Builder::new();
                thread.spawn_scoped(scope, fetch_once(range)).ok()
            })
            .collect();
        let parts = threads.into_iter().filter_map(|thread| thread.join().ok()?);
        parts.collect()
    })
}

/// One request for a range, to the first mirror that is usable, or to the server.
fn fetch_once(shared: &Shared, sources: &Sources, range: &Range<u64>) -> Option<Early> {
    let mirror = sources.usable().next();
    let source = mirror.map_or(&sources.origin, |copy| &copy.source);
    let budget = shared.of_mirror();
    tracing::debug!("{}: fetching {range:?} to open it", sources.address());
    let answer = source.range(range.start, range.end, &budget);
    let fetched = answer.and_then(|answer| match answer {
        RangeAnswer::Part { bytes, body, .. } => Ok(Some(Early {
            start: range.start,
            bytes: body.into_bytes(bytes)?,
        })),
        RangeAnswer::Whole { .. } => Ok(None),
    });
    fetched.unwrap_or_else(|fault| {
        tracing::debug!("{}: {range:?}: {}", sources.address(), fault.problem);
        None
    })
}

/// Where the parts are, in ascending order: whole chunks, behind the first request.
fn ranges(chunks: &Chunks) -> Vec<Range<u64>> {
    let covered_bytes = chunks.level_range(0).end;
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let mut add = |level: usize, start: u64, end: u64| {
        let start = start.max(HEAD_BYTES);
        let Some((first, count)) = chunks.touched(level, start, end) else {
            return;
        };
        let last = first.after(count - 1);
        let start = chunks.start(first);
        let end = chunks.start(last) + chunks.length(last) as u64;
        match ranges.last_mut() {
            Some(before) if start <= before.end => before.end = before.end.max(end),
            _ => ranges.push(start..end),
        }
    };
    let end_bytes = (covered_bytes / END_PART).clamp(FEWEST_END_BYTES, MOST_END_BYTES);
    add(0, covered_bytes.saturating_sub(end_bytes), covered_bytes);
    for level in 1..chunks.levels() {
        let Range { start, end } = chunks.level_range(level);
        add(level, start, start + FEWEST_BYTES);
        add(level, end - 1, end);
    }
    ranges
}

impl RemoteFile {
    /// Fetches the parts that are not among `parts`, checks all, and keeps what is right. A failure
    /// here is no failure of the opening, which fetches what is missing.
    pub(super) fn fetch_opening(&self, mut parts: Vec<Early>) {
        let has = |range: &Range<u64>| {
            let mut found = parts.iter().map(Early::range);
            found.any(|part| part.start <= range.start && range.end <= part.end)
        };
        let mut missing = ranges(&self.chunks);
        missing.retain(|range| !has(range));
        parts.extend(fetch(&self.shared, &self.sources, &missing));
        // The hashes of a level are in the level above.
        for level in (0..self.chunks.levels()).rev() {
            for part in &parts {
                self.keep_part(level, part.start, &part.bytes);
            }
        }
    }

    /// Keeps the whole chunks of a level in a part, if their hashes are known and right.
    fn keep_part(&self, level: usize, start: u64, bytes: &[u8]) {
        let part = start..start + bytes.len() as u64;
        let Some((first, count)) = self.chunks.touched(level, part.start, part.end) else {
            return;
        };
        for chunk in (0..count).map(|n| first.after(n)) {
            let start = self.chunks.start(chunk);
            let end = start + self.chunks.length(chunk) as u64;
            if start < part.start || end > part.end {
                continue;
            }
            let bytes = &bytes[(start - part.start) as usize..(end - part.start) as usize];
            if self.has_hash(chunk)
                && let Ok(hash) = self.hash(chunk)
                && self.matches(chunk, bytes, &hash)
            {
                self.keep(chunk, bytes.into(), Purpose::Read);
            }
        }
    }

    /// Whether memory has the hash of a chunk.
    fn has_hash(&self, chunk: Chunk) -> bool {
        match self.chunks.hash_place(chunk) {
            HashPlace::Root => true,
            HashPlace::In(parent, _) => self.shared.memory.peek(&self.key(parent)).is_some(),
        }
    }
}

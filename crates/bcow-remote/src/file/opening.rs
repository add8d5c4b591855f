//! The parts of a file that opening an image reads, requested at the same time.
//!
//! Read one after the other, each part leads to the next: the upper levels of the Merkle tree (spec
//! section 9) to the hashes of the first and the last chunks, and these to the header and to the
//! metadata of the image, which is at the end of the file. Far from the server, each of these
//! steps takes the time of a request.

use std::ops::Range;

use super::head::HEAD_BYTES;
use super::{FEWEST_BYTES, Purpose, RemoteFile};
use crate::source::RangeAnswer;
use crate::tree::{Chunk, HashPlace};

/// Bytes at the end of what the tree covers.
const END_BYTES: u64 = 128 << 10;

impl RemoteFile {
    /// Fetches the parts, checks them, and keeps what is right. A failure here is no failure of the
    /// opening, which fetches what is missing.
    pub(super) fn fetch_opening(&self) {
        let ranges = self.opening_ranges();
        let mut parts = Vec::with_capacity(ranges.len());
        std::thread::scope(|scope| {
            let threads: Vec<_> = ranges
                .iter()
                .map(|range| scope.spawn(|| self.fetch_once(range)))
                .collect();
            for (range, thread) in ranges.iter().zip(threads) {
                if let Ok(Some(bytes)) = thread.join() {
                    parts.push((range.start, bytes));
                }
            }
        });
        // The hashes of a level are in the level above.
        for level in (0..self.chunks.levels()).rev() {
            for (start, bytes) in &parts {
                self.keep_part(level, *start, bytes);
            }
        }
    }

    /// Where the parts are, in ascending order: whole chunks, behind the first request.
    fn opening_ranges(&self) -> Vec<Range<u64>> {
        let covered_bytes = self.chunks.level_range(0).end;
        let mut ranges: Vec<Range<u64>> = Vec::new();
        let mut add = |level: usize, start: u64, end: u64| {
            let start = start.max(HEAD_BYTES);
            let Some((first, count)) = self.chunks.touched(level, start, end) else {
                return;
            };
            let last = first.after(count - 1);
            let start = self.chunks.start(first);
            let end = self.chunks.start(last) + self.chunks.length(last) as u64;
            match ranges.last_mut() {
                Some(before) if start <= before.end => before.end = before.end.max(end),
                _ => ranges.push(start..end),
            }
        };
        add(0, covered_bytes.saturating_sub(END_BYTES), covered_bytes);
        for level in 1..self.chunks.levels() {
            let Range { start, end } = self.chunks.level_range(level);
            add(level, start, start + FEWEST_BYTES);
            add(level, end - 1, end);
        }
        ranges
    }

    /// One request for a range, to the first mirror that is usable, or to the server.
    fn fetch_once(&self, range: &Range<u64>) -> Option<Vec<u8>> {
        let mirror = self.sources.usable().next();
        let source = mirror.map_or(&self.sources.origin, |copy| &copy.source);
        let budget = self.shared.of_mirror();
        tracing::debug!("{}: fetching {range:?} to open it", self.name());
        let answer = source.range(range.start, range.end, &budget);
        let fetched = answer.and_then(|answer| match answer {
            RangeAnswer::Part {
                bytes, mut body, ..
            } => {
                let mut part = vec![0; bytes as usize];
                body.read_exact(&mut part)?;
                body.finish();
                Ok(Some(part))
            }
            RangeAnswer::Whole { .. } => Ok(None),
        });
        fetched.unwrap_or_else(|fault| {
            tracing::debug!("{}: {range:?}: {}", self.name(), fault.problem);
            None
        })
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

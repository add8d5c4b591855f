//! Reads of several chunks that the cache has.

use std::io::IoSliceMut;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bcow::format::HASH_BYTES;

use super::{Purpose, RemoteFile, new_chunk};
use crate::error::RemoteError;
use crate::tree::{Chunk, HashPlace};

/// Bytes of one read, at most: some of them may turn out to be missing.
const MAX_BYTES: u64 = 256 << 10;

/// Where the chunks of one read go.
struct Plan {
    /// Number of chunks.
    count: u64,
    /// Number of bytes of the first chunk, if the caller reads a part of it.
    head: Option<usize>,
    /// The same of the last chunk.
    tail: Option<usize>,
    /// Number of bytes of the chunks that the caller reads as a whole.
    middle: usize,
}

impl RemoteFile {
    /// Reads from the cache into `buf`, which begins `skip` bytes behind the start of `first`, with
    /// one read, and checks all chunks that it touches. Returns the bytes that are right, and whose
    /// chunks memory does not have; 0 if the first one is not among them.
    ///
    /// Whole chunks are read into `buf` and do not go into memory: the kernel caches them, and the
    /// layer above caches what a block of several chunks decodes to. A chunk of which a part is
    /// read goes into memory, because the next read may need the rest.
    pub(super) fn read_cached(
        &self,
        first: Chunk,
        skip: usize,
        buf: &mut [u8],
    ) -> Result<usize, RemoteError> {
        let HashPlace::In(parent, hashes_at) = self.chunks.hash_place(first) else {
            return Ok(0);
        };
        let Some(cached) = &self.cached else {
            return Ok(0);
        };
        let Some(plan) = self.plan(first, skip, buf.len()) else {
            return Ok(0);
        };
        let mut head = plan.head.map(new_chunk);
        let mut tail = plan.tail.map(new_chunk);
        let in_head = plan.head.map_or(0, |bytes| bytes - skip);
        let (head_part, rest) = buf.split_at_mut(in_head);
        let (middle, rest) = rest.split_at_mut(plan.middle);
        let mut parts = [
            IoSliceMut::new(bytes_of(&mut head)),
            IoSliceMut::new(middle),
            IoSliceMut::new(bytes_of(&mut tail)),
        ];
        if !cached.read_parts(self.chunks.start(first), &mut parts) {
            return Ok(0);
        }
        let parent = self.chunk(parent)?;
        let (hashes, _) = parent[hashes_at..].as_chunks::<{ HASH_BYTES as usize }>();
        let whole = middle.chunks(self.chunks.chunk_bytes() as usize);
        let chunks = head.as_deref().into_iter().chain(whole);
        let chunks = chunks.chain(tail.as_deref());
        let right = chunks
            .zip(hashes)
            .take_while(|(bytes, hash)| self.matches(first, bytes, hash))
            .count() as u64;
        let mut done = 0;
        let mut checked = 0;
        if let Some(head) = head.filter(|_| right > 0) {
            head_part.copy_from_slice(&head[skip..]);
            done += head_part.len();
            checked += head.len();
            self.remember(first, head, Purpose::Read);
        }
        let whole = right.saturating_sub(plan.head.is_some().into());
        let whole = (whole * self.chunks.chunk_bytes()).min(middle.len() as u64) as usize;
        done += whole;
        checked += whole;
        if let Some(tail) = tail.filter(|_| right == plan.count) {
            let part = rest.len().min(tail.len());
            rest[..part].copy_from_slice(&tail[..part]);
            done += part;
            checked += tail.len();
            self.remember(first.after(plan.count - 1), tail, Purpose::Read);
        }
        let counter = &self.shared.cached_bytes;
        counter.fetch_add(checked as u64, Ordering::Relaxed);
        Ok(done)
    }

    /// The chunks for one read of `bytes` bytes, `skip` bytes behind the start of `first`; `None`
    /// if they are fewer than two: one chunk alone gains nothing.
    fn plan(&self, first: Chunk, skip: usize, bytes: usize) -> Option<Plan> {
        let chunk_bytes = self.chunks.chunk_bytes();
        let wanted = (skip + bytes).div_ceil(chunk_bytes as usize) as u64;
        let most = wanted.min((MAX_BYTES / chunk_bytes).max(1));
        // The hash of the first chunk is not that of its bytes.
        let is_absent = |chunk: &Chunk| {
            *chunk != Chunk::FIRST && self.shared.memory.peek(&self.key(*chunk)).is_none()
        };
        let count = (0..most.min(self.chunks.siblings(first)))
            .map(|n| first.after(n))
            .take_while(is_absent)
            .count() as u64;
        if count < 2 {
            return None;
        }
        let last = first.after(count - 1);
        let start = self.chunks.start(first) + skip as u64;
        let end = start + bytes as u64;
        let last_end = self.chunks.start(last) + self.chunks.length(last) as u64;
        let head = (skip > 0).then(|| self.chunks.length(first));
        let tail = (end < last_end).then(|| self.chunks.length(last));
        let middle_start = match head {
            Some(_) => self.chunks.start(first.after(1)),
            None => start,
        };
        let middle_end = match tail {
            Some(_) => self.chunks.start(last),
            None => last_end,
        };
        Some(Plan {
            count,
            head,
            tail,
            middle: (middle_end - middle_start) as usize,
        })
    }
}

/// The bytes of a new chunk; none without one.
fn bytes_of(chunk: &mut Option<Arc<[u8]>>) -> &mut [u8] {
    let bytes = chunk.as_mut().and_then(Arc::get_mut);
    bytes.unwrap_or_default()
}

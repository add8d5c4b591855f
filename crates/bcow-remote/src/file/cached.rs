//! Reads of several chunks that the cache has.

use std::sync::atomic::Ordering;

use bcow::format::HASH_BYTES;

use super::RemoteFile;
use crate::error::RemoteError;
use crate::tree::{Chunk, HashPlace};

/// Bytes of one read, at most: some of them may turn out to be missing.
const MAX_BYTES: u64 = 256 << 10;

impl RemoteFile {
    /// Reads whole chunks from the cache into `buf`, from `first` on, with one read, and checks
    /// them there. Returns the bytes of those that are right, and that memory does not have; 0 if
    /// the first one is not among them.
    ///
    /// The chunks do not go into memory: the kernel caches them, and the layer above caches what a
    /// block of several chunks decodes to. A chunk of which a part is read goes into memory,
    /// because the next read may need the rest.
    pub(super) fn read_cached(&self, first: Chunk, buf: &mut [u8]) -> Result<usize, RemoteError> {
        let chunk_bytes = self.chunks.chunk_bytes();
        let HashPlace::In(parent, hashes_at) = self.chunks.hash_place(first) else {
            return Ok(0);
        };
        let Some(cached) = &self.cached else {
            return Ok(0);
        };
        let most = (buf.len() as u64).min(MAX_BYTES) / chunk_bytes;
        let is_absent = |chunk: &Chunk| {
            // The hash of the first chunk is not that of its bytes.
            let is_plain =
                *chunk != Chunk::FIRST && self.chunks.length(*chunk) as u64 == chunk_bytes;
            is_plain && self.shared.memory.peek(&self.key(*chunk)).is_none()
        };
        let count = (0..most.min(self.chunks.siblings(first)))
            .map(|n| first.after(n))
            .take_while(is_absent)
            .count();
        let length = chunk_bytes as usize;
        let buf = &mut buf[..count * length];
        // One chunk alone gains nothing.
        if count < 2 || !cached.read(self.chunks.start(first), buf) {
            return Ok(0);
        }
        let parent = self.chunk(parent)?;
        let (hashes, _) = parent[hashes_at..].as_chunks::<{ HASH_BYTES as usize }>();
        let right = buf
            .chunks_exact(length)
            .zip(hashes)
            .take_while(|(bytes, hash)| self.matches(first, bytes, hash))
            .count();
        let right_bytes = right * length;
        let counter = &self.shared.cached_bytes;
        counter.fetch_add(right_bytes as u64, Ordering::Relaxed);
        Ok(right_bytes)
    }
}

//! Chunks that another process with the same cache fetches.

use std::sync::Arc;

use super::{Purpose, RemoteFile};
use crate::cache::Held;
use crate::tree::{Chunk, Hash};

/// The answer to a claim.
pub(super) enum Claimed<'f> {
    /// The caller fetches the chunks to before this one. Other processes wait for what is held.
    Mine(Option<Held<'f>>, Chunk),
    /// The chunk is here.
    Present(Arc<[u8]>),
}

impl RemoteFile {
    /// Claims the chunks from `chunk` to before `end`, or as many of them, from the first on, as no
    /// other process fetches. Waits for a process that fetches the first.
    pub(super) fn claim(
        &self,
        chunk: Chunk,
        end: Chunk,
        hash: &Hash,
        purpose: Purpose,
    ) -> Claimed<'_> {
        let start = self.chunks.start(chunk);
        let last = chunk.after(end.index - chunk.index - 1);
        let range = start..self.chunks.start(last) + self.chunks.length(last) as u64;
        let end_byte = range.end;
        let mut waiting = None;
        let mut waits = || waiting = self.counted_wait(purpose);
        let longest = self.shared.longest_claim();
        let cached = self.cached.as_ref();
        let held = cached.and_then(|cached| cached.claim(range, longest, &mut waits));
        // What another thread or process fetched before the claim is here now.
        if let Some(bytes) = self.present(chunk, hash) {
            return Claimed::Present(bytes);
        }
        let end = match &held {
            // Other processes claim whole chunks too.
            Some(held) if held.range().end < end_byte => {
                let bytes = held.range().end - start;
                chunk.after((bytes / self.chunks.chunk_bytes()).max(1))
            }
            _ => end,
        };
        Claimed::Mine(held, end)
    }
}

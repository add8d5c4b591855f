//! Reads that have just failed. The kernel repeats a read that failed while it read ahead, before
//! the program learns of the failure. Such a repetition gets the same error, and does not wait for
//! the server a second time.

use std::ops::Range;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::error::RemoteError;
use crate::lock::lock;
use crate::tree::Chunk;

/// How long a failure is remembered.
const LIFETIME: Duration = Duration::from_secs(1);
/// Failures that are remembered.
const MAX_FAILURES: usize = 64;

/// The failures of one file.
#[derive(Default)]
pub(super) struct Failures {
    /// The oldest first. The lock is held to add, to look, or to remove, never during a request.
    recent: Mutex<Vec<(Instant, Range<Chunk>, RemoteError)>>,
}

impl Failures {
    /// Remembers that these chunks did not arrive.
    pub(super) fn add(&self, chunks: Range<Chunk>, error: &RemoteError) {
        let mut recent = lock(&self.recent);
        recent.retain(|(at, ..)| at.elapsed() < LIFETIME);
        if recent.len() < MAX_FAILURES {
            recent.push((Instant::now(), chunks, error.clone()));
        }
    }

    /// The error of the last read of this chunk, if it has just failed. The next read of the chunk
    /// asks the server again.
    pub(super) fn repeated(&self, chunk: Chunk) -> Option<RemoteError> {
        let mut recent = lock(&self.recent);
        if recent.is_empty() {
            return None;
        }
        recent.retain(|(at, ..)| at.elapsed() < LIFETIME);
        let found = recent
            .iter()
            .position(|(_, chunks, _)| chunks.contains(&chunk))?;
        Some(recent.remove(found).2)
    }
}

//! Fetching all of a file into the cache.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use bcow::sync::start;

use super::{MAX_BYTES, Purpose, RemoteFile};
use crate::error::{Problem, RemoteError};
use crate::lock::lock;
use crate::tree::Chunk;

/// Attempts at a chunk that is fetched, and then not in the cache: another process may evict it.
const ATTEMPTS: u32 = 3;

/// How a file is fetched into the cache.
pub struct Warm<'w> {
    /// Number of requests at a time.
    pub connections: usize,
    /// Ends the work soon when it is set.
    pub stop: &'w AtomicBool,
    /// Called before each request; may wait.
    pub before: &'w (dyn Fn() + Sync),
    /// Gets the number of bytes that were found or arrived.
    pub progress: &'w (dyn Fn(u64) + Sync),
}

impl RemoteFile {
    /// Fetches what the cache does not have of the file. What arrived before an error or a stop
    /// stays in the cache.
    pub fn warm(&self, warm: &Warm<'_>) -> Result<(), RemoteError> {
        let not_kept = |why: &str| Problem::NotKept(why.to_owned()).at(self.name());
        let Some(cached) = &self.cached else {
            return Err(not_kept("there is no cache"));
        };
        if let Some(limit) = cached.limit()
            && limit < self.file_bytes
        {
            return Err(not_kept(&format!(
                "the file has {} bytes, and the limit of the cache is {limit}",
                self.file_bytes
            )));
        }
        // The hashes of a level are in the level above.
        for level in (0..self.chunks.levels()).rev() {
            self.warm_level(level, warm)?;
            if warm.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
        }
        cached.write(self.chunks.root_offset(), self.chunks.root());
        (warm.progress)(self.file_bytes - self.chunks.root_offset());
        Ok(())
    }

    fn warm_level(&self, level: usize, warm: &Warm<'_>) -> Result<(), RemoteError> {
        let count = self.chunks.count(level);
        // All are powers of two, so the hashes of a run are in one chunk.
        let run = (MAX_BYTES / self.chunks.chunk_bytes())
            .clamp(1, self.chunks.per_parent())
            .min(count);
        let runs = count.div_ceil(run);
        let next = AtomicU64::new(0);
        // The lock is held to set the error.
        let failed = Mutex::new(None);
        let work = || {
            while !warm.stop.load(Ordering::Relaxed) {
                let first = next.fetch_add(1, Ordering::Relaxed) * run;
                if first >= count {
                    return;
                }
                let end = count.min(first + run);
                if let Err(error) = self.warm_run(level, first, end, warm) {
                    let mut failed = lock(&failed);
                    failed.get_or_insert(error);
                    // The other threads end after their runs.
                    next.store(runs, Ordering::Relaxed);
                    return;
                }
            }
        };
        let threads = (warm.connections as u64).min(runs);
        std::thread::scope(|scope| {
            // This thread works too, alone if the system refuses others.
            let _ = (1..threads).all(|_| start(scope, work));
            work();
        });
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    fn warm_run(
        &self,
        level: usize,
        first: u64,
        end: u64,
        warm: &Warm<'_>,
    ) -> Result<(), RemoteError> {
        let mut index = first;
        let mut attempts = 0;
        while index < end && !warm.stop.load(Ordering::Relaxed) {
            let chunk = Chunk { level, index };
            let hash = self.hash(chunk)?;
            if self.cached_chunk(chunk, &hash).is_some() {
                (warm.progress)(self.chunks.length(chunk) as u64);
                index += 1;
                attempts = 0;
                continue;
            }
            if attempts == ATTEMPTS {
                let failure = self.cached.as_ref().and_then(|cached| cached.failure());
                let why = failure.unwrap_or_else(|| "other files evict it".into());
                return Err(Problem::NotKept(why).at(self.place(chunk, 1)));
            }
            attempts += 1;
            (warm.before)();
            if warm.stop.load(Ordering::Relaxed) {
                return Ok(());
            }
            let known = self.shared.memory.get(&self.key(chunk));
            match (known, &self.cached) {
                (Some(bytes), Some(cached)) => cached.write(self.chunks.start(chunk), &bytes),
                // What arrives is written, and found by the next look.
                _ => drop(self.load(chunk, end - index, Purpose::Complete, &mut |_, _| {})?),
            }
        }
        Ok(())
    }
}

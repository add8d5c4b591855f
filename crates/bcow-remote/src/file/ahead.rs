//! Fetching a range of a file before it is read.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::{Purpose, RemoteFile};
use crate::demand::Demand;
use crate::error::RemoteError;

/// How an answer of a server arrived.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pace {
    /// From the request to the first chunk.
    pub(crate) latency: Duration,
    /// From the first chunk to the last.
    pub(crate) transfer: Duration,
}

impl RemoteFile {
    /// Fetches what is missing of a range of the file. What is behind the bytes that the Merkle
    /// tree covers is left out. Ends soon when `stop` is set. Returns the pace of the last answer
    /// that brought several chunks.
    pub(crate) fn fetch_ahead(
        &self,
        range: &Range<u64>,
        stop: &AtomicBool,
    ) -> Result<Option<Pace>, RemoteError> {
        let Some((first, count)) = self.chunks.touched(0, range.start, range.end) else {
            return Ok(None);
        };
        let mut pace = None;
        let mut done = 0;
        while done < count && !stop.load(Ordering::Relaxed) {
            let chunk = first.after(done);
            let begun = Instant::now();
            let mut arrived = None;
            let loaded = self.load(chunk, count - done, Purpose::Ahead, &mut |_, _| {
                arrived.get_or_insert_with(Instant::now);
            })?;
            if let Some(arrived) = arrived.filter(|_| loaded > 1) {
                pace = Some(Pace {
                    latency: arrived - begun,
                    transfer: arrived.elapsed(),
                });
            }
            done += loaded;
        }
        Ok(pace)
    }

    /// Whether what is fetched is kept on the disk.
    pub(crate) fn has_cache(&self) -> bool {
        self.cached.is_some()
    }

    /// The reads that wait for a server.
    pub(crate) fn demand(&self) -> &Demand {
        &self.shared.demand
    }
}

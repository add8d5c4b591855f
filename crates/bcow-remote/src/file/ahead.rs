//! Fetching a range of a file before it is read.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{Purpose, RemoteFile};
use crate::demand::Demand;
use crate::error::RemoteError;

impl RemoteFile {
    /// Fetches what is missing of a range of the file. What is behind the bytes that the Merkle
    /// tree covers is left out. Ends soon when `stop` is set.
    pub(crate) fn fetch_ahead(
        &self,
        range: &Range<u64>,
        stop: &AtomicBool,
    ) -> Result<(), RemoteError> {
        let Some((first, count)) = self.chunks.touched(0, range.start, range.end) else {
            return Ok(());
        };
        let mut done = 0;
        while done < count && !stop.load(Ordering::Relaxed) {
            let chunk = first.after(done);
            done += self.load(chunk, count - done, Purpose::Ahead, &mut |_, _| {})?;
        }
        Ok(())
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

//! A snapshot of the upper of a mount.

use std::path::PathBuf;

use rustix::io::Errno;

use super::UnionFs;
use crate::upper::{NewSnapshot, UpperError};

impl UnionFs {
    /// Takes the snapshot `name` of the upper: all requests that were executed before. Returns its
    /// path.
    ///
    /// `close_gate` waits for the end of the requests in progress; no request begins before what it
    /// returns is dropped, which happens before the snapshot is durable. Writes by passthrough may
    /// go on.
    pub fn snapshot<G>(
        &self,
        name: &str,
        close_gate: impl FnOnce() -> G,
    ) -> Result<PathBuf, UpperError> {
        let failed = |errno| UpperError::io(self.upper.path(), "make it durable", errno);
        // So that less is left to do while programs wait.
        self.sync_all().map_err(failed)?;
        // The thread can wait for the server of an image.
        drop(self.background.pause());
        let gate = close_gate();
        // The close of the upper waits for the end of the snapshot.
        let closed = self.closed.lock();
        if closed.is_some() {
            return Err(failed(Errno::NOTCONN));
        }
        let new = {
            let _paused = self.background.pause();
            // Neither incomplete blocks, nor files whose marks do not say yet that they were copied
            // whole.
            self.finish_batch()
                .and_then(|()| self.flush_partials(self.durability()))
                .map_err(failed)?;
            NewSnapshot::copy(&self.upper, name)?
        };
        drop(gate);
        new.place()
    }
}

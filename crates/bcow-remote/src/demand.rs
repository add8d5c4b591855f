//! Reads of programs that wait for a server: fetching ahead gives way to them.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::lock::lock;

/// The reads of all files of a process that wait for a server.
#[derive(Default)]
pub(crate) struct Demand {
    /// The lock is held to count, never during a request, and no other lock is taken under it. A
    /// read of bytes that are here does not take it.
    reads: Mutex<usize>,
    none_left: Condvar,
}

/// A read that waits for a server.
pub(crate) struct Waiting<'d>(&'d Demand);

impl Demand {
    /// Counts a read until the result is dropped.
    pub(crate) fn enter(&self) -> Waiting<'_> {
        *lock(&self.reads) += 1;
        Waiting(self)
    }

    /// Waits until no read waits for a server, and at most for `longest`; `false` if one still
    /// does.
    pub(crate) fn wait_for_none(&self, longest: Duration) -> bool {
        let reads = lock(&self.reads);
        let waited = self
            .none_left
            .wait_timeout_while(reads, longest, |reads| *reads > 0);
        let (reads, _) = waited.unwrap_or_else(PoisonError::into_inner);
        *reads == 0
    }

    /// Whether a read waits for a server.
    pub(crate) fn is_present(&self) -> bool {
        *lock(&self.reads) > 0
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let mut reads = lock(&self.0.reads);
        *reads -= 1;
        if *reads == 0 {
            self.0.none_left.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_read_that_ends_releases_the_others() {
        let demand = Demand::default();
        assert!(demand.wait_for_none(Duration::ZERO));
        let first = demand.enter();
        let second = demand.enter();
        drop(first);
        assert!(!demand.wait_for_none(Duration::ZERO));
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| demand.wait_for_none(Duration::from_secs(60)));
            drop(second);
            assert!(waits.join().expect("no panic"));
        });
    }
}

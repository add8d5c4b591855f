//! Which chunks are being fetched, so that each is fetched once however many threads need it.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::error::{Problem, RemoteError};
use crate::tree::Chunk;

/// The fetches of one file.
#[derive(Default)]
pub(crate) struct Flights {
    /// The runs of chunks that are being fetched, by their first chunk. They do not overlap. The
    /// lock is held for lookups and changes of this map, never during a request, and no other lock
    /// is taken under it.
    running: Mutex<BTreeMap<Chunk, Running>>,
}

struct Running {
    end: Chunk,
    outcome: Arc<Outcome>,
}

/// The outcome of one fetch, for the threads that wait for it.
#[derive(Default)]
struct Outcome {
    /// The lock is held to set or copy the result.
    result: Mutex<Option<Result<(), RemoteError>>>,
    done: Condvar,
}

/// The answer to a claim.
pub(crate) enum Claim<'f> {
    /// The caller fetches the chunks to before this one.
    Mine(Flight<'f>, Chunk),
    /// Another thread fetches the first chunk.
    Other(Wait),
}

/// A fetch of this thread.
pub(crate) struct Flight<'f> {
    flights: &'f Flights,
    first: Chunk,
    outcome: Arc<Outcome>,
    landed: bool,
}

/// A fetch of another thread.
pub(crate) struct Wait(Arc<Outcome>);

impl Flights {
    /// Claims the chunks from `first` to before `end`, or as many of them, from the first on, as no
    /// other thread fetches.
    pub(crate) fn claim(&self, first: Chunk, end: Chunk) -> Claim<'_> {
        let mut running = self.running();
        if let Some((_, before)) = running.range(..=first).next_back()
            && before.end > first
        {
            return Claim::Other(Wait(Arc::clone(&before.outcome)));
        }
        let end = match running.range(first..).next() {
            Some((next, _)) if *next < end => *next,
            _ => end,
        };
        let outcome = Arc::<Outcome>::default();
        running.insert(
            first,
            Running {
                end,
                outcome: Arc::clone(&outcome),
            },
        );
        let flight = Flight {
            flights: self,
            first,
            outcome,
            landed: false,
        };
        Claim::Mine(flight, end)
    }

    fn running(&self) -> MutexGuard<'_, BTreeMap<Chunk, Running>> {
        // The map is changed by single insertions and removals, and valid after a panic.
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Flight<'_> {
    /// Ends the fetch, and gives its result to the threads that wait for it.
    pub(crate) fn land(mut self, result: Result<(), RemoteError>) {
        self.end(result);
    }

    fn end(&mut self, result: Result<(), RemoteError>) {
        if std::mem::replace(&mut self.landed, true) {
            return;
        }
        self.flights.running().remove(&self.first);
        *self.outcome.result() = Some(result);
        self.outcome.done.notify_all();
    }
}

impl Drop for Flight<'_> {
    /// No thread waits for ever for a fetch that ended without a result.
    fn drop(&mut self) {
        let problem = Problem::Connection("the fetch was abandoned".into());
        self.end(Err(problem.at("a fetch")));
    }
}

impl Outcome {
    fn result(&self) -> MutexGuard<'_, Option<Result<(), RemoteError>>> {
        self.result.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Wait {
    /// Waits until the other thread has fetched its chunks. `Ok(false)`: it is still busy.
    pub(crate) fn wait(self, longest: Duration) -> Result<bool, RemoteError> {
        let outcome = &self.0;
        let (result, _) = outcome
            .done
            .wait_timeout_while(outcome.result(), longest, |result| result.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        match &*result {
            None => Ok(false),
            Some(result) => result.clone().map(|()| true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn chunk(index: u64) -> Chunk {
        Chunk { level: 0, index }
    }

    #[test]
    fn a_claim_ends_before_another_threads_chunks() {
        let flights = Flights::default();
        let Claim::Mine(middle, end) = flights.claim(chunk(4), chunk(8)) else {
            panic!("no other fetch is running");
        };
        assert_eq!(end, chunk(8));
        let Claim::Mine(_before, end) = flights.claim(chunk(0), chunk(8)) else {
            panic!("chunk 0 is free");
        };
        assert_eq!(end, chunk(4));
        assert!(matches!(flights.claim(chunk(7), chunk(9)), Claim::Other(_)));
        assert!(matches!(flights.claim(chunk(8), chunk(9)), Claim::Mine(..)));
        middle.land(Ok(()));
        assert!(matches!(flights.claim(chunk(7), chunk(8)), Claim::Mine(..)));
    }

    #[test]
    fn waiting_threads_get_the_error() {
        let flights = Flights::default();
        let Claim::Mine(flight, _) = flights.claim(chunk(0), chunk(1)) else {
            panic!("no other fetch is running");
        };
        let Claim::Other(first) = flights.claim(chunk(0), chunk(1)) else {
            panic!("chunk 0 is claimed");
        };
        let Claim::Other(second) = flights.claim(chunk(0), chunk(1)) else {
            panic!("chunk 0 is claimed");
        };
        assert!(!first.wait(Duration::from_millis(1)).expect("no result yet"));
        flight.land(Err(Problem::WrongBytes.at("here")));
        second.wait(Duration::from_secs(60)).expect_err("failed");
    }
}

//! Which chunks are being fetched, so that each is fetched once however many threads need it.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::error::{Problem, RemoteError};
use crate::lock::lock;
use crate::tree::Chunk;

/// The fetches of one file.
#[derive(Default)]
pub(crate) struct InFlight {
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
    /// The lock is held to change or copy the state.
    state: Mutex<FetchState>,
    changed: Condvar,
}

#[derive(Default)]
struct FetchState {
    /// The chunks before this one are present.
    arrived: Option<Chunk>,
    result: Option<Result<(), RemoteError>>,
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
    in_flight: &'f InFlight,
    first: Chunk,
    outcome: Arc<Outcome>,
    landed: bool,
}

/// A fetch of another thread, which has this chunk among others.
pub(crate) struct Wait {
    outcome: Arc<Outcome>,
    chunk: Chunk,
}

/// How long to wait for a fetch of another thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Until {
    /// To the arrival of the chunk. The rest of a long fetch does not delay a read.
    Arrival,
    /// To the end of the fetch.
    End,
}

impl InFlight {
    /// Claims the chunks from `first` to before `end`, or as many of them, from the first on, as no
    /// other thread fetches.
    pub(crate) fn claim(&self, first: Chunk, end: Chunk) -> Claim<'_> {
        let mut running = lock(&self.running);
        if let Some((_, before)) = running.range(..=first).next_back()
            && before.end > first
        {
            return Claim::Other(Wait {
                outcome: Arc::clone(&before.outcome),
                chunk: first,
            });
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
            in_flight: self,
            first,
            outcome,
            landed: false,
        };
        Claim::Mine(flight, end)
    }
}

impl Flight<'_> {
    /// The chunks before `next` are present.
    pub(crate) fn arrived(&self, next: Chunk) {
        lock(&self.outcome.state).arrived = Some(next);
        self.outcome.changed.notify_all();
    }

    /// Ends the fetch, and gives its result to the threads that wait for it.
    pub(crate) fn land(mut self, result: Result<(), RemoteError>) {
        self.end(result);
    }

    fn end(&mut self, result: Result<(), RemoteError>) {
        if std::mem::replace(&mut self.landed, true) {
            return;
        }
        lock(&self.in_flight.running).remove(&self.first);
        lock(&self.outcome.state).result = Some(result);
        self.outcome.changed.notify_all();
    }
}

impl Drop for Flight<'_> {
    /// No thread waits for ever for a fetch that ended without a result.
    fn drop(&mut self) {
        let problem = Problem::Connection("the fetch was abandoned".into());
        self.end(Err(problem.at("a fetch")));
    }
}

impl Wait {
    /// Waits for the other thread. `Ok(false)`: the time is over.
    pub(crate) fn wait(self, until: Until, longest: Duration) -> Result<bool, RemoteError> {
        let is_busy = |state: &mut FetchState| {
            let is_there = state.arrived.is_some_and(|next| self.chunk < next);
            state.result.is_none() && !(until == Until::Arrival && is_there)
        };
        let outcome = &self.outcome;
        let (state, timeout) = outcome
            .changed
            .wait_timeout_while(lock(&outcome.state), longest, is_busy)
            .unwrap_or_else(PoisonError::into_inner);
        match &state.result {
            None => Ok(!timeout.timed_out()),
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
        let in_flight = InFlight::default();
        let Claim::Mine(middle, end) = in_flight.claim(chunk(4), chunk(8)) else {
            panic!("no other fetch is running");
        };
        assert_eq!(end, chunk(8));
        let Claim::Mine(_before, end) = in_flight.claim(chunk(0), chunk(8)) else {
            panic!("chunk 0 is free");
        };
        assert_eq!(end, chunk(4));
        assert!(matches!(
            in_flight.claim(chunk(7), chunk(9)),
            Claim::Other(_)
        ));
        assert!(matches!(
            in_flight.claim(chunk(8), chunk(9)),
            Claim::Mine(..)
        ));
        middle.land(Ok(()));
        assert!(matches!(
            in_flight.claim(chunk(7), chunk(8)),
            Claim::Mine(..)
        ));
    }

    #[test]
    fn waiting_threads_get_the_error() {
        let in_flight = InFlight::default();
        let Claim::Mine(flight, _) = in_flight.claim(chunk(0), chunk(1)) else {
            panic!("no other fetch is running");
        };
        let Claim::Other(first) = in_flight.claim(chunk(0), chunk(1)) else {
            panic!("chunk 0 is claimed");
        };
        let Claim::Other(second) = in_flight.claim(chunk(0), chunk(1)) else {
            panic!("chunk 0 is claimed");
        };
        assert!(
            !first
                .wait(Until::End, Duration::from_millis(1))
                .expect("no result yet")
        );
        flight.land(Err(Problem::WrongBytes.at("here")));
        let waited = second.wait(Until::End, Duration::from_secs(60));
        waited.expect_err("failed");
    }

    #[test]
    fn a_read_waits_for_its_chunk_and_not_for_the_chunks_behind() {
        let in_flight = InFlight::default();
        let Claim::Mine(flight, _) = in_flight.claim(chunk(0), chunk(9)) else {
            panic!("no other fetch is running");
        };
        let wait = |index| match in_flight.claim(chunk(index), chunk(9)) {
            Claim::Other(wait) => wait,
            Claim::Mine(..) => panic!("chunk {index} is claimed"),
        };
        flight.arrived(chunk(4));
        assert!(
            wait(3)
                .wait(Until::Arrival, Duration::from_secs(60))
                .expect("chunk 3 is there")
        );
        let short = Duration::from_millis(1);
        assert!(!wait(4).wait(Until::Arrival, short).expect("no result yet"));
        assert!(!wait(3).wait(Until::End, short).expect("no result yet"));
        flight.land(Ok(()));
    }
}

//! The right to receive. The worker of a connection that has the turn receives requests; the other
//! workers execute requests.
//!
//! The turn is the ownership of the [`Receiver`]. While requests are fast, one worker keeps the
//! turn and executes them itself; no other worker wakes up.

use std::time::Duration;

use crate::receive::Receiver;
use crate::sync::{Condvar, Mutex, MutexGuard, lock, wait, wait_timeout};

/// A worker that has waited this long for the turn exits.
const IDLE: Duration = Duration::from_secs(5);

pub(crate) struct Turn {
    state: Mutex<TurnState>,
    changed: Condvar,
    most_workers: u32,
}

struct TurnState {
    /// `None` while a worker has the turn.
    receiver: Option<Box<Receiver>>,
    waiting: u32,
    workers: u32,
    closed: bool,
}

/// The action after passing the turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// No action: another worker waits for the turn, or the limit of workers is reached.
    Nothing,
    /// Start another worker. It is already counted.
    AddWorker,
}

impl Turn {
    /// For a connection whose first worker has the receiver.
    pub(crate) fn new(most_workers: u32) -> Self {
        Turn {
            state: Mutex::new(TurnState {
                receiver: None,
                waiting: 0,
                workers: 1,
                closed: false,
            }),
            changed: Condvar::new(),
            most_workers: most_workers.max(1),
        }
    }

    /// Waits for the turn. `None` if the worker must exit; it is no longer counted then.
    pub(crate) fn take(&self) -> Option<Box<Receiver>> {
        let mut state = self.state();
        state.waiting += 1;
        while !state.closed && state.receiver.is_none() {
            let (again, timed_out) = wait_timeout(&self.changed, &self.state, state, IDLE);
            state = again;
            if timed_out && state.receiver.is_none() {
                break;
            }
        }
        state.waiting -= 1;
        let taken = if state.closed { None } else { state.receiver.take() };
        if taken.is_none() {
            self.leave(state);
        }
        taken
    }

    /// Passes the turn to another worker.
    pub(crate) fn pass(&self, receiver: Box<Receiver>) -> Next {
        let mut state = self.state();
        state.receiver = Some(receiver);
        if state.waiting > 0 {
            drop(state);
            self.changed.notify_one();
            Next::Nothing
        } else if state.workers < self.most_workers {
            state.workers += 1;
            Next::AddWorker
        } else {
            Next::Nothing
        }
    }

    /// Corrects the count after a worker could not be started.
    pub(crate) fn not_added(&self) {
        self.leave(self.state());
    }

    /// Ends reception. The worker that had the turn is no longer counted.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        self.leave(state);
    }

    /// Waits until all workers have exited.
    pub(crate) fn wait_for_all(&self) {
        let mut state = self.state();
        while state.workers > 0 {
            state = wait(&self.changed, state);
        }
    }

    fn leave(&self, mut state: MutexGuard<'_, TurnState>) {
        state.workers -= 1;
        drop(state);
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, TurnState> {
        lock(&self.state)
    }
}

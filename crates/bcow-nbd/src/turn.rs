//! Whose turn it is to receive: one worker of a connection reads requests, the others carry out what they read.
//!
//! The receiver itself is passed on, so who has it has the turn. While requests are quick, one worker keeps it and
//! carries them out itself, and no other is ever woken.

use std::sync::PoisonError;
use std::time::Duration;

use crate::receive::Receiver;
use crate::sync::{Condvar, Mutex, MutexGuard, wait_timeout};

/// A worker that waited so long for nothing is not needed.
const IDLE: Duration = Duration::from_secs(5);

pub(crate) struct Turn {
    state: Mutex<State>,
    changed: Condvar,
    most_workers: u32,
}

struct State {
    /// Here while nobody has the turn.
    receiver: Option<Box<Receiver>>,
    waiting: u32,
    workers: u32,
    closed: bool,
}

/// What to do after giving the turn away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// Somebody waits for it, or nobody else may be added.
    Nothing,
    /// Start another worker; it is counted already.
    AddWorker,
}

impl Turn {
    /// For a connection whose first worker has the receiver.
    pub(crate) fn new(most_workers: u32) -> Self {
        Turn {
            state: Mutex::new(State {
                receiver: None,
                waiting: 0,
                workers: 1,
                closed: false,
            }),
            changed: Condvar::new(),
            most_workers: most_workers.max(1),
        }
    }

    /// Waits for the turn; `None` if the worker shall leave, and then it is no longer counted.
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
        let taken = match state.closed {
            true => None,
            false => state.receiver.take(),
        };
        if taken.is_none() {
            self.leave(state);
        }
        taken
    }

    /// Gives the turn away.
    pub(crate) fn give(&self, receiver: Box<Receiver>) -> Next {
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

    /// A worker that was to be added could not be.
    pub(crate) fn not_added(&self) {
        self.leave(self.state());
    }

    /// Nothing more is received; the worker who had the turn is no longer counted.
    pub(crate) fn close(&self) {
        let mut state = self.state();
        state.closed = true;
        self.leave(state);
    }

    /// Waits until all workers have left.
    pub(crate) fn wait_for_all(&self) {
        let mut state = self.state();
        while state.workers > 0 {
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn leave(&self, mut state: MutexGuard<'_, State>) {
        state.workers -= 1;
        drop(state);
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

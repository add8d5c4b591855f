//! Locks, whatever became of the thread that held one before: a panic is a bug of ours and ends the program where it is built
//! for use.

use bcow::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::sync::PoisonError;

use super::SketchError;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// One flush at a time: those who ask for one while another runs share the next.
#[derive(Debug, Default)]
pub(super) struct Turns {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    running: bool,
    /// How often one was asked for.
    #[cfg(test)]
    asked: u32,
    /// Turns that have begun, and that have ended.
    begun: u64,
    ended: u64,
    /// The newest turn that failed, and how.
    failed: Option<(u64, SketchError)>,
}

impl Turns {
    /// Returns when a turn has ended that began after this was called: one's own, or another's who also waited.
    pub(super) fn take(
        &self,
        work: impl FnOnce() -> Result<(), SketchError>,
    ) -> Result<(), SketchError> {
        let mut state = lock(&self.state);
        let mine = state.begun + 1;
        #[cfg(test)]
        {
            state.asked += 1;
        }
        while state.running && state.ended < mine {
            state = self
                .ended
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if state.ended >= mine {
            return match &state.failed {
                Some((turn, error)) if *turn >= mine => Err(error.clone()),
                _ => Ok(()),
            };
        }
        state.running = true;
        state.begun += 1;
        let turn = state.begun;
        drop(state);
        let result = work();
        let mut state = lock(&self.state);
        state.running = false;
        state.ended = turn;
        if let Err(error) = &result {
            state.failed = Some((turn, error.clone()));
        }
        drop(state);
        self.ended.notify_all();
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::thread;

    #[test]
    fn those_who_wait_share_a_turn_and_its_failure() {
        let turns = Turns::default();
        let done = AtomicU64::new(0);
        let all_wait = || {
            // The first turn lasts until the others wait for the next.
            while done.load(Ordering::Relaxed) == 0 && lock(&turns.state).asked < 8 {
                thread::yield_now();
            }
            done.fetch_add(1, Ordering::Relaxed);
            Err(SketchError::TooLarge { end: 1 })
        };
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert!(turns.take(all_wait).is_err()));
            }
        });
        assert_eq!(done.load(Ordering::Relaxed), 2);
        turns.take(|| Ok(())).unwrap();
    }
}

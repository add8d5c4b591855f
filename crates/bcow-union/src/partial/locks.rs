//! Locks without poisoning: the helpers ignore that another thread panicked while it held the lock.
//! A panic is a bug in bcow, and the panic hook of the bcow command aborts the process.

use bcow::sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::sync::PoisonError;

use super::PartialError;

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Serializes flushes. Threads that request a flush while another flush runs share the next one.
#[derive(Debug, Default)]
pub(super) struct GroupFlush {
    state: Mutex<JoinState>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct JoinState {
    running: bool,
    /// The number of requests.
    #[cfg(test)]
    requested: u32,
    /// The numbers of flushes that have begun and ended.
    begun: u64,
    ended: u64,
    /// The number and the error of the newest flush that failed.
    failed: Option<(u64, PartialError)>,
}

impl GroupFlush {
    /// Returns when a flush has ended that began after this call: the caller's own, or that of
    /// another thread that also waited.
    pub(super) fn join(
        &self,
        work: impl FnOnce() -> Result<(), PartialError>,
    ) -> Result<(), PartialError> {
        let mut state = lock(&self.state);
        let mine = state.begun + 1;
        #[cfg(test)]
        {
            state.requested += 1;
        }
        while state.running && state.ended < mine {
            state = self
                .ended
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        if state.ended >= mine {
            return match &state.failed {
                Some((number, error)) if *number >= mine => Err(error.clone()),
                _ => Ok(()),
            };
        }
        state.running = true;
        state.begun += 1;
        let number = state.begun;
        drop(state);
        let result = work();
        let mut state = lock(&self.state);
        state.running = false;
        state.ended = number;
        if let Err(error) = &result {
            state.failed = Some((number, error.clone()));
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
    fn waiting_flushes_share_the_next_one_and_its_failure() {
        let flushes = GroupFlush::default();
        let done = AtomicU64::new(0);
        let all_wait = || {
            // The first number lasts until the other threads wait for the next one.
            while done.load(Ordering::Relaxed) == 0 && lock(&flushes.state).requested < 8 {
                thread::yield_now();
            }
            done.fetch_add(1, Ordering::Relaxed);
            Err(PartialError::TooLarge { end: 1 })
        };
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert!(flushes.join(all_wait).is_err()));
            }
        });
        assert_eq!(done.load(Ordering::Relaxed), 2);
        flushes.join(|| Ok(())).unwrap();
    }
}

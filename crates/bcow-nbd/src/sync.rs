//! Locks, conditions, atomics and threads, which the feature `shuttle` exchanges for those of a model checker; and time, which passes
//! there as the scheduler likes.

use std::sync::PoisonError;
use std::time::Duration;

pub(crate) use bcow::sync::{Condvar, Mutex, MutexGuard, atomic, thread};

/// Waits until the condition is told of, or for so long. Says whether the time was over; a thread may have been told in the same
/// moment. `guard` is that of `mutex`.
#[cfg(not(feature = "shuttle"))]
pub(crate) fn wait_timeout<'a, T>(
    condition: &Condvar,
    _mutex: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
    most: Duration,
) -> (MutexGuard<'a, T>, bool) {
    let waited = condition.wait_timeout(guard, most);
    let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
    (guard, timeout.timed_out())
}

/// The same, where time is the scheduler's: it passes, or it does not.
#[cfg(feature = "shuttle")]
pub(crate) fn wait_timeout<'a, T>(
    condition: &Condvar,
    mutex: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
    _most: Duration,
) -> (MutexGuard<'a, T>, bool) {
    if by_chance() {
        let guard = condition.wait(guard);
        return (guard.unwrap_or_else(PoisonError::into_inner), false);
    }
    // Nothing wakes it until its time is over: somebody else is told.
    drop(guard);
    thread::yield_now();
    (mutex.lock().unwrap_or_else(PoisonError::into_inner), true)
}

/// What a model does not say: whether a time is over, whether a request was quick.
#[cfg(feature = "shuttle")]
pub(crate) fn by_chance() -> bool {
    use shuttle::rand::Rng;
    shuttle::rand::thread_rng().gen_bool(0.5)
}

//! Locks, condition variables, atomics, threads and time. The feature `shuttle` replaces them with
//! those of a model checker, where the scheduler decides how time passes.

#[cfg(not(feature = "shuttle"))]
use std::sync::PoisonError;
use std::time::Duration;

pub(crate) use bcow::sync::{Condvar, Mutex, MutexGuard, atomic, lock, start, thread, wait};

/// Waits on the condition variable with a timeout. `guard` must be of `mutex`. Returns whether the
/// timeout expired; a notification may have come at the same moment.
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

/// The same under the model checker: the scheduler decides whether the timeout expires.
#[cfg(feature = "shuttle")]
pub(crate) fn wait_timeout<'a, T>(
    condition: &Condvar,
    mutex: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
    _most: Duration,
) -> (MutexGuard<'a, T>, bool) {
    if by_chance() {
        return (wait(condition, guard), false);
    }
    // The timeout expires, so another waiting thread gets the notification.
    drop(guard);
    thread::yield_now();
    (lock(mutex), true)
}

/// A decision that a model leaves open: whether a timeout has expired, whether a request was fast.
#[cfg(feature = "shuttle")]
pub(crate) fn by_chance() -> bool {
    use shuttle::rand::Rng;
    shuttle::rand::thread_rng().gen_bool(0.5)
}

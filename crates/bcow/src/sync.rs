//! Locks, condition variables, atomics and threads. The feature `shuttle` replaces them with those
//! of a model checker.
//!
//! Without the feature they are those of the standard library. With the feature, which is for tests
//! only, they are those of [shuttle]: one thread runs at a time, and at each operation a scheduler
//! selects the next thread. A test thus explores thousands of interleavings, and can repeat the one
//! that failed. With the feature, nothing here works outside such a test.
//!
//! Modules with explored interleavings use these names, never those of `std`. Counters for
//! statistics, and types that never block (a `OnceLock` that is only set and read), may be those of
//! `std`.
//!
//! [shuttle]: https://docs.rs/shuttle

use std::sync::PoisonError;

#[cfg(not(feature = "shuttle"))]
pub use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak, atomic,
};
#[cfg(not(feature = "shuttle"))]
pub use std::thread;

#[cfg(feature = "shuttle")]
pub use shuttle::sync::{
    Arc, Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak, atomic,
};
#[cfg(feature = "shuttle")]
pub use shuttle::thread;

// The locks ignore poisoning: a panic is a bug, and the panic hook of the command aborts the
// program. In tests, other threads still check the invariants after a panic.

/// Locks a mutex.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks shared.
pub fn read<T: ?Sized>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Locks exclusively.
pub fn write<T: ?Sized>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification.
pub fn wait<'a, T>(condition: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condition
        .wait(guard)
        .unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification, or until the time has passed.
pub fn wait_timeout<'a, T>(
    condition: &Condvar,
    guard: MutexGuard<'a, T>,
    time: std::time::Duration,
) -> MutexGuard<'a, T> {
    let waited = condition.wait_timeout(guard, time);
    waited.unwrap_or_else(PoisonError::into_inner).0
}

/// Starts a thread, unless the system refuses one more. Returns whether it has started.
#[cfg(not(feature = "shuttle"))]
pub fn start<'scope, F>(scope: &'scope thread::Scope<'scope, '_>, work: F) -> bool
where
    F: FnOnce() + Send + 'scope,
{
    thread::Builder::new().spawn_scoped(scope, work).is_ok()
}

#[cfg(feature = "shuttle")]
pub fn start<'scope, F>(scope: &'scope thread::Scope<'scope, '_>, work: F) -> bool
where
    F: FnOnce() + Send + 'scope,
{
    scope.spawn(work);
    true
}

/// A small number that identifies the thread in the process.
#[cfg(not(feature = "shuttle"))]
pub fn thread_number() -> usize {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|number| *number)
}

/// The number of the thread in the explored execution.
#[cfg(feature = "shuttle")]
pub fn thread_number() -> usize {
    shuttle::current::me().into()
}

/// Whether tuning limits are tiny, so that a few operations reach them: space is reused at once,
/// regions are evicted at once.
pub const SMALL: bool = cfg!(feature = "shuttle");

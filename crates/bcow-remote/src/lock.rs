//! Locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex. What is under these locks is valid after a panic, too.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

//! Locks, conditions, atomics and threads, which the feature `shuttle` exchanges for those of a
//! model checker.
//!
//! A program has the standard library's. With the feature, which is for tests only, they are
//! [shuttle]'s: one thread runs at a time, and at each operation on one of these a scheduler
//! chooses which thread runs next. A test so looks at thousands of interleavings, and repeats the
//! one that failed. Outside such a test nothing here works then.
//!
//! Modules whose interleavings are explored take these names from here, never from `std`. What is
//! only counted (a figure for statistics) and what never blocks (`OnceLock` that is set and looked
//! at) may stay `std`'s.
//!
//! [shuttle]: https://docs.rs/shuttle

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

/// A small number that no other thread of the program has.
#[cfg(not(feature = "shuttle"))]
pub fn thread_number() -> usize {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static NUMBER: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|number| *number)
}

/// The number of this thread in the execution that is explored.
#[cfg(feature = "shuttle")]
pub fn thread_number() -> usize {
    shuttle::current::me().into()
}

/// Whether the numbers that only spare work are so small that a few operations meet: space is used
/// again at once, regions are forgotten at once.
pub const SMALL: bool = cfg!(feature = "shuttle");

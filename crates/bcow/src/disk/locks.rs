//! The gate of a disk, and of one whose file can change (`operation/live.rs`).

use crate::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard, read, thread_number, write};

const SHARDS: usize = 16;

/// A gate that many operations pass at once, and that closes when no operation is inside. Each
/// operation holds the lock of one shard shared; a change of the shared state (the size, the
/// backing) holds the locks of all shards exclusively. A thread always uses the same shard, so that
/// operations of different threads do not touch the same cache line.
pub(crate) struct Gate<T>([Shard<T>; SHARDS]);

#[repr(align(128))]
struct Shard<T>(RwLock<Arc<T>>);

pub(crate) type Pass<'a, T> = RwLockReadGuard<'a, Arc<T>>;

impl<T> Gate<T> {
    pub(crate) fn new(inside: T) -> Self {
        let inside = Arc::new(inside);
        Gate(std::array::from_fn(|_| {
            Shard(RwLock::new(Arc::clone(&inside)))
        }))
    }

    /// Waits while the gate is closed. A thread inside must not enter again.
    pub(crate) fn enter(&self) -> Pass<'_, T> {
        read(&self.0[thread_number() % SHARDS].0)
    }

    /// Waits until no operation is inside.
    pub(crate) fn close(&self) -> Closed<'_, T> {
        // In a fixed order, so that two closers do not deadlock.
        Closed(self.0.iter().map(|shard| write(&shard.0)).collect())
    }
}

/// A closed gate. It opens when this is dropped.
pub(crate) struct Closed<'a, T>(Vec<RwLockWriteGuard<'a, Arc<T>>>);

impl<T> Closed<'_, T> {
    pub(crate) fn get(&self) -> &Arc<T> {
        &self.0[0]
    }

    /// Replaces the state that later operations see. Returns the earlier one.
    pub(crate) fn replace(&mut self, inside: T) -> Arc<T> {
        let inside = Arc::new(inside);
        let earlier = Arc::clone(&self.0[0]);
        for shard in &mut self.0 {
            **shard = Arc::clone(&inside);
        }
        earlier
    }
}

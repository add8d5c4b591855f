//! Space of the host for the flushes of partial files.
//!
//! A write takes the space of its own bytes at once. The flush after it needs more, for the map. So
//! before a partial file gets blocks that no map lists, space for its next flush is reserved in a
//! file without a name, and if the host has none, the write fails. A flush that finds the host full
//! frees that space, and tries once more.

use std::io;
use std::sync::Arc;

use bcow::sync::Mutex;
use bcow::sync::atomic::{AtomicBool, Ordering};
use rustix::io::Errno;

use super::host::MapStore;
use super::locks::lock;
use crate::host::errno_of;

/// The reserved space changes by multiples of this, in bytes.
const STEP: u64 = 256 << 10;
/// Space for what the flushes of all partial files share, such as inodes and directories.
const SHARED: u64 = 64 << 10;
/// If more space than this is not needed any more, it is freed.
const MOST_UNUSED: u64 = 4 << 20;

pub(super) struct Reserve {
    store: Arc<dyn MapStore>,
    /// The lock makes the reserved space and these numbers agree, so it is held while the host
    /// reserves. Taken only for the first block after a flush, and by flushes: after the locks of a
    /// partial file, and before that of the store.
    space: Mutex<Space>,
}

#[derive(Default)]
struct Space {
    /// The sum of what the next flushes need, in bytes.
    needed: u64,
    held: u64,
}

impl Space {
    fn wanted(&self) -> u64 {
        (self.needed + SHARED).next_multiple_of(STEP)
    }
}

impl Reserve {
    pub(super) fn new(store: Arc<dyn MapStore>) -> Self {
        Reserve {
            store,
            space: Mutex::default(),
        }
    }

    /// Reserves `bytes` for the next flush of a partial file and sets `is_reserved`, unless it is
    /// set. Fails if the host is full. A host that cannot reserve space is not an error.
    pub(super) fn add(&self, bytes: u64, is_reserved: &AtomicBool) -> io::Result<()> {
        let mut space = lock(&self.space);
        if is_reserved.load(Ordering::Acquire) {
            return Ok(());
        }
        space.needed += bytes;
        let wanted = space.wanted();
        if wanted > space.held {
            match self.store.reserve(wanted) {
                Err(error) if matches!(errno_of(&error), Errno::NOSPC | Errno::DQUOT) => {
                    space.needed -= bytes;
                    return Err(error);
                }
                _ => space.held = wanted,
            }
        }
        is_reserved.store(true, Ordering::Release);
        Ok(())
    }

    /// Ends a reservation of `bytes`.
    pub(super) fn remove(&self, bytes: u64) {
        let mut space = lock(&self.space);
        space.needed -= bytes;
        let wanted = space.wanted();
        if space.held > wanted + MOST_UNUSED && self.store.reserve(wanted).is_ok() {
            space.held = wanted;
        }
    }

    /// Frees all reserved space, for a flush. The next reservation includes it again.
    pub(super) fn free(&self) {
        let mut space = lock(&self.space);
        if self.store.reserve(0).is_ok() {
            space.held = 0;
        }
    }
}

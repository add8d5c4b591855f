//! Options of the partial files of an instance.

use std::time::Duration;

/// Options of the partial files of an instance.
#[derive(Debug, Clone)]
pub struct PartialOptions {
    /// Threads that complete blocks in the background.
    pub fillers: usize,
    /// The limit of incomplete blocks of all partial files together. Above it, a write to a part of
    /// a block completes the block itself.
    pub most_incomplete: u64,
    /// The time for which the background threads leave an incomplete block alone, because a program
    /// may write the rest of it.
    pub fill_delay: Duration,
    /// The number of blocks that are completed ahead of a program that writes sequentially and
    /// syncs after each write.
    pub ahead_blocks: u64,
    /// Whether flushes use barriers.
    pub durable: bool,
}

impl Default for PartialOptions {
    fn default() -> Self {
        PartialOptions {
            fillers: 1,
            most_incomplete: 16 << 10,
            fill_delay: Duration::from_millis(10),
            ahead_blocks: 256,
            durable: true,
        }
    }
}

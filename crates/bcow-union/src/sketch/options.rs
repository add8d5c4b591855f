//! Options of the sketches of an instance.

use std::time::Duration;

/// Options of the sketches of an instance.
#[derive(Debug, Clone)]
pub struct SketchOptions {
    /// Threads that complete blocks in the background.
    pub fillers: usize,
    /// The limit of blocks in transit of all sketches together. Above it, a write to a part of a
    /// block completes the block itself.
    pub most_in_transit: u64,
    /// The time for which the background threads leave a block in transit alone, because a program
    /// may write the rest of it.
    pub fill_delay: Duration,
    /// The number of blocks that are completed ahead of a program that writes sequentially and
    /// syncs after each write.
    pub ahead_blocks: u64,
    /// Whether flushes use barriers.
    pub durable: bool,
}

impl Default for SketchOptions {
    fn default() -> Self {
        SketchOptions {
            fillers: 1,
            most_in_transit: 16 << 10,
            fill_delay: Duration::from_millis(10),
            ahead_blocks: 256,
            durable: true,
        }
    }
}

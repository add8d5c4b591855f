//! How a writable mount behaves.

use crate::account::Limits;

/// When small files that were copied up whole are made durable. Until then a crash leaves them as they are in the image, so no
/// write waits for it. An explicit fsync is always honoured, but for [`SyncPolicy::Volatile`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SyncPolicy {
    /// Each at once.
    #[default]
    Strict,
    /// After so many, or some seconds, all of them together.
    Batch(u32),
    /// Never, not even when a program asks: for uppers that nobody needs after a crash.
    Volatile,
}

/// How sketches are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SketchChoice {
    /// Sparse where the host's file system has holes, packed elsewhere.
    #[default]
    Auto,
    /// Blocks at their own offset of a host file with holes.
    Sparse,
    /// Blocks in the order they were written, in a BCoW file.
    Packed,
}

/// Bytes that an upper with a size limit may store for each inode that it may have, where no other limit is given: mke2fs's ratio.
pub const BYTES_PER_INODE: u64 = 16 << 10;

/// Inodes that an upper with a small size limit may have all the same, as a program's small changes are many files.
pub const FEWEST_INODES: u64 = 4096;

/// Files up to this size are copied whole by their first write.
pub const SMALL_BYTES: u64 = 64 << 10;

/// The options of a union.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnionOptions {
    /// How sketches are kept.
    pub sketch: SketchChoice,
    /// When copy-ups are made durable.
    pub sync: SyncPolicy,
    /// Most bytes that the upper may store.
    pub size_limit: Option<u64>,
    /// Most inodes that the upper may have. `None`, and a size limit: as many as a file system of that size would have.
    pub inode_limit: Option<u64>,
    /// Files up to so many bytes are copied whole.
    pub small_bytes: u64,
    /// Threads that complete blocks in the background.
    pub fillers: usize,
}

impl Default for UnionOptions {
    fn default() -> Self {
        UnionOptions {
            sketch: SketchChoice::default(),
            sync: SyncPolicy::default(),
            size_limit: None,
            inode_limit: None,
            small_bytes: SMALL_BYTES,
            fillers: 1,
        }
    }
}

impl UnionOptions {
    /// The limits of what the upper may store.
    pub fn limits(&self) -> Limits {
        let usual = |bytes: u64| (bytes / BYTES_PER_INODE).max(FEWEST_INODES);
        Limits {
            bytes: self.size_limit,
            inodes: self.inode_limit.or(self.size_limit.map(usual)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_limit_brings_an_inode_limit() {
        let limits = |size_limit, inode_limit| {
            let options = UnionOptions {
                size_limit,
                inode_limit,
                ..UnionOptions::default()
            };
            options.limits().inodes
        };
        assert_eq!(limits(None, None), None);
        assert_eq!(limits(Some(1 << 20), None), Some(4096));
        assert_eq!(limits(Some(1 << 30), None), Some(65_536));
        assert_eq!(limits(Some(1 << 30), Some(7)), Some(7));
        assert_eq!(limits(None, Some(7)), Some(7));
    }
}

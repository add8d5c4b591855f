//! Options of a writable mount.

use crate::account::Limits;

/// When small files that were copied up whole become durable. Until then a crash restores the
/// image's content, so the write does not wait for the disk. An fsync by a program is honoured at
/// once, except with [`SyncPolicy::Volatile`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SyncPolicy {
    /// Each copy is made durable at once, in the background.
    #[default]
    Strict,
    /// In batches: once this many copies wait, and at least every 5 seconds, all become durable
    /// together.
    Batch(u32),
    /// Never, also if a program calls fsync: for uppers that are not needed after a crash.
    Volatile,
}

/// Bytes of a size limit per inode, for an upper without an inode limit: the default ratio of
/// mke2fs.
pub const BYTES_PER_INODE: u64 = 16 << 10;

/// Smallest inode limit that follows from a size limit: also a small upper may store many small
/// files.
pub const FEWEST_INODES: u64 = 4096;

/// Default of [`UnionOptions::small_bytes`].
pub const SMALL_BYTES: u64 = 64 << 10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnionOptions {
    /// When whole copies become durable.
    pub sync: SyncPolicy,
    /// Upper bound of the bytes that the upper may store; `None` is no limit.
    pub size_limit: Option<u64>,
    /// Upper bound of the inodes that the upper may have. `None` with a size limit: one per
    /// [`BYTES_PER_INODE`], at least [`FEWEST_INODES`]. `None` without a size limit: no limit.
    pub inode_limit: Option<u64>,
    /// Files up to this size in bytes are copied whole at their first write.
    pub small_bytes: u64,
    /// Number of threads that complete blocks of partial files in the background.
    pub fillers: usize,
    /// Whether another process may take over the mount when this process has ended. The union then
    /// keeps a record of its nodes, and names for removed files in use.
    pub can_be_taken_over: bool,
}

impl Default for UnionOptions {
    fn default() -> Self {
        UnionOptions {
            sync: SyncPolicy::default(),
            size_limit: None,
            inode_limit: None,
            small_bytes: SMALL_BYTES,
            fillers: 1,
            can_be_taken_over: false,
        }
    }
}

impl UnionOptions {
    /// The limits of the upper.
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

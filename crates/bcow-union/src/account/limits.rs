//! Limits of an upper.

/// Limits of an upper; `None` is no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Upper bound of the stored bytes.
    pub bytes: Option<u64>,
    /// Upper bound of the inodes.
    pub inodes: Option<u64>,
}

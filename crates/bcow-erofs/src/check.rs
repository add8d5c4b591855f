//! Looks for damage in a whole file system.

use crate::reader::Filesystem;

/// What to look at.
#[derive(Debug, Clone, Copy, Default)]
pub struct CheckOptions {
    /// Also read every byte that a file's extents name.
    pub read_data: bool,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// Readers cope.
    Warning,
    /// Something cannot be read, or reads wrong.
    Error,
}

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Stable code, `erofs-...`.
    pub code: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// Path, or `superblock`.
    pub place: String,
    /// What is wrong, for people.
    pub message: String,
}

/// Walks the whole tree.
pub fn check(_fs: &Filesystem, _options: &CheckOptions) -> Vec<Finding> {
    todo!()
}

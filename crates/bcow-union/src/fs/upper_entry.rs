//! Results of a lookup in the upper.

use std::fs::File;

use bcow_erofs::reader::FileType;
use rustix::fs::Stat;

use crate::upper::Marks;

/// Result of a lookup in the upper.
pub(super) enum UpperEntry {
    /// The upper has no such name; the image's is visible.
    Absent,
    /// A whiteout: the union has no such name.
    Whiteout,
    Object(Box<UpperObject>),
}

pub(super) struct UpperObject {
    /// The object, open with `O_PATH`.
    pub(super) file: File,
    pub(super) stat: Stat,
    pub(super) kind: FileType,
    pub(super) marks: Marks,
}

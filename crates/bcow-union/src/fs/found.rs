//! Results of a lookup in the upper.

use std::fs::File;

use bcow_erofs::reader::FileType;
use rustix::fs::Stat;

use crate::upper::Marks;

/// Result of a lookup in the upper.
pub(super) enum Above {
    /// The upper has no such name; the image's is visible.
    Nothing,
    /// A whiteout: the union has no such name.
    Whiteout,
    /// The upper has this object.
    Found(Box<Found>),
}

/// An object in the upper.
pub(super) struct Found {
    /// The object, open with `O_PATH`.
    pub(super) file: File,
    pub(super) stat: Stat,
    pub(super) kind: FileType,
    pub(super) marks: Marks,
}

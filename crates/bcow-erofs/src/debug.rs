//! A canonical text form of a file system.

use crate::reader::{ErofsError, Filesystem};

/// Writes one line per path, sorted, to `out`.
pub fn dump(_fs: &Filesystem, _out: &mut dyn std::fmt::Write) -> Result<(), ErofsError> {
    todo!()
}

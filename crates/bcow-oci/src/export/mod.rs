//! Out of BCoW again: trees as tar archives, images as OCI layouts.
//!
//! `tree` walks a file system and tells `tar`, entry by entry, what to write. The same tree gives the same bytes.

mod error;
mod tar;
mod tree;

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bcow_erofs::reader::Filesystem;

use crate::options::Progress;

pub use error::ExportError;

/// How to export.
#[derive(Default)]
pub struct ExportOptions {
    /// The export stops soon after this becomes true.
    pub cancel: Option<Arc<AtomicBool>>,
}

/// What was written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TarReport {
    /// Entries of the archive.
    pub entries: u64,
    /// Bytes of file content, holes not counted.
    pub content_bytes: u64,
    /// Sockets, which tar has no form for.
    pub sockets: u64,
}

/// Writes the tree of a file system as a tar archive: sorted by name, parents first, the root as `./`.
///
/// Further names of an inode become hardlinks to the first one, and holes stay holes (GNU's sparse format 1.0). Sockets are
/// left out, with a warning. Needs memory for the paths of inodes with several names, and for nothing else that grows.
pub fn export_tar(
    fs: &Filesystem,
    out: &mut dyn Write,
    options: &ExportOptions,
    progress: &dyn Progress,
) -> Result<TarReport, ExportError> {
    tree::TreeExport::new(fs, tree::Form::Tree, options, progress).write(out)
}

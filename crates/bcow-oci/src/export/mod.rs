//! Out of BCoW again: trees as tar archives, images as ordinary OCI images.
//!
//! `tree` walks a file system and tells `tar`, entry by entry, what to write; `image` makes compressed layers of such archives,
//! and the documents that belong to them. The same tree gives the same bytes.

mod compress;
mod error;
pub(crate) mod image;
mod tree;

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bcow_erofs::reader::Filesystem;

use crate::cancel::Cancel;
use crate::options::Progress;

pub use compress::LayerCompression;
pub use error::ExportError;
pub use image::{ExportedLayer, KnownLayer, Layers, LayoutExport, OciReport, export_layout};

/// How to export.
#[derive(Debug, Clone)]
pub struct ExportOptions {
    /// Threads for compression. The output does not depend on it.
    pub threads: usize,
    /// The export stops soon after this becomes true.
    pub cancel: Option<Arc<AtomicBool>>,
}

impl Default for ExportOptions {
    fn default() -> Self {
        ExportOptions {
            threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
            cancel: None,
        }
    }
}

/// What a file system is exported as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TarForm {
    /// A tree.
    Tree,
    /// The only layer of an image: as a tree, but a name that makes a whiteout of a file is an error.
    Flattened,
    /// A layer of an image: the file system has one in overlayfs's form (see [`bcow_erofs::overlay`]), and whiteouts and
    /// opaque directories become what the image specification has for them.
    Layer,
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

/// Writes a file system as a tar archive: sorted by name, parents first, the root as `./`.
///
/// Further names of an inode become hardlinks to the first one, and holes stay holes (GNU's sparse format 1.0). Sockets are
/// left out, with a warning. Needs memory for the paths of inodes with several names, and for nothing else that grows.
pub fn export_tar(
    fs: &Filesystem,
    form: TarForm,
    out: &mut dyn Write,
    options: &ExportOptions,
    progress: &dyn Progress,
) -> Result<TarReport, ExportError> {
    let cancel = Cancel::new(options.cancel.as_deref());
    let form = match form {
        TarForm::Tree => tree::Form::Tree,
        TarForm::Flattened => tree::Form::Flattened,
        TarForm::Layer => tree::Form::Layer,
    };
    tree::TreeExport::new(fs, form, cancel, progress).write(out)
}

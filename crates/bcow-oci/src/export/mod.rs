//! Export from BCoW: trees as tar archives, and images as ordinary OCI images.
//!
//! `tree` walks a file system and passes each entry to `tar`; `image` compresses such archives into
//! layers and writes the documents of the image. The same tree gives the same bytes.

mod compress;
pub(crate) mod image;
mod tree;

use std::io::Write;

use bcow_erofs::reader::Filesystem;
use serde::Serialize;

use crate::cancel::Cancel;
use crate::error::ConvertError;
use crate::options::{Progress, RunOptions};

pub use compress::LayerCompression;
pub use image::{ExportedLayer, KnownLayer, Layers, LayoutExport, OciReport, export_layout};

/// The form of the archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TarForm {
    /// A tree of files.
    Tree,
    /// The only layer of an image: a tree, but a file name that image tools take for a whiteout is
    /// an error.
    Flattened,
    /// A layer of an image. The file system has the layer in overlayfs form (see
    /// [`bcow_erofs::overlay`]); its whiteouts and opaque directories take the form of the image
    /// specification.
    Layer,
}

/// The result of an export.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct TarReport {
    /// Entries of the archive.
    pub entries: u64,
    /// Bytes of file content, without holes.
    pub content_bytes: u64,
    /// Number of sockets, which are left out because tar cannot represent them.
    pub sockets: u64,
}

/// Writes a file system as a tar archive: sorted by name, parents first, the root as `./`.
///
/// Further names of an inode become hardlinks to its first name, and holes stay holes (GNU sparse
/// format 1.0). Sockets are left out, with a warning. The export keeps the paths of inodes with
/// several names in memory; its other memory use does not depend on the size of the tree.
pub fn export_tar(
    fs: &Filesystem,
    form: TarForm,
    out: &mut dyn Write,
    options: &RunOptions,
    progress: &dyn Progress,
) -> Result<TarReport, ConvertError> {
    let cancel = Cancel::new(options.cancel.as_deref());
    tree::TreeExport::new(fs, form, out, cancel, progress).write()
}

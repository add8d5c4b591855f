//! An image in BCoW form on this machine.

use std::path::PathBuf;

use crate::digest::Digest;

/// An image in BCoW form on this machine, or one of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LocalImage {
    /// A BCoW file.
    File(PathBuf),
    /// The stack of an image in an OCI image layout.
    Layout {
        /// The layout.
        directory: PathBuf,
        /// Name or digest of the image.
        reference: Option<String>,
    },
    /// One BCoW file of an OCI image layout: a layer, or a stack.
    Blob {
        /// The layout.
        directory: PathBuf,
        /// The file's digest.
        digest: Digest,
    },
}

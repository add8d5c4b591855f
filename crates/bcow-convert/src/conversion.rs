//! What the user asks of a conversion.

use std::path::Path;

use bcow_images::Name;
use bcow_images::image::StoreArgs;
use bcow_oci::{Attestations, Limits};

use crate::options::Encoding;

/// A conversion, as the user asks for it.
pub struct Conversion<'a> {
    /// What to convert.
    pub source: &'a Name,
    /// What to write.
    pub destination: &'a Name,
    /// The platform to select from a source with several; `all`, or several ones, make an index.
    pub platform: Option<&'a str>,
    /// What becomes of the attestations of an index, if the user chose.
    pub attestations: Option<Attestations>,
    /// How blocks are written.
    pub encoding: Encoding,
    /// Store each block uncompressed at its own offset.
    pub plain: bool,
    /// Make a writable disk.
    pub writable: bool,
    /// A directory with layers that were converted before.
    pub cache: Option<&'a Path>,
    /// Refer to content of lower layers instead of storing it again.
    pub dedup_lower: bool,
    /// The trace of a start.
    pub prefetch: Option<&'a Path>,
    /// Attach the image to the source.
    pub referrer: bool,
    /// Replace any file.
    pub force: bool,
    /// Accept an archive without an end.
    pub allow_truncated: bool,
    /// Take the files of an archive of an image as a root file system.
    pub as_files: bool,
    /// Write one file per layer to S3.
    pub layers: bool,
    /// Write the archive of one layer as a layer.
    pub as_layer: bool,
    /// Limits against hostile input.
    pub limits: Limits,
    /// Where files below the source are looked up.
    pub stores: &'a StoreArgs,
}

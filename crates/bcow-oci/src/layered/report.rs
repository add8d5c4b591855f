//! What a conversion into a layout is told, and what it tells.

use std::path::PathBuf;

use serde::Serialize;

use crate::digest::{DiffId, Digest};
use crate::layout::write::LayoutForm;
use crate::options::Platform;

/// Where a layered image goes, and what of it may be there already.
#[derive(Debug, Clone, Default)]
pub struct LayoutOptions {
    /// The layout; made where there is nothing or an empty directory. The file of an archive.
    pub directory: PathBuf,
    /// What it is written as.
    pub form: LayoutForm,
    /// Name of the image in the layout.
    pub reference: Option<String>,
    /// Where converted layers are kept for other conversions.
    pub cache: Option<PathBuf>,
    /// Content that a lower layer of the image has is named there, not stored again: less space, but a layer that is of
    /// use only above those. Not for plain images.
    pub dedup_lower: bool,
}

/// What a conversion into a layout did.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct LayoutReport {
    /// Digest of the new image's manifest.
    pub manifest: Digest,
    /// Digest of the source's manifest, if it has one.
    pub source_manifest: Option<Digest>,
    /// Name in the layout.
    pub reference: Option<String>,
    /// The image's platform, if it says so.
    pub platform: Option<Platform>,
    /// The layers, lowest first.
    pub layers: Vec<StoredLayerReport>,
    /// The stack.
    pub stack: StackReport,
    /// Milliseconds that reading the layers' trees, merging them and writing the stack took.
    pub merge_milliseconds: u64,
    /// Whether everything was read back, or checked against its digest.
    pub verified: bool,
}

/// One layer of it.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct StoredLayerReport {
    /// Digest of the BCoW file.
    pub digest: Digest,
    /// Its size in bytes.
    pub file_bytes: u64,
    /// Digest of the layer's archive, uncompressed.
    pub diff_id: DiffId,
    /// Digest of the source's blob, if it has one.
    pub source: Option<Digest>,
    /// Size of the source's blob in bytes, if it is known.
    pub source_bytes: Option<u64>,
    /// Size of the archive, uncompressed.
    pub tar_bytes: u64,
    /// Inodes.
    pub entries: u64,
    /// Bytes of file content.
    pub content_bytes: u64,
    /// Bytes of it that the layer has more than once and stores once.
    pub deduplicated_bytes: u64,
    /// Bytes of it that a lower layer has.
    pub lower_bytes: u64,
    /// Where it came from.
    pub made: Made,
}

/// Where a converted layer came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Made {
    /// Converted from the source now.
    Converted,
    /// From the cache.
    Cache,
    /// It was in the layout.
    Layout,
}

/// The stack.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct StackReport {
    /// Digest of the BCoW file.
    pub digest: Digest,
    /// Its size in bytes.
    pub file_bytes: u64,
    /// Root of its Merkle tree, in hexadecimal.
    pub merkle_root: String,
    /// Inodes of the merged tree.
    pub entries: u64,
    /// Size of the address space.
    pub size: u64,
}

//! Options and report of a conversion into a layout.

use std::path::PathBuf;

use serde::Serialize;

use crate::digest::{DiffId, Digest};
use crate::layout::write::LayoutPlace;
use crate::left_out::LeftOut;
use crate::platform::Platform;

/// The destination of a layered image, and its options.
#[derive(Debug, Clone, Default)]
pub struct LayoutOptions {
    /// Where the image is written.
    pub place: LayoutPlace,
    /// Attach the new image to the source's manifest, in a registry. The image gets no name.
    pub is_referrer: bool,
    /// The directory of a cache of converted layers.
    pub cache: Option<PathBuf>,
    /// Refer to content that a lower layer of the image has, and do not store it again. This saves
    /// space, but the layer is then usable only above those lower layers. Not valid for plain
    /// images.
    pub dedup_lower: bool,
}

/// The result of a conversion into a layout.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct LayoutReport {
    /// The source argument; `None` for an image in BCoW form.
    pub source: Option<String>,
    /// Digest of the new image's manifest.
    pub manifest: Digest,
    /// Digest of the source's manifest, if it has one.
    pub source_manifest: Option<Digest>,
    /// Name in the layout.
    pub reference: Option<String>,
    /// The image's platform, if recorded.
    pub platform: Option<Platform>,
    /// The layers, lowest first.
    pub layers: Vec<StoredLayerReport>,
    /// The stack.
    pub stack: StackReport,
    /// Milliseconds to read the layers' trees, merge them and write the stack.
    pub merge_milliseconds: u64,
    /// Whether all data was read back, or checked against its digest.
    pub verified: bool,
    /// The parts of the source that the new image does not have.
    pub left_out: LeftOut,
}

/// One layer of the new image.
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
    /// Bytes of file content that repeat content of the layer and are stored once.
    pub deduplicated_bytes: u64,
    /// Bytes of file content that a lower layer has.
    pub lower_bytes: u64,
    /// The origin of the file.
    pub made: LayerOrigin,
}

/// The origin of a converted layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum LayerOrigin {
    /// Converted from the source.
    Converted,
    /// Copied from the cache.
    Cache,
    /// Found in the layout.
    Layout,
}

/// The stack of the new image.
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
    /// Size of the address space in bytes.
    pub size: u64,
}

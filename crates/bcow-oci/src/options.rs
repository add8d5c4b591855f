//! The options, progress callbacks and report of a conversion.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bcow::Written;
use serde::Serialize;

use crate::digest::{DiffId, Digest, hex};
use crate::left_out::LeftOut;
use crate::platform::Platform;
use crate::prefetch::Prefetch;

pub use bcow::Compression;

/// Options of a conversion. [`ConvertOptions::default`] is the command without options.
#[derive(Debug, Clone)]
pub struct ConvertOptions {
    /// Selects the image of a multi-platform index; `None` selects the host's platform. If a
    /// platform is given, a single image for another platform is refused too.
    pub platform: Option<Platform>,
    /// Compression of blocks. Ignored with `plain`.
    pub compression: Compression,
    /// Store the image uncompressed and identity-mapped, so that the kernel can mount the file
    /// itself.
    pub plain: bool,
    /// Block size in bytes, a power of two from 4096 to 4 MiB; `None` selects the size by content.
    pub block_bytes: Option<u32>,
    /// Number of threads for compression. The output does not depend on it.
    pub threads: usize,
    /// Read the image back before it gets its name.
    pub verify: bool,
    /// Accept a tar archive that has neither a known digest nor an end-of-archive marker.
    pub allow_truncated: bool,
    /// Convert an archive or directory that contains container images as a plain tree of files.
    pub as_files: bool,
    /// Limits against hostile input.
    pub limits: Limits,
    /// What a start reads. An image in one file has this content together, at its start; an image
    /// in layers only has the list of it.
    pub prefetch: Option<Prefetch>,
    /// Time of creation to record, in seconds since 1970; `None` records no time.
    pub source_date_epoch: Option<i64>,
    /// Version of the tool to record.
    pub tool_version: String,
    /// A directory for the bytes of an archive that is compressed as a whole.
    pub scratch: PathBuf,
    /// A flag that cancels the conversion soon after it becomes true. The conversion then cleans
    /// up.
    pub cancel: Option<Arc<AtomicBool>>,
}

impl Default for ConvertOptions {
    fn default() -> Self {
        ConvertOptions {
            platform: None,
            compression: Compression::Zstd { level: 3 },
            plain: false,
            block_bytes: None,
            threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
            verify: true,
            allow_truncated: false,
            as_files: false,
            limits: Limits::default(),
            prefetch: None,
            source_date_epoch: None,
            tool_version: env!("CARGO_PKG_VERSION").to_owned(),
            scratch: std::env::temp_dir(),
            cancel: None,
        }
    }
}

/// Limits against hostile input. An input that exceeds one fails with
/// [`crate::ConvertError::Limit`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Files, directories and other nodes over all layers.
    pub max_entries: u64,
    /// Decompressed over compressed bytes of a layer, checked beyond the first 4 GiB decompressed.
    pub max_ratio: u64,
    /// Uncompressed bytes over all layers, holes of sparse files included.
    pub max_bytes: u64,
}

/// Options of a copy or an export.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// Number of threads that compress, or that compare and read chunks. The output does not depend
    /// on it.
    pub threads: usize,
    /// A flag that cancels the operation soon after it becomes true.
    pub cancel: Option<Arc<AtomicBool>>,
}

impl Default for RunOptions {
    fn default() -> Self {
        RunOptions {
            threads: ConvertOptions::default().threads,
            cancel: None,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_entries: 4_000_000,
            max_ratio: 2000,
            max_bytes: 1 << 40,
        }
    }
}

/// Callbacks of a conversion. Each method does nothing unless implemented; `()` is silent.
pub trait Progress: Send + Sync {
    /// The number of bytes to read in this phase, if known.
    fn total(&self, _bytes: Option<u64>) {}
    /// This many more bytes have been read.
    fn advance(&self, _bytes: u64) {}
    /// A new phase begins: "layer 2 of 5", "metadata", "verify".
    fn phase(&self, _name: &str) {}
    /// A warning for the user; the conversion continues.
    fn warning(&self, _message: &str) {}
}

impl Progress for () {}

/// The result of a conversion.
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The source argument; `None` for an image in BCoW form.
    pub source: Option<String>,
    /// Digest of the image's manifest, if the source has one.
    pub manifest: Option<Digest>,
    /// The image's platform, if recorded.
    pub platform: Option<Platform>,
    /// The layers, lowest first.
    pub layers: Vec<LayerReport>,
    /// Inodes in the image.
    pub entries: u64,
    /// Bytes of file content of the image, before deduplication, without holes.
    pub content_bytes: u64,
    /// Bytes of `content_bytes` that were found in the image already and are stored once.
    pub deduplicated_bytes: u64,
    /// Bytes of file content that upper layers hide; they are not stored.
    pub hidden_bytes: u64,
    /// Bytes of file content that are in the images below; 0 unless the image is a commit.
    #[serde(skip)]
    pub base_bytes: u64,
    /// Size of the image's address space in bytes.
    pub size: u64,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Root of the Merkle tree over the file, in hexadecimal.
    pub merkle_root: String,
    /// Whether the image was read back.
    pub verified: bool,
    /// The parts of the source that the new image does not have.
    pub left_out: LeftOut,
}

impl Report {
    /// What is known of a file that was written.
    pub(crate) fn of(written: &Written) -> Self {
        Report {
            size: written.size(),
            file_bytes: written.file_bytes(),
            merkle_root: hex(&written.merkle_root()),
            ..Report::default()
        }
    }
}

/// One layer of a converted image.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct LayerReport {
    /// Digest of the stored (compressed) bytes, if the source has one.
    pub digest: Option<Digest>,
    /// Digest of the uncompressed bytes, if the source has one.
    pub diff_id: Option<DiffId>,
    /// Media type, if the source has one.
    pub media_type: Option<String>,
    /// Length of the stored bytes.
    pub stored_bytes: u64,
    /// Length of the uncompressed bytes.
    pub bytes: u64,
    /// Number of entries.
    pub entries: u64,
}

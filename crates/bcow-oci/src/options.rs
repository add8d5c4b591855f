//! What a caller says about a conversion, and what it hears back.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde::Serialize;

use crate::digest::{DiffId, Digest};
use crate::error::ConvertError;

pub use bcow::Compression;

/// How to convert. [`ConvertOptions::default`] is what the command does without options.
#[derive(Debug, Clone)]
pub struct ConvertOptions {
    /// Which image of a multi-platform index; `None` is the host's. If given, a single image for
    /// another platform is refused too.
    pub platform: Option<Platform>,
    /// How blocks are stored. Ignored with `plain`.
    pub compression: Compression,
    /// Uncompressed and identity-mapped, so that the kernel can mount the file itself.
    pub plain: bool,
    /// Block size in bytes, a power of two from 4096 to 4 MiB; `None` picks by content.
    pub block_bytes: Option<u32>,
    /// Threads for compression. The output does not depend on it.
    pub threads: usize,
    /// Read the image back before it gets its name.
    pub verify: bool,
    /// Take a tar archive that no digest vouches for without its end-of-archive marker.
    pub allow_truncated: bool,
    /// Take the files of an archive or directory that holds images for those of a root file system.
    pub as_files: bool,
    /// Guards against hostile input.
    pub limits: Limits,
    /// Recorded as the time of creation, seconds since 1970; if `None`, none is recorded.
    pub source_date_epoch: Option<i64>,
    /// Recorded as the version of the tool that made the image.
    pub tool_version: String,
    /// The conversion stops soon after this becomes true, and cleans up.
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
            source_date_epoch: None,
            tool_version: env!("CARGO_PKG_VERSION").to_owned(),
            cancel: None,
        }
    }
}

/// Guards against hostile input. An input that exceeds one ends in [`ConvertError::Limit`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Files, directories and other nodes over all layers.
    pub max_entries: u64,
    /// Decompressed over compressed bytes of a layer, applied past the first 4 GiB decompressed.
    pub max_ratio: u64,
    /// Uncompressed bytes over all layers, the holes of sparse files counted.
    pub max_bytes: u64,
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

/// An operating system and processor, in OCI's words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Platform {
    /// `linux`, ...
    pub os: String,
    /// `amd64`, `arm64`, ...
    pub architecture: String,
    /// `v8`, ...
    #[serde(skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
}

impl Platform {
    /// The platform this program runs on.
    pub fn host() -> Platform {
        let (architecture, variant) = match std::env::consts::ARCH {
            "x86_64" => ("amd64", None),
            "aarch64" => ("arm64", None),
            "x86" => ("386", None),
            "arm" => ("arm", Some("v7")),
            "powerpc64" if cfg!(target_endian = "little") => ("ppc64le", None),
            "loongarch64" => ("loong64", None),
            other => (other, None),
        };
        Platform {
            os: std::env::consts::OS.to_owned(),
            architecture: architecture.to_owned(),
            variant: variant.map(str::to_owned),
        }
    }
}

impl FromStr for Platform {
    type Err = ConvertError;

    fn from_str(text: &str) -> Result<Self, ConvertError> {
        let bad = || ConvertError::PlatformSyntax {
            text: text.to_owned(),
        };
        let parts: Vec<&str> = text.split('/').collect();
        if parts.iter().any(|p| p.is_empty()) {
            return Err(bad());
        }
        let (os, architecture, variant) = match parts[..] {
            [os, architecture] => (os, architecture, None),
            [os, architecture, variant] => (os, architecture, Some(variant.to_owned())),
            _ => return Err(bad()),
        };
        Ok(Platform {
            os: os.to_owned(),
            architecture: architecture.to_owned(),
            variant,
        })
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        match &self.variant {
            Some(variant) => write!(f, "/{variant}"),
            None => Ok(()),
        }
    }
}

/// Told how a conversion goes on. Every method does nothing unless implemented; `()` is silent.
pub trait Progress: Send + Sync {
    /// How many bytes there are to read in this phase, if that is known.
    fn total(&self, bytes: Option<u64>) {
        let _ = bytes;
    }
    /// That many more bytes have been read.
    fn advance(&self, bytes: u64) {
        let _ = bytes;
    }
    /// A new phase begins: "layer 2 of 5", "metadata", "verify".
    fn phase(&self, name: &str) {
        let _ = name;
    }
    /// Something the user should know that is no failure.
    fn warning(&self, message: &str) {
        let _ = message;
    }
}

impl Progress for () {}

/// What a conversion did.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// Digest of the image's manifest, if the source has one.
    pub manifest: Option<Digest>,
    /// The image's platform, if it says so.
    pub platform: Option<Platform>,
    /// The layers, lowest first.
    pub layers: Vec<LayerReport>,
    /// Inodes in the image.
    pub entries: u64,
    /// Bytes of file content that were kept, before deduplication, holes not counted.
    pub content_bytes: u64,
    /// Bytes of it that were there already and are stored once.
    pub deduplicated_bytes: u64,
    /// Bytes of file content that upper layers hide; they are not stored.
    pub hidden_bytes: u64,
    /// Size of the image's address space.
    pub size: u64,
    /// Size of the file.
    pub file_bytes: u64,
    /// Root of the Merkle tree over the file, in hexadecimal.
    pub merkle_root: String,
    /// Whether the image was read back.
    pub verified: bool,
}

/// One layer of a converted image.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct LayerReport {
    /// Digest of the bytes as they were stored, if the source has one.
    pub digest: Option<Digest>,
    /// Digest of the uncompressed bytes, if the source has one.
    pub diff_id: Option<DiffId>,
    /// Media type, if the source says one.
    pub media_type: Option<String>,
    /// Bytes as stored.
    pub stored_bytes: u64,
    /// Bytes uncompressed.
    pub bytes: u64,
    /// Entries.
    pub entries: u64,
}

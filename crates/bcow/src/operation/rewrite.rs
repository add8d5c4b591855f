//! Rewrite: a disk in a new file, with other blocks, compression or state.

use std::sync::Arc;

use bcow_format::{BlockShift, Header};
use serde_json::Value;

use super::{Monitor, OperationError, Phase, step};
use crate::{
    BlockDevice, Compression, DiskForm, Error, Image, ImageWriter, Keep, Layout, Storage,
    WriterOptions, Written, append_disk, verify_written,
};

/// Size in bytes of the record log of a disk that stays writable, as [`Disk::create`] makes it.
///
/// [`Disk::create`]: crate::Disk::create
pub const WRITABLE_LOG_BYTES: u64 = 4 << 20;

/// Block sizes in bytes that the auto layout chooses for large and for small writes.
const LARGE_BLOCK_BYTES: u32 = 64 << 10;
const SMALL_BLOCK_BYTES: u32 = 4 << 10;

/// Form of the new file.
#[derive(Debug, Clone)]
pub struct RewriteOptions {
    /// Which content of the source the new file stores.
    pub keep: Keep,
    /// Size, backing, region size and log of the new file.
    pub form: DiskForm,
    /// Compression of blocks.
    pub compression: Compression,
    /// Largest block size in bytes; `None` selects the default.
    pub block_bytes: Option<u32>,
    /// Number of threads that compress; the bytes of the file do not depend on it.
    pub threads: usize,
    /// Whether the new file is read back.
    pub verify: bool,
    /// The metadata section of the new file.
    pub metadata: Value,
}

impl RewriteOptions {
    /// A sealed file with all content of a device of `size` bytes.
    pub fn new(size: u64) -> Self {
        RewriteOptions {
            keep: Keep::All,
            form: DiskForm {
                size,
                ..DiskForm::default()
            },
            compression: Compression::Zstd { level: 3 },
            block_bytes: None,
            threads: 1,
            verify: true,
            metadata: Value::Object(serde_json::Map::new()),
        }
    }

    /// The disk `image` as a sealed file: over the same backing with [`Keep::Own`], without a
    /// backing with [`Keep::All`].
    pub fn sealed(image: &Image, keep: Keep) -> Self {
        let mut options = RewriteOptions::new(image.size());
        options.keep = keep;
        options.form.backing = match keep {
            Keep::All => None,
            Keep::Own => image.disk_backing().cloned(),
        };
        options
    }

    /// The disk `image` as a writable file without unused space, with the same layout, metadata and
    /// backing. Later writes are not compressed.
    pub fn compacted(image: &Image, compression: Compression) -> Result<Self, Error> {
        let metadata = image.metadata()?;
        let mut options = RewriteOptions::sealed(image, Keep::Own);
        options.form.region_shift = Some(image.header().region_shift);
        options.form.log_bytes = WRITABLE_LOG_BYTES;
        options.compression = compression;
        options.block_bytes = largest_block(&metadata, image.header(), compression);
        options.metadata = metadata;
        Ok(options)
    }
}

/// Writes the content of `source` into `storage`, which must be empty. Nothing is synced.
///
/// An error of the host while it writes is [`OperationError::Write`], any other error of the copy
/// is [`OperationError::Read`].
pub fn rewrite(
    source: &dyn BlockDevice,
    storage: Arc<dyn Storage>,
    options: RewriteOptions,
    monitor: &dyn Monitor,
) -> Result<Written, OperationError> {
    monitor.phase(Phase::Write, Some(source.size()));
    let writer = WriterOptions {
        compression: options.compression,
        block_bytes: options.block_bytes,
        threads: options.threads,
        disk: Some(options.form),
        ..WriterOptions::default()
    };
    let mut writer = ImageWriter::on_storage(storage, writer).map_err(OperationError::Write)?;
    append_disk(&mut writer, source, options.keep, &mut |bytes| {
        step(monitor, bytes)
    })?;
    monitor.phase(Phase::Hash, None);
    let written = writer.finish(&[], &options.metadata);
    let written = written.map_err(OperationError::Write)?;
    if options.verify {
        monitor.phase(Phase::Verify, None);
        verify_written(&written, options.threads).map_err(OperationError::Write)?;
    }
    Ok(written)
}

/// For [`append_disk`], which reads and writes.
impl From<Error> for OperationError {
    fn from(error: Error) -> Self {
        match error {
            Error::Io {
                action: "write", ..
            } => OperationError::Write(error),
            error => OperationError::Read(error),
        }
    }
}

/// The largest block size in bytes that the layout of the disk makes; larger blocks where they are
/// compressed.
fn largest_block(metadata: &Value, header: &Header, compression: Compression) -> Option<u32> {
    let (layout, chosen) = Layout::recorded(metadata);
    let region = 1u64 << header.region_shift;
    let bytes = match (layout, compression) {
        (Some(Layout::Performance), _) if header.region_shift <= 24 => region as u32,
        (_, Compression::Zstd { .. }) => return None,
        (Some(Layout::Space), _) => SMALL_BLOCK_BYTES,
        _ => chosen.map_or(LARGE_BLOCK_BYTES, BlockShift::bytes),
    };
    Some(u64::from(bytes).min(region) as u32)
}

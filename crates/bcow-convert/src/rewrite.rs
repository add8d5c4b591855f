//! Long operations on disks: their errors, and disks in new files.

use std::path::Path;
use std::sync::Arc;

use bcow::operation::{OperationError, RewriteOptions, rewrite};
use bcow::{BlockDevice, Compression, Written};
use bcow_images::error::{CommandError, Context};
use bcow_images::interrupt::interrupted;
use bcow_images::new_file::NewFile;
use serde_json::{Map, Value, json};

use crate::options::source_date_epoch;
use crate::work::Work;

/// The error of an operation that reads `source` and writes `destination`.
pub fn operation_failure(
    error: &OperationError,
    source: impl FnOnce() -> String,
    destination: impl FnOnce() -> String,
) -> CommandError {
    match error {
        OperationError::Cancelled => interrupted(),
        OperationError::Write(_) => CommandError::new(destination()).caused_by(error),
        _ => CommandError::new(source()).caused_by(error),
    }
}

/// Writes `source`, which the user calls `name`, into `new`, which becomes `destination`. Nothing
/// is synced.
pub(crate) fn write_new(
    source: &dyn BlockDevice,
    name: &Path,
    new: &NewFile,
    destination: &Path,
    options: RewriteOptions,
    work: &Work<'_>,
) -> Result<Written, CommandError> {
    let cannot_write = || format!("cannot write {}", destination.display());
    let file = new.file().try_clone().context(cannot_write)?;
    rewrite(source, Arc::new(file), options, work).map_err(|error| {
        let cannot_read = || format!("cannot read {}", name.display());
        operation_failure(&error, cannot_read, cannot_write)
    })
}

/// The metadata of a sealed disk.
pub(crate) fn metadata(
    compression: Compression,
    block_bytes: Option<u32>,
    source: Option<Value>,
) -> Result<Value, CommandError> {
    let mut all = Map::new();
    let tool = format!("bcow {}", env!("CARGO_PKG_VERSION"));
    all.insert("tool".into(), tool.into());
    if let Some(created) = source_date_epoch()?.and_then(bcow::rfc3339) {
        all.insert("created".into(), created.into());
    }
    let compress = match compression {
        Compression::None => "none".to_owned(),
        Compression::Zstd { level } => format!("zstd:{level}"),
    };
    let block_size = block_bytes.map_or(json!("auto"), |bytes| json!(bytes));
    all.insert(
        "options".into(),
        json!({ "compress": compress, "block_size": block_size }),
    );
    if let Some(source) = source {
        all.insert("source".into(), source);
    }
    Ok(Value::Object(all))
}

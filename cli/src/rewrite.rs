//! Long operations on disks: their progress, their cancellation, their errors; and disks in new
//! files.

use std::path::Path;
use std::sync::Arc;

use bcow::operation::{Monitor, OperationError, Phase, RewriteOptions, rewrite};
use bcow::{BlockDevice, Compression, Written};
use bcow_oci::ConvertOptions;
use serde_json::{Map, Value, json};

use crate::conversion::source_date_epoch;
use crate::error::{CommandError, Context};
use crate::interrupt::{Interrupt, interrupted};
use crate::new_file::NewFile;
use crate::ui::{Progress, Ui};

/// Shows the progress of an operation, and cancels it after a signal.
pub struct TerminalMonitor<'u> {
    progress: Progress<'u>,
    interrupt: Interrupt,
}

impl<'u> TerminalMonitor<'u> {
    /// Catches signals from now on.
    pub fn new(ui: &'u Ui) -> Self {
        TerminalMonitor {
            interrupt: Interrupt::catch(),
            progress: ui.progress(),
        }
    }

    /// The progress, for what follows the operation.
    pub fn progress(&self) -> &Progress<'u> {
        &self.progress
    }

    /// The signals, for what follows the operation.
    pub fn interrupt(&self) -> &Interrupt {
        &self.interrupt
    }
}

impl Monitor for TerminalMonitor<'_> {
    fn phase(&self, phase: Phase, total: Option<u64>) {
        self.progress.phase(match phase {
            Phase::Commit => "committing",
            Phase::Compare => "comparing",
            Phase::Write => "writing",
            Phase::Hash => "hashing",
            Phase::Verify => "verifying",
            _ => "syncing",
        });
        if total.is_some() {
            self.progress.total(total);
        }
    }

    fn advance(&self, bytes: u64) {
        self.progress.advance(bytes);
    }

    fn is_cancelled(&self) -> bool {
        self.interrupt.check().is_err()
    }
}

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
pub fn write_new(
    source: &dyn BlockDevice,
    name: &Path,
    new: &NewFile,
    destination: &Path,
    options: RewriteOptions,
    monitor: &TerminalMonitor<'_>,
) -> Result<Written, CommandError> {
    let cannot_write = || format!("cannot write {}", destination.display());
    let file = new.file().try_clone().context(cannot_write)?;
    rewrite(source, Arc::new(file), options, monitor).map_err(|error| {
        let cannot_read = || format!("cannot read {}", name.display());
        operation_failure(&error, cannot_read, cannot_write)
    })
}

/// The number of threads that `--jobs` selects.
pub fn threads(jobs: Option<u16>) -> usize {
    jobs.map_or(ConvertOptions::default().threads, usize::from)
}

/// The metadata of a sealed disk.
pub fn metadata(
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

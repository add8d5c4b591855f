//! The check of a finished image's file system.

use std::sync::Arc;

use bcow::BlockDevice;
use bcow_erofs::check::{CheckOptions, Severity, check};
use bcow_erofs::reader::Filesystem;

use crate::error::ConvertError;

/// A finding of the check.
#[derive(Debug, thiserror::Error)]
#[error("{place}: {message} ({code})")]
struct Damage {
    code: &'static str,
    place: String,
    message: String,
}

/// Checks the file system in `device`. Its data was compared block by block before.
pub(crate) fn file_system(device: Arc<dyn BlockDevice>) -> Result<(), ConvertError> {
    let fs = Filesystem::open(device).map_err(|e| ConvertError::Verify(Box::new(e)))?;
    let findings = check(&fs, &CheckOptions { read_data: false });
    match findings.into_iter().find(|f| f.severity == Severity::Error) {
        None => Ok(()),
        Some(finding) => Err(ConvertError::Verify(Box::new(Damage {
            code: finding.code,
            place: finding.place,
            message: finding.message,
        }))),
    }
}

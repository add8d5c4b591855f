//! The conversion itself.

use std::path::Path;

use crate::error::ConvertError;
use crate::options::{ConvertOptions, Progress, Report};
use crate::source::Source;

/// Converts `source` into one flattened image at `destination`.
pub fn convert(
    source: &Source,
    destination: &Path,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<Report, ConvertError> {
    let _ = (destination, options, progress);
    Err(ConvertError::Options(format!(
        "cannot convert {source} yet"
    )))
}

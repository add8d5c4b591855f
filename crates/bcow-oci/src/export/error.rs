//! Errors of an export.

use std::io;

use bcow_erofs::reader::ErofsError;

use crate::error::ConvertError;
use crate::text::quoted;

/// An export failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The file system cannot be read.
    #[error("cannot read {}", quoted(path))]
    Read {
        /// Absolute path in the file system.
        path: Vec<u8>,
        /// The cause.
        #[source]
        source: ErofsError,
    },
    /// The archive cannot be written.
    #[error("cannot write the archive")]
    Write(#[source] io::Error),
    /// The form of the archive cannot represent a property of a file.
    #[error("{}: {problem}", quoted(path))]
    Unrepresentable {
        /// Absolute path in the file system.
        path: Vec<u8>,
        /// The property that cannot be represented.
        problem: String,
    },
    /// The paths of files with several names take more memory than allowed.
    #[error("the paths of hardlinked files take more than {allowed} bytes")]
    Hardlinks {
        /// The limit in bytes.
        allowed: usize,
    },
    /// The configuration of the image is invalid, so the export cannot derive that of the new
    /// image.
    #[error("invalid image configuration: {problem}")]
    Config {
        /// What is wrong with the configuration.
        problem: &'static str,
    },
    /// The OCI layout cannot be written.
    #[error(transparent)]
    Layout(#[from] ConvertError),
    /// The caller cancelled the operation.
    #[error("interrupted")]
    Interrupted,
}

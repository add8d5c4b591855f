//! What can go wrong in an export.

use std::io;

use bcow_erofs::reader::ErofsError;

use crate::error::{ConvertError, quoted};

/// Failure of an export.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The file system cannot be read.
    #[error("cannot read {}", quoted(path))]
    Read {
        /// Where, from the root on, with a slash before it.
        path: Vec<u8>,
        /// Why.
        #[source]
        source: ErofsError,
    },
    /// The archive cannot be written.
    #[error("cannot write the archive")]
    Write(#[source] io::Error),
    /// Something that the form has no place for.
    #[error("{}: {problem}", quoted(path))]
    Unrepresentable {
        /// Where, from the root on, with a slash before it.
        path: Vec<u8>,
        /// What does not fit.
        problem: String,
    },
    /// More names of inodes with several names than memory is meant for.
    #[error("the paths of hardlinked files take more than {allowed} bytes")]
    Hardlinks {
        /// How many they may take.
        allowed: usize,
    },
    /// The image's configuration cannot become that of another image.
    #[error("the image's configuration is not as it should be: {problem}")]
    Config {
        /// What is wrong with it.
        problem: &'static str,
    },
    /// The layout cannot be written.
    #[error(transparent)]
    Layout(#[from] ConvertError),
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
}

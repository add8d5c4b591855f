//! Errors.

use std::io;
use std::path::PathBuf;

use bcow::NewFileError;
use bcow_erofs::reader::ErofsError;
use bcow_ext4::{Ext4Error, InodeProblem, ReadError};

/// A view cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ViewError {
    /// The EROFS cannot be read.
    #[error(transparent)]
    Erofs(#[from] ErofsError),
    /// The ext4 cannot be written.
    #[error(transparent)]
    Ext4(#[from] Ext4Error),
    #[error("cannot read {path} in the image: {source}")]
    Unreadable {
        /// Its path. Bytes that a terminal would interpret are escaped.
        path: String,
        /// The cause.
        source: ErofsError,
    },
    /// A file of the image that ext4 cannot hold.
    #[error("ext4 cannot hold {path}: {problem}")]
    Inode {
        /// Its path. Bytes that a terminal would interpret are escaped.
        path: String,
        /// Why it cannot.
        problem: InodeProblem,
    },
    /// The EROFS has blocks of another size.
    #[error("the EROFS has blocks of {0} bytes; a view needs 4096")]
    BlockBytes(u32),
    /// The ext4 has no room for the image.
    #[error(
        "an ext4 of {} is too small for the image, which needs {}",
        shown(*bytes),
        shown(*least)
    )]
    TooSmall {
        /// Size of the ext4 in bytes.
        bytes: u64,
        /// The least size in bytes, a multiple of 1 MiB.
        least: u64,
    },
    #[error("the image has more than {0} ends of files and shared blocks")]
    Fragments(usize),
    /// The image is no container image.
    #[error("a view shows the tree of a whole image: {0}")]
    NoImage(&'static str),
    #[error("cannot read the image: {0}")]
    Image(#[source] bcow::Error),
    #[error("cannot read the image and its layers: {0}")]
    Layers(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The file of the view cannot be written.
    #[error("cannot write the view: {0}")]
    Write(#[source] bcow::Error),
    /// The file of the view cannot be made or named.
    #[error("cannot make {}: {source}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// The cause.
        source: NewFileError,
    },
    /// The cache cannot be used.
    #[error("cannot keep views in {}: {source}", path.display())]
    Directory {
        /// Path of the directory.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    #[error("cannot keep views in {}: another user can write there", .0.display())]
    WritableByOthers(PathBuf),
    /// A file that was just made cannot be opened.
    #[error("the view in {} is not the one that was written", .0.display())]
    Replaced(PathBuf),
    #[error("the disk needs a view of layout {wanted}; this version makes layout {made}")]
    Layout {
        /// The layout that the disk names.
        wanted: u32,
        /// The layout of this version.
        made: u32,
    },
    #[error("the view of the image is not the one that the disk was made over")]
    Identity,
    /// The ext4 of a view cannot be read.
    #[error("the view: {0}")]
    Ext4OfView(#[source] ReadError),
    /// A disk over a view cannot be made.
    #[error(transparent)]
    Disk(bcow::Error),
    /// The system gives no random bytes.
    #[error("cannot get random bytes for a UUID: {0}")]
    Random(#[source] io::Error),
    /// More inodes than ext4 numbers.
    #[error("the image has more inodes than ext4 can number")]
    Inodes,
}

/// A size in MiB, or in bytes if it is not a multiple of 1 MiB.
fn shown(bytes: u64) -> String {
    if bytes.is_multiple_of(1 << 20) {
        format!("{} MiB", bytes >> 20)
    } else {
        format!("{bytes} bytes")
    }
}

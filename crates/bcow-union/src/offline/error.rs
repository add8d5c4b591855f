//! Why an upper cannot be read.

use bcow_erofs::reader::ErofsError;
use bcow_ext4::ReadError;
use bcow_view::{CompareError, ViewError};
use rustix::io::Errno;

use crate::upper::{META, MarkError, ReadMarksError, UpperError};

#[derive(Debug, thiserror::Error)]
#[error("cannot read {}", show(path))]
pub struct ChangesError {
    /// The path in the tree, without a leading slash.
    pub path: Vec<u8>,
    /// The cause.
    #[source]
    pub problem: Problem,
}

/// Why an object of an upper cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The host failed.
    #[error("host error: {0}")]
    Host(#[source] Errno),
    /// A mark is damaged.
    #[error(transparent)]
    Mark(#[from] MarkError),
    /// The image cannot be read.
    #[error("the image: {0}")]
    Image(#[source] ErofsError),
    /// The object of the image that this one continues does not exist.
    #[error("the image has no {kind} that it continues")]
    NoLower {
        /// The type of the missing object.
        kind: &'static str,
    },
    /// An entry of the index is not the file of its inode number.
    #[error("{META}/index/{nid:016x} is not a copy of the inode that its name gives")]
    Index {
        /// The image's inode number.
        nid: u64,
    },
    /// A partial file's map is missing or damaged.
    #[error("{0}")]
    Partial(String),
    /// The ext4 of the disk cannot be read.
    #[error(transparent)]
    Disk(ReadError),
    #[error("the view of the image: {0}")]
    View(#[source] ReadError),
    /// The inodes of the image cannot be numbered.
    #[error("the view of the image: {0}")]
    Numbers(#[from] ViewError),
    /// The disk cannot be compared with the view.
    #[error(transparent)]
    Compare(#[from] CompareError),
    #[error("the ext4 is damaged: directory {0} has two names")]
    DirectoryTwice(u32),
    #[error("the files of the upper are larger than an image can address (7 TiB)")]
    TooLarge,
    #[error("the upper has more than {allowed} files")]
    TooMany {
        /// The largest allowed number of files.
        allowed: u64,
    },
}

impl From<Errno> for Problem {
    fn from(errno: Errno) -> Self {
        Problem::Host(errno)
    }
}

impl From<UpperError> for Problem {
    fn from(error: UpperError) -> Self {
        // Only an object that is no directory has no errno.
        Problem::Host(error.errno().unwrap_or(Errno::NOTDIR))
    }
}

impl From<ErofsError> for Problem {
    fn from(error: ErofsError) -> Self {
        Problem::Image(error)
    }
}

impl From<ReadMarksError> for Problem {
    fn from(error: ReadMarksError) -> Self {
        match error {
            ReadMarksError::Io(errno) => Problem::Host(errno),
            ReadMarksError::Mark(error) => Problem::Mark(error),
        }
    }
}

/// Adds the path to a problem.
pub(super) fn at(path: &[u8]) -> impl Fn(Problem) -> ChangesError + use<> {
    let path = path.to_vec();
    move |problem| ChangesError {
        path: path.clone(),
        problem,
    }
}

/// Adds the path to an error of the image.
pub(super) fn below(path: &[u8]) -> impl Fn(ErofsError) -> ChangesError + use<> {
    let at = at(path);
    move |error| at(error.into())
}

fn show(path: &[u8]) -> String {
    match path {
        [] => "the root".into(),
        path => format!("{:?}", String::from_utf8_lossy(path)),
    }
}

//! The errors of images that cannot be opened, and the problems of the files below an image.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use bcow::chain::MAX_DEPTH;
use rustix::io::Errno;

use crate::digest::Digest;
use crate::error::ConvertError;

/// An image could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The layout is missing, unreadable or invalid, or the image is not in BCoW form.
    #[error(transparent)]
    Layout(#[from] ConvertError),
    /// The layout does not have this blob.
    #[error("{} has no blob {digest}", directory.display())]
    NoSuchBlob {
        /// The layout.
        directory: PathBuf,
        /// The requested digest.
        digest: Digest,
    },
    /// The file cannot be opened as an image.
    #[error("cannot open {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: bcow::Error,
    },
    /// Files below the image are missing or wrong.
    #[error("{}{first}", in_all(*others))]
    Layers {
        /// The first of the problems.
        #[source]
        first: Arc<LayerProblem>,
        /// How many more problems there are.
        others: usize,
    },
}

/// The problem of a file below an image. `name` is the file's name in messages; see
/// [`BelowFile::name`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerProblem {
    /// No searched directory has the file.
    #[error("{name} is missing{}", searched_in(places))]
    Missing {
        /// The name of the file.
        name: String,
        /// The directories that were searched.
        places: Vec<PathBuf>,
    },
    /// The file was found, but cannot be opened.
    #[error("cannot open {name} in {}: {source}", path.display())]
    Open {
        /// The name of the file.
        name: String,
        /// The path of the file.
        path: PathBuf,
        /// The cause.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The file that was found is a different file.
    #[error("{} is not {name}: its {property} is {found}, not {expected}", path.display())]
    Wrong {
        /// The name of the expected file.
        name: String,
        /// The path of the file that was found.
        path: PathBuf,
        /// The property that differs.
        property: &'static str,
        /// The value of the file that was found.
        found: String,
        /// The expected value.
        expected: String,
    },
    /// The file has a backing that is not named by digest.
    #[error("{name} is over {backing}, and below such a file bcow looks up only digests")]
    NotByDigest {
        /// The name of the file.
        name: String,
        /// The name of its backing.
        backing: String,
    },
    /// The chain of files has more than [`MAX_DEPTH`] files, or a file is below itself.
    #[error("more than {MAX_DEPTH} files, one below the other, end in {name}")]
    TooDeep {
        /// The name of the file.
        name: String,
    },
}

/// The beginning of the message about the first of several problems.
fn in_all(others: usize) -> String {
    match others {
        0 => String::new(),
        others => format!("{} files are missing or wrong; the first: ", others + 1),
    }
}

fn searched_in(places: &[PathBuf]) -> String {
    let places: Vec<String> = places.iter().map(|p| p.display().to_string()).collect();
    match &places[..] {
        [] => String::new(),
        places => format!("; searched in {}", places.join(", ")),
    }
}

impl LayerProblem {
    /// A stable code, for the findings of `bcow fsck`.
    pub fn code(&self) -> &'static str {
        match self {
            LayerProblem::Missing { .. } => "backing-missing",
            LayerProblem::Open { .. } | LayerProblem::NotByDigest { .. } => "backing-unreadable",
            LayerProblem::Wrong { .. } | LayerProblem::TooDeep { .. } => "backing-entry",
        }
    }

    /// The name of the file that is missing or wrong.
    pub fn name(&self) -> &str {
        match self {
            LayerProblem::Missing { name, .. }
            | LayerProblem::Open { name, .. }
            | LayerProblem::Wrong { name, .. }
            | LayerProblem::NotByDigest { name, .. }
            | LayerProblem::TooDeep { name } => name,
        }
    }

    /// A hint for the user.
    pub fn hint(&self) -> &'static str {
        match self {
            LayerProblem::Missing { .. } => {
                "copy it from the origin of the image, or name its directory with --store"
            }
            LayerProblem::Open { source, .. }
                if source
                    .downcast_ref::<io::Error>()
                    .and_then(io::Error::raw_os_error)
                    .is_some_and(|number| {
                        [Errno::MFILE, Errno::NFILE].contains(&Errno::from_raw_os_error(number))
                    }) =>
            {
                "every layer takes a file descriptor; raise the limit (ulimit -n)"
            }
            LayerProblem::Open { .. } | LayerProblem::Wrong { .. } => {
                "copy it again from the origin of the image, or name the directory of the right \
                 file with --store"
            }
            LayerProblem::NotByDigest { .. } => {
                "name it by its file name, without --by-digest; or store all its content in one \
                 file: `bcow seal --flatten FILE -o NEW`"
            }
            LayerProblem::TooDeep { .. } => "convert the image again",
        }
    }
}

impl StoreError {
    /// A hint for the user, if there is one.
    pub fn hint(&self) -> Option<String> {
        match self {
            StoreError::Layout(error) => error.hint(),
            StoreError::NoSuchBlob { .. } | StoreError::Open { .. } => None,
            StoreError::Layers { first, .. } => Some(first.hint().into()),
        }
    }
}

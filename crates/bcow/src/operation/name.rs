//! The record of a backing by its file name.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow_format::{BackingEntry, BackingName};

use crate::chain::{ChainProblem, Opener, Policy};
use crate::new_file::parent_of;
use crate::{BlockDevice, Image};

/// The reason why a file cannot be recorded as a backing by its name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// The path cannot be resolved.
    #[error(transparent)]
    Path(io::Error),
    /// The file name is not UTF-8, as the format requires.
    #[error("its name is not UTF-8")]
    NotUtf8,
    /// The disk would not find the file: it is in another directory.
    #[error("it is not in {}, and a backing is looked up beside the disk", searched.display())]
    OutOfReach {
        /// The directory of the disk.
        searched: PathBuf,
        /// The directory of the backing.
        directory: PathBuf,
    },
    /// The disk would find the file, but not open it.
    #[error(transparent)]
    Chain(Arc<ChainProblem>),
}

/// Returns the entry with which the disk at `disk` names the file at `path` as its backing. `image`
/// is the open file. Opens the backing as the disk will: the depth of the chain, symbolic links,
/// and another file of that name show now.
pub fn name_backing(
    disk: &Path,
    path: &Path,
    image: &Image,
    policy: &Policy<'_>,
) -> Result<BackingEntry, NameError> {
    let path = path.canonicalize().map_err(NameError::Path)?;
    require_in_reach(disk, &path, policy)?;
    let name = path.file_name().and_then(|name| name.to_str());
    let entry = BackingEntry {
        name: BackingName::FileName {
            name: name.ok_or(NameError::NotUtf8)?.to_owned(),
            identity: Some(image.identity_hash()),
        },
        size: image.size(),
    };
    let opener = Opener::new(disk, policy.clone());
    opener.open(&entry).map_err(NameError::Chain)?;
    Ok(entry)
}

/// Fails if the disk at `disk` would not look for its backing in the directory of the file at
/// `path`, whose links are resolved.
pub fn require_in_reach(disk: &Path, path: &Path, policy: &Policy<'_>) -> Result<(), NameError> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    let beside = parent_of(disk);
    let is_here = |place: &Path| place.canonicalize().is_ok_and(|place| place == directory);
    if is_here(beside) || policy.directories.iter().any(|place| is_here(place)) {
        Ok(())
    } else {
        Err(NameError::OutOfReach {
            searched: beside.to_owned(),
            directory: directory.to_owned(),
        })
    }
}

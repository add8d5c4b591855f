//! Candidates: files on this machine or on another one that may have the digest of a lookup.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use bcow::Storage;
use bcow::chain::{self, Named, directory_of};
use rustix::io::Errno;

use super::recorded::RecordedFile;
use super::remote::{RemoteFailure, RemoteFiles};
use crate::blob::open_regular;
use crate::digest::Digest;
use crate::error::ConvertError;

/// A file that may have the digest of a lookup.
pub(super) enum Candidate {
    /// A file named by the digest, in the image's layout or in a store.
    Path(PathBuf),
    /// A name in a directory. Symbolic links are not followed, because the name comes from an image
    /// file.
    Named(PathBuf, String),
    /// A file that the user named. It is tried for every digest, so its errors are not reported.
    UserFile(PathBuf),
    /// A file of another machine.
    Remote {
        files: Arc<dyn RemoteFiles>,
        digest: Digest,
    },
}

impl Candidate {
    /// The path, for messages; of a file of another machine, its name.
    pub(super) fn path(&self) -> PathBuf {
        match self {
            Candidate::Remote { files, digest } => files.name(digest),
            Candidate::Path(path) | Candidate::UserFile(path) => path.clone(),
            Candidate::Named(directory, name) => directory.join(name),
        }
    }

    /// Whether the candidate is a file on this machine. A file that the user named is a candidate
    /// for every digest.
    pub(super) fn may_be_local(&self) -> bool {
        match self {
            Candidate::Remote { .. } => false,
            Candidate::UserFile(_) => true,
            Candidate::Path(_) | Candidate::Named(..) => self.path().symlink_metadata().is_ok(),
        }
    }

    /// The directory of the file, if it is on this machine.
    pub(super) fn directory(&self) -> Option<PathBuf> {
        match self {
            Candidate::Remote { .. } => None,
            _ => Some(directory_of(&self.path())),
        }
    }

    /// Opens the file; `None` if it does not exist.
    pub(super) fn open(
        &self,
        recorded: Option<&RecordedFile>,
    ) -> Result<Option<Arc<dyn Storage>>, RemoteFailure> {
        match self {
            Candidate::Remote { files, digest } => match recorded {
                Some(recorded) => files.open(digest, recorded),
                // Without the root hash, the whole file would have to be fetched to check it.
                None => Err("the image does not record the root hash of this file".into()),
            },
            Candidate::Path(path) | Candidate::UserFile(path) => match open_regular(path) {
                Ok(Some(blob)) => Ok(blob.file().map(|file| file as Arc<dyn Storage>)),
                Ok(None) => Ok(None),
                // The caller's error has the path.
                Err(ConvertError::Read { source, .. }) => Err(source.into()),
                Err(error) => Err(error.into()),
            },
            Candidate::Named(directory, name) => match chain::open_named(directory, name) {
                Ok(Named::File(file)) => Ok(Some(Arc::new(file))),
                Ok(Named::Other(what)) => Err(format!("it is {what}").into()),
                Err(Errno::NOENT) => Ok(None),
                Err(error) => Err(io::Error::from(error).into()),
            },
        }
    }
}

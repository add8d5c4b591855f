//! Files that may be the right ones: on this machine, and on others.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use bcow::Storage;
use bcow::chain::{self, Named, directory_of};
use rustix::io::Errno;

use super::facts::LayerFacts;
use super::remote::{RemoteFailure, RemoteFiles};
use crate::blob::open_regular;
use crate::digest::Digest;
use crate::error::ConvertError;

/// A file that may be the right one.
pub(super) enum Candidate {
    /// A path made of a directory of the user's choice and of the digest.
    Path(PathBuf),
    /// A name in a directory. Symbolic links are not followed, because the name comes from an image
    /// file.
    Named(PathBuf, String),
    /// A file that the user named, perhaps for a different purpose.
    UserFile(PathBuf),
    /// A file of another machine.
    Remote {
        files: Arc<dyn RemoteFiles>,
        digest: Digest,
    },
}

impl Candidate {
    pub(super) fn path(&self) -> PathBuf {
        match self {
            Candidate::Remote { files, digest } => files.name(digest),
            Candidate::Path(path) | Candidate::UserFile(path) => path.clone(),
            Candidate::Named(directory, name) => directory.join(name),
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
        facts: Option<&LayerFacts>,
    ) -> Result<Option<Arc<dyn Storage>>, RemoteFailure> {
        match self {
            Candidate::Remote { files, digest } => match facts {
                Some(facts) => files.open(digest, facts),
                // Its bytes could be checked only by reading all of them.
                None => Err("the image does not record its root hash".into()),
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

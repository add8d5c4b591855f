//! The files that an image is put on top of.

use std::path::PathBuf;
use std::sync::Arc;

use bcow::{Storage, header_of};
use bcow_oci::Digest;
use bcow_oci::store::{RecordedFile, RemoteFailure, RemoteFiles};

/// Files among which a layer finds those below it.
#[derive(Default)]
pub struct Given {
    /// Files of this machine.
    pub files: Vec<PathBuf>,
    /// Files of other machines.
    pub remote: Option<Arc<dyn RemoteFiles>>,
}

/// Open files of other machines, and the places that have more of them.
#[derive(Default)]
pub struct OpenFiles {
    /// Each checks what it reads against its Merkle tree.
    pub files: Vec<Arc<dyn Storage>>,
    pub places: Vec<Arc<dyn RemoteFiles>>,
}

impl RemoteFiles for OpenFiles {
    fn name(&self, digest: &Digest) -> PathBuf {
        match self.places.last() {
            Some(place) => place.name(digest),
            None => digest.to_string().into(),
        }
    }

    fn open(
        &self,
        digest: &Digest,
        recorded: &RecordedFile,
    ) -> Result<Option<Arc<dyn Storage>>, RemoteFailure> {
        let is_meant = |file: &&Arc<dyn Storage>| {
            let tree = header_of(&***file).and_then(|header| header.merkle);
            tree.is_some_and(|tree| tree.root == recorded.merkle_root)
        };
        if let Some(file) = self.files.iter().find(is_meant) {
            return Ok(Some(Arc::clone(file)));
        }
        for place in &self.places {
            if let Some(file) = place.open(digest, recorded)? {
                return Ok(Some(file));
            }
        }
        Ok(None)
    }
}

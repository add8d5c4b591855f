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
    /// Searched in this order, after the files.
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
        // A server that does not answer does not hide the file of another one.
        let mut failed = None;
        for place in &self.places {
            match place.open(digest, recorded) {
                Ok(Some(file)) => return Ok(Some(file)),
                Ok(None) => {}
                Err(error) => {
                    failed.get_or_insert(error);
                }
            }
        }
        failed.map_or(Ok(None), Err)
    }
}

#[cfg(test)]
mod tests {
    use bcow::MemoryStorage;

    use super::*;

    /// A place that has every file, or fails.
    struct Server {
        answers: bool,
    }

    impl RemoteFiles for Server {
        fn name(&self, digest: &Digest) -> PathBuf {
            digest.to_string().into()
        }

        fn open(
            &self,
            _: &Digest,
            _: &RecordedFile,
        ) -> Result<Option<Arc<dyn Storage>>, RemoteFailure> {
            if self.answers {
                Ok(Some(Arc::new(MemoryStorage::default())))
            } else {
                Err("no answer".into())
            }
        }
    }

    #[test]
    fn server_that_does_not_answer_does_not_hide_the_file_of_another_one() {
        let digest = Digest::of(b"layer");
        let recorded = RecordedFile {
            digest: digest.clone(),
            file_bytes: 5,
            merkle_root: [0; 32],
        };
        let open = |answers: &[bool]| {
            let servers = answers.iter().map(|&answers| Server { answers });
            let files = OpenFiles {
                files: Vec::new(),
                places: servers.map(|one| Arc::new(one) as _).collect(),
            };
            files.open(&digest, &recorded)
        };
        assert!(open(&[false, true]).unwrap().is_some());
        assert_eq!(
            open(&[false, false]).err().unwrap().to_string(),
            "no answer"
        );
    }
}

//! The layers of a stack on a web server or in S3: files named by their digests, in the directory
//! `blobs/sha256` beside the stack (spec section 17).

use std::path::PathBuf;
use std::sync::Arc;

use bcow::Storage;
use bcow_oci::Digest;
use bcow_oci::store::{RecordedFile, RemoteFailure, RemoteFiles};
use bcow_remote::{Address, Expected, Problem, Remote, RemoteError, RemoteFile, Root, S3, S3Name};

use super::Client;

/// The place of a file.
pub(super) enum FileAddress {
    Web(Address),
    S3(S3, S3Name),
}

impl FileAddress {
    /// Opens the file.
    pub(super) fn open(
        &self,
        remote: &Remote,
        expected: Option<Expected>,
    ) -> Result<RemoteFile, RemoteError> {
        match self {
            FileAddress::Web(address) => remote.open(address, expected),
            FileAddress::S3(server, name) => remote.open_in_s3(server, name, expected),
        }
    }

    /// The place of a layer of the stack that is here.
    fn blob(&self, digest: &Digest) -> Result<FileAddress, Problem> {
        let hex = digest.hex();
        Ok(match self {
            FileAddress::Web(address) => FileAddress::Web(address.blob(&hex)?),
            FileAddress::S3(server, name) => FileAddress::S3(server.clone(), name.blob(&hex)),
        })
    }

    /// The name in messages.
    fn name(&self) -> String {
        match self {
            FileAddress::Web(address) => address.to_string(),
            FileAddress::S3(_, name) => name.to_string(),
        }
    }
}

/// What `bcow_oci` reads of the directory of a stack.
pub(super) struct Beside {
    /// The place of the stack.
    pub(super) place: FileAddress,
    pub(super) client: Arc<Client>,
}

impl RemoteFiles for Beside {
    fn name(&self, digest: &Digest) -> PathBuf {
        let place = self.place.blob(digest);
        let name = place.map_or_else(|_| digest.to_string(), |place| place.name());
        name.into()
    }

    fn open(
        &self,
        digest: &Digest,
        recorded: &RecordedFile,
    ) -> Result<Option<Arc<dyn Storage>>, RemoteFailure> {
        if digest.sha256().is_none() {
            return Err("only layers with a SHA-256 digest are found beside their stack".into());
        }
        let expected = Expected {
            root: Root(recorded.merkle_root),
            file_bytes: Some(recorded.file_bytes),
        };
        let opened = self
            .place
            .blob(digest)?
            .open(&self.client.remote, Some(expected));
        self.client.add_found(opened)
    }
}

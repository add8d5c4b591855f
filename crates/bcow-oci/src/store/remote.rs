//! Stores on other machines, such as registry repositories.

use std::path::PathBuf;
use std::sync::Arc;

use bcow::Storage;

use super::recorded::RecordedFile;
use crate::digest::Digest;

/// A content-addressed store on another machine, such as a repository of a registry.
pub trait RemoteFiles: Send + Sync {
    /// The name of the file with this digest. A `PathBuf`, because errors show it where they show
    /// paths.
    fn name(&self, digest: &Digest) -> PathBuf;

    /// Opens the file with this digest; `None` if the store does not have it. Every byte that the
    /// storage returns is checked against the root hash in `recorded`.
    fn open(
        &self,
        digest: &Digest,
        recorded: &RecordedFile,
    ) -> Result<Option<Arc<dyn Storage>>, RemoteFailure>;
}

/// Why a file does not open.
pub type RemoteFailure = Box<dyn std::error::Error + Send + Sync>;

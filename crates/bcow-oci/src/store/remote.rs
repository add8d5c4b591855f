//! Places on other machines that have files of images.

use std::path::PathBuf;
use std::sync::Arc;

use bcow::Storage;

use super::facts::LayerFacts;
use crate::digest::Digest;

/// A place on another machine that has files by digest.
pub trait RemoteFiles: Send + Sync {
    /// The name of the file with this digest, for messages.
    fn name(&self, digest: &Digest) -> PathBuf;

    /// Opens the file with this digest; `None` if the place does not have it. Every byte that the
    /// storage returns is checked against the root hash in `facts`.
    fn open(
        &self,
        digest: &Digest,
        facts: &LayerFacts,
    ) -> Result<Option<Arc<dyn Storage>>, RemoteFailure>;
}

/// The cause for which a file of another machine does not open.
pub type RemoteFailure = Box<dyn std::error::Error + Send + Sync>;

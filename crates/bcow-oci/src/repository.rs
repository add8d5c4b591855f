//! What this crate needs of a registry. Another crate makes the connections.

use std::fmt;
use std::io::{self, Read};

use crate::digest::Digest;

/// A repository of a registry, and the name of one image in it.
pub trait Repository: Send + Sync {
    /// The name of the image, for messages: `docker://HOST/REPOSITORY:TAG`.
    fn name(&self) -> String;

    /// The manifest or index with a digest; without one, that of the name. The bytes match the
    /// digest, and that of the name if it has one.
    fn manifest(&self, digest: Option<&Digest>) -> io::Result<Vec<u8>>;

    /// The index of all images of this artifact type that are attached to a manifest, and perhaps
    /// of others. An error is no statement about what is attached.
    fn referrers(&self, digest: &Digest, artifact_type: &str) -> io::Result<Vec<u8>>;

    /// The blob with a digest. The reader returns as many bytes as `length`, or fails; the bytes
    /// are not checked. No connection is made before the first read.
    fn blob(&self, digest: &Digest, length: u64) -> io::Result<Box<dyn Read + Send>>;
}

impl fmt::Debug for dyn Repository {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

/// Returns the content of a blob from an offset on.
pub type OpenContent<'o> = dyn Fn(u64) -> io::Result<Box<dyn Read>> + 'o;

/// A name in a registry under which an image is written.
pub trait Upload: Send + Sync {
    /// The name of the image, for messages: `docker://HOST/REPOSITORY:TAG`.
    fn name(&self) -> String;

    /// Whether the repository has the blob of this length, or can take it from another repository
    /// of the registry without an upload.
    fn adopt(&self, digest: &Digest, length: u64) -> io::Result<bool>;

    /// Brings a blob of this length into the repository. A blob that is there is not sent. `sent`
    /// learns of each byte that has arrived, once.
    fn blob(
        &self,
        digest: &Digest,
        length: u64,
        open: &OpenContent<'_>,
        sent: &dyn Fn(u64),
    ) -> io::Result<()>;

    /// The manifest or index that the name leads to; `None` if it leads to nothing.
    fn named(&self) -> io::Result<Option<Vec<u8>>>;

    /// Writes the manifest, whose blobs are there. No name changes.
    fn store(&self, bytes: &[u8], media_type: &str, digest: &Digest) -> io::Result<()>;

    /// The same, and gives it the name.
    fn manifest(&self, bytes: &[u8], media_type: &str, digest: &Digest) -> io::Result<()>;

    /// Writes the manifest, whose blobs are there, and attaches it to `subject`. No name changes.
    /// `entry` is its descriptor in an index.
    fn attach(
        &self,
        bytes: &[u8],
        media_type: &str,
        digest: &Digest,
        subject: &Digest,
        entry: &serde_json::Value,
    ) -> io::Result<()>;
}

impl fmt::Debug for dyn Upload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

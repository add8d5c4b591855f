//! Images in registries (OCI distribution specification 1.1): manifests, and blobs in ranges.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use bcow::Storage;
use sha2::{Digest, Sha256};

use crate::address::{Address, Transport};
use crate::auth::{Auth, Keychain};
use crate::error::{Problem, RemoteError};
use crate::file::RemoteFile;
use crate::patience::Patience;
use crate::remote::Remote;
use crate::shared::{Root, Shared};
use crate::source::Source;

/// Largest size of a manifest or index.
const MANIFEST_BYTES: u64 = 4 << 20;
/// Largest size of a blob that is read whole because no root hash is known for it.
const WHOLE_BLOB_BYTES: u64 = 256 << 20;
/// The forms of manifests that are requested.
const ACCEPT: &str = "application/vnd.oci.image.manifest.v1+json, \
     application/vnd.oci.image.index.v1+json, \
     application/vnd.docker.distribution.manifest.v2+json, \
     application/vnd.docker.distribution.manifest.list.v2+json";
/// The registry of names without a server, its host, and its name in credentials.
const DOCKER_IO: &str = "docker.io";
const DOCKER_HOST: &str = "registry-1.docker.io";
const DOCKER_KEY: &str = "https://index.docker.io/v1/";

/// The name of an image in a registry: `docker://[SERVER/]REPOSITORY[:TAG][@sha256:HEX]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    server: String,
    repository: String,
    tag: Option<String>,
    /// `sha256:` and 64 digits.
    digest: Option<String>,
}

impl FromStr for Reference {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let rest = text
            .strip_prefix("docker://")
            .ok_or("it does not begin with docker://")?;
        let (rest, digest) = match rest.split_once('@') {
            Some((rest, digest)) if is_digest(digest) => (rest, Some(digest.to_owned())),
            Some(_) => return Err("the part behind @ is not sha256: and 64 digits"),
            None => (rest, None),
        };
        let (server, path) = match rest.split_once('/') {
            Some((server, path)) if server.contains(['.', ':']) || server == "localhost" => {
                (server, path)
            }
            _ => (DOCKER_IO, rest),
        };
        let (path, tag) = match path.rsplit_once(':') {
            Some((path, tag)) if is_tag(tag) => (path, Some(tag.to_owned())),
            Some(_) => return Err("the part behind the last colon is not a tag"),
            None => (path, None),
        };
        let is_server = server
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b".-:[]".contains(&byte));
        if !is_server {
            return Err("the server is not HOST[:PORT]");
        }
        let repository = match server == DOCKER_IO && !path.contains('/') {
            true => format!("library/{path}"),
            false => path.to_owned(),
        };
        let is_part = |part: &str| {
            !part.is_empty()
                && part.bytes().all(|byte| {
                    byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"._-".contains(&byte)
                })
                && !part.starts_with('.')
        };
        if path.is_empty() || !repository.split('/').all(is_part) {
            return Err("the repository may have lower-case letters, digits, and . _ - /");
        }
        Ok(Reference {
            server: server.to_owned(),
            repository,
            tag,
            digest,
        })
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "docker://{}/{}", self.server, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        match &self.digest {
            Some(digest) => write!(f, "@{digest}"),
            None => Ok(()),
        }
    }
}

fn is_digest(text: &str) -> bool {
    text.strip_prefix("sha256:").is_some_and(|hex| {
        hex.len() == 64
            && hex
                .bytes()
                .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    })
}

fn is_tag(text: &str) -> bool {
    let is_start = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
    text.len() <= 128
        && text.bytes().next().is_some_and(is_start)
        && text
            .bytes()
            .all(|byte| is_start(byte) || b".-".contains(&byte))
}

fn sha256(bytes: &[u8]) -> String {
    format!(
        "sha256:{}",
        data_encoding::HEXLOWER.encode(&Sha256::digest(bytes))
    )
}

/// A repository of a registry.
pub struct Registry {
    shared: Arc<Shared>,
    reference: Reference,
    auth: Arc<Auth>,
}

impl Registry {
    /// The repository of an image. No connection is made.
    pub fn new(remote: &Remote, reference: Reference, keychain: Arc<dyn Keychain>) -> Self {
        let key = match &*reference.server {
            DOCKER_IO => DOCKER_KEY,
            server => server,
        };
        Registry {
            shared: Arc::clone(&remote.shared),
            auth: Arc::new(Auth::new(key.to_owned(), &reference.repository, keychain)),
            reference,
        }
    }

    /// The manifest or index of the image. If the name has a digest, the bytes match it, and the
    /// cache can have them.
    pub fn manifest(&self) -> Result<Vec<u8>, RemoteError> {
        match (&self.reference.digest, &self.reference.tag) {
            (Some(digest), _) => self.manifest_with_digest(digest),
            (None, Some(tag)) => self.fetch_manifest(tag),
            (None, None) => self.fetch_manifest("latest"),
        }
    }

    /// The manifest with a digest (`sha256:HEX`).
    pub fn manifest_with_digest(&self, digest: &str) -> Result<Vec<u8>, RemoteError> {
        let place = || format!("manifest {digest} of {}", self.reference);
        if !is_digest(digest) {
            let problem = Problem::Answer("its digest is not sha256: and 64 digits".into());
            return Err(problem.at(place()));
        }
        let cache = self.shared.options.cache.as_ref();
        if let Some(bytes) = cache.and_then(|cache| cache.document(digest, MANIFEST_BYTES))
            && sha256(&bytes) == digest
        {
            return Ok(bytes);
        }
        let bytes = self.fetch_manifest(digest)?;
        if sha256(&bytes) != digest {
            let found = sha256(&bytes);
            let problem = Problem::Answer(format!("the digest of the manifest is {found}"));
            return Err(problem.at(place()));
        }
        if let Some(cache) = cache {
            cache.keep_document(digest, &bytes);
        }
        Ok(bytes)
    }

    fn fetch_manifest(&self, which: &str) -> Result<Vec<u8>, RemoteError> {
        let source = self.source(&format!("manifests/{which}"))?;
        let place = || format!("manifest {which} of {}", self.reference);
        let mut patience = Patience::opening(self.shared.options.timeout);
        loop {
            match source.document(&[("accept", ACCEPT)], MANIFEST_BYTES, &patience) {
                Ok(bytes) => return Ok(bytes),
                Err(fault) => patience
                    .wait(fault)
                    .map_err(|problem| problem.at(place()))?,
            }
        }
    }

    /// Opens the blob with a digest (`sha256:HEX`), which is a BCoW file with this root hash.
    /// Without a root hash, the whole blob is read and compared with the digest.
    pub fn blob(&self, digest: &str, root: Option<Root>) -> Result<RemoteFile, RemoteError> {
        let source = self.source(&format!("blobs/{digest}"))?;
        let shared = Arc::clone(&self.shared);
        let file = RemoteFile::open(shared, source, root.map(|root| root.0))?;
        if root.is_none() {
            check_whole(&file, digest)?;
        }
        Ok(file)
    }

    /// The address of a blob, for messages.
    pub fn blob_name(&self, digest: &str) -> String {
        let host = self.host();
        format!(
            "{}://{host}/v2/{}/blobs/{digest}",
            self.scheme(),
            self.reference.repository
        )
    }

    fn host(&self) -> &str {
        match &*self.reference.server {
            DOCKER_IO => DOCKER_HOST,
            server => server,
        }
    }

    fn scheme(&self) -> &'static str {
        match self.shared.client.transport {
            Transport::TlsOnly => "https",
            Transport::PlainToo => "http",
        }
    }

    fn source(&self, path: &str) -> Result<Source, RemoteError> {
        let host = self.host();
        let url = format!(
            "{}://{host}/v2/{}/{path}",
            self.scheme(),
            self.reference.repository
        );
        let address =
            Address::parse(&url).map_err(|problem| problem.at(self.reference.to_string()))?;
        let client = Arc::clone(&self.shared.client);
        Ok(Source::with_auth(client, address, Arc::clone(&self.auth)))
    }
}

/// Reads a whole file and compares it with a digest. All bytes match the root in the header of the
/// file, so later reads have the same bytes.
fn check_whole(file: &RemoteFile, digest: &str) -> Result<(), RemoteError> {
    let place = file.name();
    let failed = |why: String| Problem::Answer(why).at(place.as_str());
    let length = file.len().map_err(|error| failed(error.to_string()))?;
    if length > WHOLE_BLOB_BYTES {
        return Err(failed(format!(
            "the manifest has no root hash, and the file is too long to be read whole \
             ({length} bytes)"
        )));
    }
    let mut hasher = Sha256::new();
    let mut buf = vec![0; length.min(1 << 20) as usize];
    let mut at = 0;
    while at < length {
        let count = (length - at).min(buf.len() as u64) as usize;
        file.read_checked(at, &mut buf[..count])?;
        hasher.update(&buf[..count]);
        at += count as u64;
    }
    let found = format!(
        "sha256:{}",
        data_encoding::HEXLOWER.encode(&hasher.finalize())
    );
    match found == digest {
        true => Ok(()),
        false => Err(failed(format!("the digest of the file is {found}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIGEST: &str = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

    #[test]
    fn references_are_completed_as_usual() {
        let digest = format!("docker://localhost:5000/a/b:t@{DIGEST}");
        for (text, shown) in [
            (
                "docker://python:3.12",
                "docker://docker.io/library/python:3.12",
            ),
            ("docker://user/app", "docker://docker.io/user/app"),
            ("docker://host.x/app", "docker://host.x/app"),
            (
                "docker://localhost/app:1.0-rc_1",
                "docker://localhost/app:1.0-rc_1",
            ),
            (digest.as_str(), digest.as_str()),
        ] {
            let reference: Reference = text.parse().expect(text);
            assert_eq!(reference.to_string(), shown);
        }
    }

    #[test]
    fn invalid_references_are_refused() {
        for text in [
            "docker://",
            "docker:///x",
            "docker://host.x/",
            "docker://host.x/App",
            "docker://host.x/../x",
            "docker://host.x/a//b",
            "docker://host.x/a?b",
            "docker://user:pass@host.x/a",
            "docker://host.x/a@sha256:12",
            "docker://host.x/a:",
            "docker://ho st.x/a",
        ] {
            text.parse::<Reference>().expect_err(text);
        }
    }
}

//! Images in registries (OCI distribution specification 1.1): manifests, and blobs in ranges.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use bcow::Storage;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::address::{Address, Transport, query};
use crate::auth::{Auth, Keychain};
use crate::cache::{MANIFEST_BYTES, sha256};
use crate::download::Download;
use crate::error::{Problem, RemoteError};
use crate::file::RemoteFile;
use crate::mirrors::{Mirror, Sources};
use crate::remote::Remote;
use crate::shared::Shared;
use crate::source::{Access, Source};
use crate::tree::Expected;

/// Largest size of a blob that is read whole because no root hash is known for it.
const WHOLE_BLOB_BYTES: u64 = 256 << 20;
/// Pages of a list of referrers, and their bytes.
const MAX_PAGES: u32 = 100;
const LIST_BYTES: u64 = 16 << 20;
/// The forms of manifests that are requested.
pub(crate) const ACCEPT: &str = "application/vnd.oci.image.manifest.v1+json, \
     application/vnd.oci.image.index.v1+json, \
     application/vnd.docker.distribution.manifest.v2+json, \
     application/vnd.docker.distribution.manifest.list.v2+json";
pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
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
        // Any spelling of it leads to its host and its credentials.
        let server = if server.eq_ignore_ascii_case(DOCKER_IO) { DOCKER_IO } else { server };
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
        let repository = if server == DOCKER_IO && !path.contains('/') {
            format!("library/{path}")
        } else {
            path.to_owned()
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

impl Reference {
    /// The server in the name; `docker.io` if it names none.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// The repository, with the `library/` that the name may leave out.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The tag in the name.
    pub fn tag(&self) -> Option<&str> {
        self.tag.as_deref()
    }

    /// The digest in the name: `sha256:` and 64 digits.
    pub fn digest(&self) -> Option<&str> {
        self.digest.as_deref()
    }

    pub(crate) fn same_server(&self, other: &Reference) -> bool {
        self.server.eq_ignore_ascii_case(&other.server)
    }

    /// The name of the server in credentials.
    pub(crate) fn key(&self) -> &str {
        match &*self.server {
            DOCKER_IO => DOCKER_KEY,
            server => server,
        }
    }

    /// `https://HOST/v2/REPOSITORY/`
    pub(crate) fn base(&self, shared: &Shared) -> Result<Address, RemoteError> {
        let host = match &*self.server {
            DOCKER_IO => DOCKER_HOST,
            server => server,
        };
        let scheme = match shared.client.transport {
            Transport::TlsOnly => "https",
            Transport::PlainToo => "http",
        };
        Address::parse(&format!("{scheme}://{host}/v2/{}/", self.repository))
            .map_err(|problem| problem.at(self.to_string()))
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

/// The tag of the index of referrers, where the registry has no list of them.
pub(crate) fn referrers_tag(digest: &str) -> String {
    digest.replace(':', "-")
}

/// A repository of a registry.
pub struct Registry {
    shared: Arc<Shared>,
    reference: Reference,
    auth: Arc<Auth>,
    /// The mirrors, and the access to each.
    mirrors: Vec<(Arc<Mirror>, Arc<Auth>)>,
}

impl Registry {
    /// The repository of an image. No connection is made. If images of the same repository are open
    /// already, their token and their keychain are used.
    pub fn new(remote: &Remote, reference: Reference, keychain: Arc<dyn Keychain>) -> Self {
        let auth = |server: &str| {
            let repository = &reference.repository;
            remote.shared.access(server, repository, || {
                Auth::new(&remote.shared.client, server, repository, &keychain)
            })
        };
        let mirrors = remote.shared.mirrors.iter();
        Registry {
            shared: Arc::clone(&remote.shared),
            auth: auth(reference.key()),
            mirrors: mirrors
                .map(|mirror| (Arc::clone(mirror), auth(mirror.server())))
                .collect(),
            reference,
        }
    }

    /// The manifest or index of the image. If the name has a digest, the bytes match it, and the
    /// cache can have them.
    pub fn manifest(&self) -> Result<Vec<u8>, RemoteError> {
        match (&self.reference.digest, &self.reference.tag) {
            (Some(digest), _) => self.manifest_with_digest(digest),
            (None, Some(tag)) => self.tagged(tag),
            (None, None) => self.tagged("latest"),
        }
    }

    /// The manifest with a digest (`sha256:HEX`).
    pub fn manifest_with_digest(&self, digest: &str) -> Result<Vec<u8>, RemoteError> {
        let accept = [("accept", ACCEPT)];
        self.by_digest("manifest", digest, &accept, MANIFEST_BYTES)
    }

    /// The manifest that a tag leads to; without the registry, the one that it led to last.
    pub(crate) fn tagged(&self, tag: &str) -> Result<Vec<u8>, RemoteError> {
        let source = self.source(&format!("manifests/{tag}"))?;
        let place = format!("manifest {tag} of {}", self.reference);
        self.fetch_named(source.address(), &place, || {
            self.fetch(&source, &[("accept", ACCEPT)], MANIFEST_BYTES)
        })
    }

    /// The bytes of a small blob, which match the digest.
    pub(crate) fn document(&self, digest: &str, max_bytes: u64) -> Result<Vec<u8>, RemoteError> {
        self.by_digest("blob", digest, &[], max_bytes)
    }

    /// A document from the cache or the registry, which matches the digest.
    fn by_digest(
        &self,
        kind: &str,
        digest: &str,
        headers: &[(&str, &str)],
        max_bytes: u64,
    ) -> Result<Vec<u8>, RemoteError> {
        let place = || format!("{kind} {digest} of {}", self.reference);
        if !is_digest(digest) {
            let problem = Problem::Answer("its digest is not sha256: and 64 digits".into());
            return Err(problem.at(place()));
        }
        let cache = self.shared.options.cache.as_ref();
        if let Some(bytes) = cache.and_then(|cache| cache.document(digest, max_bytes))
            && sha256(&bytes) == digest
        {
            return Ok(bytes);
        }
        self.fetch_document(kind, digest, headers, max_bytes)
            .map_err(|problem| problem.at(place()))
    }

    /// Fetches a document, compares it with its digest, and keeps it. The mirrors are asked first.
    fn fetch_document(
        &self,
        kind: &str,
        digest: &str,
        headers: &[(&str, &str)],
        max_bytes: u64,
    ) -> Result<Vec<u8>, Problem> {
        let path = format!("{kind}s/{digest}");
        let check = |bytes: Vec<u8>| match sha256(&bytes) {
            found if found == digest => Ok(bytes),
            found => Err(Problem::Answer(format!(
                "the digest of the document is {found}"
            ))),
        };
        let sources = self.sources(&path).map_err(|error| error.problem)?;
        let from_mirror = sources.usable().find_map(|copy| {
            let budget = self.shared.of_mirror();
            let sent = copy.source.document(headers, max_bytes, &budget);
            sent.map_err(|fault| fault.problem)
                .and_then(check)
                .map_err(|problem| {
                    budget.give_up(&problem);
                    copy.failed(&problem, &copy.source.address().to_string());
                })
                .ok()
        });
        let bytes = match from_mirror {
            Some(bytes) => bytes,
            None => check(self.fetch(&sources.origin, headers, max_bytes)?)?,
        };
        if let Some(cache) = &self.shared.options.cache {
            cache.keep_document(digest, &bytes);
        }
        Ok(bytes)
    }

    /// Fetches a document that may change, with this address; without the registry, it is the last
    /// one.
    fn fetch_named(
        &self,
        address: &Address,
        place: &str,
        fetch: impl FnOnce() -> Result<Vec<u8>, Problem>,
    ) -> Result<Vec<u8>, RemoteError> {
        let fetched = fetch();
        let Some(cache) = &self.shared.options.cache else {
            return fetched.map_err(|problem| problem.at(place));
        };
        let name = address.with_secrets();
        let problem = match fetched {
            Ok(bytes) => {
                let digest = sha256(&bytes);
                cache.keep_document(&digest, &bytes);
                cache.record_name(&name, &address.to_string(), &digest);
                return Ok(bytes);
            }
            Err(problem) if problem.is_unreachable() => problem,
            Err(problem) => return Err(problem.at(place)),
        };
        let recorded = cache.recorded_target(&name);
        let Some((target, age)) = recorded.filter(|(target, _)| is_digest(target)) else {
            let why = "the cache has no record of this name";
            return Err(problem.and_not_cached(why).at(place));
        };
        match cache.document(&target, MANIFEST_BYTES) {
            Some(bytes) if sha256(&bytes) == target => {
                tracing::warn!(
                    "{place}: {problem}; using the document to which the name resolved {age} ago"
                );
                Ok(bytes)
            }
            _ => {
                let why = format!("{target} is not in the cache");
                Err(problem.and_not_cached(&why).at(place))
            }
        }
    }

    fn fetch(
        &self,
        source: &Source,
        headers: &[(&str, &str)],
        max_bytes: u64,
    ) -> Result<Vec<u8>, Problem> {
        let budget = self.shared.opening();
        budget.run(|budget| source.document(headers, max_bytes, budget))
    }

    /// The index of the manifests of this type that are attached to the one with this digest, in
    /// the order of the registry (distribution specification, "Listing Referrers"). Where the
    /// registry does not make such lists, it is the one that writers keep. Nothing attached is an
    /// index without manifests.
    pub fn referrers(&self, digest: &str, artifact_type: &str) -> Result<Vec<u8>, RemoteError> {
        let query = query(&[("artifactType", artifact_type)]);
        let first = self.source(&format!("referrers/{digest}?{query}"))?;
        let kept = self.source(&format!("manifests/{}", referrers_tag(digest)))?;
        let place = format!("referrers of {digest} of {}", self.reference);
        self.fetch_named(first.address(), &place, || {
            let listed = match self.listed(&first)? {
                Some(entries) => Some(entries),
                None => match self.fetch(&kept, &[("accept", INDEX)], MANIFEST_BYTES) {
                    Err(Problem::NotFound(404)) => None,
                    index => Some(entries(&index?)?),
                },
            };
            let mut entries = listed.unwrap_or_default();
            entries.retain(|entry| entry["artifactType"] == artifact_type);
            let index = json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": entries});
            Ok(index.to_string().into_bytes())
        })
    }

    /// The entries of a list of referrers, with those of all its pages; `None` if the registry does
    /// not make such lists. A page that is missing is an error: the entries would not be all.
    fn listed(&self, first: &Source) -> Result<Option<Vec<Value>>, Problem> {
        let mut all = Vec::new();
        let mut bytes_left = LIST_BYTES;
        let mut next = None;
        for _ in 0..MAX_PAGES {
            let source = next.as_ref().unwrap_or(first);
            let page = self.shared.opening().run(|budget| {
                let most = MANIFEST_BYTES.min(bytes_left);
                source.page(&[("accept", INDEX)], most, budget)
            })?;
            let Some(page) = page.filter(|page| page.is_json || next.is_some()) else {
                return match next {
                    None => Ok(None),
                    Some(_) => Err(Problem::Answer("a page of its list is missing".into())),
                };
            };
            all.append(&mut entries(&page.bytes)?);
            bytes_left -= page.bytes.len() as u64;
            let Some(address) = page.next else {
                return Ok(Some(all));
            };
            if !address.same_server(first.address()) {
                let why = "the next page of its list is on another server";
                return Err(Problem::Answer(why.into()));
            }
            next = Some(self.source_at(address));
        }
        let why = format!("its list has more than {MAX_PAGES} pages");
        Err(Problem::Answer(why))
    }

    /// Opens the blob with a digest (`sha256:HEX`), which is the expected BCoW file. If nothing is
    /// known of the file, the whole blob is read and compared with the digest.
    pub fn blob(
        &self,
        digest: &str,
        expected: Option<Expected>,
    ) -> Result<RemoteFile, RemoteError> {
        let path = format!("blobs/{digest}");
        let sources = match expected {
            Some(_) => self.sources(&path)?,
            None => Sources::new(self.source(&path)?),
        };
        let file = RemoteFile::open(&self.shared, &Arc::new(sources), expected)?;
        if expected.is_none() {
            check_whole(&file, digest)?;
        }
        Ok(file)
    }

    /// The bytes of the blob with a digest (`sha256:HEX`), which has this length. They are not
    /// checked: the caller compares them with the digest. Mirrors are asked first, at the first
    /// read. No connection is made yet.
    pub fn download(&self, digest: &str, length: u64) -> Result<Download, RemoteError> {
        let sources = self.sources(&format!("blobs/{digest}"))?;
        let shared = Arc::clone(&self.shared);
        Ok(Download::new(shared, sources, digest, length))
    }

    /// The name of the image, for messages.
    pub fn reference(&self) -> &Reference {
        &self.reference
    }

    /// The address of a blob, for messages.
    pub fn blob_name(&self, digest: &str) -> String {
        match self.address(&format!("blobs/{digest}")) {
            Ok(address) => address.to_string(),
            Err(_) => format!("{digest} of {}", self.reference),
        }
    }

    fn address(&self, path: &str) -> Result<Address, RemoteError> {
        let base = self.reference.base(&self.shared)?;
        let joined = base.join(path);
        joined.map_err(|problem| problem.at(self.reference.to_string()))
    }

    /// The registry and its mirrors.
    fn sources(&self, path: &str) -> Result<Sources, RemoteError> {
        let mut sources = Sources::new(self.source(path)?);
        for (mirror, auth) in &self.mirrors {
            let place = format!("/v2/{}/{path}", self.reference.repository);
            let access = Access::Registry(Arc::clone(auth));
            let added = sources.add(mirror, &place, &self.shared.client, access);
            added.map_err(|problem| problem.at(self.reference.to_string()))?;
        }
        Ok(sources)
    }

    fn source(&self, path: &str) -> Result<Source, RemoteError> {
        Ok(self.source_at(self.address(path)?))
    }

    /// A document or a file at an address of the registry.
    fn source_at(&self, address: Address) -> Source {
        let client = Arc::clone(&self.shared.client);
        let access = Access::Registry(Arc::clone(&self.auth));
        Source::new(client, address, access)
    }
}

/// The entries of an index. Programs in Go write an empty list as `null`.
pub(crate) fn entries(index: &[u8]) -> Result<Vec<Value>, Problem> {
    let invalid = || Problem::Answer("its list of referrers is invalid".into());
    let mut index: Value = serde_json::from_slice(index).map_err(|_| invalid())?;
    match index.get_mut("manifests").map(Value::take) {
        Some(Value::Array(entries)) => Ok(entries),
        Some(Value::Null) => Ok(Vec::new()),
        _ => Err(invalid()),
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
    if found == digest {
        Ok(())
    } else {
        Err(failed(format!("the digest of the file is {found}")))
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
            ("docker://Docker.io/app", "docker://docker.io/library/app"),
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

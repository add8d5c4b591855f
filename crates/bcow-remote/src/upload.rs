//! Writes images into a registry (OCI distribution specification 1.1, "Push"): first the blobs,
//! then the manifest.
//!
//! A blob that the repository has is not sent, and one that another repository of the registry has
//! is mounted. Any other goes in pieces; after a break, the registry says how much of it has
//! arrived. A registry that has forgotten the upload, or takes no pieces, gets the blob from the
//! start.

mod access;
pub(crate) mod session;

use std::sync::Arc;

use serde_json::{Value, json};
use ureq::http::Method;

use crate::address::{Address, query};
use crate::auth::{Auth, Keychain};
use crate::cache::{MANIFEST_BYTES, sha256};
use crate::client::Content;
use crate::error::{Fault, Problem, RemoteError, printable};
use crate::refusal::refusal;
use crate::registry::{ACCEPT, INDEX, Reference, referrers_tag};
use crate::remote::Remote;
use crate::retry_budget::RetryBudget;
use crate::source::is_redirect;
use access::Access;
use session::{Blob, Ended, PIECE_BYTES, Session, location};

pub use session::Open;

/// A blob of at most this length is sent in one request, without a session of pieces.
const SMALL_BYTES: u64 = 1 << 20;
/// How often a blob is sent from the start.
const MAX_SESSIONS: u32 = 5;
/// How often a list of referrers is written, if other writers change it at the same time.
const MAX_LISTS: u32 = 5;

/// How a blob came into the repository.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushed {
    /// The repository had it.
    There,
    /// The registry took it from another repository.
    Mounted,
    Sent,
}

/// A repository that takes an image.
pub struct Upload {
    access: Access,
    reference: Reference,
    /// Another repository of the registry, which may have some of the blobs.
    from: Option<String>,
}

impl Upload {
    /// The place of an image. No connection is made. `from` is the image whose parts it has, if
    /// that is in a registry too.
    pub fn new(
        remote: &Remote,
        reference: Reference,
        keychain: Arc<dyn Keychain>,
        from: Option<&Reference>,
    ) -> Result<Upload, RemoteError> {
        let shared = Arc::clone(&remote.shared);
        let base = reference.base(&shared)?;
        let from = from
            .filter(|from| from.same_server(&reference))
            .filter(|from| from.repository() != reference.repository())
            .map(|from| from.repository().to_owned());
        let repository = reference.repository();
        let auth = Auth::new(&shared.client, reference.key(), repository, &keychain)
            .and_push(repository, from.as_deref());
        Ok(Upload {
            access: Access { shared, base, auth },
            reference,
            from,
        })
    }

    /// The name of the image.
    pub fn reference(&self) -> &Reference {
        &self.reference
    }

    /// Fails unless the registry takes an upload from this user. Nothing is sent.
    pub fn require_access(&self) -> Result<(), RemoteError> {
        let begun = self.access.persist(|budget| self.begin_empty(budget));
        let location = begun.map_err(|problem| problem.at(self.reference.to_string()))?;
        self.abandon(&location);
        Ok(())
    }

    /// Whether the repository has the blob (`sha256:HEX`) of this length, or can take it from the
    /// other one. Nothing is sent.
    pub fn adopt(&self, digest: &str, length: u64) -> Result<bool, RemoteError> {
        let adopted = || {
            if self.has(digest, length)? {
                return Ok(true);
            }
            if self.from.is_none() {
                return Ok(false);
            }
            match self.access.persist(|budget| self.begin(digest, budget))? {
                None => Ok(true),
                Some(location) => {
                    self.abandon(&location);
                    Ok(false)
                }
            }
        };
        adopted().map_err(|problem| self.at_blob(problem, digest))
    }

    /// Brings a blob (`sha256:HEX`) of this length into the repository. `sent` learns of each byte
    /// that has arrived, once.
    pub fn blob(
        &self,
        digest: &str,
        length: u64,
        open: &Open<'_>,
        sent: &dyn Fn(u64),
    ) -> Result<Pushed, RemoteError> {
        let mut report = each_once(sent);
        let pushed = match self.has(digest, length) {
            Ok(true) => Ok(Pushed::There),
            Ok(false) => {
                let blob = Blob {
                    digest,
                    length,
                    open,
                };
                self.push(blob, &mut report)
            }
            Err(problem) => Err(problem),
        };
        let pushed = pushed.map_err(|problem| self.at_blob(problem, digest))?;
        report(length);
        tracing::debug!("{digest} of {}: {pushed:?}", self.reference);
        Ok(pushed)
    }

    /// The manifest or index that the name leads to; `None` if it leads to nothing.
    pub fn named(&self) -> Result<Option<Vec<u8>>, RemoteError> {
        match self.document(self.tag(), ACCEPT) {
            // Some registries deny what is not there. The upload then says what is allowed.
            Err(Problem::Denied { .. }) => Ok(None),
            found => found.map_err(|problem| problem.at(self.reference.to_string())),
        }
    }

    /// Writes the manifest, whose blobs are there. No name changes. The digest is `sha256:HEX`.
    pub fn store(&self, bytes: &[u8], media_type: &str, digest: &str) -> Result<(), RemoteError> {
        let stored = self.store_checked(bytes, media_type, digest);
        stored
            .map(drop)
            .map_err(|problem| self.at_manifest(problem, digest))
    }

    /// The same, and gives it the name.
    pub fn manifest(
        &self,
        bytes: &[u8],
        media_type: &str,
        digest: &str,
    ) -> Result<(), RemoteError> {
        let written = || {
            self.store_checked(bytes, media_type, digest)?;
            // The tag moves only to what the registry really has.
            self.put(self.tag(), bytes, media_type)
        };
        written()
            .map(drop)
            .map_err(|problem| self.at_manifest(problem, digest))
    }

    /// Writes the manifest, whose blobs are there, and attaches it to the manifest with the digest
    /// `subject`, which it names. No tag changes, except that of the list of referrers where the
    /// registry makes no such list itself. `entry` is the manifest's descriptor in this list.
    pub fn attach(
        &self,
        bytes: &[u8],
        media_type: &str,
        digest: &str,
        subject: &str,
        entry: &Value,
    ) -> Result<(), RemoteError> {
        let attached = || {
            if self.document(subject, ACCEPT)?.is_none() {
                return Err(Problem::NoSubject);
            }
            if self.store_checked(bytes, media_type, digest)? {
                Ok(())
            } else {
                self.list_referrer(subject, entry)
            }
        };
        attached().map_err(|problem| self.at_manifest(problem, digest))
    }

    /// Writes the manifest under its digest, and reads it back. Returns whether the registry lists
    /// what is attached to a manifest.
    fn store_checked(&self, bytes: &[u8], media_type: &str, digest: &str) -> Result<bool, Problem> {
        let lists = self.put(digest, bytes, media_type)?;
        let stored = self.document(digest, media_type)?.unwrap_or_default();
        match sha256(&stored) {
            found if found == digest => Ok(lists),
            found => Err(Problem::Answer(format!(
                "the manifest that it has stored has the digest {found}"
            ))),
        }
    }

    /// Adds an entry to the list of referrers that writers keep (distribution specification,
    /// "Pushing Manifests with Subject").
    fn list_referrer(&self, subject: &str, entry: &Value) -> Result<(), Problem> {
        let tag = referrers_tag(subject);
        let invalid = || Problem::Answer("its list of referrers is invalid".into());
        let is_entry = |other: &Value| other["digest"] == entry["digest"];
        // Two writers at one time can each lose the other's entry, and see that here.
        for _ in 0..MAX_LISTS {
            let mut list = match self.document(&tag, INDEX)? {
                Some(bytes) => serde_json::from_slice(&bytes).map_err(|_| invalid())?,
                None => json!({"schemaVersion": 2, "mediaType": INDEX, "manifests": []}),
            };
            let entries = list.get_mut("manifests").and_then(Value::as_array_mut);
            let entries = entries.ok_or_else(invalid)?;
            if entries.last().is_some_and(is_entry) {
                return Ok(());
            }
            entries.retain(|other| !is_entry(other));
            entries.push(entry.clone());
            self.put(&tag, list.to_string().as_bytes(), INDEX)?;
        }
        Err(Problem::Answer(
            "its list of referrers does not keep an entry".into(),
        ))
    }

    fn tag(&self) -> &str {
        self.reference.tag().unwrap_or("latest")
    }

    fn at_manifest(&self, problem: Problem, digest: &str) -> RemoteError {
        problem.at(format!("manifest {digest} of {}", self.reference))
    }

    fn at_blob(&self, problem: Problem, digest: &str) -> RemoteError {
        problem.at(format!("blob {digest} of {}", self.reference))
    }

    fn has(&self, digest: &str, length: u64) -> Result<bool, Problem> {
        self.access.persist(|budget| {
            let address = self.access.address(&format!("blobs/{digest}"))?;
            let nothing = Content::Nothing;
            let answer = self
                .access
                .send(Method::HEAD, &address, &[], nothing, budget)?;
            match answer.status {
                200 => match answer.header("content-length").map(str::trim) {
                    Some(found) if found != length.to_string() => Err(Problem::Answer(format!(
                        "the blob has {found} bytes there, and {length} here"
                    ))
                    .permanent()),
                    _ => Ok(true),
                },
                // To the place of the blob.
                status if is_redirect(status) => {
                    let target = address.join(answer.header("location").unwrap_or_default());
                    match target.map_err(Problem::permanent)? {
                        target if target == address => Err(refusal(answer)),
                        _ => Ok(true),
                    }
                }
                // Some registries deny what is not there. The upload then says what is allowed.
                403 | 404 => Ok(false),
                _ => Err(refusal(answer)),
            }
        })
    }

    /// Begins an upload; `None` if the registry has taken the blob from the other repository.
    fn begin(&self, digest: &str, budget: &RetryBudget) -> Result<Option<Address>, Fault> {
        let uploads = self.access.address("blobs/uploads/")?;
        if let Some(from) = &self.from {
            let query = query(&[("mount", digest), ("from", from)]);
            let address = uploads.with_query(&query).map_err(Problem::permanent)?;
            match self
                .access
                .send(Method::POST, &address, &[], Content::Bytes(&[]), budget)
            {
                Ok(answer) if answer.status == 201 => return Ok(None),
                Ok(answer) if answer.status == 202 => {
                    return location(&answer, &address).map(Some);
                }
                // The other repository may be closed to this user.
                Ok(answer) => tracing::debug!("not mounted: status {}", answer.status),
                Err(fault) => tracing::debug!("not mounted: {}", fault.problem),
            }
        }
        self.begin_empty(budget).map(Some)
    }

    /// Begins an upload of any blob.
    fn begin_empty(&self, budget: &RetryBudget) -> Result<Address, Fault> {
        let uploads = self.access.address("blobs/uploads/")?;
        let answer = self
            .access
            .send(Method::POST, &uploads, &[], Content::Bytes(&[]), budget)?;
        match answer.status {
            202 => location(&answer, &uploads),
            405 => Err(Problem::ReadOnly.permanent()),
            _ => Err(refusal(answer)),
        }
    }

    /// Ends an upload that is not used. The registry does so too after some days.
    fn abandon(&self, location: &Address) {
        let budget = self.access.shared.opening();
        let ended = self
            .access
            .send(Method::DELETE, location, &[], Content::Nothing, &budget);
        if let Err(fault) = ended {
            tracing::debug!("an unused upload stays: {}", fault.problem);
        }
    }

    fn push(&self, blob: Blob<'_>, report: &mut dyn FnMut(u64)) -> Result<Pushed, Problem> {
        let Blob { digest, length, .. } = blob;
        let mut in_pieces = length > SMALL_BYTES;
        let mut piece_bytes = PIECE_BYTES;
        let mut sessions = 0;
        let mut budget = self.access.shared.uploading();
        loop {
            let Some(location) = self.access.persist(|budget| self.begin(digest, budget))? else {
                return Ok(Pushed::Mounted);
            };
            let mut session = Session::new(&self.access, blob, location);
            let result = if in_pieces {
                session.in_pieces(&mut piece_bytes, report)
            } else {
                session.whole()
            };
            let problem = match result {
                Ok(()) => return Ok(Pushed::Sent),
                Err(Ended::Failed(problem)) => return Err(problem),
                Err(Ended::NoPieces(problem)) => {
                    in_pieces = false;
                    problem
                }
                Err(Ended::Lost(problem)) => problem,
            };
            if problem.is_throttling() {
                budget.wait(problem.clone().transient())?;
            } else {
                sessions += 1;
                if sessions == MAX_SESSIONS {
                    return Err(problem);
                }
            }
            tracing::debug!("{digest} is sent again from its start: {problem}");
            // The blob may be complete although the answer was lost.
            if self.has(digest, length)? {
                return Ok(Pushed::Sent);
            }
        }
    }

    /// Writes a manifest. Returns whether the registry lists what is attached to a manifest.
    fn put(&self, name: &str, bytes: &[u8], media_type: &str) -> Result<bool, Problem> {
        self.access.persist(|budget| {
            let address = self.access.address(&format!("manifests/{name}"))?;
            let headers = [("content-type", media_type)];
            let content = Content::Bytes(bytes);
            let answer = self
                .access
                .send(Method::PUT, &address, &headers, content, budget)?;
            let digest = sha256(bytes);
            match (answer.status, answer.header("docker-content-digest")) {
                (200..=204, Some(found)) if found.trim() != digest => Err(Problem::Answer(
                    format!("the registry counts the manifest as {}", printable(found)),
                )
                .permanent()),
                (200..=204, _) => Ok(answer.header("oci-subject").is_some()),
                (405, _) => Err(Problem::ReadOnly.permanent()),
                _ => Err(refusal(answer)),
            }
        })
    }

    /// A manifest or index; `None` if it is missing.
    fn document(&self, name: &str, accept: &str) -> Result<Option<Vec<u8>>, Problem> {
        self.access.persist(|budget| {
            let address = self.access.address(&format!("manifests/{name}"))?;
            let (headers, nothing) = ([("accept", accept)], Content::Nothing);
            let answer = self
                .access
                .send(Method::GET, &address, &headers, nothing, budget)?;
            match answer.status {
                200 => answer.document(MANIFEST_BYTES).map(Some),
                404 => Ok(None),
                _ => Err(refusal(answer)),
            }
        })
    }
}

/// Calls `sent` with each byte once, also if a count of bytes begins anew.
pub(crate) fn each_once(sent: &dyn Fn(u64)) -> impl FnMut(u64) {
    let mut reported = 0;
    move |at| {
        if at > reported {
            sent(at - reported);
            reported = at;
        }
    }
}

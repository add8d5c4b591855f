//! Images in registries: finds the manifest for a platform, through indexes.
//!
//! A [`Repository`] makes the connections.

use std::io;
use std::sync::Arc;

use serde::Deserialize;

use crate::archive::Files;
use crate::blob::read_error;
use crate::digest::Digest;
use crate::error::{ConvertError, parse_digest};
use crate::layout::{self, Descriptor, Form, IMAGE, Manifests, OCI_INDEX};
use crate::left_out::{Annotations, FromIndex};
use crate::null::null_as_absent;
use crate::platform::Platform;
use crate::repository::Repository;

/// Number of attached images that are looked at.
const MAX_REFERRERS: usize = 16;
/// The begin of the media types of Docker's first form of manifests.
const SCHEMA_1: &str = "application/vnd.docker.distribution.manifest.v1";

/// An image in a registry.
#[derive(Debug, Clone)]
pub enum RegistryImage {
    /// An image in BCoW form.
    Bcow(BcowImage),
    /// An ordinary image: a source of conversions.
    Ordinary(OrdinaryImage),
}

/// The manifest of an image in BCoW form.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BcowImage {
    /// The manifest.
    pub manifest: Vec<u8>,
    /// The stack that the manifest names.
    pub stack: RemoteStack,
    /// What the indexes that lead to the manifest have beside it.
    pub from_index: FromIndex,
}

/// The stack of an image in BCoW form, as its manifest describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteStack {
    /// Digest of the file.
    pub digest: Digest,
    /// Length of the file in bytes.
    pub bytes: u64,
    /// The root of the file's Merkle tree. Manifests of earlier versions of bcow do not have it.
    pub merkle_root: Option<[u8; 32]>,
}

/// The manifest of an ordinary image, and where its blobs are.
#[derive(Debug, Clone)]
pub struct OrdinaryImage {
    pub(crate) repository: Arc<dyn Repository>,
    /// The manifest.
    pub(crate) manifest: Vec<u8>,
    pub(crate) digest: Digest,
    /// The platform that the index gives for the manifest, if there is an index.
    pub(crate) platform: Option<Platform>,
    /// What the indexes that lead to the manifest have beside it.
    pub(crate) from_index: FromIndex,
}

impl OrdinaryImage {
    /// The name that leads to the image.
    pub fn name(&self) -> String {
        self.repository.name()
    }

    /// The bytes of the manifest.
    pub fn manifest(&self) -> &[u8] {
        &self.manifest
    }
}

/// Two values are equal if they have the same manifest and the same name.
impl PartialEq for OrdinaryImage {
    fn eq(&self, other: &Self) -> bool {
        self.digest == other.digest && self.name() == other.name()
    }
}

impl Eq for OrdinaryImage {}

/// A manifest or an index. All documents of registries have some of these fields.
#[derive(Deserialize)]
struct Document {
    #[serde(rename = "schemaVersion", default, deserialize_with = "null_as_absent")]
    schema_version: u64,
    #[serde(rename = "mediaType", default)]
    media_type: Option<String>,
    #[serde(default)]
    manifests: Option<Vec<Descriptor>>,
    #[serde(default)]
    layers: Option<Vec<Descriptor>>,
    #[serde(default)]
    subject: Option<Descriptor>,
    #[serde(default)]
    annotations: Option<Annotations>,
}

/// Finds the image that the name of `repository` leads to: through indexes, for `platform`, or for
/// this machine's.
pub fn find_in_registry(
    repository: Arc<dyn Repository>,
    platform: Option<&Platform>,
) -> Result<RegistryImage, ConvertError> {
    let root = Root::read(&repository)?;
    let name = repository.name();
    let Some(manifests) = root.document.manifests else {
        return image_of(
            repository,
            root.bytes,
            root.document,
            None,
            FromIndex::default(),
        );
    };
    let files = Files::Registry(Arc::clone(&repository));
    let manifests = Manifests::of(&files, manifests, root.document.annotations)?;
    let (chosen, from_index) = manifests.choose(&name, platform, Form::Bcow)?;
    let (place, bytes) = layout::manifest_bytes(&files, "manifest", &chosen)?;
    let document: Document = layout::parse(&place, &bytes)?;
    check_form(&place, &document)?;
    if document.manifests.is_some() {
        return Err(ConvertError::layout(
            place,
            "it is listed as a manifest, and is an index",
        ));
    }
    image_of(repository, bytes, document, chosen.platform, from_index)
}

/// The document that the name of a repository leads to.
struct Root {
    bytes: Vec<u8>,
    document: Document,
}

impl Root {
    fn read(repository: &Arc<dyn Repository>) -> Result<Self, ConvertError> {
        let name = repository.name();
        let bytes = repository
            .manifest(None)
            .map_err(|source| read_error("read", &name, source))?;
        let document: Document = layout::parse(&name, &bytes)?;
        check_form(&name, &document)?;
        Ok(Root { bytes, document })
    }
}

/// Finds the index that the name of `repository` leads to, with all that it lists; `None` if the
/// name leads to one manifest. The first of the indexes is the one of the name.
pub(crate) fn index_in_registry(
    repository: &Arc<dyn Repository>,
) -> Result<Option<Manifests>, ConvertError> {
    let Root { bytes, document } = Root::read(repository)?;
    let Some(entries) = document.manifests else {
        return Ok(None);
    };
    let root = Descriptor {
        media_type: document.media_type.unwrap_or_else(|| OCI_INDEX.to_owned()),
        digest: Digest::of(&bytes).to_string(),
        size: bytes.len() as u64,
        ..Descriptor::default()
    };
    let files = Files::Registry(Arc::clone(repository));
    let mut manifests = Manifests::of(&files, entries, document.annotations)?;
    manifests.indexes.insert(0, root);
    Ok(Some(manifests))
}

/// The image of a manifest.
fn image_of(
    repository: Arc<dyn Repository>,
    manifest: Vec<u8>,
    document: Document,
    of_index: Option<Platform>,
    from_index: FromIndex,
) -> Result<RegistryImage, ConvertError> {
    let layers = document.layers.unwrap_or_default();
    Ok(match bcow_stack(&repository.name(), &layers)? {
        Some(stack) => RegistryImage::Bcow(BcowImage {
            manifest,
            stack,
            from_index,
        }),
        None => RegistryImage::Ordinary(OrdinaryImage {
            repository,
            digest: Digest::of(&manifest),
            manifest,
            platform: of_index,
            from_index,
        }),
    })
}

/// Finds the image in BCoW form that is attached to an ordinary image; of several, the last of the
/// index.
pub fn find_attached(image: &OrdinaryImage) -> Result<Option<BcowImage>, ConvertError> {
    let name = image.name();
    let attached = format!("what is attached to {name}");
    let unreadable = |source| read_error("read", &attached, source);
    let repository = &image.repository;
    let index = repository.referrers(&image.digest, IMAGE);
    let place = format!("referrers of {name}");
    let index: Document = layout::parse(&place, &index.map_err(unreadable)?)?;
    let ours = index.manifests.unwrap_or_default().into_iter().rev();
    let ours = ours.filter(|entry| entry.artifact_type.as_deref() == Some(IMAGE));
    for (number, entry) in ours.enumerate() {
        if number == MAX_REFERRERS {
            let why = format!("none of the last {MAX_REFERRERS} attached images is usable");
            return Err(ConvertError::layout(&place, why));
        }
        let digest = parse_digest(&name, &entry.digest)?;
        let manifest = match repository.manifest(Some(&digest)) {
            // A list may name what was deleted.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                tracing::warn!("{name}: an attached image is listed, and missing: {error}");
                continue;
            }
            manifest => manifest.map_err(unreadable)?,
        };
        let place = format!("manifest {} of {name}", digest.short());
        let document: Document = layout::parse(&place, &manifest)?;
        // An index can list anything; the manifest says what it belongs to.
        let subject = document.subject.map(|subject| subject.digest);
        if subject != Some(image.digest.to_string()) {
            tracing::debug!("{place} belongs to another image");
            continue;
        }
        if let Some(stack) = bcow_stack(&place, &document.layers.unwrap_or_default())? {
            return Ok(Some(BcowImage {
                manifest,
                stack,
                from_index: FromIndex::default(),
            }));
        }
    }
    Ok(None)
}

/// Refuses what is neither a manifest nor an index.
fn check_form(name: &str, document: &Document) -> Result<(), ConvertError> {
    let media_type = document.media_type.as_deref().unwrap_or_default();
    if document.schema_version == 1 || media_type.starts_with(SCHEMA_1) {
        return Err(ConvertError::refused(
            format!("{name} is in Docker's schema 1, which is obsolete and not supported"),
            "push the image again with a current tool; `skopeo copy --format oci` converts it",
        ));
    }
    if !media_type.is_empty() && !layout::is_manifest_or_index(media_type) {
        return Err(ConvertError::media_type(name, media_type));
    }
    match (&document.manifests, &document.layers) {
        (Some(_), Some(_)) => Err(ConvertError::layout(name, "it has manifests and layers")),
        _ => Ok(()),
    }
}

/// The stack among the layers of a manifest, which is called `place` in messages.
fn bcow_stack(place: &str, layers: &[Descriptor]) -> Result<Option<RemoteStack>, ConvertError> {
    let Some(stack) = layout::stack_of(place, layers)? else {
        return Ok(None);
    };
    Ok(Some(RemoteStack {
        digest: parse_digest(place, &stack.digest)?,
        bytes: stack.size,
        merkle_root: layout::merkle_root(place, stack)?,
    }))
}

//! Converts the images of an index, one after the other, and makes an index of the new ones.

use std::collections::HashMap;
use std::path::Path;

use serde::Serialize;
use serde_json::{Value, json};

use super::manifest::{SOURCE_MANIFEST, TOOL};
use super::{LayoutOptions, LayoutReport, Made, check_options, convert_image, refuse_to_replace};
use crate::digest::Digest;
use crate::error::ConvertError;
use crate::index::{ImageIndex, Platforms};
use crate::layout::write::{LayoutWriter, ManifestEntry, NewBlob, json_bytes};
use crate::layout::{self, Candidate, IMAGE, OCI_INDEX};
use crate::left_out::{Annotations, FromIndex, LeftOut};
use crate::metadata::tool;
use crate::options::{ConvertOptions, Progress};

/// The annotation of an attestation's descriptor with the digest of the manifest that it is of.
const ATTESTED: &str = "vnd.docker.reference.digest";

/// What becomes of the attestations of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attestations {
    /// They are copied as they are. The index says to which new image each belongs.
    Keep,
    /// They are left out.
    Drop,
}

/// The result of the conversion of an index.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct IndexReport {
    /// The source argument.
    pub source: String,
    /// Digest of the new index.
    pub index: Digest,
    /// Name in the layout.
    pub reference: Option<String>,
    /// The new images, in the order of the source's index.
    pub images: Vec<LayoutReport>,
    /// Number of attestations that were kept.
    pub attestations: u64,
    /// The parts of the source that the new index does not have.
    pub left_out: LeftOut,
}

/// Converts the images of an index for some platforms, and writes an index of them.
///
/// The index appears when all images are complete, or not at all. Layers that several images have
/// are converted once.
pub fn convert_index(
    index: &ImageIndex,
    platforms: &Platforms,
    attestations: Attestations,
    layout: &LayoutOptions,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<IndexReport, ConvertError> {
    check_options(layout, options)?;
    if let Some(source) = &index.layout {
        refuse_to_replace(source, index.reference.as_deref(), layout)?;
    }
    let (wanted, mut left_out) = index.choose(platforms)?;
    let writer = LayoutWriter::open(&layout.place, options.cancel.clone())?;
    let mut new = NewIndex {
        made: Made::default(),
        converted: HashMap::new(),
        descriptors: Vec::new(),
    };
    let mut images = Vec::new();
    for candidate in wanted {
        let image = layout::of_index(&index.files, candidate)?;
        progress.phase(&candidate.descriptor.platform_name());
        let bytes = image.layers.iter().map(|layer| layer.blob.length());
        progress.total(bytes.sum());
        let converted = convert_image(&image, layout, &writer, &mut new.made, options, progress);
        let (mut entry, mut report) = converted?;
        // The index decides for which platform an image is: the same one can be for several.
        if let Some(platform) = &candidate.descriptor.platform {
            entry.platform = Some(platform.clone());
            report.platform = Some(platform.clone());
        }
        report.source = Some(index.name.clone());
        report.reference = None;
        new.add(candidate, entry);
        images.push(report);
    }
    let mut kept = 0;
    for attestation in &index.manifests.attestations {
        if attestations == Attestations::Keep && new.attest(index, attestation, &writer)? {
            kept += 1;
        } else {
            left_out.attestations += 1;
        }
    }
    let document = new.document(index, options)?;
    let document = writer.manifest(&document, OCI_INDEX)?;
    let digest = document.digest.clone();
    let entry = ManifestEntry {
        artifact_type: Some(IMAGE),
        reference: layout.place.reference.clone(),
        ..ManifestEntry::of(&document)
    };
    new.made.blobs.push(document);
    writer.publish(new.made.blobs, &entry, progress)?;
    Ok(IndexReport {
        source: index.name.clone(),
        index: digest,
        reference: layout.place.reference.clone(),
        images,
        attestations: kept,
        left_out,
    })
}

/// An index that is made.
struct NewIndex {
    made: Made,
    /// The digests of the new manifests, by those of the source.
    converted: HashMap<String, Digest>,
    descriptors: Vec<Value>,
}

impl NewIndex {
    /// Adds a new image.
    fn add(&mut self, source: &Candidate, entry: ManifestEntry) {
        let digest = source.descriptor.digest.clone();
        self.converted.insert(digest, entry.digest.clone());
        let entry = ManifestEntry {
            annotations: own_annotations(source),
            reference: None,
            ..entry
        };
        self.descriptors.push(entry.descriptor());
    }

    /// Copies an attestation of an image that was converted. The result is `false` for one of
    /// another image.
    fn attest(
        &mut self,
        index: &ImageIndex,
        attestation: &Candidate,
        writer: &LayoutWriter,
    ) -> Result<bool, ConvertError> {
        let descriptor = &attestation.descriptor;
        let attested = descriptor.annotation(ATTESTED);
        let Some(converted) = attested.and_then(|digest| self.converted.get(digest)) else {
            return Ok(false);
        };
        let (place, bytes) = layout::manifest_bytes(&index.files, "attestation", descriptor)?;
        let document: layout::ManifestDocument = layout::parse(&place, &bytes)?;
        for part in [&document.config].into_iter().chain(&document.layers) {
            let blob: NewBlob = writer.copy_of(&index.files, "attestation", part)?;
            self.made.blobs.push(blob);
        }
        let manifest = writer.manifest(&bytes, &descriptor.media_type)?;
        let mut annotations = own_annotations(attestation);
        annotations.insert(ATTESTED.to_owned(), converted.to_string());
        let entry = ManifestEntry {
            platform: descriptor.platform.clone(),
            annotations,
            ..ManifestEntry::of(&manifest)
        };
        self.descriptors.push(entry.descriptor());
        self.made.blobs.push(manifest);
        Ok(true)
    }

    fn document(
        &self,
        source: &ImageIndex,
        options: &ConvertOptions,
    ) -> Result<Vec<u8>, ConvertError> {
        let mut annotations = source.manifests.annotations.clone();
        annotations.insert(TOOL.to_owned(), tool(options));
        if let Some(root) = source.root() {
            annotations.insert(SOURCE_MANIFEST.to_owned(), root.digest.clone());
        }
        let document = json!({
            "schemaVersion": 2,
            "mediaType": OCI_INDEX,
            "manifests": self.descriptors,
            "annotations": annotations,
        });
        json_bytes(&document, Path::new("index"))
    }
}

/// The annotations of a descriptor that are kept.
fn own_annotations(candidate: &Candidate) -> Annotations {
    let mut own = FromIndex::default();
    own.annotate(candidate.descriptor.annotations.as_ref());
    own.annotations
}

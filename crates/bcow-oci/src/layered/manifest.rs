//! The manifest of a layered image: OCI image specification 1.1, with media types of bcow.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::stored::{LayerRequest, StoredLayer};
use crate::digest::{Digest, hex};
use crate::error::ConvertError;
use crate::image::{Image, ImageConfig};
use crate::layer::LayerInput;
use crate::layout::write::{ManifestEntry, NewBlob, annotated, descriptor, json_bytes};
use crate::layout::{self, IMAGE, LAYER, MERKLE_ROOT, OCI_CONFIG, OCI_MANIFEST, STACK};
use crate::left_out::Annotations;
use crate::metadata::tool;
use crate::null::null_as_absent;
use crate::options::ConvertOptions;

/// The digest of a layer's uncompressed archive.
const DIFF_ID: &str = "io.bcow.layer.diff-id";
/// The options that the layer was made with, as JSON.
const OPTIONS: &str = "io.bcow.layer.options";
/// The version of bcow that made the layer.
pub(crate) const TOOL: &str = "io.bcow.tool";
/// Digest, media type and size of the source blob of the layer. The digest is a claim on which
/// later conversions rely, so it is written only for a blob that was checked.
const SOURCE_DIGEST: &str = "io.bcow.source.digest";
const SOURCE_MEDIA_TYPE: &str = "io.bcow.source.media-type";
const SOURCE_SIZE: &str = "io.bcow.source.size";
/// The manifest that the image was made of.
pub(crate) const SOURCE_MANIFEST: &str = "io.bcow.source.manifest";
const CREATED: &str = "org.opencontainers.image.created";

/// The input of a manifest.
pub(crate) struct Manifest<'m> {
    pub config: &'m NewBlob,
    /// Lowest first.
    pub layers: Vec<(&'m StoredLayer, &'m LayerInput)>,
    pub stack: &'m NewBlob,
    /// The root of the stack's Merkle tree, in hexadecimal.
    pub stack_root: &'m str,
    pub source: Option<&'m Digest>,
    /// The descriptor of the manifest that this one is attached to.
    pub subject: Option<Value>,
    /// The annotations of the source.
    pub annotations: &'m Annotations,
    pub options: &'m ConvertOptions,
}

impl Manifest<'_> {
    pub(crate) fn to_json(&self) -> Result<Vec<u8>, ConvertError> {
        let tool = tool(self.options);
        let mut layers: Vec<Value> = self
            .layers
            .iter()
            .map(|(layer, input)| {
                let mut all = BTreeMap::from([
                    (DIFF_ID, layer.diff_id.to_string()),
                    (OPTIONS, layer.options.to_string()),
                    (TOOL, tool.clone()),
                    (MERKLE_ROOT, hex(&layer.merkle_root)),
                ]);
                let checked = layer.checked_source.as_ref();
                let checked = checked.filter(|digest| input.digest.as_ref() == Some(digest));
                if let Some(digest) = checked {
                    all.insert(SOURCE_DIGEST, digest.to_string());
                }
                if let Some(media_type) = &input.media_type {
                    all.insert(SOURCE_MEDIA_TYPE, media_type.clone());
                }
                if let (Some(_), Some(size)) = (checked, input.size) {
                    all.insert(SOURCE_SIZE, size.to_string());
                }
                annotated(LAYER, &layer.digest, layer.file_bytes, &all)
            })
            .collect();
        let stack = BTreeMap::from([
            (TOOL, tool.clone()),
            (MERKLE_ROOT, self.stack_root.to_owned()),
        ]);
        layers.push(annotated(
            STACK,
            &self.stack.digest,
            self.stack.size,
            &stack,
        ));
        let mut annotations = self.annotations.clone();
        annotations.insert(TOOL.to_owned(), tool);
        if let Some(source) = self.source {
            annotations.insert(SOURCE_MANIFEST.to_owned(), source.to_string());
        }
        let created = self.options.source_date_epoch.and_then(crate::rfc3339);
        if let Some(created) = created {
            annotations.insert(CREATED.to_owned(), created);
        }
        let mut all = json!({
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": IMAGE,
            "config": descriptor(OCI_CONFIG, &self.config.digest, self.config.size),
            "layers": layers,
            "annotations": annotations,
        });
        if let Some(subject) = &self.subject {
            all["subject"] = subject.clone();
        }
        json_bytes(&all, Path::new("manifest"))
    }
}

/// The manifest's entry in the index.
pub(crate) fn entry(
    manifest: &NewBlob,
    image: &Image,
    config: &[u8],
    reference: Option<String>,
) -> ManifestEntry {
    let from_config = || ImageConfig::parse("config", config).ok()?.platform;
    ManifestEntry {
        artifact_type: Some(IMAGE),
        platform: image.platform.clone().or_else(from_config),
        reference,
        ..ManifestEntry::of(manifest)
    }
}

/// A BCoW layer in a layout, as its manifest describes it.
#[derive(Debug, Clone)]
pub(crate) struct LayoutLayer {
    pub digest: Digest,
    pub size: u64,
    pub diff_id: String,
    /// Digest of the source blob, if it was checked.
    pub source: Option<String>,
    options: serde_json::Value,
    tool: String,
}

impl LayoutLayer {
    /// Whether, by its manifest, the layer was made with these options by this version.
    pub(crate) fn is_made_as(&self, request: &LayerRequest) -> bool {
        self.tool == request.tool && self.options == request.options
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    // The type is in the manifest and not only in the index, because some tools that copy images
    // drop fields of the index.
    #[serde(default, deserialize_with = "null_as_absent")]
    artifact_type: String,
    #[serde(default, deserialize_with = "null_as_absent")]
    layers: Vec<layout::Descriptor>,
}

/// The BCoW layers of all images in a layout; none where there is no layout.
pub(crate) fn layers_in(directory: &Path) -> Result<Vec<LayoutLayer>, ConvertError> {
    let mut found = Vec::new();
    layout::manifests_in(directory, |bytes| {
        // Documents that are not manifests are skipped.
        let document = serde_json::from_slice::<Document>(&bytes);
        if let Ok(document) = document
            && document.artifact_type == IMAGE
        {
            found.extend(document.layers.iter().filter_map(described));
        }
    })?;
    Ok(found)
}

/// The layer of a descriptor; `None` if the descriptor is not of a layer, or lacks an annotation.
fn described(layer: &layout::Descriptor) -> Option<LayoutLayer> {
    let annotation = |key| layer.annotation(key).map(str::to_owned);
    if layer.media_type != LAYER {
        return None;
    }
    Some(LayoutLayer {
        digest: layer.digest.parse::<Digest>().ok()?,
        size: layer.size,
        diff_id: annotation(DIFF_ID)?,
        source: annotation(SOURCE_DIGEST),
        options: serde_json::from_str(&annotation(OPTIONS)?).ok()?,
        tool: annotation(TOOL)?,
    })
}

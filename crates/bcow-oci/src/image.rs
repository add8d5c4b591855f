//! The image of a source other than `dir:`: a configuration and layers.

use serde::Deserialize;
use serde_json::{Value, json};

use crate::digest::{DiffId, Digest};
use crate::error::{ConvertError, parse_digest};
use crate::layer::LayerInput;
use crate::left_out::{Annotations, LeftOut};
use crate::null::{null_as_absent, some_fields};
use crate::platform::Platform;
use crate::text::plural;

/// An image whose layers are not yet read.
#[derive(Debug, Default)]
pub(crate) struct Image {
    pub manifest: Option<Digest>,
    /// Media type and length of the manifest.
    pub manifest_form: Option<(String, u64)>,
    /// The image's name in the source, if it has one.
    pub reference: Option<String>,
    pub platform: Option<Platform>,
    /// The original OCI configuration.
    pub config: Option<ImageConfig>,
    /// Lowest first.
    pub layers: Vec<LayerInput>,
    /// The annotations of the manifest and of the indexes that lead to it.
    pub annotations: Annotations,
    /// The parts of the source that are not in this image.
    pub left_out: LeftOut,
}

/// An image configuration.
#[derive(Debug)]
pub(crate) struct ImageConfig {
    /// The original bytes.
    pub bytes: Vec<u8>,
    pub document: Value,
    pub platform: Option<Platform>,
    pub diff_ids: Vec<DiffId>,
}

#[derive(Deserialize)]
struct ConfigDocument {
    #[serde(flatten)]
    platform: Platform,
    #[serde(default, deserialize_with = "null_as_absent")]
    rootfs: RootDocument,
}

#[derive(Default, Deserialize)]
struct RootDocument {
    #[serde(default, deserialize_with = "null_as_absent")]
    diff_ids: Vec<String>,
}

impl ImageConfig {
    pub(crate) fn parse(place: &str, bytes: &[u8]) -> Result<ImageConfig, ConvertError> {
        let bad = |error: serde_json::Error| {
            ConvertError::layout(place, format!("invalid document: {error}"))
        };
        let document: Value = serde_json::from_slice(bytes).map_err(bad)?;
        let fields = ConfigDocument::deserialize(&document).map_err(bad)?;
        let diff_ids = fields.rootfs.diff_ids.iter();
        let diff_ids = diff_ids.map(|text| Ok(DiffId(parse_digest(place, text)?)));
        let platform = Some(fields.platform)
            .filter(|platform| !platform.os.is_empty() && !platform.architecture.is_empty());
        Ok(ImageConfig {
            bytes: bytes.to_vec(),
            document,
            platform,
            diff_ids: diff_ids.collect::<Result<_, ConvertError>>()?,
        })
    }

    /// The number of layers must equal the number of diffIDs.
    pub(crate) fn check_layers(&self, place: &str, layers: usize) -> Result<(), ConvertError> {
        match self.diff_ids.len() {
            count if count == layers => Ok(()),
            count => {
                let layers = plural(layers as u64, "layer");
                let problem = format!("it has {layers}, but its configuration lists {count}");
                Err(ConvertError::layout(place, problem))
            }
        }
    }
}

/// The configuration of an image that records none: the required fields.
pub(crate) fn minimal_config(platform: Platform, diff_ids: &[&DiffId]) -> Value {
    let rootfs = json!({"type": "layers", "diff_ids": diff_ids});
    some_fields([
        ("architecture", Some(json!(platform.architecture))),
        ("os", Some(json!(platform.os))),
        ("config", Some(json!({}))),
        ("rootfs", Some(rootfs)),
        ("variant", platform.variant.map(|variant| json!(variant))),
    ])
    .into()
}

/// The name of a layer in messages.
pub(crate) fn layer_name(index: usize, count: usize, digest: Option<&Digest>) -> String {
    match digest {
        Some(digest) => format!("layer {} of {count} ({})", index + 1, digest.short()),
        None => format!("layer {} of {count}", index + 1),
    }
}

//! What an image's metadata records about the files below it.

use bcow::format::is_plain_name;

use crate::digest::Digest;

/// What identifies a layer, from a stack's metadata (spec section 13).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LayerFacts {
    /// Digest of the file.
    pub digest: Digest,
    /// `file_bytes` of the file's header.
    pub file_bytes: u64,
    /// `merkle_root` of the file's header.
    pub merkle_root: [u8; 32],
}

/// What an image's metadata records about a file below it that the image names by digest (spec
/// section 13, `backings`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackingFacts {
    /// What identifies the file.
    pub facts: LayerFacts,
    /// The file name that the file had when the image was written.
    pub name: Option<String>,
}

/// The layers in a stack's metadata; empty for an image that is not a stack. A layer without one of
/// the required fields is left out.
pub(super) fn stack_facts(metadata: &serde_json::Value) -> Vec<LayerFacts> {
    let layers = metadata["layers"].as_array().map_or(&[][..], Vec::as_slice);
    layers.iter().filter_map(facts_of).collect()
}

fn facts_of(object: &serde_json::Value) -> Option<LayerFacts> {
    let root: Digest = object["merkle_root"].as_str()?.parse().ok()?;
    Some(LayerFacts {
        digest: object["digest"].as_str()?.parse().ok()?,
        file_bytes: object["file_bytes"].as_u64()?,
        merkle_root: root.sha256()?,
    })
}

/// The files below an image that its metadata names by digest. A file without one of the required
/// fields is left out; a name that is not a plain file name counts as no name.
pub fn backing_facts(metadata: &serde_json::Value) -> Vec<BackingFacts> {
    let backings = metadata["backings"].as_array();
    backings
        .map_or(&[][..], Vec::as_slice)
        .iter()
        .filter_map(|backing| {
            let name = backing["name"].as_str().filter(|name| is_plain_name(name));
            Some(BackingFacts {
                facts: facts_of(backing)?,
                name: name.map(str::to_owned),
            })
        })
        .collect()
}

//! The files below an image, as the metadata of the image records them (spec section 13).

use bcow::format::is_plain_name;

use crate::digest::Digest;

/// A file below an image: its digest, and the header fields that a lookup compares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedFile {
    /// Digest of the file.
    pub digest: Digest,
    /// `file_bytes` of the file's header.
    pub file_bytes: u64,
    /// `merkle_root` of the file's header.
    pub merkle_root: [u8; 32],
}

/// A member of `backings` in the metadata: a file that the backing table names by digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedBacking {
    /// The file.
    pub file: RecordedFile,
    /// Name of the file when the image was written.
    pub name: Option<String>,
}

/// The members of `layers` in a stack's metadata; empty for an image that is not a stack. A member
/// without a required field is omitted.
pub(super) fn recorded_layers(metadata: &serde_json::Value) -> Vec<RecordedFile> {
    let layers = metadata["layers"].as_array().map_or(&[][..], Vec::as_slice);
    layers.iter().filter_map(recorded_file).collect()
}

fn recorded_file(object: &serde_json::Value) -> Option<RecordedFile> {
    let root: Digest = object["merkle_root"].as_str()?.parse().ok()?;
    Some(RecordedFile {
        digest: object["digest"].as_str()?.parse().ok()?,
        file_bytes: object["file_bytes"].as_u64()?,
        merkle_root: root.sha256()?,
    })
}

/// The members of `backings` in an image's metadata. A member without a required field is omitted.
/// A `name` that is not a plain file name is ignored.
pub fn recorded_backings(metadata: &serde_json::Value) -> Vec<RecordedBacking> {
    let backings = metadata["backings"].as_array();
    backings
        .map_or(&[][..], Vec::as_slice)
        .iter()
        .filter_map(|backing| {
            let name = backing["name"].as_str().filter(|name| is_plain_name(name));
            Some(RecordedBacking {
                file: recorded_file(backing)?,
                name: name.map(str::to_owned),
            })
        })
        .collect()
}

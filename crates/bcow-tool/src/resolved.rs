//! What `bcow inspect --resolve --json` prints, checked.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::registry::is_plain;

/// Layers of one image, at most.
const MAX_LAYERS: usize = 1024;

/// An image in BCoW form in a registry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resolved {
    /// Its name, with a digest.
    pub name: String,
    /// The digest of the ordinary manifest to which the image is attached.
    pub attached_to: Option<String>,
    /// The root hashes of its files: the stack, then the layers from the lowest.
    pub files: Vec<String>,
    /// The layers, the lowest first.
    pub layers: Vec<ResolvedLayer>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResolvedLayer {
    /// The digest of its uncompressed tar.
    pub diff_id: String,
    /// The chain ID: the layer and all layers below it (OCI image specification).
    pub chain_id: String,
    /// The size of the uncompressed tar, if it is known.
    pub tar_bytes: Option<u64>,
    /// The layer of the ordinary image.
    pub blob: Option<Blob>,
}

/// The layer of an ordinary image in a registry.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    /// The digest of the blob.
    pub digest: String,
    /// Its size in bytes.
    pub size: u64,
    /// The media type in the manifest.
    pub media_type: String,
    /// The digest of its table of contents, if the manifest has one (eStargz, zstd:chunked).
    pub toc_digest: Option<String>,
}

#[derive(Deserialize)]
struct Printed {
    name: String,
    attached_to: Option<String>,
    merkle_root: Option<String>,
    layers: Vec<PrintedLayer>,
}

#[derive(Deserialize)]
struct PrintedLayer {
    diff_id: Option<String>,
    merkle_root: Option<String>,
    tar_bytes: Option<u64>,
    blob: Option<Blob>,
}

impl Resolved {
    /// Reads what `bcow` has printed. The error says what is wrong with the image.
    pub fn read(json: &[u8]) -> Result<Self, String> {
        let printed: Printed =
            serde_json::from_slice(json).map_err(|error| format!("is not described: {error}"))?;
        if printed.layers.len() > MAX_LAYERS {
            return Err(format!("has more than {MAX_LAYERS} layers"));
        }
        if !is_plain(&printed.name) {
            return Err(format!("has an unusable name, {:?}", printed.name));
        }
        let mut files = vec![root(printed.merkle_root)?];
        let mut layers: Vec<ResolvedLayer> = Vec::new();
        for layer in printed.layers {
            let diff_id = layer.diff_id.ok_or("has a layer without a diffID")?;
            let below = layers.last().map(|below| &*below.chain_id);
            layers.push(ResolvedLayer {
                chain_id: chain_id(below, &diff_id),
                diff_id,
                tar_bytes: layer.tar_bytes,
                blob: layer.blob,
            });
            files.push(root(layer.merkle_root)?);
        }
        Ok(Resolved {
            name: printed.name,
            attached_to: printed.attached_to,
            files,
            layers,
        })
    }
}

/// The digits of a root hash.
fn root(text: Option<String>) -> Result<String, String> {
    let digits = text
        .as_deref()
        .and_then(|text| text.strip_prefix("sha256:"));
    let is_hash =
        |digits: &&str| digits.len() == 64 && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let digits = digits.filter(is_hash);
    let digits = digits.ok_or("has a file without a root hash")?;
    Ok(digits.to_owned())
}

/// The name of a layer with this diffID on the layer `below` (OCI image specification, "layer
/// ChainID").
fn chain_id(below: Option<&str>, diff_id: &str) -> String {
    match below {
        None => diff_id.to_owned(),
        Some(below) => format!("sha256:{}", sha256(&format!("{below} {diff_id}"))),
    }
}

/// The digits of the SHA-256 of a text.
pub fn sha256(text: &str) -> String {
    let hash = Sha256::digest(text);
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(diff_ids: &[&str]) -> String {
        let root = format!("sha256:{}", "a".repeat(64));
        let layers: Vec<_> = diff_ids
            .iter()
            .map(|id| serde_json::json!({"diff_id": id, "merkle_root": root}))
            .collect();
        serde_json::json!({
            "schema": "bcow.resolve/1", "name": "docker://h/r@sha256:b", "merkle_root": root,
            "attached_to": "sha256:m", "layers": layers,
        })
        .to_string()
    }

    /// The values are those of the function ChainID of github.com/opencontainers/image-spec.
    #[test]
    fn chain_ids_are_those_of_the_specification() {
        let image = Resolved::read(document(&["sha256:a", "sha256:b", "sha256:c"]).as_bytes());
        let image = image.unwrap();
        let chain: Vec<_> = image.layers.iter().map(|layer| &*layer.chain_id).collect();
        assert_eq!(chain[0], "sha256:a");
        assert_eq!(chain[1], format!("sha256:{}", sha256("sha256:a sha256:b")));
        assert_eq!(
            chain[2],
            format!("sha256:{}", sha256(&format!("{} sha256:c", chain[1])))
        );
        assert_eq!(image.files.len(), 4);
        assert_eq!(image.attached_to.as_deref(), Some("sha256:m"));
    }

    #[test]
    fn a_document_that_cannot_be_used_is_refused() {
        let json = document(&["sha256:a"]);
        for (json, expected) in [
            (json.replace("diff_id", "x"), "without a diffID"),
            (json.replace("sha256:aaa", "md5:aaa"), "without a root hash"),
            ("{".to_owned(), "is not described"),
            (json.replace("h/r", "h,r"), "unusable name"),
        ] {
            let error = Resolved::read(json.as_bytes()).unwrap_err();
            assert!(error.contains(expected), "{json}: {error}");
        }
    }
}

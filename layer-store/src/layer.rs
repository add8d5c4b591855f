//! A layer that the store serves.

use bcow_tool::resolved::{Blob, Resolved, sha256};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// The lowest layers of an image in BCoW form, as what podman calls one layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// The image in BCoW form: its name, with a digest.
    pub image: String,
    /// How many of its layers, from the lowest.
    pub count: usize,
    /// The chain ID: what the layer shows.
    pub chain_id: String,
    /// The digest of the uncompressed tar of the uppermost of these layers.
    pub diff_id: String,
    /// The size of this tar.
    pub tar_bytes: Option<u64>,
    /// The layer of the ordinary image.
    pub blob: Blob,
}

impl Layer {
    /// The layers of an image of which the blob in the ordinary image is known.
    pub fn of(image: &Resolved) -> Vec<Layer> {
        let layers = image.layers.iter().enumerate();
        let layers = layers.filter_map(|(index, layer)| {
            Some(Layer {
                image: image.name.clone(),
                count: index + 1,
                chain_id: layer.chain_id.clone(),
                diff_id: layer.diff_id.clone(),
                tar_bytes: layer.tar_bytes,
                blob: layer.blob.clone()?,
            })
        });
        layers.collect()
    }

    /// The source of the mount.
    pub fn source(&self) -> String {
        format!("{}#layers={}", self.image, self.count)
    }

    /// The name of the directory of the mount: one for each source.
    pub fn mount_name(&self) -> String {
        sha256(&self.source())[..32].to_owned()
    }

    /// The description for containers/storage: fields of its type Layer.
    pub fn info(&self) -> Vec<u8> {
        // archive.Compression
        let compression = match &*self.blob.media_type {
            kind if kind.ends_with("gzip") => 2,
            kind if kind.ends_with("zstd") => 4,
            _ => 0,
        };
        let mut info = json!({
            "compressed-diff-digest": self.blob.digest,
            "compressed-size": self.blob.size,
            "diff-digest": self.diff_id,
            "compression": compression,
        });
        if let Some(bytes) = self.tar_bytes {
            info["diff-size"] = json!(bytes);
        }
        if let Some(digest) = &self.blob.toc_digest {
            info["toc-digest"] = json!(digest);
        }
        let mut text = info.to_string().into_bytes();
        text.push(b'\n');
        text
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn digest(digit: char) -> String {
        format!("sha256:{}", digit.to_string().repeat(64))
    }

    pub fn layer(blob: char, chain: char) -> Layer {
        Layer {
            image: format!("docker://h.org/r@{}", digest('0')),
            count: 1,
            chain_id: digest(chain),
            diff_id: digest('d'),
            tar_bytes: Some(10),
            blob: Blob {
                digest: digest(blob),
                size: 7,
                media_type: "application/vnd.oci.image.layer.v1.tar+gzip".to_owned(),
                toc_digest: None,
            },
        }
    }

    #[test]
    fn description_has_the_fields_of_containers_storage() {
        let mut layer = layer('a', 'c');
        let info: serde_json::Value = serde_json::from_slice(&layer.info()).unwrap();
        assert_eq!(
            info,
            json!({"compressed-diff-digest": digest('a'), "compressed-size": 7,
                   "diff-digest": digest('d'), "diff-size": 10, "compression": 2})
        );
        layer.blob.toc_digest = Some(digest('e'));
        layer.blob.media_type = "application/vnd.oci.image.layer.v1.tar+zstd".to_owned();
        let info: serde_json::Value = serde_json::from_slice(&layer.info()).unwrap();
        assert_eq!(info["toc-digest"], digest('e'));
        assert_eq!(info["compression"], 4);
    }
}

//! The image to which a name in a registry leads.

use bcow::format::hex;
use bcow_oci::Digest;
use serde_json::{Value, json};

use crate::error::CommandError;
use crate::image::{OpenImage, StoreArgs};
use crate::name::Name;
use crate::remote::{self, Pinned};
use crate::url::Url;

/// The image in BCoW form to which a name in a registry leads, as JSON has it (schema
/// `bcow.resolve/1`).
///
/// Looks the name up in its registry. All layers of the image are looked up too, so the image can
/// be mounted by the name that is found.
pub fn find(name: &Name, stores: &StoreArgs) -> Result<Value, CommandError> {
    let no_registry = || {
        CommandError::usage(format!("{} is not in a registry", name.display()))
            .hint("--resolve is for docker://SERVER/REPOSITORY[:TAG][@sha256:DIGEST]")
    };
    let reference = name.registry().ok_or_else(no_registry)?;
    let url = Url::Registry(reference.clone());
    let mut found = remote::open(&url, &stores.remote, Pinned::AsAsked)?;
    let ordinary = found.ordinary.take().unwrap_or_default();
    let (Some(manifest), Some(name)) = (found.manifest.clone(), found.lasting_url.clone()) else {
        return Err(no_registry());
    };
    let image = OpenImage::of_remote(found, stores)?;
    let manifest: Value = serde_json::from_slice(&manifest).unwrap_or_default();
    let metadata = image.metadata()?;
    let layers = metadata["layers"].as_array().map_or(&[][..], Vec::as_slice);
    let diff_ids: Vec<&Value> = layers.iter().map(|layer| &layer["diff_id"]).collect();
    let blobs = ordinary_blobs(&ordinary, &metadata["config"], &diff_ids);
    let blobs = blobs.into_iter().flatten();
    let blobs = blobs.chain(std::iter::repeat(Value::Null));
    // As the metadata of the stack describes them, the lowest first.
    let layers = layers.iter().zip(blobs).map(|(layer, blob)| {
        json!({
            "diff_id": layer["diff_id"],
            "digest": layer["digest"],
            "file_bytes": layer["file_bytes"],
            "merkle_root": layer["merkle_root"],
            "tar_bytes": layer["source"]["tar_bytes"],
            "blob": blob,
        })
    });
    let root = image.image().header().merkle.as_ref();
    Ok(json!({
        "schema": "bcow.resolve/1",
        "name": name,
        "attached_to": manifest["subject"]["digest"],
        "merkle_root": root.map(|tree| format!("sha256:{}", hex(&tree.root))),
        "layers": layers.collect::<Vec<_>>(),
    }))
}

/// The annotations with the digest of the table of contents of a layer: of eStargz, and of
/// zstd:chunked.
const TOC_DIGESTS: [&str; 2] = [
    "containerd.io/snapshot/stargz/toc.digest",
    "io.github.containers.zstd-chunked.manifest-checksum",
];

/// The blobs of the layers in the ordinary image, the lowest first. `None` if its manifest does not
/// have one for each of these diffIDs, in the order of its configuration.
fn ordinary_blobs(manifest: &[u8], config: &Value, diff_ids: &[&Value]) -> Option<Vec<Value>> {
    let manifest: Value = serde_json::from_slice(manifest).ok()?;
    let layers = manifest["layers"].as_array()?;
    let in_config = config["rootfs"]["diff_ids"].as_array()?;
    if layers.len() != diff_ids.len() || !in_config.iter().eq(diff_ids.iter().copied()) {
        return None;
    }
    let blobs = layers.iter().map(|layer| {
        let annotations = &layer["annotations"];
        let toc_digests = TOC_DIGESTS
            .iter()
            .filter_map(|name| annotations[*name].as_str());
        let parse = |digest: &str| digest.parse::<Digest>().ok();
        Some(json!({
            "digest": parse(layer["digest"].as_str()?)?,
            "size": layer["size"].as_u64()?,
            "media_type": layer["mediaType"].as_str()?,
            "toc_digest": toc_digests.filter_map(parse).next(),
        }))
    });
    blobs.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(digit: char) -> String {
        format!("sha256:{}", digit.to_string().repeat(64))
    }

    #[test]
    fn blobs_are_those_of_the_manifest_in_the_order_of_the_configuration() {
        let layer = |digit, annotation: &str| {
            json!({"digest": digest(digit), "size": 7, "mediaType": "m",
                   "annotations": {annotation: digest('c')}})
        };
        let manifest = json!({"layers": [layer('a', "x"), layer('b', TOC_DIGESTS[0])]});
        let (first, second) = (json!(digest('1')), json!(digest('2')));
        let config = json!({"rootfs": {"diff_ids": [first, second]}});
        let of = |manifest: &Value, diff_ids: &[&Value]| {
            let found = ordinary_blobs(manifest.to_string().as_bytes(), &config, diff_ids)?;
            Some(json!(found))
        };
        let found = of(&manifest, &[&first, &second]).unwrap();
        assert_eq!(
            found[0],
            json!({"digest": digest('a'), "size": 7, "media_type": "m", "toc_digest": null})
        );
        assert_eq!(found[1]["toc_digest"], digest('c'));
        assert_eq!(of(&manifest, &[&second, &first]), None);
        assert_eq!(of(&manifest, &[&first]), None);
        let bad = json!({"layers": [layer('a', "x"), {"digest": "sha256:x", "size": 7}]});
        assert_eq!(of(&bad, &[&first, &second]), None);
        assert!(ordinary_blobs(b"{", &config, &[]).is_none());
    }
}

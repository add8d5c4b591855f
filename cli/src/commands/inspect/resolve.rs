//! `bcow inspect --resolve`: the image to which a name in a registry leads.

use bcow::format::hex;
use bcow_images::Url;
use bcow_oci::Digest;
use serde_json::{Value, json};

use super::Args;
use crate::error::{Answer, CommandError, exit};
use crate::image::OpenImage;
use crate::remote::{self, Pinned};
use crate::ui::Ui;

/// Prints the name of the image with the digest of its manifest. All its layers are looked up, so
/// that the image can be mounted by that name.
///
/// The exit status says whether the registry has answered, for callers that continue without a
/// BCoW image.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    resolve(args, ui).map_err(|error| match error.answer() {
        Answer::None => error,
        Answer::NoImage => error.exit_with(exit::RESOLVED_TO_NONE),
        Answer::Denied => error.exit_with(exit::RESOLVE_DENIED),
    })
}

fn resolve(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let no_registry = || {
        CommandError::usage(format!("{} is not in a registry", args.image.display()))
            .hint("--resolve is for docker://SERVER/REPOSITORY[:TAG][@sha256:DIGEST]")
    };
    let Some(image) = args.image.registry() else {
        return Err(no_registry());
    };
    let found = remote::open(
        &Url::Registry(image.clone()),
        &args.stores.remote,
        Pinned::AsAsked,
    )?;
    let (Some(manifest), Some(name)) = (found.manifest.clone(), found.lasting_url.clone()) else {
        return Err(no_registry());
    };
    let ordinary = found.ordinary.clone().unwrap_or_default();
    let image = OpenImage::of_remote(found, &args.stores)?;
    if !args.json {
        let mut out = ui.output();
        writeln!(out, "{name}")?;
        return out.finish();
    }
    let manifest: Value = serde_json::from_slice(&manifest).unwrap_or_default();
    let metadata = image.metadata()?;
    let layers = metadata["layers"].as_array().cloned().unwrap_or_default();
    let diff_ids: Vec<&Value> = layers.iter().map(|layer| &layer["diff_id"]).collect();
    let blobs = blobs(&ordinary, &metadata["config"], &diff_ids).unwrap_or_default();
    let layers: Vec<Value> = layers
        .iter()
        .enumerate()
        .map(|(index, layer)| {
            json!({
                "diff_id": layer["diff_id"],
                "digest": layer["digest"],
                "file_bytes": layer["file_bytes"],
                "merkle_root": layer["merkle_root"],
                "tar_bytes": layer["source"]["tar_bytes"],
                "blob": blobs.get(index),
            })
        })
        .collect();
    let root = image.image().header().merkle.as_ref();
    ui.print_json(&json!({
        "schema": "bcow.resolve/1",
        "name": name,
        "attached_to": manifest["subject"]["digest"],
        "merkle_root": root.map(|tree| format!("sha256:{}", hex(&tree.root))),
        "layers": layers,
    }))
}

/// The annotations with the digest of the table of contents of a layer: of eStargz, and of
/// zstd:chunked.
const TOC_DIGESTS: [&str; 2] = [
    "containerd.io/snapshot/stargz/toc.digest",
    "io.github.containers.zstd-chunked.manifest-checksum",
];

/// The layers of the ordinary image, the lowest first. `None` if its manifest does not have one for
/// each of these diffIDs, in the order of its configuration.
fn blobs(manifest: &[u8], config: &Value, diff_ids: &[&Value]) -> Option<Vec<Value>> {
    let manifest: Value = serde_json::from_slice(manifest).ok()?;
    let layers = manifest["layers"].as_array()?;
    let in_config = config["rootfs"]["diff_ids"].as_array()?;
    if layers.len() != diff_ids.len() || !in_config.iter().eq(diff_ids.iter().copied()) {
        return None;
    }
    let blobs = layers.iter().map(|layer| {
        let digest: Digest = layer["digest"].as_str()?.parse().ok()?;
        let annotations = &layer["annotations"];
        let toc_digest = TOC_DIGESTS
            .iter()
            .filter_map(|name| annotations[*name].as_str())
            .find_map(|digest| digest.parse::<Digest>().ok());
        Some(json!({
            "digest": digest,
            "size": layer["size"].as_u64()?,
            "media_type": layer["mediaType"].as_str()?,
            "toc_digest": toc_digest,
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
            blobs(manifest.to_string().as_bytes(), &config, diff_ids)
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
        assert_eq!(blobs(b"{", &config, &[]), None);
    }
}

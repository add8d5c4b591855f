//! `bcow inspect --resolve`: the image to which a name in a registry leads.

use bcow_oci::ImageName;
use serde_json::{Value, json};

use super::Args;
use crate::error::CommandError;
use crate::image::{OpenImage, parse_name};
use crate::remote::{self, Pinned};
use crate::ui::Ui;

/// Prints the name of the image with the digest of its manifest. All its layers are looked up, so
/// that the image can be mounted by that name.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let no_registry = || {
        CommandError::usage(format!("{} is not in a registry", args.image.display()))
            .hint("--resolve is for docker://SERVER/REPOSITORY[:TAG][@sha256:DIGEST]")
    };
    let ImageName::Remote(url) = parse_name(&args.image)? else {
        return Err(no_registry());
    };
    let found = remote::open(&url, &args.stores.remote, Pinned::AsAsked)?;
    let (Some(manifest), Some(name)) = (found.manifest.clone(), found.lasting_url.clone()) else {
        return Err(no_registry());
    };
    let image = OpenImage::of_remote(found, &args.stores)?;
    if !args.json {
        let mut out = ui.output();
        writeln!(out, "{name}")?;
        return out.finish();
    }
    let manifest: Value = serde_json::from_slice(&manifest).unwrap_or_default();
    let metadata = image.metadata()?;
    let layers = metadata["layers"].as_array().cloned().unwrap_or_default();
    let layers: Vec<Value> = layers
        .iter()
        .map(|layer| {
            json!({
                "diff_id": layer["diff_id"],
                "digest": layer["digest"],
                "file_bytes": layer["file_bytes"],
                "merkle_root": layer["merkle_root"],
            })
        })
        .collect();
    let root = image.image().header().merkle.as_ref();
    ui.print_json(&json!({
        "schema": "bcow.resolve/1",
        "name": name,
        "attached_to": manifest["subject"]["digest"],
        "merkle_root": root.map(|tree| format!("sha256:{}", crate::names::hex(&tree.root))),
        "layers": layers,
    }))
}

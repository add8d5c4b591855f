//! Archives of `docker save` and `podman save`, which have a `manifest.json`.
//!
//! Newer archives are OCI layouts too. bcow prefers `manifest.json`, because it has the names that
//! were given to `save`.

use serde::Deserialize;

use crate::archive::{Archive, Files};
use crate::digest::Digest;
use crate::error::{ConvertError, check_equal};
use crate::image::{Image, ImageConfig, layer_name};
use crate::layer::LayerInput;
use crate::layout::{self, MAX_CONFIG_BYTES};
use crate::platform::Platform;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Saved {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    #[serde(default)]
    layers: Option<Vec<String>>,
}

/// Finds the image `reference`: `NAME[:TAG]`, or `@N` for the Nth image, from 0.
pub(crate) fn find(
    archive: Archive,
    reference: Option<&str>,
    platform: Option<&Platform>,
) -> Result<Image, ConvertError> {
    let files = Files::Archive(archive);
    let bad = |problem: String| {
        ConvertError::layout(format!("manifest.json in {}", files.name()), problem)
    };
    let Some(bytes) = files.document("manifest.json", 4 << 20)? else {
        if layout::is_layout(&files)? {
            return layout::find(&files, reference, platform);
        }
        return Err(ConvertError::layout(
            files.name(),
            "not a docker archive: it has no manifest.json; for a root file system in an archive, \
             use tar:",
        ));
    };
    let images: Vec<Saved> = serde_json::from_slice(&bytes)
        .map_err(|error| bad(format!("invalid document: {error}")))?;
    let image = choose(&files, &images, reference)?;
    let Some(config) = files.document(&image.config, MAX_CONFIG_BYTES)? else {
        return Err(bad(format!(
            "the config {:?} is not in the archive",
            image.config
        )));
    };
    let place = format!("{} in {}", image.config, files.name());
    if let Some(expected) = digest_in_name(&image.config) {
        check_equal(&place, "digest", &expected, &Digest::of(&config))?;
    }
    let config = ImageConfig::parse(&place, &config)?;
    let paths = image.layers.as_deref().unwrap_or_default();
    config.check_layers(&files.name(), paths.len())?;
    layout::check_layer_count(&files.name(), paths.len())?;
    layout::check_platform(&files.name(), config.platform.as_ref(), platform)?;
    let layers = paths
        .iter()
        .zip(&config.diff_ids)
        .enumerate()
        .map(|(i, (path, diff_id))| {
            let name = layer_name(i, paths.len(), Some(&diff_id.0));
            let Some(blob) = files.open(path)? else {
                return Err(bad(format!("{name} is not in the archive at {path:?}")));
            };
            Ok(LayerInput {
                name,
                digest: digest_in_name(path),
                diff_id: Some(diff_id.clone()),
                ..LayerInput::unverified(blob)
            })
        })
        .collect::<Result<_, _>>()?;
    Ok(Image {
        reference: image.repo_tags.iter().flatten().next().cloned(),
        platform: config.platform.clone(),
        config: Some(config),
        layers,
        ..Image::default()
    })
}

fn choose<'s>(
    files: &Files,
    images: &'s [Saved],
    reference: Option<&str>,
) -> Result<&'s Saved, ConvertError> {
    let names = |image: &Saved| image.repo_tags.clone().unwrap_or_default();
    let available: Vec<String> = images
        .iter()
        .enumerate()
        .flat_map(|(i, image)| match names(image) {
            names if names.is_empty() => vec![format!("@{i}")],
            names => names,
        })
        .collect();
    let found: Vec<&Saved> = match reference {
        None => images.iter().collect(),
        Some(reference) => match reference.strip_prefix('@').map(str::parse::<usize>) {
            Some(Ok(index)) => images.get(index).into_iter().collect(),
            _ => images
                .iter()
                .filter(|image| names(image).iter().any(|name| is_named(name, reference)))
                .collect(),
        },
    };
    match found[..] {
        [image] => Ok(image),
        [] if reference.is_none() => Err(ConvertError::layout(files.name(), "it lists no images")),
        _ => {
            let (place, count) = (files.name(), found.len());
            Err(ConvertError::not_one(place, count, reference, &available))
        }
    }
}

/// Whether a name in the archive matches the user's: the user may omit the tag `latest` and the
/// registry.
fn is_named(name: &str, reference: &str) -> bool {
    let has_tag = reference
        .rsplit('/')
        .next()
        .is_some_and(|last| last.contains(':'));
    let wanted = if has_tag { reference.to_owned() } else { format!("{reference}:latest") };
    name == wanted
        || name
            .strip_suffix(&wanted)
            .is_some_and(|rest| rest.ends_with('/'))
}

/// The digest in a member's name: `blobs/sha256/HEX`, or `HEX.json` in older archives.
fn digest_in_name(path: &str) -> Option<Digest> {
    let hex = match path.strip_prefix("blobs/sha256/") {
        Some(hex) => hex,
        None => path.strip_suffix(".json")?,
    };
    format!("sha256:{hex}").parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_may_leave_out_tag_and_registry() {
        assert!(is_named("busybox:latest", "busybox"));
        assert!(is_named("host/library/busybox:latest", "busybox"));
        assert!(is_named("host:5000/a/b:1", "a/b:1"));
        assert!(is_named("host:5000/a/b:latest", "host:5000/a/b"));
        assert!(!is_named("host/notbusybox:latest", "busybox"));
        assert!(!is_named("busybox:1", "busybox"));
    }
}

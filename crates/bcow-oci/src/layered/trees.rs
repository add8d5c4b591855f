//! Converts trees of images in BCoW form into layers of a new image. bcow writes a tar archive of
//! each tree, and converts the archive.

use std::sync::Arc;

use serde_json::Value;

use super::{LayoutOptions, LayoutReport, Made, check_options, convert_image};
use crate::blob::Blob;
use crate::error::ConvertError;
use crate::export::Layers;
use crate::export::image::{archives, config_with};
use crate::image::{Image, ImageConfig, layer_name};
use crate::layer::LayerInput;
use crate::layout::write::LayoutWriter;
use crate::left_out::Annotations;
use crate::options::{ConvertOptions, Progress, RunOptions};

/// Converts the trees into an image in an OCI layout, one layer per tree. `config` is the image's
/// original configuration. The conversion replaces the digests of layers in it. It also replaces
/// the history, if that does not match the layers. `annotations` are those of the image's manifest.
///
/// The layout gets the blobs and the entry in its index after all of them are complete. After an
/// error it has none of them, as in [`super::convert_to_layout`].
pub fn convert_trees(
    trees: &Layers<'_>,
    config: Option<&Value>,
    annotations: &Annotations,
    layout: &LayoutOptions,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<LayoutReport, ConvertError> {
    check_options(layout, options)?;
    layout.place.require_no_index()?;
    let writer = LayoutWriter::open(&layout.place, options.cancel.clone())?;
    progress.phase("reading");
    let export = RunOptions {
        threads: options.threads,
        cancel: options.cancel.clone(),
    };
    let archives = archives(trees, &writer, &export, progress)?;
    let diff_ids: Vec<_> = archives.iter().map(|(_, diff_id)| &diff_id.0).collect();
    let config = config_with(config, &diff_ids, &layout.place.path)?;
    let config = ImageConfig::parse("configuration", &config)?;
    let count = archives.len();
    let layers = archives
        .iter()
        .enumerate()
        .map(|(index, (blob, diff_id))| {
            let name = layer_name(index, count, None);
            let file = Arc::new(blob.file()?);
            Ok(LayerInput {
                diff_id: Some(diff_id.clone()),
                ..LayerInput::unverified(Blob::range(name, file, 0, blob.size))
            })
        })
        .collect::<Result<Vec<_>, ConvertError>>()?;
    let image = Image {
        platform: config.platform.clone(),
        config: Some(config),
        layers,
        annotations: annotations.clone(),
        ..Image::default()
    };
    progress.total(Some(archives.iter().map(|(blob, _)| blob.size).sum()));
    let mut made = Made::default();
    let (entry, report) = convert_image(&image, layout, &writer, &mut made, options, progress)?;
    writer.publish(made.blobs, &entry, progress)?;
    Ok(report)
}

//! The conversion into one flattened image: the layers from the uppermost down, then the merged
//! tree.

use std::path::Path;
use std::sync::Arc;

use bcow::{Compression, OpenOptions};
use bcow_erofs::merge::merge;
use bcow_erofs::overlay::TreeForm;
use bcow_erofs::tree::LayerTree;

use crate::cancel::Cancel;
use crate::conversion::{Conversion, Target};
use crate::error::ConvertError;
use crate::hidden::UpperLayers;
use crate::image::Image;
use crate::image_file::{ImagesByDigest, read_back, tree_error};
use crate::input::Input;
use crate::layer::Reading;
use crate::left_out::LeftOut;
use crate::metadata::{Metadata, flattened_layer};
use crate::options::{ConvertOptions, LayerReport, Progress, Report};
use crate::output::Output;
use crate::recode::recode;
use crate::source::Source;

/// Converts `source` into one flattened image at `destination`.
///
/// The destination is created or replaced atomically, or stays as it was. If the destination is a
/// symlink, its target is replaced. [`ConvertError`] lists the errors.
pub fn convert(
    source: &Source,
    destination: &Path,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<Report, ConvertError> {
    let input = Input::open(source, options, progress)?;
    let output = Output::create(destination)?;
    if options.prefetch.is_some() {
        return convert_placed(source, &input, &output, destination, options, progress);
    }
    let report = write(source, &input, &output, destination, options, progress)?;
    output.publish()?;
    Ok(report)
}

/// Places the content that a start reads before all other content. The archives have their own
/// order, so a second pass does this, from the file of the first one, which never gets a name.
fn convert_placed(
    source: &Source,
    input: &Input,
    unplaced: &Output,
    destination: &Path,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<Report, ConvertError> {
    let first_pass = ConvertOptions {
        prefetch: None,
        verify: false,
        plain: false,
        compression: Compression::None,
        ..options.clone()
    };
    let report = write(source, input, unplaced, destination, &first_pass, progress)?;
    let name = destination.display().to_string();
    let image = bcow::Image::open_storage(Arc::new(unplaced.file()?), &OpenOptions::default())
        .map_err(|error| ConvertError::read_through(&name, error))?;
    let placed = recode(
        &image,
        TreeForm::Whole,
        &name,
        destination,
        options,
        progress,
    )?;
    Ok(Report {
        entries: placed.entries,
        content_bytes: report.content_bytes,
        size: placed.size,
        file_bytes: placed.file_bytes,
        merkle_root: placed.merkle_root,
        verified: placed.verified,
        ..report
    })
}

/// Writes the image to `output`, which has no name yet.
fn write(
    source: &Source,
    input: &Input,
    output: &Output,
    destination: &Path,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<Report, ConvertError> {
    let target = Target::image(output, destination, options);
    let mut conversion = Conversion::start(target, options, progress)?;
    let cancel = Cancel::new(options.cancel.as_deref());
    let reading = Reading::new(&options.limits, progress, cancel);
    progress.total(input.bytes());
    let mut layer_reports = Vec::new();
    let (layers, names) = match input {
        Input::Image(image) => {
            let layers = read_layers(&mut conversion, image, &reading, &mut layer_reports)
                .map_err(|error| source.explain(error))?;
            let names = image.layers.iter().map(|layer| layer.name.clone());
            (layers, names.collect())
        }
        Input::Directory(path) => {
            let tree = conversion.directory(path, &reading)?;
            (vec![tree], vec![path.display().to_string()])
        }
    };
    progress.phase("metadata");
    progress.total(None);
    let layer_metadata = layer_reports.iter().map(flattened_layer).collect();
    let metadata = Metadata::of_source(input.image(), options, layer_metadata);
    let tree = merge(layers).map_err(|e| tree_error(&names, e))?;
    let (written, mut report) = conversion.finish(&tree, metadata)?;
    drop(tree);
    report.source = Some(source.to_string());
    report.layers = layer_reports;
    if let Some(image) = input.image() {
        report.manifest = image.manifest.clone();
        report.platform = image.platform.clone();
        report.left_out = LeftOut {
            annotations: image.annotations.keys().cloned().collect(),
            ..image.left_out.clone()
        };
    }
    tracing::info!(
        "written: {} entries, an address space of {} bytes, {} bytes stored",
        report.entries,
        report.size,
        report.file_bytes
    );
    if options.verify {
        progress.phase("verify");
        let begun = std::time::Instant::now();
        let below = ImagesByDigest::default();
        read_back(&written, output.file()?, &below, options.threads)?;
        report.verified = true;
        tracing::info!("verified in {} ms", begun.elapsed().as_millis());
    }
    cancel.check()?;
    Ok(report)
}

/// Reads all layers, uppermost first; returns them lowest first.
fn read_layers(
    conversion: &mut Conversion<'_>,
    image: &Image,
    reading: &Reading<'_>,
    reports: &mut Vec<LayerReport>,
) -> Result<Vec<LayerTree>, ConvertError> {
    let mut uppers = UpperLayers::default();
    for input in image.layers.iter().rev() {
        reports.push(conversion.layer(input, reading, &mut uppers)?);
    }
    reports.reverse();
    let mut layers = uppers.into_layers();
    layers.reverse();
    Ok(layers)
}

//! Re-encodes a BCoW image: as one file, or layer by layer in an OCI layout.

use std::path::Path;

use bcow_images::error::CommandError;
use bcow_images::image::OpenImage;
use bcow_oci::recode::recode;
use bcow_oci::{ConvertOptions, LayoutOptions, LayoutReport, Progress, Report, convert_trees};

use crate::export::{ImageLayers, export_failure};

/// Re-encodes `image` into the file `destination`.
pub fn to_file(
    image: &OpenImage,
    destination: &Path,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<Report, CommandError> {
    image.refuse_own_file(destination)?;
    let form = image.form()?;
    let name = image.path().display().to_string();
    let (annotations, left_out) = image.annotations()?;
    let mut report = recode(image.image(), form, &name, destination, options, progress)?;
    report.left_out = left_out;
    report.left_out.annotations = annotations.into_keys().collect();
    Ok(report)
}

/// Writes `image` into an OCI layout: a stack keeps its layers, another image becomes one
/// layer.
pub fn to_layout(
    image: &OpenImage,
    destination: &LayoutOptions,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<LayoutReport, CommandError> {
    image.refuse_as_destination(&destination.place)?;
    let metadata = image.metadata()?;
    let trees = ImageLayers::of(image, &metadata)?;
    let config = metadata.get("config");
    let (annotations, left_out) = image.annotations()?;
    let layers = trees.layers();
    let report = convert_trees(
        &layers,
        config,
        &annotations,
        destination,
        options,
        progress,
    );
    let mut report = report.map_err(|error| export_failure(image, &error))?;
    report.left_out = left_out;
    Ok(report)
}

//! Re-encodes a BCoW image: as one file, or layer by layer in an OCI layout.

use std::path::Path;

use bcow_oci::export::ExportError;
use bcow_oci::recode::recode;
use bcow_oci::{ConvertOptions, LayoutOptions, LayoutReport, Report, convert_trees};
use serde_json::Value;

use crate::commands::export::{ImageLayers, export_failure};
use crate::conversion::failure;
use crate::error::CommandError;
use crate::image::OpenImage;
use crate::push::Layout;
use crate::ui::Ui;

/// Re-encodes `image` into the file `destination`.
pub fn to_file(
    image: &OpenImage,
    destination: &Path,
    options: &ConvertOptions,
    ui: &Ui,
) -> Result<Report, CommandError> {
    image.refuse_own_file(destination)?;
    let form = image.form()?;
    let progress = ui.progress();
    let name = image.path().display().to_string();
    let (annotations, left_out) = image.annotations()?;
    let mut report = recode(image.image(), form, &name, destination, options, &progress)
        .map_err(|error| failure(&error))?;
    report.left_out = left_out;
    report.left_out.annotations = annotations.into_keys().collect();
    Ok(report)
}

/// Writes `image` into an OCI layout: a stack keeps its layers, another image becomes one
/// layer.
pub fn to_layout(
    image: &OpenImage,
    layout: &Layout,
    destination: &LayoutOptions,
    options: &ConvertOptions,
    ui: &Ui,
) -> Result<LayoutReport, CommandError> {
    image.refuse_as_destination(layout)?;
    let metadata: Value = image.metadata()?;
    let trees = ImageLayers::of(image, &metadata)?;
    let progress = ui.progress();
    let config = metadata.get("config");
    let (annotations, left_out) = image.annotations()?;
    let layers = trees.layers();
    let report = convert_trees(
        &layers,
        config,
        &annotations,
        destination,
        options,
        &progress,
    );
    let mut report = report.map_err(|error| match error {
        ExportError::Layout(error) => failure(&error),
        error => export_failure(image, &error),
    })?;
    report.left_out = left_out;
    Ok(report)
}

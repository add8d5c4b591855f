//! Writes one layer: the changes that an archive makes to the layers below it, which are not read.

use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::cancel::Cancel;
use crate::conversion::{Conversion, Target};
use crate::error::ConvertError;
use crate::hidden::UpperLayers;
use crate::image_file::{ImagesByDigest, read_back};
use crate::input::Input;
use crate::layer::{LayerInput, Reading};
use crate::lower::LowerIndex;
use crate::metadata::{Metadata, options_json, tool};
use crate::options::{ConvertOptions, Progress, Report};
use crate::output::Output;
use crate::source::Source;
use crate::space::INLINE_MAX;

/// Converts `source`, an archive of one layer, into a layer at `destination`, with whiteouts and
/// opaque directories (section 17 of the specification). It shows its files over the layers on
/// which it is mounted. The report has the layer's diffID, which is computed.
///
/// The destination is created or replaced atomically, or stays as it was.
pub fn convert_layer(
    source: &Source,
    destination: &Path,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<Report, ConvertError> {
    let opened = Input::open(source, options, progress)?;
    let layers = opened.image().map_or(&[][..], |image| &image.layers);
    let [input] = layers else {
        return Err(ConvertError::Options(format!(
            "{source} is not the archive of one layer"
        )));
    };
    progress.total(opened.bytes());
    let output = Output::create(destination)?;
    let target = Target {
        output: &output,
        path: destination.to_owned(),
        threads: options.threads.max(1),
        inline_max: INLINE_MAX,
    };
    let cancel = Cancel::new(options.cancel.as_deref());
    let mut reading = Reading::new(&options.limits, progress, cancel);
    reading.find_diff_id = true;
    let described = options_json(options);
    let report = write_layer(input, target, &described, options, &reading, None)
        .map_err(|error| source.explain(error))?;
    cancel.check()?;
    output.publish()?;
    Ok(Report {
        source: Some(source.to_string()),
        ..report
    })
}

/// Writes a layer to the output of `target`, and reads it back unless the options say otherwise.
/// Content that `lower` has is referenced there. `described` are the options in the layer's
/// metadata. The report has the layer.
pub(crate) fn write_layer(
    input: &LayerInput,
    target: Target<'_>,
    described: &Value,
    options: &ConvertOptions,
    reading: &Reading<'_>,
    lower: Option<Arc<LowerIndex>>,
) -> Result<Report, ConvertError> {
    let (output, threads) = (target.output, target.threads);
    let mut conversion = Conversion::start(target, options, reading.progress)?;
    if let Some(lower) = lower {
        conversion.deduplicate_against(lower);
    }
    let mut uppers = UpperLayers::default();
    let read = conversion.layer(input, reading, &mut uppers)?;
    // The same archive, options and tool give the same text for any source.
    let layer = json!({
        "diff_id": read.diff_id,
        "tar_bytes": read.bytes,
        "tar_entries": read.entries,
    });
    let layer = Map::from_iter([("layer".to_owned(), layer)]);
    let metadata = Metadata::new(&tool(options), described.clone(), layer);
    let tree = uppers.into_layers().pop().unwrap_or_default();
    let tree = tree.into_overlay();
    let tree = tree.map_err(|problem| ConvertError::layout(&input.name, problem))?;
    let (written, report) = conversion.finish(&tree, metadata)?;
    drop(tree);
    if options.verify {
        let below = ImagesByDigest::default();
        read_back(&written, output.file()?, &below, threads)?;
    }
    Ok(Report {
        layers: vec![read],
        verified: options.verify,
        ..report
    })
}

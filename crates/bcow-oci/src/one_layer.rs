//! Writes one layer: the changes that an archive makes to the layers below it, which are not read.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use bcow::Written;
use serde_json::{Map, Value, json};

use crate::cancel::Cancel;
use crate::conversion::{Conversion, ReadLayer, Target};
use crate::digest::{DiffId, hex};
use crate::error::ConvertError;
use crate::hidden::UpperLayers;
use crate::image_file::{ImagesByDigest, read_back, tree_error};
use crate::input::Input;
use crate::layer::{LayerInput, Reading};
use crate::lower::LowerIndex;
use crate::metadata::{Metadata, insert_some, options_json, tool};
use crate::options::{ConvertOptions, LayerReport, Progress, Report};
use crate::output::Output;
use crate::source::Source;
use crate::space::INLINE_MAX;

/// A layer that was written.
pub(crate) struct WrittenLayer {
    pub read: ReadLayer,
    pub diff_id: DiffId,
    pub written: Written,
    /// Inodes of the layer.
    pub entries: u64,
    /// Bytes of file content, and those of them that are stored once for several files.
    pub content_bytes: u64,
    pub deduplicated_bytes: u64,
}

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
    let reading = Reading {
        limits: &options.limits,
        progress,
        cancel,
        find_diff_id: true,
        bytes: &AtomicU64::new(0),
    };
    let layer = write_layer(
        input,
        target,
        &options_json(options),
        options,
        &reading,
        None,
    )
    .map_err(|error| source.explain(error))?;
    if cancel.is_set() {
        return Err(ConvertError::Interrupted);
    }
    output.publish()?;
    Ok(Report {
        source: Some(source.to_string()),
        layers: vec![LayerReport {
            digest: input.digest.clone(),
            diff_id: Some(layer.diff_id),
            media_type: input.media_type.clone(),
            stored_bytes: layer.read.bytes.stored,
            bytes: layer.read.bytes.tar,
            entries: layer.read.entries,
        }],
        entries: layer.entries,
        content_bytes: layer.content_bytes,
        deduplicated_bytes: layer.deduplicated_bytes,
        size: layer.written.size(),
        file_bytes: layer.written.file_bytes(),
        merkle_root: hex(&layer.written.merkle_root()),
        verified: options.verify,
        ..Report::default()
    })
}

/// Writes a layer to the output of `target`, and reads it back unless the options say otherwise.
/// Content that `lower` has is referenced there. `described` are the options in the layer's
/// metadata.
pub(crate) fn write_layer(
    input: &LayerInput,
    target: Target<'_>,
    described: &Value,
    options: &ConvertOptions,
    reading: &Reading<'_>,
    lower: Option<Arc<LowerIndex>>,
) -> Result<WrittenLayer, ConvertError> {
    let (output, threads) = (target.output, target.threads);
    let mut conversion = Conversion::start(target, options, reading.progress)?;
    if let Some(lower) = lower {
        conversion.deduplicate_against(lower);
    }
    let mut uppers = UpperLayers::default();
    let read = conversion.layer(input, reading, &mut uppers)?;
    // The archive may lack padding that the recorded diffID covers.
    let diff_id = input.diff_id.clone().or(read.bytes.diff_id.clone());
    let diff_id = diff_id.ok_or(ConvertError::Interrupted)?;
    let mut layer = Map::new();
    let fields = [
        ("diff_id", Some(json!(diff_id))),
        ("tar_bytes", Some(json!(read.bytes.tar))),
        ("tar_entries", Some(json!(read.entries))),
    ];
    insert_some(&mut layer, fields);
    let metadata = Metadata::of_layer(described.clone(), &tool(options), Value::Object(layer));
    let tree = uppers.into_layers().pop().unwrap_or_default();
    let tree = tree.into_overlay().map_err(|source| {
        let error = bcow_erofs::merge::MergeError::Layer { layer: 0, source };
        tree_error(std::slice::from_ref(&input.name), error)
    })?;
    let finished = conversion.finish(&tree, metadata)?;
    drop(tree);
    if options.verify {
        let below = ImagesByDigest::default();
        read_back(&finished.written, output.file()?, &below, threads)?;
    }
    Ok(WrittenLayer {
        read,
        diff_id,
        written: finished.written,
        entries: finished.entries,
        content_bytes: finished.stats.content_bytes,
        deduplicated_bytes: finished.stats.deduplicated_bytes,
    })
}

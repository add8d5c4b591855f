//! The conversion into an OCI image layout: one sealed image per layer, and a stack that merges
//! them.
//!
//! The bytes of a layer's file depend only on the layer's archive and on the options; with
//! `dedup_lower`, the options include the digests of the layers below. So each layer is converted
//! once (`cache`), several layers in parallel, and all images with this layer share the file. With
//! `dedup_lower`, layers are converted one after the other. The stack (`stack`) has the metadata of
//! the merged file system, read from the stored layers, and a window onto each layer. `manifest`
//! writes the image's manifest.

mod cache;
mod directory;
mod index;
mod manifest;
mod report;
mod stack;
mod stored;
mod trees;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use bcow::OpenOptions;
use serde_json::{Value, json};

use crate::cancel::Cancel;
use crate::conversion::Target;
use crate::digest::{DiffId, Digest, hex};
use crate::error::{ConvertError, LimitKind, TarPlace, check_limit};
use crate::image::{Image, ImageConfig, minimal_config};
use crate::image_file::{ImagesByDigest, read_back, writer_options};
use crate::input::Input;
use crate::layer::{LayerInput, Reading, read_layer};
use crate::layout::OCI_MANIFEST;
use crate::layout::write::{
    LayoutForm, LayoutPlace, LayoutWriter, ManifestEntry, NewBlob, descriptor, json_bytes,
};
use crate::lower::LowerIndex;
use crate::metadata::{Metadata, options_json, tool};
use crate::null::some_fields;
use crate::one_layer::write_layer;
use crate::options::{ConvertOptions, Progress};
use crate::parallel;
use crate::platform::Platform;
use crate::source::Source;
use crate::space::INLINE_MAX;
use crate::stream::ChunkStream;
use crate::tar::TarReader;
use cache::{LayerCache, LayoutLayers};
use stored::{LayerRequest, StoredLayer};

pub use index::{Attestations, IndexReport, convert_index};
pub use trees::convert_trees;

pub use report::{LayerOrigin, LayoutOptions, LayoutReport, StackReport, StoredLayerReport};

/// Limit on layers that are converted at the same time: each takes tens of megabytes of memory.
const MAX_AT_ONCE: usize = 16;

/// Converts `source` into an image in an OCI layout.
///
/// Blobs and index appear when all of them are complete, or not at all. Other contents of the
/// layout stay. Several processes may write to one layout and use one cache at the same time.
pub fn convert_to_layout(
    source: &Source,
    layout: &LayoutOptions,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<LayoutReport, ConvertError> {
    check_options(layout, options)?;
    if !layout.is_referrer {
        layout.place.require_no_index()?;
    }
    let input = Input::open(source, options, progress)?;
    if let Some(image) = input.image() {
        refuse_to_replace(source, image.reference.as_deref(), layout)?;
    }
    if let (Input::Directory(path), LayoutForm::Directory) = (&input, &layout.place.form) {
        refuse_inside(path, &layout.place.path)?;
    }
    let writer = LayoutWriter::open(&layout.place, options.cancel.clone())?;
    progress.total(input.bytes());
    let mut made = Made::default();
    let mut convert = |image: &Image| {
        convert_image(image, layout, &writer, &mut made, options, progress)
            .map_err(|error| source.explain(error))
    };
    let (entry, mut report) = match input {
        Input::Image(image) => convert(&image)?,
        Input::Directory(path) => {
            directory::as_image(&path, &writer, options, progress, |image| convert(&image))?
        }
    };
    writer.publish(made.blobs, &entry, progress)?;
    report.source = Some(source.to_string());
    Ok(report)
}

/// Checks the options before anything is read.
fn check_options(layout: &LayoutOptions, options: &ConvertOptions) -> Result<(), ConvertError> {
    if layout.dedup_lower && options.plain {
        return Err(ConvertError::Options(
            "a plain layer cannot refer to content of the layers below".to_owned(),
        ));
    }
    writer_options(options, 1).map(drop)
}

/// Fails if the image would take its source's name in the layout, which would hide the source.
fn refuse_to_replace(
    source: &Source,
    name: Option<&str>,
    layout: &LayoutOptions,
) -> Result<(), ConvertError> {
    let Source::Oci { directory, .. } = source else {
        return Ok(());
    };
    let LayoutPlace {
        path,
        form,
        reference,
        ..
    } = &layout.place;
    let same_layout = matches!(form, LayoutForm::Directory)
        && match (directory.canonicalize(), path.canonicalize()) {
            (Ok(source), Ok(destination)) => source == destination,
            _ => false,
        };
    match reference {
        Some(reference) if same_layout && name == Some(reference) => {
            let path = path.display();
            Err(ConvertError::refused(
                format!("the new image would replace its source {reference:?} in {path}"),
                "choose another name, or another layout",
            ))
        }
        _ => Ok(()),
    }
}

/// Fails if the layout would be in the directory that becomes an image, and so in the image.
fn refuse_inside(source: &Path, layout: &Path) -> Result<(), ConvertError> {
    // The layout may not exist yet.
    let existing = std::path::absolute(layout)
        .ok()
        .and_then(|path| path.ancestors().find_map(|path| path.canonicalize().ok()));
    match (source.canonicalize(), existing) {
        (Ok(inner), Some(existing)) if existing.starts_with(&inner) => {
            Err(ConvertError::Options(format!(
                "the layout {} is in the source directory {}, so it would become a part of the \
                 image",
                layout.display(),
                source.display()
            )))
        }
        _ => Ok(()),
    }
}

/// The blobs that a conversion has made. They have no names yet.
#[derive(Default)]
struct Made {
    blobs: Vec<NewBlob>,
    /// The layers among them, by diffID and options: the number of the blob, and the checked blob
    /// of the source.
    layers: HashMap<(DiffId, String), (usize, Option<Digest>)>,
}

impl Made {
    fn add(&mut self, layer: StoredLayer) {
        let Some(blob) = layer.new else { return };
        let key = (layer.diff_id, layer.options.to_string());
        self.layers
            .insert(key, (self.blobs.len(), layer.checked_source));
        self.blobs.push(blob);
    }

    fn find(&self, request: &LayerRequest) -> Option<&(usize, Option<Digest>)> {
        let key = (request.diff_id.clone(), request.options.to_string());
        self.layers.get(&key)
    }

    /// Opens the requested layer, if an earlier image has it.
    fn get(&self, request: &LayerRequest) -> Result<Option<StoredLayer>, ConvertError> {
        let Some((index, _)) = self.find(request) else {
            return Ok(None);
        };
        let blob = &self.blobs[*index];
        let (file, digest) = (Arc::new(blob.file()?), blob.digest.clone());
        let name = format!("layer {}", digest.short());
        let opened = StoredLayer::open(file, digest, blob.size, request, LayerOrigin::Layout);
        opened
            .map(Some)
            .map_err(|problem| ConvertError::layout(name, problem))
    }
}

/// Makes all blobs of the image, and adds them to `made`.
fn convert_image(
    image: &Image,
    layout: &LayoutOptions,
    writer: &LayoutWriter,
    made: &mut Made,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<(ManifestEntry, LayoutReport), ConvertError> {
    let stop = AtomicBool::new(false);
    let cancel = Cancel::new(options.cancel.as_deref()).or(&stop);
    let mut reading = Reading::new(&options.limits, progress, cancel);
    reading.find_diff_id = true;
    let conversions = LayerConversions {
        image,
        options,
        progress,
        reading,
        cache: layout.cache.as_deref().map(LayerCache::open).transpose()?,
        existing: if writer.keeps_other_images() {
            LayoutLayers::find(&layout.place.path)?
        } else {
            LayoutLayers::default()
        },
        layout: writer,
        made: &*made,
        open: OpenOptions::default(),
    };
    let distinct = if !layout.dedup_lower {
        conversions.convert_all(&stop)?
    } else {
        conversions.convert_over_lower()?
    };
    let entries: u64 = distinct
        .layers
        .iter()
        .map(|layer| layer.content.entries)
        .sum();
    check_limit(LimitKind::Entries, entries, options.limits.max_entries)
        .map_err(|exceeded| exceeded.at(TarPlace::layer("all layers together")))?;
    progress.phase("merge");
    progress.total(None);
    let begun = Instant::now();
    let layers: Vec<&StoredLayer> = distinct
        .order
        .iter()
        .map(|&i| &distinct.layers[i])
        .collect();
    let described = layers
        .iter()
        .zip(&image.layers)
        .map(|(layer, input)| layer_in_stack(layer, input))
        .collect();
    let metadata = Metadata::of_source(Some(image), options, described);
    let names: Vec<String> = image.layers.iter().map(|l| l.name.clone()).collect();
    let stack = stack::write(&layers, &names, metadata, writer, options)?;
    let merge_milliseconds = begun.elapsed().as_millis() as u64;
    tracing::info!(
        "merged {} layers in {merge_milliseconds} ms",
        image.layers.len()
    );
    if options.verify {
        progress.phase("verify");
        let below = layers
            .iter()
            .map(|layer| Ok((layer.sha256()?, layer.image.clone())));
        let below = ImagesByDigest(below.collect::<Result<_, ConvertError>>()?);
        read_back(&stack.written, stack.blob.file()?, &below, options.threads)?;
    }
    let subject = if layout.is_referrer { Some(subject(image)?) } else { None };
    let config = config(image, &layers, options)?;
    let config_blob = writer.document(&config)?;
    let manifest = manifest::Manifest {
        config: &config_blob,
        layers: layers.iter().copied().zip(&image.layers).collect(),
        stack: &stack.blob,
        stack_root: &stack.report.merkle_root,
        source: image.manifest.as_ref(),
        subject,
        annotations: &image.annotations,
        options,
    };
    let manifest_blob = writer.manifest(&manifest.to_json()?, OCI_MANIFEST)?;
    let report = LayoutReport {
        source: None,
        manifest: manifest_blob.digest.clone(),
        source_manifest: image.manifest.clone(),
        reference: layout.place.reference.clone(),
        platform: image.platform.clone(),
        layers: layers
            .iter()
            .zip(&image.layers)
            .map(|(layer, input)| layer.report(input))
            .collect(),
        stack: stack.report,
        merge_milliseconds,
        verified: options.verify,
        left_out: image.left_out.clone(),
    };
    cancel.check()?;
    let reference = layout.place.reference.clone();
    let mut entry = manifest::entry(&manifest_blob, image, &config, reference);
    entry.subject = image.manifest.clone().filter(|_| layout.is_referrer);
    for layer in distinct.layers {
        made.add(layer);
    }
    made.blobs.extend([stack.blob, config_blob, manifest_blob]);
    Ok((entry, report))
}

/// The descriptor of an image's manifest.
fn subject(image: &Image) -> Result<Value, ConvertError> {
    match (&image.manifest, &image.manifest_form) {
        (Some(digest), Some((media_type, bytes))) => {
            Ok(Value::Object(descriptor(media_type, digest, *bytes)))
        }
        _ => Err(ConvertError::Options(
            "the source has no manifest that an image can be attached to".to_owned(),
        )),
    }
}

/// The distinct layers of an image, and the layer at each position.
struct DistinctLayers {
    layers: Vec<StoredLayer>,
    order: Vec<usize>,
}

/// The context of the conversion of all layers.
struct LayerConversions<'w> {
    image: &'w Image,
    options: &'w ConvertOptions,
    progress: &'w dyn Progress,
    reading: Reading<'w>,
    cache: Option<LayerCache>,
    existing: LayoutLayers,
    layout: &'w LayoutWriter,
    /// The blobs of earlier images.
    made: &'w Made,
    open: OpenOptions,
}

impl LayerConversions<'_> {
    /// Makes the layers, several at a time.
    fn convert_all(&self, stop: &AtomicBool) -> Result<DistinctLayers, ConvertError> {
        let inputs = &self.image.layers;
        let (distinct, order) = distinct(inputs);
        // Start with the longest layers, so that no long layer is the last to run alone.
        let mut begin: Vec<usize> = (0..distinct.len()).collect();
        let length = |i: usize| distinct[i].blob.length().unwrap_or(u64::MAX);
        begin.sort_by_key(|&i| std::cmp::Reverse(length(i)));
        let all: u64 = begin
            .iter()
            .fold(0, |sum, &i| length(i).saturating_add(sum));
        let threads = self.options.threads.max(1);
        let at_once = threads.min(distinct.len()).clamp(1, MAX_AT_ONCE);
        let layers = parallel::run(&begin, at_once, stop, |i| {
            // A layer with more than half of all bytes gets all threads.
            let share = if length(i) > all / 2 { threads } else { threads.div_ceil(at_once) };
            self.layer(distinct[i], options_json(self.options), share, None)
        })?;
        Ok(DistinctLayers { layers, order })
    }

    /// Makes the layers from the lowest up, because each may refer to content of those below it.
    fn convert_over_lower(&self) -> Result<DistinctLayers, ConvertError> {
        let inputs = &self.image.layers;
        let (mut layers, mut order): (Vec<StoredLayer>, Vec<usize>) = Default::default();
        let mut index = Arc::new(LowerIndex::default());
        let mut below: Vec<Digest> = Vec::new();
        for (i, input) in inputs.iter().enumerate() {
            let mut options = options_json(self.options);
            options["dedup_lower"] = json!(below);
            let threads = self.options.threads.max(1);
            let layer = self.layer(input, options, threads, Some(index.clone()))?;
            below.push(layer.digest.clone());
            if i + 1 < inputs.len() {
                // No conversion has a reference left, so `make_mut` does not copy.
                Arc::make_mut(&mut index)
                    .add(
                        layer.image.clone(),
                        layer.sha256()?,
                        layer.own_bytes,
                        layer.content.metadata_start,
                    )
                    .map_err(|error| layer.damaged(error))?;
            }
            order.push(layers.len());
            layers.push(layer);
        }
        Ok(DistinctLayers { layers, order })
    }

    /// Makes one layer: from the layout, from the cache, or from its archive.
    fn layer(
        &self,
        input: &LayerInput,
        options: Value,
        threads: usize,
        lower: Option<Arc<LowerIndex>>,
    ) -> Result<StoredLayer, ConvertError> {
        let request = |diff_id: &DiffId| LayerRequest {
            diff_id: diff_id.clone(),
            options: options.clone(),
            tool: tool(self.options),
            open: self.open.clone(),
        };
        if let Some(diff_id) = &input.diff_id {
            let request = request(diff_id);
            let verify = self.options.verify;
            let mut found = self.made.get(&request)?;
            if found.is_none() {
                found = self
                    .existing
                    .get(&request, self.layout, verify, self.progress)?;
            }
            if let (None, Some(cache)) = (&found, &self.cache) {
                found = cache.get(&request, self.layout, self.progress)?;
            }
            if let Some(mut layer) = found {
                tracing::info!("{}: there already, as {}", input.name, layer.digest);
                self.progress.phase(&input.name);
                if self.check_source(input, &request)? {
                    layer.checked_source.clone_from(&input.digest);
                }
                return Ok(layer);
            }
        }
        tracing::debug!("{}: converted with {threads} threads", input.name);
        let (blob, diff_id) = self.convert(input, &options, threads, lower)?;
        let place = self.layout.blob_path(&blob.digest).display().to_string();
        let request = request(&diff_id);
        let layer = StoredLayer::of_blob(blob, &request, LayerOrigin::Converted)?;
        let mut layer = layer.map_err(|problem| ConvertError::layout(place, problem))?;
        layer.checked_source.clone_from(&input.digest);
        if let Some(cache) = &self.cache {
            cache.put(&request, &layer, self.progress);
            cache.record_source(&request, input.digest.as_ref());
        }
        Ok(layer)
    }

    /// Checks that the source's blob has the recorded diffID, for a layer whose BCoW file existed
    /// already. Without this check, an image whose manifest and configuration contradict each other
    /// would fail or succeed depending on the cache. A blob that was checked before is not read
    /// again. Without verification, no blob is read. Returns whether the blob is checked.
    fn check_source(
        &self,
        input: &LayerInput,
        request: &LayerRequest,
    ) -> Result<bool, ConvertError> {
        let digest = input.digest.as_ref();
        let cache = self.cache.as_ref();
        let of_made = |(_, source): &(usize, Option<Digest>)| source.as_ref() == digest;
        let is_checked = self.made.find(request).is_some_and(of_made)
            || self.existing.has_source(request, digest)
            || cache.is_some_and(|cache| cache.has_source(request, digest));
        if is_checked || !self.options.verify {
            self.progress.advance(input.blob.length().unwrap_or(0));
            return Ok(is_checked);
        }
        let read = |stream: ChunkStream<'_>| TarReader::new(stream).finish();
        read_layer(input, &self.reading, read)?;
        if let Some(cache) = cache {
            cache.record_source(request, digest);
        }
        Ok(true)
    }

    /// Makes a layer from its archive.
    fn convert(
        &self,
        input: &LayerInput,
        options: &Value,
        threads: usize,
        lower: Option<Arc<LowerIndex>>,
    ) -> Result<(NewBlob, DiffId), ConvertError> {
        let output = self.layout.new_blob()?;
        let target = Target {
            output: &output,
            path: self.layout.directory().to_owned(),
            threads,
            inline_max: INLINE_MAX,
        };
        let mut report = write_layer(input, target, options, self.options, &self.reading, lower)?;
        let diff_id = report.layers.pop().and_then(|layer| layer.diff_id);
        let diff_id = diff_id.ok_or(ConvertError::Interrupted)?;
        Ok((self.layout.finish(output)?, diff_id))
    }
}

/// The distinct layers, and the index into them for each layer of the image.
fn distinct(inputs: &[LayerInput]) -> (Vec<&LayerInput>, Vec<usize>) {
    let mut known: HashMap<&DiffId, usize> = HashMap::new();
    let mut distinct = Vec::new();
    let mut order = Vec::new();
    for input in inputs {
        let next = distinct.len();
        let index = match &input.diff_id {
            Some(diff_id) => *known.entry(diff_id).or_insert(next),
            None => next,
        };
        if index == next {
            distinct.push(input);
        }
        order.push(index);
    }
    (distinct, order)
}

/// A layer's entry in the stack's metadata.
fn layer_in_stack(layer: &StoredLayer, input: &LayerInput) -> Value {
    let source = some_fields([
        ("digest", input.digest.as_ref().map(|d| json!(d))),
        ("media_type", input.media_type.as_ref().map(|m| json!(m))),
        // Without a digest, the compression of the archive is not recorded.
        (
            "stored_bytes",
            input.digest.as_ref().and(input.size).map(|n| json!(n)),
        ),
        ("tar_bytes", Some(json!(layer.tar_bytes))),
    ]);
    json!({
        "digest": layer.digest,
        "file_bytes": layer.file_bytes,
        "merkle_root": format!("sha256:{}", hex(&layer.merkle_root)),
        "diff_id": layer.diff_id,
        "entries": layer.content.entries,
        "source": source,
    })
}

/// The image's configuration: the source's, byte for byte. A bare archive has none, and gets one
/// with the required fields only.
fn config(
    image: &Image,
    layers: &[&StoredLayer],
    options: &ConvertOptions,
) -> Result<Vec<u8>, ConvertError> {
    if let Some(ImageConfig { bytes, .. }) = &image.config {
        return Ok(bytes.clone());
    }
    let platform = options.platform.clone().unwrap_or_else(Platform::host);
    let diff_ids: Vec<&DiffId> = layers.iter().map(|layer| &layer.diff_id).collect();
    json_bytes(&minimal_config(platform, &diff_ids), Path::new("config"))
}

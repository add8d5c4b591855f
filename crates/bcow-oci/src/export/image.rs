//! An ordinary OCI image in a layout: a tar archive per layer, configuration, manifest.

use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use bcow_erofs::reader::Filesystem;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::compress::{Encoder, LayerCompression};
use super::tree::TreeExport;
use super::{TarForm, TarReport};
use crate::cancel::Cancel;
use crate::digest::{Algorithm, DiffId, Digest, Hasher};
use crate::error::ConvertError;
use crate::image::ImageConfig;
use crate::layout::write::{
    LayoutPlace, LayoutWriter, ManifestEntry, NewBlob, descriptor, json_bytes,
};
use crate::layout::{OCI_CONFIG, OCI_MANIFEST};
use crate::left_out::Annotations;
use crate::null::some_fields;
use crate::options::{Progress, RunOptions};
use crate::parallel;
use crate::platform::Platform;

/// Size of the pieces that are sent between threads, in bytes.
const CHUNK_BYTES: usize = 1 << 20;
/// Pieces in flight between two threads.
const QUEUE: usize = 4;

/// The file systems to export.
#[derive(Clone)]
pub struct Layers<'e> {
    /// The form of the lowest layer: [`TarForm::Flattened`] for a whole tree. The others are layers
    /// in overlayfs form (see [`bcow_erofs::overlay`]).
    pub lowest: TarForm,
    /// All layers, lowest first. For some of them, the layout may have the original archive.
    pub layers: Vec<(&'e Filesystem, Option<KnownLayer>)>,
}

/// The archive that a layer was made of. If the layout has this archive, the export uses it
/// unchanged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownLayer {
    /// Digest of the blob.
    pub digest: Digest,
    /// Its media type.
    pub media_type: String,
    /// Its size in bytes.
    pub stored_bytes: u64,
    /// Digest of the archive, uncompressed.
    pub diff_id: DiffId,
}

impl<'e> Layers<'e> {
    /// Layers, lowest first, without known archives.
    pub fn new(lowest: TarForm, layers: impl IntoIterator<Item = &'e Filesystem>) -> Self {
        let layers = layers.into_iter().map(|layer| (layer, None)).collect();
        Layers { lowest, layers }
    }

    /// The file systems, lowest first.
    fn filesystems(&self) -> Vec<&'e Filesystem> {
        self.layers.iter().map(|layer| layer.0).collect()
    }
}

impl KnownLayer {
    /// The layers of a stack, lowest first, as its metadata describes them; `None` for a layer
    /// without one of the required fields.
    pub fn of_stack(metadata: &Value) -> Vec<Option<KnownLayer>> {
        let layers = metadata["layers"].as_array().map_or(&[][..], Vec::as_slice);
        let known = |layer: &Value| {
            let source = &layer["source"];
            Some(KnownLayer {
                digest: source["digest"].as_str()?.parse().ok()?,
                media_type: source["media_type"].as_str()?.to_owned(),
                stored_bytes: source["stored_bytes"].as_u64()?,
                diff_id: DiffId(layer["diff_id"].as_str()?.parse().ok()?),
            })
        };
        layers.iter().map(known).collect()
    }
}

/// The destination of an image.
#[derive(Debug, Clone, Default)]
pub struct LayoutExport {
    /// Where the image is written.
    pub place: LayoutPlace,
    /// How the layers are compressed.
    pub compression: LayerCompression,
    /// The annotations of the manifest.
    pub annotations: Annotations,
}

/// The result of an export.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct OciReport {
    /// Digest of the manifest.
    pub manifest: Digest,
    /// The layers, lowest first.
    pub layers: Vec<ExportedLayer>,
}

/// A layer of the exported image.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct ExportedLayer {
    /// Digest of the blob.
    pub digest: Digest,
    /// Its size in bytes.
    pub stored_bytes: u64,
    /// Digest of the archive, uncompressed.
    pub diff_id: DiffId,
    /// Size of the archive, uncompressed; 0 if the destination had the archive already.
    pub tar_bytes: u64,
    /// Entries of the archive; 0 if the destination had the archive already.
    pub entries: u64,
}

/// Writes an image into an OCI layout. `config` is the image's original configuration. The export
/// replaces its digests of layers. If its history does not match the layers, the export replaces it
/// too, or drops it if there is not exactly one layer.
///
/// The index names the image only when all blobs are complete. Other contents of the layout stay.
pub fn export_layout(
    layers: &Layers<'_>,
    config: Option<&Value>,
    destination: &LayoutExport,
    options: &RunOptions,
    progress: &dyn Progress,
) -> Result<OciReport, ConvertError> {
    let trees = layers.filesystems();
    // Check the configuration before anything is written.
    let template = ConfigTemplate::new(config)?;
    destination.place.require_no_index()?;
    let writer = LayoutWriter::open(&destination.place, options.cancel.clone())?;
    let stop = AtomicBool::new(false);
    let export = ImageExport {
        writer: &writer,
        lowest: layers.lowest,
        compression: destination.compression,
        is_piped: options.threads > 1,
        cancel: Cancel::new(options.cancel.as_deref()).or(&stop),
        progress,
    };
    let order: Vec<usize> = (0..trees.len()).collect();
    // Each layer takes two threads.
    let at_once = (options.threads / 2).max(1);
    let written = parallel::run(&order, at_once, &stop, |index| {
        match &layers.layers[index].1 {
            Some(known) if export.has_archive(known)? => Ok(WrittenLayer::existing(known)),
            _ => export.layer(trees[index], &trees[..index]),
        }
    })?;
    progress.phase("syncing");
    let diff_ids: Vec<&Digest> = written
        .iter()
        .map(|layer| &layer.report.diff_id.0)
        .collect();
    let platform = template.platform();
    let path = &destination.place.path;
    let config = writer.document(&json_bytes(&template.fill(&diff_ids), path)?)?;
    let media_type = destination.compression.media_type();
    let descriptors: Vec<Value> = written
        .iter()
        .map(|layer| {
            let media_type = layer.existing_type.as_deref().unwrap_or(media_type);
            let (digest, size) = (&layer.report.digest, layer.report.stored_bytes);
            Value::Object(descriptor(media_type, digest, size))
        })
        .collect();
    let mut manifest = json!({
        "schemaVersion": 2,
        "mediaType": OCI_MANIFEST,
        "config": descriptor(OCI_CONFIG, &config.digest, config.size),
        "layers": descriptors,
    });
    if !destination.annotations.is_empty() {
        manifest["annotations"] = json!(destination.annotations);
    }
    let manifest = writer.manifest(&json_bytes(&manifest, path)?, OCI_MANIFEST)?;
    let entry = ManifestEntry {
        platform,
        reference: destination.place.reference.clone(),
        ..ManifestEntry::of(&manifest)
    };
    export.cancel.check()?;
    let (blobs, layers): (Vec<Option<NewBlob>>, Vec<ExportedLayer>) = written
        .into_iter()
        .map(|layer| (layer.blob, layer.report))
        .unzip();
    let mut blobs: Vec<NewBlob> = blobs.into_iter().flatten().collect();
    let report = OciReport {
        manifest: manifest.digest.clone(),
        layers,
    };
    blobs.extend([config, manifest]);
    writer.publish(blobs, &entry, progress)?;
    Ok(report)
}

/// Writes the uncompressed archives of `layers` into unnamed files. Returns them with their
/// digests, lowest first.
pub(crate) fn archives(
    layers: &Layers<'_>,
    writer: &LayoutWriter,
    options: &RunOptions,
    progress: &dyn Progress,
) -> Result<Vec<(NewBlob, DiffId)>, ConvertError> {
    let trees = layers.filesystems();
    let stop = AtomicBool::new(false);
    let export = ImageExport {
        writer,
        lowest: layers.lowest,
        compression: LayerCompression::None,
        is_piped: false,
        cancel: Cancel::new(options.cancel.as_deref()).or(&stop),
        progress,
    };
    let order: Vec<usize> = (0..trees.len()).collect();
    let written = parallel::run(&order, options.threads.max(1), &stop, |index| {
        export.layer(trees[index], &trees[..index])
    })?;
    let pairs = written.into_iter().filter_map(|layer: WrittenLayer| {
        let diff_id = layer.report.diff_id;
        layer.blob.map(|blob| (blob, diff_id))
    });
    Ok(pairs.collect())
}

/// Makes the configuration of an image with these layers from `config`.
pub(crate) fn config_with(
    config: Option<&Value>,
    diff_ids: &[&Digest],
    path: &Path,
) -> Result<Vec<u8>, ConvertError> {
    json_bytes(&ConfigTemplate::new(config)?.fill(diff_ids), path)
}

struct ImageExport<'w> {
    writer: &'w LayoutWriter,
    /// Form of the lowest layer; the others have [`TarForm::Layer`].
    lowest: TarForm,
    compression: LayerCompression,
    /// Whether compression has a thread of its own.
    is_piped: bool,
    cancel: Cancel<'w>,
    progress: &'w dyn Progress,
}

struct WrittenLayer {
    /// The blob; `None` if the layout has it already.
    blob: Option<NewBlob>,
    /// Media type of the blob that the layout has.
    existing_type: Option<String>,
    report: ExportedLayer,
}

impl WrittenLayer {
    fn existing(known: &KnownLayer) -> WrittenLayer {
        WrittenLayer {
            blob: None,
            existing_type: Some(known.media_type.clone()),
            report: ExportedLayer {
                digest: known.digest.clone(),
                stored_bytes: known.stored_bytes,
                diff_id: known.diff_id.clone(),
                tar_bytes: 0,
                entries: 0,
            },
        }
    }
}

impl ImageExport<'_> {
    /// Whether the layout or the registry has this layer's archive, with a media type that OCI
    /// images allow. The registry may take the archive from another of its repositories. A blob of
    /// a layout is read and hashed, because a blob with the right name can have other content.
    fn has_archive(&self, known: &KnownLayer) -> Result<bool, ConvertError> {
        const FORM: &str = "application/vnd.oci.image.layer.v1.tar";
        if !known.media_type.starts_with(FORM) {
            return Ok(false);
        }
        if let Some(upload) = self.writer.upload() {
            let found = upload.adopt(&known.digest, known.stored_bytes);
            let name = PathBuf::from(upload.name());
            return found.map_err(|error| ConvertError::write("write", &name, error));
        }
        self.writer.has_blob(&known.digest, known.stored_bytes)
    }

    fn layer(&self, fs: &Filesystem, below: &[&Filesystem]) -> Result<WrittenLayer, ConvertError> {
        let failed = |error| ConvertError::write("write", self.writer.directory(), error);
        let output = self.writer.new_blob()?;
        let file = BufWriter::with_capacity(CHUNK_BYTES, output.file()?);
        let mut encoder = Encoder::new(file, self.compression).map_err(failed)?;
        let archive = if !self.is_piped {
            self.archive(fs, below, &mut encoder)
        } else {
            self.piped(fs, below, &mut encoder)
        };
        let (tar, diff_id, tar_bytes) = archive.map_err(|error| match error {
            ConvertError::WriteArchive(error) => failed(error),
            other => other,
        })?;
        encoder
            .finish()
            .and_then(|mut file| file.flush())
            .map_err(failed)?;
        let blob = self.writer.finish(output)?;
        Ok(WrittenLayer {
            report: ExportedLayer {
                digest: blob.digest.clone(),
                stored_bytes: blob.size,
                diff_id: DiffId(diff_id),
                tar_bytes,
                entries: tar.entries,
            },
            blob: Some(blob),
            existing_type: None,
        })
    }

    fn archive(
        &self,
        fs: &Filesystem,
        below: &[&Filesystem],
        out: &mut dyn Write,
    ) -> Result<(TarReport, Digest, u64), ConvertError> {
        let mut hashed = HashedPieces {
            out,
            piece: Vec::with_capacity(CHUNK_BYTES),
            hasher: Hasher::new(Algorithm::Sha256),
            bytes: 0,
        };
        let form = match below {
            [] => self.lowest,
            _ => TarForm::Layer,
        };
        let export = TreeExport::new(fs, form, &mut hashed, self.cancel, self.progress);
        let report = export.above(below).write()?;
        let last = hashed.out.write_all(&hashed.piece);
        last.map_err(ConvertError::WriteArchive)?;
        Ok((report, hashed.hasher.finish(), hashed.bytes))
    }

    /// The same with two threads: one reads and hashes, the other compresses.
    fn piped(
        &self,
        fs: &Filesystem,
        below: &[&Filesystem],
        out: &mut (dyn Write + Send),
    ) -> Result<(TarReport, Digest, u64), ConvertError> {
        let (sender, receiver) = sync_channel::<Vec<u8>>(QUEUE);
        thread::scope(|scope| {
            let compress = move || {
                let mut chunks = receiver.iter();
                chunks.try_for_each(|chunk| out.write_all(&chunk))
            };
            let compressor = thread::Builder::new().spawn_scoped(scope, compress);
            let compressor = compressor.map_err(ConvertError::WriteArchive)?;
            let mut chunks = Chunks(sender);
            let archive = self.archive(fs, below, &mut chunks);
            // Closing the channel ends the compressor.
            drop(chunks);
            match compressor.join() {
                // The compressor's error is the cause of the closed channel.
                Ok(Err(error)) => Err(ConvertError::WriteArchive(error)),
                Ok(Ok(())) => archive,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }
}

/// Sends the bytes that are written to it to another thread.
struct Chunks(SyncSender<Vec<u8>>);

impl Write for Chunks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.send(bytes.to_vec()) {
            Ok(()) => Ok(bytes.len()),
            Err(_) => Err(io::ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Hashes and counts the bytes that are written to it, and passes them on in pieces of one size.
/// The output of deflate depends on the sizes of its input pieces. It must depend neither on how
/// the image is stored nor on the number of threads.
struct HashedPieces<'h> {
    out: &'h mut dyn Write,
    /// Always shorter than [`CHUNK_BYTES`].
    piece: Vec<u8>,
    hasher: Hasher,
    bytes: u64,
}

impl Write for HashedPieces<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(CHUNK_BYTES - self.piece.len());
        self.hasher.update(&bytes[..taken]);
        self.bytes += taken as u64;
        self.piece.extend_from_slice(&bytes[..taken]);
        if self.piece.len() == CHUNK_BYTES {
            self.out.write_all(&self.piece)?;
            self.piece.clear();
        }
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// An image's configuration, to be completed with the layers.
struct ConfigTemplate(Map<String, Value>);

impl ConfigTemplate {
    fn new(config: Option<&Value>) -> Result<Self, ConvertError> {
        let bad =
            |problem: &str| ConvertError::Export(format!("invalid image configuration: {problem}"));
        let config = match config {
            Some(Value::Object(config)) => config.clone(),
            Some(_) => return Err(bad("it is not an object")),
            // An archive does not record its platform; the host's is the default.
            None => {
                let host = Platform::host();
                some_fields([
                    ("architecture", Some(json!(host.architecture))),
                    ("variant", host.variant.map(|variant| json!(variant))),
                    ("os", Some(json!(host.os))),
                ])
            }
        };
        match config.get("rootfs") {
            None | Some(Value::Object(_)) => Ok(ConfigTemplate(config)),
            Some(_) => Err(bad("its rootfs is not an object")),
        }
    }

    fn platform(&self) -> Option<Platform> {
        let bytes = serde_json::to_vec(&self.fill(&[])).ok()?;
        ImageConfig::parse("configuration", &bytes).ok()?.platform
    }

    /// The configuration of an image with these layers.
    fn fill(&self, diff_ids: &[&Digest]) -> Value {
        let mut config = self.0.clone();
        let rootfs = config.entry("rootfs").or_insert_with(|| json!({}));
        rootfs["type"] = json!("layers");
        rootfs["diff_ids"] = json!(diff_ids);
        if let Some(history) = config.get("history")
            && layers_in_history(history) != Some(diff_ids.len())
        {
            match diff_ids.len() {
                1 => {
                    let mut entry = Map::new();
                    if let Some(created) = config.get("created") {
                        entry.insert("created".into(), created.clone());
                    }
                    entry.insert("created_by".into(), json!("bcow export"));
                    entry.insert("comment".into(), json!("all layers merged into one"));
                    config.insert("history".into(), json!([entry]));
                }
                _ => {
                    config.shift_remove("history");
                }
            }
        }
        Value::Object(config)
    }
}

/// Number of layers that a history describes.
fn layers_in_history(history: &Value) -> Option<usize> {
    let entries = history.as_array()?.iter();
    let layers = entries.filter(|entry| entry.get("empty_layer") != Some(&json!(true)));
    Some(layers.count())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(config: &Value, layers: usize) -> String {
        let digest = Digest::of(b"layer");
        let template = ConfigTemplate::new(Some(config)).unwrap();
        let filled = template.fill(&vec![&digest; layers]);
        filled.to_string().replace(&digest.to_string(), "LAYER")
    }

    #[test]
    fn a_configuration_keeps_all_but_its_layers() {
        let created = "2024-01-01T00:00:00Z";
        let config = |layers: &[&str], history: Option<Value>| {
            let mut config = json!({
                "created": created, "zebra": {"b": 1, "a": 2},
                "architecture": "riscv64", "os": "linux",
                "rootfs": {"type": "layers", "diff_ids": layers},
                "history": history,
                "config": {"Cmd": ["sh"]},
            });
            if history.is_none() {
                config.as_object_mut().unwrap().shift_remove("history");
            }
            config
        };
        let history = json!([
            {"created_by": "one"},
            {"created_by": "none", "empty_layer": true},
            {"created_by": "two"},
        ]);
        let original = config(&["sha256:old", "sha256:older"], Some(history.clone()));
        let merged = json!([{
            "created": created, "created_by": "bcow export",
            "comment": "all layers merged into one",
        }]);
        for (layers, history) in [(1, Some(merged)), (2, Some(history)), (3, None)] {
            let expected = config(&["LAYER"; 3][..layers], history);
            assert_eq!(filled(&original, layers), expected.to_string());
        }
        let platform = ConfigTemplate::new(Some(&original)).unwrap().platform();
        assert_eq!(platform.unwrap().to_string(), "linux/riscv64");
    }

    #[test]
    fn an_invalid_configuration_is_refused() {
        for config in [json!([]), json!("x"), json!({"rootfs": []})] {
            assert!(matches!(
                ConfigTemplate::new(Some(&config)),
                Err(ConvertError::Export(_))
            ));
        }
    }

    #[test]
    fn a_platform_is_exported_without_a_configuration() {
        let template = ConfigTemplate::new(None).unwrap();
        assert_eq!(template.platform(), Some(Platform::host()));
    }
}

//! The conversion itself: layers from the top, content as it comes, then the merged tree.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bcow::{Image as BcowImage, ImageWriter, OpenOptions, WriterOptions, Written};
use bcow_erofs::merge::{MergeError, merge};
use bcow_erofs::tree::LayerTree;
use bcow_erofs::writer::{EmitError, Plan, WriteOptions};
use serde_json::{Map, Value, json};

use crate::archive::{Archive, Files};
use crate::blob::Blob;
use crate::builder::Budget;
use crate::content::{ContentSink, ContentStats, ContentWriter};
use crate::directory::DirectoryIngest;
use crate::error::ConvertError;
use crate::hidden::Uppers;
use crate::image::Image;
use crate::ingest::{LayerIngest, rescue};
use crate::layer::{LayerInput, Reading, read_layer};
use crate::options::{Compression, ConvertOptions, LayerReport, Progress, Report};
use crate::output::Output;
use crate::source::{Source, TarInput};
use crate::stream::ChunkStream;
use crate::tails::TailStore;
use crate::tar::TarReader;
use crate::warnings::Warnings;
use crate::{docker, layout};

/// Longest file tail that is kept beside its inode in a compressed image, where the zeros behind a tail
/// in a block of its own cost next to nothing, but a fatter inode table slows every lookup. Measured on 1.4 GB
/// of Debian with Python: 0 to 512 give the same file size within 0.1 %, 2000 gives 0.3 % more.
const INLINE_MAX: u16 = 256;
/// The same in a plain image, where such a tail costs a block of 4096 bytes: 5 % of the same image.
const INLINE_MAX_PLAIN: u16 = 2000;

/// What zstd knows, and bcow promises to.
const ZSTD_LEVELS: RangeInclusive<i32> = -7..=22;

/// Converts `source` into one flattened image at `destination`.
///
/// The destination appears, or is replaced, at once and complete, or not at all. A destination that is a
/// symlink stays one; what it points to is replaced. See [`ConvertError`] for what can go wrong.
pub fn convert(
    source: &Source,
    destination: &Path,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<Report, ConvertError> {
    let input = Input::open(source, options)?;
    let output = Output::create(destination)?;
    let mut conversion = Conversion::start(&output, destination, options, progress)?;
    let (layers, mut report) = match &input {
        Input::Image(image) => conversion.layers(image)?,
        Input::Directory(path) => conversion.directory(path)?,
    };
    let metadata = Metadata::new(&input, source, options, &report);
    let written = conversion.finish(layers, metadata, &mut report)?;
    if options.verify {
        progress.phase("verify");
        progress.total(None);
        verify(&written, &output, options)?;
        report.verified = true;
    }
    let cancel = options.cancel.as_ref();
    if cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed)) {
        return Err(ConvertError::Interrupted);
    }
    output.publish()?;
    Ok(report)
}

/// What there is to convert.
enum Input {
    Image(Image),
    Directory(PathBuf),
}

impl Input {
    fn open(source: &Source, options: &ConvertOptions) -> Result<Input, ConvertError> {
        let platform = options.platform.as_ref();
        let image = match source {
            Source::Oci {
                directory,
                reference,
            } => layout::find(
                &Files::directory(directory)?,
                reference.as_deref(),
                platform,
            )?,
            Source::OciArchive { file, reference } => {
                let files = Files::Archive(Archive::open_file(file)?);
                layout::find(&files, reference.as_deref(), platform)?
            }
            Source::DockerArchive { file, reference } => {
                docker::find(Archive::open_file(file)?, reference.as_deref(), platform)?
            }
            Source::Tar(TarInput::File(path)) => single_layer(Blob::open(path)?),
            Source::Tar(TarInput::Stdin) => single_layer(Blob::stdin()?),
            Source::Directory(path) => return Ok(Input::Directory(path.clone())),
        };
        Ok(Input::Image(image))
    }
}

/// A root file system in one tar archive. Nothing promises its digest, so none is computed.
fn single_layer(blob: Blob) -> Image {
    Image {
        manifest: None,
        reference: None,
        platform: None,
        config: None,
        layers: vec![LayerInput {
            name: blob.name.clone(),
            blob,
            digest: None,
            size: None,
            diff_id: None,
            media_type: None,
        }],
    }
}

/// A conversion under way.
struct Conversion<'c> {
    content: ContentWriter<ImageSink>,
    options: &'c ConvertOptions,
    progress: &'c dyn Progress,
    budget: Budget,
    warnings: Warnings,
    path: PathBuf,
    /// How messages name the layers, lowest first.
    names: Vec<String>,
    inline_max: u16,
}

impl<'c> Conversion<'c> {
    fn start(
        output: &Output,
        destination: &Path,
        options: &'c ConvertOptions,
        progress: &'c dyn Progress,
    ) -> Result<Self, ConvertError> {
        let path = destination.to_owned();
        if let Compression::Zstd { level } = options.compression
            && !ZSTD_LEVELS.contains(&level)
        {
            return Err(ConvertError::Options(format!(
                "zstd has no level {level}, only {} to {}",
                ZSTD_LEVELS.start(),
                ZSTD_LEVELS.end()
            )));
        }
        let writer_options = WriterOptions {
            compression: options.compression,
            plain: options.plain,
            block_bytes: options.block_bytes,
            threads: options.threads.max(1),
            erofs: true,
            ..WriterOptions::default()
        };
        let writer = ImageWriter::create(output.file()?, writer_options).map_err(|e| match e {
            bcow::Error::Unsupported(text) => ConvertError::Options(text),
            e => image_error(&path, e),
        })?;
        let inline_max = match options.plain {
            true => INLINE_MAX_PLAIN,
            false => INLINE_MAX,
        };
        let sink = ImageSink {
            writer,
            path: path.clone(),
        };
        Ok(Conversion {
            content: ContentWriter::new(
                sink,
                TailStore::new(output.directory()),
                inline_max,
                options.limits.max_bytes,
            ),
            options,
            progress,
            budget: Budget {
                entries: 0,
                max_entries: options.limits.max_entries,
                name_bytes: 0,
            },
            warnings: Warnings::default(),
            path,
            names: Vec::new(),
            inline_max,
        })
    }

    /// Reads all layers, uppermost first; gives them back lowest first.
    fn layers(&mut self, image: &Image) -> Result<(Vec<LayerTree>, Report), ConvertError> {
        self.names = image.layers.iter().map(|l| l.name.clone()).collect();
        let lengths = image.layers.iter().map(|layer| layer.blob.length());
        self.progress
            .total(lengths.sum::<Option<u64>>().filter(|&bytes| bytes > 0));
        let all_bytes = AtomicU64::new(0);
        let reading = Reading {
            limits: &self.options.limits,
            progress: self.progress,
            cancel: self.options.cancel.as_deref(),
            bytes: &all_bytes,
        };
        let mut uppers = Uppers::default();
        let mut hidden_bytes = 0;
        let mut reports = Vec::new();
        for input in image.layers.iter().rev() {
            self.progress.phase(&input.name);
            let parse = |stream: ChunkStream<'_>| {
                let ingest = LayerIngest {
                    name: &input.name,
                    content: &mut self.content,
                    uppers: &mut uppers,
                    budget: &mut self.budget,
                    warnings: &mut self.warnings,
                    hidden_bytes: &mut hidden_bytes,
                };
                let mut tar = TarReader::new(stream);
                let read = ingest.run(&mut tar);
                whole_layer(read, &mut tar)
            };
            let (ingested, bytes) = read_layer(input, &reading, parse)?;
            let mut tree = ingested.tree;
            if !ingested.rescue.is_empty() {
                let parse = |stream: ChunkStream<'_>| {
                    let mut tar = TarReader::new(stream);
                    let wanted = &ingested.rescue;
                    let name = &input.name;
                    let read = rescue(wanted, name, &mut tar, &mut tree, &mut self.content);
                    whole_layer(read, &mut tar)
                };
                // What was counted once is not counted again.
                let again = Reading {
                    progress: &(),
                    bytes: &AtomicU64::new(0),
                    ..reading
                };
                let (rescued, _) = read_layer(input, &again, parse)?;
                hidden_bytes -= rescued;
            }
            uppers.push(tree);
            reports.push(LayerReport {
                digest: input.digest.clone(),
                diff_id: input.diff_id.clone(),
                media_type: input.media_type.clone(),
                stored_bytes: bytes.stored,
                bytes: bytes.tar,
                entries: ingested.entries,
            });
        }
        reports.reverse();
        let mut layers = uppers.into_layers();
        layers.reverse();
        let mut report = empty_report();
        report.manifest = image.manifest.clone();
        report.platform = image.platform.clone();
        report.layers = reports;
        report.hidden_bytes = hidden_bytes;
        Ok((layers, report))
    }

    fn directory(&mut self, path: &Path) -> Result<(Vec<LayerTree>, Report), ConvertError> {
        let name = path.display().to_string();
        self.progress.phase(&name);
        self.names = vec![name];
        self.progress.total(None);
        let ingest = DirectoryIngest {
            content: &mut self.content,
            budget: &mut self.budget,
            warnings: &mut self.warnings,
            progress: self.progress,
            cancel: self.options.cancel.as_deref(),
        };
        Ok((vec![ingest.run(path)?], empty_report()))
    }

    /// Merges the layers and writes the file system's metadata.
    fn finish(
        self,
        layers: Vec<LayerTree>,
        mut metadata: Metadata,
        report: &mut Report,
    ) -> Result<Written, ConvertError> {
        self.warnings.report(self.progress);
        self.progress.phase("metadata");
        self.progress.total(None);
        let path = self.path;
        let tree = merge(layers).map_err(|e| tree_error(&self.names, e))?;
        let stats = self.content.stats();
        let (sink, tails) = self.content.into_parts();
        let mut writer = sink.writer;
        let failed = |e| image_error(&path, e);
        let metadata_start = writer.begin_metadata().map_err(failed)?;
        let write_options = WriteOptions {
            metadata_start,
            inline_max: self.inline_max,
        };
        let unfit = |e| ConvertError::Image {
            path: path.clone(),
            source: Box::new(e),
        };
        let plan = Plan::new(&tree, &write_options).map_err(unfit)?;
        let end = metadata_start + plan.metadata_bytes();
        plan.write(&tails, &mut |bytes| writer.append(bytes))
            .map_err(|e| match e {
                EmitError::Output(e) => image_error(&path, e),
                EmitError::Tail(source) => ConvertError::Read {
                    action: "read",
                    what: "a temporary file".to_owned(),
                    source,
                },
            })?;
        debug_assert_eq!(writer.position(), end);
        let entries = plan.inodes();
        metadata.content(entries, stats, metadata_start);
        let superblock = plan.superblock(end / 4096);
        let written = writer
            .finish(&superblock, &Value::Object(metadata.0))
            .map_err(failed)?;
        report.entries = entries;
        report.content_bytes = stats.content_bytes;
        report.deduplicated_bytes = stats.deduplicated_bytes;
        report.size = written.size();
        report.file_bytes = written.file_bytes();
        let root = written.merkle_root();
        report.merkle_root = root.iter().map(|b| format!("{b:02x}")).collect();
        Ok(written)
    }
}

/// Says which layer does not fit.
fn tree_error(names: &[String], error: MergeError) -> ConvertError {
    let (place, problem) = match error {
        MergeError::Layer { layer, source } => (names.get(layer).cloned(), source),
        MergeError::Tree(source) => (None, source),
        other => {
            return ConvertError::Layout {
                place: "the layers".to_owned(),
                problem: other.to_string(),
            };
        }
    };
    ConvertError::Tree {
        place: place.unwrap_or_else(|| "the merged layers".to_owned()),
        problem,
    }
}

/// Reads a layer to its end. If its archive is broken, its digest may be wrong too, and that is the
/// better thing to say.
fn whole_layer<R>(
    read: Result<R, ConvertError>,
    tar: &mut TarReader<'_>,
) -> Result<R, ConvertError> {
    match read {
        Ok(result) => tar.finish().map(|()| result),
        Err(error @ ConvertError::Tar { .. }) => match tar.finish() {
            Err(
                digest @ (ConvertError::DigestMismatch { .. } | ConvertError::SizeMismatch { .. }),
            ) => Err(digest),
            _ => Err(error),
        },
        Err(error) => Err(error),
    }
}

fn empty_report() -> Report {
    Report {
        manifest: None,
        platform: None,
        layers: Vec::new(),
        entries: 0,
        content_bytes: 0,
        deduplicated_bytes: 0,
        hidden_bytes: 0,
        size: 0,
        file_bytes: 0,
        merkle_root: String::new(),
        verified: false,
    }
}

/// The JSON section (spec section 13). Nothing in it depends on the host, the time, or paths.
struct Metadata(Map<String, Value>);

impl Metadata {
    fn new(input: &Input, source: &Source, options: &ConvertOptions, report: &Report) -> Self {
        let mut all = Map::new();
        all.insert(
            "tool".into(),
            json!(format!("bcow {}", options.tool_version)),
        );
        if let Some(created) = options.source_date_epoch.and_then(crate::rfc3339) {
            all.insert("created".into(), json!(created));
        }
        let compress = match (options.plain, options.compression) {
            (true, _) | (_, Compression::None) => json!("none"),
            (_, Compression::Zstd { level }) => json!(format!("zstd:{level}")),
        };
        let block_size = match options.block_bytes {
            Some(bytes) => json!(bytes),
            None => json!("auto"),
        };
        all.insert(
            "options".into(),
            json!({"compress": compress, "plain": options.plain, "block_size": block_size}),
        );
        let transport = match source {
            Source::Oci { .. } => "oci",
            Source::OciArchive { .. } => "oci-archive",
            Source::DockerArchive { .. } => "docker-archive",
            Source::Tar(_) => "tar",
            Source::Directory(_) => "dir",
        };
        let mut origin = Map::new();
        origin.insert("transport".into(), json!(transport));
        if let Input::Image(image) = input {
            let fields = [
                ("reference", image.reference.as_ref().map(|r| json!(r))),
                ("manifest_digest", image.manifest.as_ref().map(|d| json!(d))),
                (
                    "platform",
                    image.platform.as_ref().map(|p| json!(p.to_string())),
                ),
            ];
            for (key, value) in fields {
                if let Some(value) = value {
                    origin.insert(key.into(), value);
                }
            }
        }
        all.insert("source".into(), Value::Object(origin));
        let layers = report.layers.iter().map(layer_metadata).collect();
        all.insert("layers".into(), Value::Array(layers));
        if let Input::Image(Image {
            config: Some(config),
            ..
        }) = input
        {
            all.insert("config".into(), config.clone());
        }
        Metadata(all)
    }

    fn content(&mut self, entries: u64, stats: ContentStats, metadata_start: u64) {
        self.0.insert(
            "content".into(),
            json!({
                "entries": entries,
                "file_bytes": stats.content_bytes,
                "deduplicated_bytes": stats.deduplicated_bytes,
                "metadata_start": metadata_start,
            }),
        );
    }
}

fn layer_metadata(layer: &LayerReport) -> Value {
    let mut all = Map::new();
    let fields = [
        ("digest", layer.digest.as_ref().map(|d| json!(d))),
        ("diff_id", layer.diff_id.as_ref().map(|d| json!(d))),
        ("media_type", layer.media_type.as_ref().map(|m| json!(m))),
        // An archive without a digest is the same however it was compressed.
        (
            "stored_bytes",
            layer.digest.as_ref().map(|_| json!(layer.stored_bytes)),
        ),
        ("tar_bytes", Some(json!(layer.bytes))),
    ];
    for (key, value) in fields {
        if let Some(value) = value {
            all.insert(key.into(), value);
        }
    }
    Value::Object(all)
}

/// Reads the image back: every block against what was appended, then the file system in it.
fn verify(
    written: &Written,
    output: &Output,
    options: &ConvertOptions,
) -> Result<(), ConvertError> {
    let wrong = |e: bcow::Error| ConvertError::Verify(Box::new(e));
    bcow::verify_written(written, options.threads).map_err(wrong)?;
    let storage = Arc::new(output.file()?);
    let image = BcowImage::open_storage(storage, &OpenOptions::default()).map_err(wrong)?;
    crate::verify::file_system(image)
}

/// An [`ImageWriter`] whose errors name the destination.
struct ImageSink {
    writer: ImageWriter,
    path: PathBuf,
}

impl ContentSink for ImageSink {
    fn position(&self) -> u64 {
        self.writer.position()
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), ConvertError> {
        self.writer
            .append(bytes)
            .map_err(|e| image_error(&self.path, e))
    }

    fn append_zeros(&mut self, count: u64) -> Result<(), ConvertError> {
        self.writer
            .append_zeros(count)
            .map_err(|e| image_error(&self.path, e))
    }
}

fn image_error(path: &Path, error: bcow::Error) -> ConvertError {
    match error {
        bcow::Error::Io { action, source, .. } => ConvertError::Write {
            action,
            path: path.to_owned(),
            source,
        },
        error => ConvertError::Image {
            path: path.to_owned(),
            source: Box::new(error),
        },
    }
}

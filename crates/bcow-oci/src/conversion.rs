//! Writes one image: the content as the layers are read, then the file system's metadata, then a
//! check.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::{ImageWriter, Written};
use bcow_erofs::tree::{LayerTree, Tree};

use crate::builder::{Budget, LayerBuilder};
use crate::content::ContentWriter;
use crate::directory::read_directory;
use crate::ending::Ending;
use crate::error::{ConvertError, TarPlace, TarProblem};
use crate::hidden::UpperLayers;
use crate::image_file::{ImageSink, image_error, writer_options};
use crate::ingest::{LayerIngest, Rescue, rescue};
use crate::layer::{LayerInput, Reading, read_layer};
use crate::lower::LowerIndex;
use crate::metadata::Metadata;
use crate::options::{ConvertOptions, LayerReport, Progress, Report};
use crate::output::Output;
use crate::space::inline_max;
use crate::stream::ChunkStream;
use crate::tails::TailStore;
use crate::tar::{End, TarReader};
use crate::warnings::Warnings;

/// How an image is written.
pub(crate) struct Target<'t> {
    pub output: &'t Output,
    /// The path in messages.
    pub path: PathBuf,
    pub threads: usize,
    /// Longest inline tail, in bytes. A layer of a layout uses [`crate::space::INLINE_MAX`] even if
    /// it is plain,
    /// because its tails are stored in the stack.
    pub inline_max: u16,
}

impl<'t> Target<'t> {
    /// A flattened image.
    pub(crate) fn image(output: &'t Output, path: &Path, options: &ConvertOptions) -> Self {
        Target {
            output,
            path: path.to_owned(),
            threads: options.threads.max(1),
            inline_max: inline_max(options.plain),
        }
    }
}

/// A conversion in progress.
pub(crate) struct Conversion<'c> {
    content: ContentWriter<ImageSink>,
    progress: &'c dyn Progress,
    options: &'c ConvertOptions,
    budget: Budget,
    warnings: Warnings,
    path: PathBuf,
    inline_max: u16,
    /// Apparent size of the files that upper layers hide.
    hidden_bytes: u64,
}

impl<'c> Conversion<'c> {
    pub(crate) fn start(
        target: Target<'_>,
        options: &'c ConvertOptions,
        progress: &'c dyn Progress,
    ) -> Result<Self, ConvertError> {
        let Target {
            output,
            path,
            threads,
            inline_max,
        } = target;
        let writer = ImageWriter::create(output.file()?, writer_options(options, threads)?)
            .map_err(|e| match e {
                bcow::Error::Unsupported(text) => ConvertError::Options(text),
                e => image_error(&path, e),
            })?;
        let sink = ImageSink::new(writer, &path);
        Ok(Conversion {
            content: ContentWriter::new(
                sink,
                TailStore::new(output.directory()),
                inline_max,
                options.limits.max_bytes,
            ),
            progress,
            options,
            budget: Budget {
                entries: 0,
                max_entries: options.limits.max_entries,
                name_bytes: 0,
            },
            warnings: Warnings::default(),
            path,
            inline_max,
            hidden_bytes: 0,
        })
    }

    /// Content that lower layers have is from now on referenced there.
    pub(crate) fn deduplicate_against(&mut self, lower: Arc<LowerIndex>) {
        self.content.deduplicate_against(lower);
    }

    /// Reads one layer and adds it below the layers read before.
    pub(crate) fn layer(
        &mut self,
        input: &LayerInput,
        reading: &Reading<'_>,
        uppers: &mut UpperLayers,
    ) -> Result<LayerReport, ConvertError> {
        self.progress.phase(&input.name);
        let options = self.options;
        let begun = std::time::Instant::now();
        let parse = |stream: ChunkStream<'_>| {
            let ingest = LayerIngest {
                name: &input.name,
                reading,
                // An archive in an image may contain images as files.
                recognise: !input.has_digest() && !options.as_files,
                content: &mut self.content,
                uppers,
                builder: LayerBuilder::new(&mut self.budget),
                warnings: &mut self.warnings,
                hidden_bytes: &mut self.hidden_bytes,
                dropped: HashMap::new(),
                rescue: Rescue::default(),
            };
            let mut tar = TarReader::new(stream);
            let read = ingest.run(&mut tar);
            let read = whole_layer(read, &mut tar)?;
            if !input.has_digest() {
                check_end(&input.name, &tar, options, reading.progress)?;
            }
            Ok(read)
        };
        let (ingested, bytes) = read_layer(input, reading, parse)?;
        let mut tree = ingested.tree;
        if !ingested.rescue.is_empty() {
            tracing::debug!(
                "{}: read a second time, for files that an upper layer has another name of",
                input.name
            );
            let parse = |stream: ChunkStream<'_>| {
                let mut tar = TarReader::new(stream);
                let wanted = &ingested.rescue;
                let name = &input.name;
                let read = rescue(wanted, name, &mut tar, &mut tree, &mut self.content);
                whole_layer(read, &mut tar)
            };
            let (rescued, _) = read_layer(input, &reading.uncounted(), parse)?;
            self.hidden_bytes -= rescued;
        }
        uppers.push(tree);
        tracing::info!(
            "{}: {} entries, {} bytes of archive from {} stored, read in {} ms",
            input.name,
            ingested.entries,
            bytes.tar,
            bytes.stored,
            begun.elapsed().as_millis()
        );
        Ok(LayerReport {
            digest: input.digest.clone(),
            // The archive may lack padding that the recorded diffID covers.
            diff_id: input.diff_id.clone().or(bytes.diff_id),
            media_type: input.media_type.clone(),
            stored_bytes: bytes.stored,
            bytes: bytes.tar,
            entries: ingested.entries,
        })
    }

    pub(crate) fn directory(
        &mut self,
        path: &Path,
        reading: &Reading<'_>,
    ) -> Result<LayerTree, ConvertError> {
        self.progress.phase(&path.display().to_string());
        let (content, warnings) = (&mut self.content, &mut self.warnings);
        read_directory(path, content, &mut self.budget, warnings, reading)
    }

    /// Writes the file system's metadata and the JSON section. The report has what is known of the
    /// tree and of the file.
    pub(crate) fn finish(
        self,
        tree: &Tree,
        metadata: Metadata,
    ) -> Result<(Written, Report), ConvertError> {
        self.warnings.report(self.progress);
        let stats = self.content.stats();
        let shown = self.content.lower_used();
        let (sink, tails) = self.content.into_parts();
        let ending = Ending {
            tree,
            tails: &tails,
            shown: &shown,
            as_devices: false,
            inline_max: self.inline_max,
            stats,
            prefetch: None,
            path: &self.path,
        };
        let written = ending.write(sink.into_writer(), metadata)?;
        let report = Report {
            entries: tree.len() as u64,
            content_bytes: stats.content_bytes,
            deduplicated_bytes: stats.deduplicated_bytes,
            hidden_bytes: self.hidden_bytes,
            ..Report::of(&written)
        };
        Ok((written, report))
    }
}

/// Checks that an archive without a known digest is complete, as far as its end shows.
///
/// The output of a program that dies often ends exactly behind an entry, because a pipe carries
/// whole blocks. GNU tar and Go accept such an archive as complete. An archive with half of the
/// marker gives a warning, as in GNU tar: its writer had written all entries.
fn check_end(
    name: &str,
    tar: &TarReader<'_>,
    options: &ConvertOptions,
    progress: &dyn Progress,
) -> Result<(), ConvertError> {
    let refused = |problem| {
        Err(ConvertError::Tar {
            place: TarPlace::layer(name),
            problem,
        })
    };
    match tar.end() {
        Some(End::Marker { followed }) => {
            if followed {
                progress.warning(&format!(
                    "{name}: data after the end-of-archive marker is ignored, as tar does"
                ));
            }
        }
        Some(End::HalfMarker) => progress.warning(&format!(
            "{name}: the end-of-archive marker has one block of zeros instead of two"
        )),
        Some(End::Nothing { offset: 0 }) => return refused(TarProblem::Empty),
        Some(End::Nothing { offset }) if !options.allow_truncated => {
            return refused(TarProblem::NoEndMarker { offset });
        }
        _ => progress.warning(&format!(
            "{name}: no end-of-archive marker: the archive may have been cut off"
        )),
    }
    Ok(())
}

/// Reads a layer to its end. If the archive is corrupt and its digest does not match, the digest
/// error is returned, because it is more precise.
fn whole_layer<R>(
    read: Result<R, ConvertError>,
    tar: &mut TarReader<'_>,
) -> Result<R, ConvertError> {
    match read {
        Ok(result) => tar.finish().map(|()| result),
        Err(error @ ConvertError::Tar { .. }) => match tar.finish() {
            Err(mismatch @ ConvertError::Mismatch { .. }) => Err(mismatch),
            _ => Err(error),
        },
        Err(error) => Err(error),
    }
}

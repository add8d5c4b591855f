//! Exports of the content of an image: as an archive, an ordinary image, or its bytes.

use std::io::{BufWriter, Write};
use std::path::Path;

use bcow::BlockDevice;
use bcow_erofs::reader::Filesystem;
use bcow_images::error::{CommandError, Context};
use bcow_images::image::OpenImage;
use bcow_images::new_file::NewFile;
use bcow_images::size::plural;
use bcow_images::{failure, names};
use bcow_oci::export::{
    LayerCompression, Layers, LayoutExport, OciReport, TarForm, TarReport, export_layout,
    export_tar,
};
use bcow_oci::{ConvertError, LayoutPlace, LeftOut, RunOptions};
use serde_json::Value;

use crate::copy_out::CopyOut;
use crate::work::Work;

/// Where an archive or the bytes of an image go.
pub enum Output<'a> {
    /// To a file, complete or not at all.
    File(&'a Path),
    /// To standard output, which the caller flushes.
    Stream(&'a mut dyn Write),
}

impl<'a> Output<'a> {
    /// The output that the user calls `path`: for `-`, the stream.
    pub fn named(path: &'a Path, stream: &'a mut dyn Write) -> Self {
        if is_stream(path) { Output::Stream(stream) } else { Output::File(path) }
    }
}

/// Whether the user calls standard output `path`.
pub fn is_stream(path: &Path) -> bool {
    path == Path::new("-")
}

/// The part of an address space that is exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExportedPart {
    /// The file system in it.
    Erofs,
    /// All of it.
    Whole,
}

/// Buffer of output that comes in small pieces, in bytes.
const BUFFER_BYTES: usize = 1 << 20;

pub(crate) fn export_options(jobs: Option<usize>, work: &Work<'_>) -> RunOptions {
    RunOptions {
        threads: jobs.unwrap_or(RunOptions::default().threads),
        cancel: Some(work.interrupt.flag()),
    }
}

/// Writes the tree of an image, or the changes of a single layer (of `bcow commit --upper`).
pub fn export_archive(
    image: &OpenImage,
    output: Output<'_>,
    jobs: Option<usize>,
    work: &Work<'_>,
) -> Result<TarReport, CommandError> {
    let tree = image.tree()?;
    let is_layer = image.metadata()?.get("layer").is_some();
    let form = if is_layer { TarForm::Layer } else { TarForm::Tree };
    work.progress.phase("exporting");
    to_archive(image, tree.filesystem(), form, output, jobs, work)
}

/// Writes an archive of a tree. `image` is in errors.
pub(crate) fn to_archive(
    image: &OpenImage,
    tree: &Filesystem,
    form: TarForm,
    output: Output<'_>,
    jobs: Option<usize>,
    work: &Work<'_>,
) -> Result<TarReport, CommandError> {
    let options = export_options(jobs, work);
    let write = |out: &mut dyn Write| export_tar(tree, form, out, &options, work.progress);
    let path = match output {
        Output::Stream(out) => {
            return write(out).map_err(|error| match error {
                ConvertError::WriteArchive(error) => CommandError::standard_output(&error),
                _ => export_failure(image, &error),
            });
        }
        Output::File(path) => path,
    };
    image.refuse_own_file(path)?;
    let new = NewFile::create(path)?;
    let cannot = || format!("cannot write {}", path.display());
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, new.file());
    let report = write(&mut out).map_err(|error| match error {
        ConvertError::WriteArchive(error) => CommandError::new(cannot()).caused_by(&error),
        _ => export_failure(image, &error),
    })?;
    out.flush().context(cannot)?;
    drop(out);
    work.progress.phase("syncing");
    new.complete()?;
    Ok(report)
}

/// The trees of an image's layers.
pub(crate) struct ImageLayers {
    lowest: TarForm,
    /// Lowest first.
    trees: Vec<Filesystem>,
}

impl ImageLayers {
    /// Opens the trees of all layers of a stack, or the one tree of another image.
    pub(crate) fn of(image: &OpenImage, metadata: &Value) -> Result<Self, CommandError> {
        let mut trees = layers_of_stack(image, metadata)?;
        let is_whole = trees.is_empty() && metadata.get("layer").is_none();
        if trees.is_empty() {
            trees.push(image.tree()?.into_filesystem());
        }
        Ok(ImageLayers {
            lowest: if is_whole { TarForm::Flattened } else { TarForm::Layer },
            trees,
        })
    }

    /// The layers to write.
    pub(crate) fn layers(&self) -> Layers<'_> {
        Layers::new(self.lowest, &self.trees)
    }
}

/// Writes an ordinary image. Also returns the parts of the image that the new one does not have.
pub fn export_image(
    image: &OpenImage,
    layout: &LayoutPlace,
    compression: LayerCompression,
    jobs: Option<usize>,
    work: &Work<'_>,
) -> Result<(OciReport, LeftOut), CommandError> {
    let metadata = image.metadata()?;
    image.refuse_as_destination(layout)?;
    let trees = ImageLayers::of(image, &metadata)?;
    let (annotations, left_out) = image.annotations()?;
    let destination = LayoutExport {
        place: layout.clone(),
        compression,
        annotations,
    };
    work.progress.phase("exporting");
    let report = export_layout(
        &trees.layers(),
        metadata.get("config"),
        &destination,
        &export_options(jobs, work),
        work.progress,
    );
    let report = report.map_err(|error| export_failure(image, &error))?;
    Ok((report, left_out))
}

/// Writes the bytes of an address space. Returns their number.
pub fn export_bytes(
    image: &OpenImage,
    part: ExportedPart,
    output: Output<'_>,
    work: &Work<'_>,
) -> Result<u64, CommandError> {
    let end = match part {
        ExportedPart::Erofs => erofs_bytes(image)?,
        ExportedPart::Whole => image.image().size(),
    };
    work.progress.phase("exporting");
    work.progress.total(Some(end));
    let export = CopyOut {
        device: &**image.image(),
        name: image.path(),
        end,
        work,
    };
    match output {
        Output::Stream(out) => export.stream(out)?,
        Output::File(path) => {
            image.refuse_own_file(path)?;
            let new = NewFile::create(path)?;
            export.raw(&new, &|| format!("cannot write {}", path.display()))?;
            work.progress.phase("syncing");
            new.complete()?;
        }
    }
    Ok(end)
}

/// The file systems of a stack's layers, lowest first; empty for other images.
pub(crate) fn layers_of_stack(
    image: &OpenImage,
    metadata: &Value,
) -> Result<Vec<Filesystem>, CommandError> {
    // Not a stack: a merged commit, or a single layer, is exported as one tree.
    if metadata.get("commit").is_some() || metadata.get("layer").is_some() {
        return Ok(Vec::new());
    }
    let opened = image.opened();
    let backings: Vec<String> = image
        .image()
        .backings()
        .map(|b| b.name.to_string())
        .collect();
    let layers: Vec<String> = opened
        .layers
        .iter()
        .map(|layer| layer.recorded.digest.to_string())
        .collect();
    // A layer that the metadata does not name would be missing from the new image.
    let described = metadata["layers"].as_array().map_or(0, Vec::len);
    let is_complete = described == layers.len() && backings.iter().all(|b| layers.contains(b));
    if !backings.is_empty() && !is_complete {
        return Err(
            CommandError::new(format!("cannot export {}", image.path().display()))
                .caused_by_text("its metadata does not name all its layers"),
        );
    }
    opened
        .layers
        .iter()
        .map(|layer| {
            // Metadata can list a layer that is no backing, and is not searched for.
            let file = layer.file.as_ref().ok_or_else(|| {
                CommandError::new(format!("cannot export {}", image.path().display()))
                    .caused_by_text(format!("its layer {} was not found", layer.recorded.digest))
            })?;
            Filesystem::open(file.image.clone())
                .context(|| format!("cannot read the file system in {}", file.path.display()))
        })
        .collect()
}

/// The error for a failed export, except for errors of the output.
pub(crate) fn export_failure(image: &OpenImage, error: &ConvertError) -> CommandError {
    let cannot = |path: &[u8], doing: &str| {
        CommandError::new(format!(
            "cannot {doing} {} in {}",
            names::quoted(path),
            image.path().display()
        ))
    };
    match error {
        ConvertError::ReadImage { path, source } => cannot(path, "read").caused_by(source),
        ConvertError::Unrepresentable { path, problem } => {
            cannot(path, "export").caused_by_text(problem)
        }
        ConvertError::WriteArchive(_) | ConvertError::Export(_) => {
            CommandError::new(format!("cannot export {}", image.path().display())).caused_by(error)
        }
        _ => failure::failure(error),
    }
}

/// The length of the file system in the address space, in bytes.
fn erofs_bytes(image: &OpenImage) -> Result<u64, CommandError> {
    let tree = image.tree()?;
    let superblock = tree.filesystem().superblock();
    let size = image.image().size();
    if !superblock.devices.is_empty() {
        // The superblock counts only the blocks of the first device; in the address space, the
        // other devices follow it.
        return Ok(size);
    }
    match superblock.blocks.checked_mul(superblock.block_bytes.into()) {
        Some(bytes) if bytes <= size => Ok(bytes),
        _ => Err(CommandError::new(format!(
            "cannot export {}: its EROFS superblock claims {} of {}, the address space has {}",
            image.path().display(),
            plural(superblock.blocks, "block"),
            plural(superblock.block_bytes.into(), "byte"),
            plural(size, "byte")
        ))),
    }
}

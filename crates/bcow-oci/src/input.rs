//! Opens a source: finds its image, or its directory.

use std::path::PathBuf;
use std::sync::Arc;

use crate::archive::{Archive, Files, Spool, begins_as_image};
use crate::blob::Blob;
use crate::cancel::Cancel;
use crate::digest::DiffId;
use crate::error::ConvertError;
use crate::image::Image;
use crate::layer::{LayerInput, Reading};
use crate::options::{ConvertOptions, Progress};
use crate::recognise::recognise_directory;
use crate::source::{Source, TarInput};
use crate::{docker, layout};

/// The input of a conversion.
pub(crate) enum Input {
    Image(Box<Image>),
    Directory(PathBuf),
}

impl Input {
    pub(crate) fn open(
        source: &Source,
        options: &ConvertOptions,
        progress: &dyn Progress,
    ) -> Result<Input, ConvertError> {
        let cancel = Cancel::new(options.cancel.as_deref());
        let spool = Spool {
            directory: &options.scratch,
            reading: Reading::new(&options.limits, progress, cancel),
        };
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
                let files = Files::Archive(Archive::open_file(file, &spool)?);
                layout::find(&files, reference.as_deref(), platform)?
            }
            Source::DockerArchive { file, reference } => {
                let archive = Archive::open_file(file, &spool)?;
                docker::find(archive, reference.as_deref(), platform)?
            }
            Source::Registry(image) => layout::of_manifest(
                &Files::Registry(Arc::clone(&image.repository)),
                image.digest.clone(),
                &image.manifest,
                image.platform.clone(),
                &image.from_index,
                platform,
            )?,
            Source::Tar(input) => single_layer(tar_blob(input)?),
            Source::Archive(input) if options.as_files => single_layer(tar_blob(input)?),
            Source::Archive(input) => {
                let mut blob = tar_blob(input)?;
                // What is piped can be read only once, and the files that say what an archive is
                // may be at its end.
                if blob.length().is_none() {
                    blob = spool.uncompressed(blob)?;
                }
                if !begins_as_image(&blob, &spool.reading) {
                    single_layer(blob)
                } else {
                    let archive = Archive::of(blob, &spool)?;
                    if archive.has_image() {
                        docker::find(archive, None, platform)?
                    } else {
                        single_layer(archive.blob)
                    }
                }
            }
            Source::Directory(path) => {
                if path.is_file() {
                    return Err(ConvertError::layout(
                        path.display().to_string(),
                        "not a directory; for a root file system in a tar archive, use tar:",
                    ));
                }
                if !options.as_files
                    && let Some(form) = recognise_directory(path)?
                {
                    return Err(source.explain(ConvertError::HoldsImage {
                        place: path.display().to_string(),
                        form,
                        source_text: None,
                    }));
                }
                tracing::info!("source {source}: a directory");
                return Ok(Input::Directory(path.clone()));
            }
        };
        log_image(source, &image);
        Ok(Input::Image(image.into()))
    }

    /// The image; `None` for a directory.
    pub(crate) fn image(&self) -> Option<&Image> {
        match self {
            Input::Image(image) => Some(image),
            Input::Directory(_) => None,
        }
    }

    /// The number of bytes to read, if known.
    pub(crate) fn bytes(&self) -> Option<u64> {
        match self {
            Input::Image(image) => {
                let lengths = image.layers.iter().map(|layer| layer.blob.length());
                lengths.sum::<Option<u64>>().filter(|&bytes| bytes > 0)
            }
            Input::Directory(_) => None,
        }
    }
}

/// The diffIDs of the layers of `source`, lowest first, without reading a layer. `None` if the
/// source does not record them, or can be read only once: a directory, or a tar archive.
pub fn diff_ids(
    source: &Source,
    options: &ConvertOptions,
) -> Result<Option<Vec<DiffId>>, ConvertError> {
    if matches!(
        source,
        Source::Tar(_) | Source::Archive(_) | Source::Directory(_)
    ) {
        return Ok(None);
    }
    let input = Input::open(source, options, &())?;
    let layers = input.image().map_or(&[][..], |image| &image.layers);
    Ok(layers.iter().map(|layer| layer.diff_id.clone()).collect())
}

/// Logs the image that was found.
fn log_image(source: &Source, image: &Image) {
    let manifest = image.manifest.as_ref().map_or_else(
        || "no manifest".to_owned(),
        |digest| format!("manifest {digest}"),
    );
    tracing::info!("source {source}: {manifest}, {} layers", image.layers.len());
    for layer in &image.layers {
        tracing::debug!(
            "{}: {}, {} bytes, blob {}, content {}",
            layer.name,
            layer.media_type.as_deref().unwrap_or("no media type"),
            or_unknown(layer.blob.length()),
            or_unknown(layer.digest.as_ref()),
            or_unknown(layer.diff_id.as_ref()),
        );
    }
}

/// The text of an optional value.
fn or_unknown(value: Option<impl std::fmt::Display>) -> String {
    value.map_or_else(|| "unknown".to_owned(), |value| value.to_string())
}

fn tar_blob(input: &TarInput) -> Result<Blob, ConvertError> {
    match input {
        TarInput::File(path) => Blob::open(path),
        TarInput::Stdin => Blob::stdin(),
    }
}

/// A root file system in one tar archive. No digest is recorded for it, so none is computed.
pub(crate) fn single_layer(blob: Blob) -> Image {
    Image {
        layers: vec![LayerInput::unverified(blob)],
        ..Image::default()
    }
}

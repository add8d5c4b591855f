//! Writes the file of an image, and reads it back.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::format::{BackingEntry, BackingName};
use bcow::{
    BackingResolver, BlockDevice, Error, Image, ImageWriter, OpenOptions, WriterOptions, Written,
};
use bcow_erofs::check::{CheckOptions, Finding, check};
use bcow_erofs::merge::MergeError;
use bcow_erofs::reader::Filesystem;
use bcow_erofs::tree::TailSource;
use bcow_erofs::writer::{EmitError, Plan, WriteError};

use crate::blob::read_error;
use crate::content::ContentSink;
use crate::error::ConvertError;
use crate::options::{Compression, ConvertOptions};

/// The levels of zstd that bcow supports.
const ZSTD_LEVELS: RangeInclusive<i32> = -7..=22;

/// The options of the writer; an error if the conversion's options contradict each other.
pub(crate) fn writer_options(
    options: &ConvertOptions,
    threads: usize,
) -> Result<WriterOptions, ConvertError> {
    if let Compression::Zstd { level } = options.compression
        && !ZSTD_LEVELS.contains(&level)
    {
        return Err(ConvertError::Options(format!(
            "zstd has no level {level}, only {} to {}",
            ZSTD_LEVELS.start(),
            ZSTD_LEVELS.end()
        )));
    }
    Ok(WriterOptions {
        compression: options.compression,
        plain: options.plain,
        block_bytes: options.block_bytes,
        threads,
        erofs: true,
        metadata_first: false,
        disk: None,
    })
}

/// Writes a file system's metadata.
pub(crate) fn emit(
    plan: &Plan<'_>,
    tails: &dyn TailSource,
    writer: &mut ImageWriter,
    path: &Path,
) -> Result<(), ConvertError> {
    let end = writer.position() + plan.metadata_bytes();
    plan.write(tails, &mut |bytes| writer.append(bytes))
        .map_err(|e| match e {
            EmitError::Output(e) => image_error(path, e),
            EmitError::Tail(error) => read_error("read", "the end of a file", error),
        })?;
    debug_assert_eq!(writer.position(), end);
    Ok(())
}

/// An error for a tree that cannot be written as EROFS.
pub(crate) fn plan_error(path: &Path, error: WriteError) -> ConvertError {
    ConvertError::write("write", path, io::Error::other(error))
}

/// An error that names the layer that does not fit.
pub(crate) fn tree_error(names: &[String], error: MergeError) -> ConvertError {
    let (place, problem) = match error {
        MergeError::Layer { layer, source } => (names.get(layer).cloned(), source),
        MergeError::Tree(source) => (None, source),
        other => {
            return ConvertError::layout("the layers", other);
        }
    };
    let place = place.unwrap_or_else(|| "the merged layers".to_owned());
    ConvertError::layout(place, problem)
}

/// An [`ImageWriter`] whose errors name the destination.
pub(crate) struct ImageSink {
    writer: ImageWriter,
    path: PathBuf,
}

impl ImageSink {
    pub(crate) fn new(writer: ImageWriter, path: &Path) -> Self {
        ImageSink {
            writer,
            path: path.to_owned(),
        }
    }

    pub(crate) fn into_writer(self) -> ImageWriter {
        self.writer
    }
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

pub(crate) fn image_error(path: &Path, error: Error) -> ConvertError {
    match error {
        Error::Io { action, source, .. } => ConvertError::write(action, path, source),
        error => ConvertError::write("write", path, io::Error::other(error)),
    }
}

/// Open images by the digests of their files.
#[derive(Default)]
pub(crate) struct ImagesByDigest(pub HashMap<[u8; 32], Arc<Image>>);

impl BackingResolver for ImagesByDigest {
    fn resolve(&self, backing: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, Error> {
        Ok(match &backing.name {
            BackingName::Digest(digest) => {
                let image = self.0.get(digest).cloned();
                image.map(|image| image as Arc<dyn BlockDevice>)
            }
            BackingName::FileName { .. } | BackingName::Url { .. } | BackingName::View { .. } => {
                None
            }
        })
    }
}

/// Reads an image back: compares every block with the appended data, then checks the file system.
/// `below` has the images that the image refers to.
pub(crate) fn read_back(
    written: &Written,
    file: File,
    below: &ImagesByDigest,
    threads: usize,
) -> Result<(), ConvertError> {
    let wrong = |error: Error| ConvertError::Verify(Box::new(error));
    bcow::verify_written(written, threads).map_err(wrong)?;
    let image =
        Image::open_with_backings(Arc::new(file), &OpenOptions::default(), below).map_err(wrong)?;
    let fs = Filesystem::open(image).map_err(|error| ConvertError::Verify(Box::new(error)))?;
    // The data was compared block by block.
    let findings = check(&fs, &CheckOptions { read_data: false });
    match findings.into_iter().find(Finding::is_error) {
        None => Ok(()),
        Some(finding) => Err(ConvertError::Verify(Box::new(finding))),
    }
}

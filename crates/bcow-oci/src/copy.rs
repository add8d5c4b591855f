//! Copies images in BCoW form, byte for byte, between files, layouts and registries.
//!
//! A copy to a file, or to a layout in a directory, writes each file under a temporary name. After
//! an interruption, the next copy finds the `.partial` file by this name. It compares each chunk of
//! this file with the Merkle tree, and reads only missing and wrong chunks from the source.
//! A copy to an archive or a registry starts from the beginning. A blob that the layout or the
//! registry has already is not copied.

mod file;
mod image;
mod index;
mod send;

use std::path::Path;

use serde::Serialize;

use crate::archive::Files;
use crate::digest::{Digest, hex};
use crate::error::{ConvertError, check_equal};
use crate::layout::write::{LayoutForm, LayoutPlace, LayoutWriter, ManifestEntry, NewBlob};
use crate::layout::{IMAGE, OCI_MANIFEST};
use crate::options::{Progress, RunOptions};
use crate::output::Output;
use image::OtherBlob;
use send::Sending;

pub use file::CopyFile;
pub use image::CopyImage;
pub use index::{CopyIndex, copy_index};

/// The result of a copy of one file.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct FileReport {
    /// Root of the Merkle tree, in hexadecimal.
    pub merkle_root: String,
    /// Length of the file in bytes.
    pub file_bytes: u64,
    /// Bytes that were read from the source and written. The other bytes come from an interrupted
    /// copy.
    pub copied_bytes: u64,
}

impl FileReport {
    /// The report of a copy that the caller made itself, such as a copy to S3.
    pub fn new(merkle_root: &[u8; 32], file_bytes: u64, copied_bytes: u64) -> Self {
        FileReport {
            merkle_root: hex(merkle_root),
            file_bytes,
            copied_bytes,
        }
    }
}

/// The result of a copy of an image.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct ImageReport {
    /// Digest of the manifest or the index.
    pub manifest: Digest,
    /// The manifests that an index lists.
    pub images: Vec<Digest>,
    /// The layers, the stack, and the configuration.
    pub blobs: Vec<BlobReport>,
}

/// One blob of an image.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct BlobReport {
    /// Digest of the blob.
    pub digest: Digest,
    /// Length of the blob in bytes.
    pub bytes: u64,
    /// Bytes that were copied; 0 if the destination had the blob. A copy to a layout always writes
    /// the configuration.
    pub copied_bytes: u64,
}

impl BlobReport {
    fn new(digest: &Digest, bytes: u64, copied_bytes: u64) -> Self {
        BlobReport {
            digest: digest.clone(),
            bytes,
            copied_bytes,
        }
    }
}

/// Copies one file to `destination`. The path shows the new file only when the copy is complete.
pub fn copy_file(
    file: &CopyFile,
    destination: &Path,
    options: &RunOptions,
    progress: &dyn Progress,
) -> Result<FileReport, ConvertError> {
    progress.phase(&file.name);
    let output = Output::resumed(destination, &file.root()[..16])?;
    let cancel = options.cancel.as_ref();
    let copied_bytes =
        file.complete(&output.file()?, destination, options.threads.max(1), cancel)?;
    progress.phase("syncing");
    output.publish()?;
    Ok(FileReport {
        merkle_root: file.root(),
        file_bytes: file.bytes,
        copied_bytes,
    })
}

/// Copies an image into a layout or a registry. The image gets its entry in the index, or its tag,
/// after all its blobs. For a registry, the path and the reference of the place are not used, and
/// neither is the number of threads.
pub fn copy_image(
    image: &CopyImage,
    to: &LayoutPlace,
    options: &RunOptions,
    progress: &dyn Progress,
) -> Result<ImageReport, ConvertError> {
    to.require_no_index()?;
    let blobs = match &to.form {
        LayoutForm::Registry(upload) => Sending::new(&**upload, options, progress).image(image)?,
        _ => {
            let writer = LayoutWriter::open(to, options.cancel.clone())?;
            let mut storing = Storing::new(writer, options, progress);
            let blobs = storing.blobs(image)?;
            storing.manifest(&image.manifest, OCI_MANIFEST)?;
            storing.publish(to, |entry| {
                entry.platform.clone_from(&image.platform);
                entry.annotations.clone_from(&image.from_index.annotations);
            })?;
            blobs
        }
    };
    Ok(ImageReport {
        manifest: image.digest.clone(),
        images: Vec::new(),
        blobs,
    })
}

/// A copy into a layout.
struct Storing<'a> {
    writer: LayoutWriter,
    options: &'a RunOptions,
    progress: &'a dyn Progress,
    new: Vec<NewBlob>,
}

impl<'a> Storing<'a> {
    fn new(writer: LayoutWriter, options: &'a RunOptions, progress: &'a dyn Progress) -> Self {
        Storing {
            writer,
            options,
            progress,
            new: Vec::new(),
        }
    }

    /// Copies the BCoW files that the layout does not have, and the configuration.
    fn blobs(&mut self, image: &CopyImage) -> Result<Vec<BlobReport>, ConvertError> {
        let mut reports = Vec::new();
        for (digest, file) in image.distinct_files() {
            self.progress.phase(&file.name);
            let mut copied_bytes = 0;
            if !self.has(digest, file.bytes)? {
                let output = self.writer.resumed_blob(digest)?;
                let cancel = self.options.cancel.as_ref();
                let threads = self.options.threads.max(1);
                let target = output.file()?;
                copied_bytes = file.complete(&target, self.writer.directory(), threads, cancel)?;
                let blob = self.writer.finish(output)?;
                check_equal(&file.name, "digest", digest, &blob.digest)?;
                self.new.push(blob);
            }
            reports.push(BlobReport::new(digest, file.bytes, copied_bytes));
        }
        let (digest, config) = &image.config;
        let bytes = config.len() as u64;
        reports.push(BlobReport::new(digest, bytes, bytes));
        self.new.push(self.writer.document(config)?);
        Ok(reports)
    }

    /// Copies another blob of the place `files`.
    fn other(&mut self, other: &OtherBlob, files: &Files) -> Result<BlobReport, ConvertError> {
        let bytes = other.descriptor.size;
        let mut copied_bytes = 0;
        if !self.has(&other.digest, bytes)? {
            let blob = self.writer.copy_of(files, "blob", &other.descriptor)?;
            self.new.push(blob);
            copied_bytes = bytes;
        }
        Ok(BlobReport::new(&other.digest, bytes, copied_bytes))
    }

    /// Whether the layout has the blob, or gets it with this copy.
    fn has(&self, digest: &Digest, bytes: u64) -> Result<bool, ConvertError> {
        Ok(self.new.iter().any(|blob| blob.digest == *digest)
            || self.writer.has_blob(digest, bytes)?)
    }

    fn manifest(&mut self, bytes: &[u8], media_type: &str) -> Result<(), ConvertError> {
        self.new.push(self.writer.manifest(bytes, media_type)?);
        Ok(())
    }

    /// Adds the last manifest to the layout's index; `complete` adds to its entry there.
    fn publish(
        self,
        to: &LayoutPlace,
        complete: impl FnOnce(&mut ManifestEntry),
    ) -> Result<(), ConvertError> {
        let Some(manifest) = self.new.last() else {
            return Ok(());
        };
        let mut entry = ManifestEntry {
            artifact_type: Some(IMAGE),
            reference: to.reference.clone(),
            ..ManifestEntry::of(manifest)
        };
        complete(&mut entry);
        self.progress.phase("syncing");
        self.writer.publish(self.new, &entry, self.progress)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    use super::*;

    #[test]
    fn a_copy_is_cancelled_while_it_hashes_a_blob_of_the_layout() {
        let layout = tempfile::tempdir().unwrap();
        let image = send::tests::image();
        let (digest, file) = &image.files[0];
        let blobs = layout.path().join("blobs/sha256");
        std::fs::create_dir_all(&blobs).unwrap();
        std::fs::write(blobs.join(digest.hex()), b"layer").unwrap();
        let to = LayoutPlace {
            path: layout.path().to_owned(),
            ..LayoutPlace::default()
        };
        let options = RunOptions {
            threads: 1,
            cancel: Some(Arc::new(AtomicBool::new(true))),
        };
        let error = copy_image(&image, &to, &options, &()).unwrap_err();
        assert!(matches!(error, ConvertError::Interrupted), "{error}");
        assert!(!layout.path().join("index.json").exists());
        let unchecked = CopyFile {
            is_checked: false,
            ..file.clone()
        };
        let error = unchecked.check(digest, options.cancel.as_deref());
        assert!(matches!(error, Err(ConvertError::Interrupted)));
        copy_image(&image, &to, &RunOptions::default(), &()).unwrap();
    }
}

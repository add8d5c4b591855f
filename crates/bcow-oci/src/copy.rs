//! Copies images in BCoW form, byte for byte, between files, layouts and registries.
//!
//! A copy to a file, or to a layout in a directory, writes each file under a temporary name. After
//! an interruption, the next copy finds the partial file by this name. It compares each chunk of
//! the partial file with the Merkle tree, and reads only missing and wrong chunks from the source.
//! A copy to an archive or a registry starts from the beginning. A blob that the layout or the
//! registry has already is not copied.

mod file;
mod image;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde::Serialize;

use crate::digest::{Digest, hex};
use crate::error::ConvertError;
use crate::layout::write::{LayoutForm, LayoutWriter, ManifestEntry, NewBlob};
use crate::layout::{IMAGE, OCI_MANIFEST};
use crate::options::Progress;
use crate::output::Output;
use crate::repository::Upload;
use file::InOrder;

pub use file::CopyFile;
pub use image::CopyImage;

/// Options of a copy.
#[derive(Debug, Clone, Default)]
pub struct CopyOptions {
    /// Number of threads that compare and read chunks. A copy to a registry does not use it.
    pub threads: usize,
    /// Cancels the copy when the value becomes true.
    pub cancel: Option<Arc<AtomicBool>>,
}

/// The destination of a copy of an image.
#[derive(Debug, Clone)]
pub struct CopyDestination {
    /// The directory of the layout. For an archive, the file. For a registry, unused.
    pub directory: PathBuf,
    /// Directory, archive or registry.
    pub form: LayoutForm,
    /// Name of the image in the layout. For a registry, unused.
    pub reference: Option<String>,
}

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
    /// Digest of the manifest.
    pub manifest: Digest,
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

/// Copies one file to `destination`. The path shows the new file only when the copy is complete.
pub fn copy_file(
    file: &CopyFile,
    destination: &Path,
    options: &CopyOptions,
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
/// after all its blobs.
pub fn copy_image(
    image: &CopyImage,
    to: &CopyDestination,
    options: &CopyOptions,
    progress: &dyn Progress,
) -> Result<ImageReport, ConvertError> {
    let blobs = match &to.form {
        LayoutForm::Registry(upload) => send(image, &**upload, options, progress)?,
        _ => store(image, to, options, progress)?,
    };
    Ok(ImageReport {
        manifest: image.digest.clone(),
        blobs,
    })
}

/// Copies an image into a layout.
fn store(
    image: &CopyImage,
    to: &CopyDestination,
    options: &CopyOptions,
    progress: &dyn Progress,
) -> Result<Vec<BlobReport>, ConvertError> {
    let writer = LayoutWriter::open(&to.directory, &to.form)?;
    let mut blobs: Vec<NewBlob> = Vec::new();
    let mut reports: Vec<BlobReport> = Vec::new();
    for (digest, file) in &image.files {
        if reports.iter().any(|report| report.digest == *digest) {
            continue;
        }
        progress.phase(&file.name);
        let mut copied_bytes = 0;
        if !writer.has_blob(digest, file.bytes)? {
            let output = writer.resumed_blob(digest)?;
            let cancel = options.cancel.as_ref();
            let threads = options.threads.max(1);
            let target = output.file()?;
            copied_bytes = file.complete(&target, writer.directory(), threads, cancel)?;
            let blob = writer.finish(output)?;
            if blob.digest != *digest {
                return Err(ConvertError::DigestMismatch {
                    place: file.name.clone(),
                    what: "digest",
                    expected: digest.clone(),
                    found: blob.digest.clone(),
                });
            }
            blobs.push(blob);
        }
        reports.push(BlobReport {
            digest: digest.clone(),
            bytes: file.bytes,
            copied_bytes,
        });
    }
    let (digest, config) = &image.config;
    reports.push(BlobReport {
        digest: digest.clone(),
        bytes: config.len() as u64,
        copied_bytes: config.len() as u64,
    });
    blobs.push(writer.document(config)?);
    let manifest = writer.document(&image.manifest)?;
    let entry = ManifestEntry {
        digest: manifest.digest.clone(),
        size: manifest.size,
        artifact_type: Some(IMAGE),
        platform: image.platform.clone(),
        reference: to.reference.clone(),
        subject: None,
    };
    blobs.push(manifest);
    progress.phase("syncing");
    writer.publish(blobs, &entry, progress)?;
    Ok(reports)
}

/// Copies an image into a registry.
fn send(
    image: &CopyImage,
    upload: &dyn Upload,
    options: &CopyOptions,
    progress: &dyn Progress,
) -> Result<Vec<BlobReport>, ConvertError> {
    let name = PathBuf::from(upload.name());
    let is_cancelled = || {
        let cancel = options.cancel.as_ref();
        cancel.is_some_and(|cancel| cancel.load(std::sync::atomic::Ordering::Relaxed))
    };
    let failed = |source| match is_cancelled() {
        true => ConvertError::Interrupted,
        false => ConvertError::write("write", &name, source),
    };
    let files = image.files.iter().map(|(_, file)| file.bytes);
    progress.total(Some(files.sum()));
    let mut reports = Vec::new();
    for (digest, file) in &image.files {
        progress.phase(&file.name);
        let mut copied_bytes = 0;
        if upload.adopt(digest, file.bytes).map_err(failed)? {
            progress.advance(file.bytes);
        } else {
            file.check(digest)?;
            let open = |offset| -> io::Result<Box<dyn io::Read>> {
                if is_cancelled() {
                    return Err(io::Error::other("interrupted"));
                }
                Ok(Box::new(InOrder {
                    storage: Arc::clone(&file.storage),
                    at: offset,
                    end: file.bytes,
                }))
            };
            let sent = |bytes| progress.advance(bytes);
            upload
                .blob(digest, file.bytes, &open, &sent)
                .map_err(failed)?;
            copied_bytes = file.bytes;
        }
        if is_cancelled() {
            return Err(ConvertError::Interrupted);
        }
        reports.push(BlobReport {
            digest: digest.clone(),
            bytes: file.bytes,
            copied_bytes,
        });
    }
    let (digest, config) = &image.config;
    let bytes = config.len() as u64;
    let copied_bytes = match upload.adopt(digest, bytes).map_err(failed)? {
        true => 0,
        false => {
            let open = |offset: u64| -> io::Result<Box<dyn io::Read>> {
                let rest = config.get(offset as usize..).unwrap_or_default();
                Ok(Box::new(io::Cursor::new(rest.to_vec())))
            };
            upload.blob(digest, bytes, &open, &|_| {}).map_err(failed)?;
            bytes
        }
    };
    reports.push(BlobReport {
        digest: digest.clone(),
        bytes,
        copied_bytes,
    });
    upload
        .manifest(&image.manifest, OCI_MANIFEST, &image.digest)
        .map_err(failed)?;
    Ok(reports)
}

#[cfg(test)]
mod tests {
    use bcow::MemoryStorage;

    use super::*;

    /// A registry without blobs. The user cancels the copy when the upload of the first blob
    /// begins.
    struct Cancelled(Arc<AtomicBool>);

    impl Upload for Cancelled {
        fn name(&self) -> String {
            "docker://host/image".to_owned()
        }

        fn adopt(&self, _digest: &Digest, _length: u64) -> io::Result<bool> {
            Ok(false)
        }

        fn blob(
            &self,
            _digest: &Digest,
            _length: u64,
            open: &crate::repository::OpenContent<'_>,
            _sent: &dyn Fn(u64),
        ) -> io::Result<()> {
            self.0.store(true, std::sync::atomic::Ordering::Relaxed);
            open(0).map(drop)
        }

        fn manifest(&self, _: &[u8], _: &str, _: &Digest) -> io::Result<()> {
            unreachable!("a blob is missing")
        }

        fn attach(
            &self,
            _: &[u8],
            _: &str,
            _: &Digest,
            _: &Digest,
            _: &serde_json::Value,
        ) -> io::Result<()> {
            unreachable!("a blob is missing")
        }
    }

    #[test]
    fn a_copy_to_a_registry_that_is_cancelled_is_no_failed_write() {
        let digest = Digest::of(b"layer");
        let file = CopyFile {
            name: "layer".to_owned(),
            storage: Arc::new(MemoryStorage::new(b"layer".to_vec())),
            bytes: 5,
            merkle_root: [0; 32],
            is_checked: true,
        };
        let image = CopyImage {
            name: "image".to_owned(),
            manifest: b"{}".to_vec(),
            digest: Digest::of(b"{}"),
            platform: None,
            config: (Digest::of(b"{}"), b"{}".to_vec()),
            files: vec![(digest, file)],
        };
        let cancel = Arc::new(AtomicBool::new(false));
        let options = CopyOptions {
            threads: 1,
            cancel: Some(Arc::clone(&cancel)),
        };
        let error = send(&image, &Cancelled(cancel), &options, &()).unwrap_err();
        assert!(matches!(error, ConvertError::Interrupted), "{error}");
    }
}

//! Copies an image into a registry.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use bcow::{MemoryStorage, Storage};

use super::image::OtherBlob;
use super::{BlobReport, CopyImage};
use crate::archive::Files;
use crate::cancel::Cancel;
use crate::digest::Digest;
use crate::error::ConvertError;
use crate::in_order::InOrder;
use crate::layout::write::LayoutWriter;
use crate::layout::{Descriptor, OCI_MANIFEST};
use crate::options::{Progress, RunOptions};
use crate::repository::Upload;

/// A copy into a registry.
pub(super) struct Sending<'a> {
    upload: &'a dyn Upload,
    options: &'a RunOptions,
    progress: &'a dyn Progress,
    /// The name of the repository in messages.
    name: PathBuf,
}

impl<'a> Sending<'a> {
    pub(super) fn new(
        upload: &'a dyn Upload,
        options: &'a RunOptions,
        progress: &'a dyn Progress,
    ) -> Self {
        Sending {
            upload,
            options,
            progress,
            name: upload.name().into(),
        }
    }

    /// Sends the blobs that the registry does not have, and then the manifest.
    pub(super) fn image(&self, image: &CopyImage) -> Result<Vec<BlobReport>, ConvertError> {
        let reports = self.blobs(image)?;
        self.upload
            .manifest(&image.manifest, OCI_MANIFEST, &image.digest)
            .map_err(|error| self.failed(error))?;
        Ok(reports)
    }

    /// Sends a manifest or an index that its descriptor names.
    pub(super) fn store(&self, bytes: &[u8], from: &Descriptor) -> Result<(), ConvertError> {
        self.upload
            .store(bytes, &from.media_type, &Digest::of(bytes))
            .map_err(|error| self.failed(error))
    }

    /// The same, and gives it the name of the image.
    pub(super) fn name(&self, bytes: &[u8], from: &Descriptor) -> Result<(), ConvertError> {
        self.upload
            .manifest(bytes, &from.media_type, &Digest::of(bytes))
            .map_err(|error| self.failed(error))
    }

    /// Sends a blob of the place `files` that is no BCoW file. It is stored on this machine first,
    /// if the registry does not have it, and compared with its digest.
    pub(super) fn other(
        &self,
        other: &OtherBlob,
        files: &Files,
        scratch: &LayoutWriter,
    ) -> Result<BlobReport, ConvertError> {
        let (digest, bytes) = (&other.digest, other.descriptor.size);
        let content = || -> Result<Arc<dyn Storage>, ConvertError> {
            let blob = scratch.copy_of(files, "blob", &other.descriptor)?;
            Ok(Arc::new(blob.file()?))
        };
        let sent = self.blob(digest, bytes, &content, &|_| {})?;
        Ok(BlobReport::new(digest, bytes, sent))
    }

    /// Sends the BCoW files and the configuration, if the registry does not have them.
    pub(super) fn blobs(&self, image: &CopyImage) -> Result<Vec<BlobReport>, ConvertError> {
        let files = image.distinct_files();
        let bytes = files.iter().map(|(_, file)| file.bytes);
        self.progress.total(Some(bytes.sum()));
        let mut reports = Vec::new();
        for (digest, file) in files {
            self.progress.phase(&file.name);
            let content = || {
                file.check(digest, self.options.cancel.as_deref())?;
                Ok(Arc::clone(&file.storage))
            };
            let sent = |bytes| self.progress.advance(bytes);
            let copied_bytes = self.blob(digest, file.bytes, &content, &sent)?;
            self.cancel().check()?;
            reports.push(BlobReport::new(digest, file.bytes, copied_bytes));
        }
        let (digest, config) = &image.config;
        let bytes = config.len() as u64;
        let content = || -> Result<Arc<dyn Storage>, ConvertError> {
            Ok(Arc::new(MemoryStorage::new(config.clone())))
        };
        let sent = self.blob(digest, bytes, &content, &|_| {})?;
        reports.push(BlobReport::new(digest, bytes, sent));
        Ok(reports)
    }

    /// Sends a blob that the registry does not have. `content` returns the checked content. `sent`
    /// learns of each byte that is sent or need not be sent. Returns the number of bytes sent.
    fn blob(
        &self,
        digest: &Digest,
        bytes: u64,
        content: &dyn Fn() -> Result<Arc<dyn Storage>, ConvertError>,
        sent: &dyn Fn(u64),
    ) -> Result<u64, ConvertError> {
        let failed = |error| self.failed(error);
        if self.upload.adopt(digest, bytes).map_err(failed)? {
            sent(bytes);
            return Ok(0);
        }
        let content = content()?;
        let open = |offset| -> io::Result<Box<dyn io::Read>> {
            Ok(Box::new(InOrder {
                storage: Arc::clone(&content),
                at: offset,
                end: bytes,
                cancel: self.options.cancel.clone(),
            }))
        };
        self.upload
            .blob(digest, bytes, &open, sent)
            .map_err(failed)?;
        Ok(bytes)
    }

    fn cancel(&self) -> Cancel<'_> {
        Cancel::new(self.options.cancel.as_deref())
    }

    fn failed(&self, source: io::Error) -> ConvertError {
        if self.cancel().is_set() {
            ConvertError::Interrupted
        } else {
            ConvertError::write("write", &self.name, source)
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::io::Read;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::super::CopyFile;
    use super::*;
    use crate::left_out::FromIndex;

    /// A registry that has all blobs, or none. It records which ones were asked for. The user
    /// cancels the copy when the upload of the first blob begins.
    #[derive(Default)]
    struct Registry {
        has_all: bool,
        asked: Mutex<Vec<Digest>>,
        cancelled: Arc<AtomicBool>,
    }

    impl Upload for Registry {
        fn name(&self) -> String {
            "docker://host/image".to_owned()
        }

        fn adopt(&self, digest: &Digest, _length: u64) -> io::Result<bool> {
            self.asked.lock().unwrap().push(digest.clone());
            Ok(self.has_all)
        }

        fn blob(
            &self,
            _digest: &Digest,
            _length: u64,
            open: &crate::repository::OpenContent<'_>,
            _sent: &dyn Fn(u64),
        ) -> io::Result<()> {
            assert!(!self.has_all, "the registry has all blobs");
            let mut content = open(0)?;
            self.cancelled.store(true, Ordering::Relaxed);
            let error = content.read(&mut [0]).unwrap_err();
            // The client replaces the error.
            Err(io::Error::other(error.to_string()))
        }

        fn named(&self) -> io::Result<Option<Vec<u8>>> {
            Ok(None)
        }

        fn store(&self, _: &[u8], _: &str, _: &Digest) -> io::Result<()> {
            unreachable!("one manifest has the name")
        }

        fn manifest(&self, _: &[u8], _: &str, _: &Digest) -> io::Result<()> {
            assert!(self.has_all, "a blob is missing");
            Ok(())
        }

        fn attach(
            &self,
            _: &[u8],
            _: &str,
            _: &Digest,
            _: &Digest,
            _: &serde_json::Value,
        ) -> io::Result<()> {
            unreachable!("a copy attaches nothing")
        }
    }

    /// An image of one layer.
    pub(in super::super) fn image() -> CopyImage {
        let digest = Digest::of(b"layer");
        let file = CopyFile {
            name: "layer".to_owned(),
            storage: Arc::new(MemoryStorage::new(b"layer".to_vec())),
            bytes: 5,
            merkle_root: [0; 32],
            is_checked: true,
        };
        CopyImage {
            name: "image".to_owned(),
            manifest: b"{}".to_vec(),
            digest: Digest::of(b"{}"),
            platform: None,
            from_index: FromIndex::default(),
            config: (Digest::of(b"{}"), b"{}".to_vec()),
            files: vec![(digest, file)],
            others: Vec::new(),
        }
    }

    #[test]
    fn a_copy_to_a_registry_that_is_cancelled_is_no_failed_write() {
        let registry = Registry::default();
        let options = RunOptions {
            threads: 1,
            cancel: Some(Arc::clone(&registry.cancelled)),
        };
        let error = Sending::new(&registry, &options, &())
            .image(&image())
            .unwrap_err();
        assert!(matches!(error, ConvertError::Interrupted), "{error}");
    }

    #[test]
    fn a_layer_that_is_twice_in_an_image_is_sent_and_reported_once() {
        let mut image = image();
        image.files.push(image.files[0].clone());
        let registry = Registry {
            has_all: true,
            ..Registry::default()
        };
        let options = RunOptions::default();
        let reports = Sending::new(&registry, &options, &()).image(&image);
        let expected = [Digest::of(b"layer"), Digest::of(b"{}")];
        let reported: Vec<_> = reports.unwrap().into_iter().map(|it| it.digest).collect();
        assert_eq!(reported, expected);
        assert_eq!(*registry.asked.lock().unwrap(), expected);
    }
}

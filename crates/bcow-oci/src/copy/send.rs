//! Copies an image into a registry.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{BlobReport, CopyFile, CopyImage, CopyOptions};
use crate::digest::Digest;
use crate::error::ConvertError;
use crate::in_order::InOrder;
use crate::layout::OCI_MANIFEST;
use crate::options::Progress;
use crate::repository::Upload;

/// A copy into a registry.
pub(super) struct Sending<'a> {
    upload: &'a dyn Upload,
    options: &'a CopyOptions,
    progress: &'a dyn Progress,
    /// The name of the repository in messages.
    name: PathBuf,
}

impl<'a> Sending<'a> {
    pub(super) fn new(
        upload: &'a dyn Upload,
        options: &'a CopyOptions,
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
        let files = image.distinct_files();
        let bytes = files.iter().map(|(_, file)| file.bytes);
        self.progress.total(Some(bytes.sum()));
        let mut reports = Vec::new();
        for (digest, file) in files {
            let copied_bytes = self.file(digest, file)?;
            if self.is_cancelled() {
                return Err(ConvertError::Interrupted);
            }
            reports.push(BlobReport::new(digest, file.bytes, copied_bytes));
        }
        let (digest, config) = &image.config;
        let sent = self.config(digest, config)?;
        reports.push(BlobReport::new(digest, config.len() as u64, sent));
        self.upload
            .manifest(&image.manifest, OCI_MANIFEST, &image.digest)
            .map_err(|error| self.failed(error))?;
        Ok(reports)
    }

    /// Sends a layer or the stack. Returns the number of bytes sent.
    fn file(&self, digest: &Digest, file: &CopyFile) -> Result<u64, ConvertError> {
        let failed = |error| self.failed(error);
        self.progress.phase(&file.name);
        if self.upload.adopt(digest, file.bytes).map_err(failed)? {
            self.progress.advance(file.bytes);
            return Ok(0);
        }
        let cancel = &self.options.cancel;
        file.check(digest, cancel.as_deref())?;
        let open = |offset| -> io::Result<Box<dyn io::Read>> {
            Ok(Box::new(InOrder {
                storage: Arc::clone(&file.storage),
                at: offset,
                end: file.bytes,
                cancel: cancel.clone(),
            }))
        };
        let sent = |bytes| self.progress.advance(bytes);
        self.upload
            .blob(digest, file.bytes, &open, &sent)
            .map_err(failed)?;
        Ok(file.bytes)
    }

    /// Sends the configuration. Returns the number of bytes sent.
    fn config(&self, digest: &Digest, config: &[u8]) -> Result<u64, ConvertError> {
        let failed = |error| self.failed(error);
        let bytes = config.len() as u64;
        if self.upload.adopt(digest, bytes).map_err(failed)? {
            return Ok(0);
        }
        let open = |offset: u64| -> io::Result<Box<dyn io::Read>> {
            let rest = config.get(offset as usize..).unwrap_or_default();
            Ok(Box::new(io::Cursor::new(rest.to_vec())))
        };
        self.upload
            .blob(digest, bytes, &open, &|_| {})
            .map_err(failed)?;
        Ok(bytes)
    }

    fn is_cancelled(&self) -> bool {
        let cancel = self.options.cancel.as_ref();
        cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed))
    }

    fn failed(&self, source: io::Error) -> ConvertError {
        if self.is_cancelled() {
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
    use std::sync::atomic::AtomicBool;

    use bcow::MemoryStorage;

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
        }
    }

    #[test]
    fn a_copy_to_a_registry_that_is_cancelled_is_no_failed_write() {
        let registry = Registry::default();
        let options = CopyOptions {
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
        let options = CopyOptions::default();
        let reports = Sending::new(&registry, &options, &()).image(&image);
        let expected = [Digest::of(b"layer"), Digest::of(b"{}")];
        let reported: Vec<_> = reports.unwrap().into_iter().map(|it| it.digest).collect();
        assert_eq!(reported, expected);
        assert_eq!(*registry.asked.lock().unwrap(), expected);
    }
}

//! The parts of an image that is copied, from the place that it is in.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bcow::Storage;
use bcow::format::Use;
use serde_json::{Value, json};

use super::file::{CopyFile, Member};
use crate::archive::Files;
use crate::digest::Digest;
use crate::error::{ConvertError, check_equal, parse_digest};
use crate::image::{ImageConfig, minimal_config};
use crate::index::layout_files;
use crate::layout::write::{annotated, descriptor, json_bytes};
use crate::layout::{self, Descriptor, IMAGE, LAYER, MERKLE_ROOT, OCI_CONFIG, OCI_MANIFEST, STACK};
use crate::left_out::{FromIndex, LeftOut};
use crate::options::Progress;
use crate::platform::Platform;
use crate::registry::BcowImage;
use crate::repository::Repository;
use crate::source::Source;
use crate::store::{RecordedFile, RemoteFiles};

/// An image in BCoW form: a manifest and its blobs.
pub struct CopyImage {
    /// The name in messages.
    pub name: String,
    pub(super) manifest: Vec<u8>,
    pub(super) digest: Digest,
    pub(super) platform: Option<Platform>,
    /// What the indexes that lead to the manifest have beside it.
    pub(super) from_index: FromIndex,
    pub(super) config: (Digest, Vec<u8>),
    /// The layers, then the stack.
    pub(super) files: Vec<(Digest, CopyFile)>,
    /// The other blobs.
    pub(super) others: Vec<OtherBlob>,
}

/// A blob that is no BCoW file.
#[derive(Clone)]
pub(super) struct OtherBlob {
    pub digest: Digest,
    pub descriptor: Descriptor,
}

/// Whether an image may have blobs that are no BCoW files.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Others {
    Refused,
    Taken,
}

/// The place of the images that are copied.
pub(super) struct Place<'a> {
    /// The name in messages.
    pub name: String,
    pub files: &'a Files,
    /// Opens the BCoW files of a registry.
    pub remote: Option<&'a dyn RemoteFiles>,
}

impl Place<'_> {
    /// The image with this manifest.
    pub(super) fn image(
        &self,
        manifest: Vec<u8>,
        others: Others,
    ) -> Result<CopyImage, ConvertError> {
        let name = &self.name;
        let document: layout::ManifestDocument = layout::parse(name, &manifest)?;
        layout::check_layer_count(name, document.layers.len())?;
        let count = document.layers.len().saturating_sub(1);
        let (mut files, mut rest) = (Vec::new(), Vec::new());
        for (index, layer) in document.layers.into_iter().enumerate() {
            let digest = parse_digest(name, &layer.digest)?;
            let part = match &*layer.media_type {
                STACK => format!("stack ({})", digest.short()),
                LAYER => crate::image::layer_name(index, count, Some(&digest)),
                _ if others == Others::Taken => {
                    rest.push(OtherBlob {
                        digest,
                        descriptor: layer,
                    });
                    continue;
                }
                other => return Err(ConvertError::media_type(name, other)),
            };
            let file = self.open(format!("{part} of {name}"), &layer, &digest)?;
            let differs = |what: &'static str| {
                ConvertError::layout(&file.name, format!("its {what} differs from its manifest"))
            };
            if file.bytes != layer.size {
                return Err(differs("length"));
            }
            let root = layout::merkle_root(name, &layer)?;
            if root.is_some_and(|root| root != file.merkle_root) {
                return Err(differs("root hash"));
            }
            files.push((digest, file));
        }
        let bytes = layout::config_bytes(self.files, &document.config)?;
        let expected = parse_digest(name, &document.config.digest)?;
        let found = Digest::of(&bytes);
        check_equal(&format!("config of {name}"), "digest", &expected, &found)?;
        Ok(CopyImage {
            others: rest,
            ..CopyImage::new(name.clone(), manifest, (found, bytes), files)
        })
    }

    /// Opens a BCoW file.
    fn open(
        &self,
        name: String,
        layer: &Descriptor,
        digest: &Digest,
    ) -> Result<CopyFile, ConvertError> {
        let Some(remote) = self.remote else {
            let Some(blob) = self.files.blob(digest, layer.size)? else {
                return Err(ConvertError::missing_blob(&name, digest));
            };
            let (Some((file, offset)), Some(bytes)) = (blob.place(), blob.length()) else {
                return Err(ConvertError::layout(name, "not a regular file"));
            };
            let member = Member {
                file,
                offset,
                bytes,
            };
            return CopyFile::new(name, Arc::new(member) as Arc<dyn Storage>, false);
        };
        let Some(merkle_root) = layout::merkle_root(&name, layer)? else {
            return Err(ConvertError::refused(
                format!("{name}: the manifest has no root hash for it"),
                "an earlier version of bcow wrote the manifest; `skopeo copy` copies the image",
            ));
        };
        let recorded = RecordedFile {
            digest: digest.clone(),
            file_bytes: layer.size,
            merkle_root,
        };
        match remote.open(digest, &recorded) {
            Ok(Some(storage)) => CopyFile::new(name, storage, true),
            Ok(None) => Err(ConvertError::missing_blob(&name, digest)),
            Err(error) => Err(ConvertError::read_through(&name, error)),
        }
    }
}

impl CopyImage {
    /// The files, each once: a layer can be in an image several times.
    pub(super) fn distinct_files(&self) -> Vec<&(Digest, CopyFile)> {
        let mut files: Vec<&(Digest, CopyFile)> = Vec::new();
        for file in &self.files {
            if files.iter().all(|(digest, _)| *digest != file.0) {
                files.push(file);
            }
        }
        files
    }

    /// The image of a layout: `oci:DIR[:REF]` or `oci-archive:FILE[:REF]`, for `platform` or for
    /// that of this machine. The directory `scratch` gets the bytes of an archive that is
    /// compressed as a whole. `cancel` ends the decompression when it becomes true.
    pub fn of_layout(
        source: &Source,
        platform: Option<&Platform>,
        scratch: &Path,
        progress: &dyn Progress,
        cancel: Option<&AtomicBool>,
    ) -> Result<CopyImage, ConvertError> {
        let Some((files, reference)) = layout_files(source, scratch, progress, cancel)? else {
            return Err(ConvertError::Options(format!(
                "{source} cannot have an image in BCoW form"
            )));
        };
        let found = layout::find_bcow(&files, reference, platform)?;
        let place = Place {
            name: source.to_string(),
            files: &files,
            remote: None,
        };
        let image = place.image(found.bytes, Others::Refused)?;
        layout::check_platform(&place.name, image.platform.as_ref(), platform)?;
        Ok(CopyImage {
            from_index: found.from_index,
            ..image
        })
    }

    /// The image of a registry.
    pub fn of_registry(
        image: BcowImage,
        repository: Arc<dyn Repository>,
        remote: &dyn RemoteFiles,
        platform: Option<&Platform>,
    ) -> Result<CopyImage, ConvertError> {
        let place = Place {
            name: repository.name(),
            files: &Files::Registry(repository),
            remote: Some(remote),
        };
        let from_index = image.from_index;
        let image = place.image(image.manifest, Others::Refused)?;
        layout::check_platform(&place.name, image.platform.as_ref(), platform)?;
        Ok(CopyImage {
            from_index,
            ..image
        })
    }

    fn new(
        name: String,
        manifest: Vec<u8>,
        config: (Digest, Vec<u8>),
        files: Vec<(Digest, CopyFile)>,
    ) -> CopyImage {
        CopyImage {
            digest: Digest::of(&manifest),
            platform: ImageConfig::parse("config", &config.1)
                .ok()
                .and_then(|config| config.platform),
            from_index: FromIndex::default(),
            name,
            manifest,
            config,
            files,
            others: Vec::new(),
        }
    }

    /// The parts of the source that a copy into a layout does not have.
    pub fn left_out(&self) -> &LeftOut {
        &self.from_index.left_out
    }

    /// The parts of the source that a copy into a registry does not have: there, no index has the
    /// annotations of the source's.
    pub fn left_out_of_registry(&self) -> LeftOut {
        LeftOut {
            annotations: self.from_index.annotations.keys().cloned().collect(),
            ..self.from_index.left_out.clone()
        }
    }

    /// The parts of the source that a copy of its files alone does not have: no manifest has the
    /// annotations.
    pub fn left_out_of_files(&self) -> Result<LeftOut, ConvertError> {
        let annotations = layout::annotations(&self.name, &self.manifest, &self.from_index)?;
        Ok(LeftOut {
            annotations: annotations.into_keys().collect(),
            ..self.from_index.left_out.clone()
        })
    }

    /// The image in one file, and in the files below it, as an image of a layout or registry: the
    /// file is the stack, and those below it are the layers. Each of `below` has the digest by
    /// which the stack names it. Files of this machine are compared with it.
    pub fn of_files(
        file: CopyFile,
        below: Vec<(Digest, CopyFile)>,
    ) -> Result<CopyImage, ConvertError> {
        let name = file.name.clone();
        let metadata = metadata(&file)?;
        let config = match metadata.get("config") {
            Some(config @ Value::Object(_)) => config.clone(),
            _ => minimal_config(Platform::host(), &[]),
        };
        let what = std::path::Path::new(&name);
        let config = json_bytes(&config, what)?;
        let mut files = Vec::new();
        let mut layers = Vec::new();
        let count = below.len();
        let digest = file.digest(None)?;
        let stack = (digest, file);
        for (index, (digest, part)) in below.into_iter().chain([stack]).enumerate() {
            part.check(&digest, None)?;
            let media_type = if index == count { STACK } else { LAYER };
            let annotations = [(MERKLE_ROOT, part.root())].into();
            layers.push(annotated(media_type, &digest, part.bytes, &annotations));
            files.push((digest, part));
        }
        let config_digest = Digest::of(&config);
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "artifactType": IMAGE,
            "config": descriptor(OCI_CONFIG, &config_digest, config.len() as u64),
            "layers": layers,
        });
        let manifest = json_bytes(&manifest, what)?;
        Ok(CopyImage::new(
            name,
            manifest,
            (config_digest, config),
            files,
        ))
    }

    /// The layers, then the stack. Of files that a server has, the digest is what the manifest or
    /// the stack says.
    pub fn files(&self) -> &[(Digest, CopyFile)] {
        &self.files
    }

    /// The root of the stack's Merkle tree.
    pub fn merkle_root(&self) -> [u8; 32] {
        self.files
            .last()
            .map_or([0; 32], |(_, file)| file.merkle_root)
    }

    /// The file of an image that is in one file.
    pub fn only_file(&self) -> Option<&CopyFile> {
        match &self.files[..] {
            [(_, file)] => Some(file),
            _ => None,
        }
    }
}

/// The metadata of an image; refuses a disk, and a layer on its own.
fn metadata(file: &CopyFile) -> Result<Value, ConvertError> {
    let bad = |error: bcow::Error| ConvertError::layout(&file.name, error);
    let options = bcow::OpenOptions::default();
    let image = bcow::Image::open_storage(Arc::clone(&file.storage), &options).map_err(bad)?;
    let refuse = |what: &str| {
        let why = format!("{what}, which a layout or registry cannot have as an image");
        Err(ConvertError::Options(format!("{} is {why}", file.name)))
    };
    if image.header().purpose != Use::Image {
        return refuse("a disk");
    }
    let metadata = image.metadata().map_err(bad)?;
    match metadata.get("layer") {
        Some(_) => refuse("a single layer"),
        None => Ok(metadata),
    }
}

//! A converted layer in its stored form, and its metadata.

use std::fmt;
use std::fs::File;
use std::sync::Arc;

use bcow::{BlockDevice, Image, Mapping, OpenOptions, ShownBy};
use bcow_erofs::reader::Filesystem;
use serde::Deserialize;
use serde_json::Value;

use super::{LayerOrigin, StoredLayerReport};
use crate::digest::{DiffId, Digest};
use crate::error::ConvertError;
use crate::layer::LayerInput;
use crate::layout::write::NewBlob;

/// The properties that a layer must have.
#[derive(Debug, Clone)]
pub(crate) struct LayerRequest {
    pub diff_id: DiffId,
    pub options: Value,
    pub tool: String,
    /// The options to open the layer with; they contain the cache that all layers of the image
    /// share.
    pub open: OpenOptions,
}

/// A layer's file.
pub(crate) struct StoredLayer {
    pub image: Arc<Image>,
    pub digest: Digest,
    pub file_bytes: u64,
    pub merkle_root: [u8; 32],
    pub diff_id: DiffId,
    /// Length of the uncompressed archive.
    pub tar_bytes: u64,
    pub content: LayerContent,
    /// The options that the layer was made with.
    pub options: Value,
    /// Bytes of the address space that are the layer's own; windows onto lower layers follow.
    pub own_bytes: u64,
    /// The windows onto lower layers.
    pub windows: Vec<LowerWindow>,
    pub made: LayerOrigin,
    /// Digest of the source's blob, if a conversion has checked that the uncompressed archive of
    /// this blob has the diffID of the layer.
    pub checked_source: Option<Digest>,
    /// The blob, if it has no name in the layout yet. `None` if the layout already had the blob.
    pub new: Option<NewBlob>,
    /// The name in messages.
    name: String,
}

/// A window onto a lower layer in a layer's address space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LowerWindow {
    pub start: u64,
    pub bytes: u64,
    /// Index of the backing.
    pub backing: u32,
    /// Address in the backing.
    pub address: u64,
}

#[derive(Deserialize)]
struct Document {
    tool: String,
    options: Value,
    layer: LayerDocument,
    content: LayerContent,
}

#[derive(Deserialize)]
struct LayerDocument {
    diff_id: String,
    tar_bytes: u64,
}

/// The content of a layer, as its metadata describes it.
#[derive(Deserialize)]
pub(crate) struct LayerContent {
    pub entries: u64,
    /// Bytes of file content.
    pub file_bytes: u64,
    pub deduplicated_bytes: u64,
    #[serde(default)]
    pub lower_bytes: u64,
    /// The byte in the address space where the metadata of the file system begins.
    pub metadata_start: u64,
}

/// Why the file of a layer is unusable.
pub(crate) enum Unusable {
    /// It cannot be read. The cause may be temporary, such as the limit on open files.
    Unreadable(String),
    /// It can be read, but it is not the requested layer, or it is damaged.
    Wrong(String),
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Unusable::Unreadable(problem) | Unusable::Wrong(problem)) = self;
        f.write_str(problem)
    }
}

impl From<bcow::Error> for Unusable {
    fn from(error: bcow::Error) -> Self {
        match error.code() {
            Some(_) => Unusable::Wrong(error.to_string()),
            None => Unusable::Unreadable(error.to_string()),
        }
    }
}

impl StoredLayer {
    /// Opens a layer in a blob that has no name yet.
    pub(crate) fn of_blob(
        blob: NewBlob,
        request: &LayerRequest,
        made: LayerOrigin,
    ) -> Result<Result<StoredLayer, Unusable>, ConvertError> {
        let file = Arc::new(blob.file()?);
        let opened = StoredLayer::open(file, blob.digest.clone(), blob.size, request, made);
        Ok(opened.map(|layer| StoredLayer {
            new: Some(blob),
            ..layer
        }))
    }

    /// Opens a layer whose digest the caller has verified or trusts. [`Unusable::Wrong`]
    /// names the property in which the layer differs from the requested one.
    pub(crate) fn open(
        file: Arc<File>,
        digest: Digest,
        file_bytes: u64,
        request: &LayerRequest,
        made: LayerOrigin,
    ) -> Result<StoredLayer, Unusable> {
        let wrong = |problem: String| Err(Unusable::Wrong(problem));
        let image = Image::open_storage(file, &request.open)?;
        let document: Document = match serde_json::from_value(image.metadata()?) {
            Ok(document) => document,
            Err(error) => return wrong(format!("its metadata is not that of a layer: {error}")),
        };
        if document.layer.diff_id != request.diff_id.to_string() {
            return wrong(format!(
                "it is layer {}, not {}",
                document.layer.diff_id.chars().take(80).collect::<String>(),
                request.diff_id
            ));
        }
        if document.tool != request.tool || document.options != request.options {
            return wrong("it was made by another version or with other options".to_owned());
        }
        let Some(merkle) = &image.header().merkle else {
            return wrong("it has no Merkle tree".to_owned());
        };
        if image.header().file_bytes != file_bytes {
            return wrong(format!(
                "the length in bytes is {file_bytes}, but its header records {}",
                image.header().file_bytes
            ));
        }
        let merkle_root = merkle.root;
        let windows = windows(&image)?;
        let own_bytes = windows.first().map_or(image.size(), |first| first.start);
        let mut content = document.content;
        content.metadata_start = content.metadata_start.min(own_bytes);
        Ok(StoredLayer {
            name: format!("layer {}", digest.short()),
            image,
            digest,
            file_bytes,
            merkle_root,
            diff_id: request.diff_id.clone(),
            tar_bytes: document.layer.tar_bytes,
            content,
            options: document.options,
            own_bytes,
            windows,
            made,
            checked_source: None,
            new: None,
        })
    }

    /// The layer's file system.
    pub(crate) fn filesystem(&self) -> Result<Filesystem, ConvertError> {
        Filesystem::open(self.image.clone()).map_err(|error| self.damaged(error))
    }

    /// The bytes of the digest, as a backing table stores them. A digest of another algorithm than
    /// SHA-256 is an error.
    pub(crate) fn sha256(&self) -> Result<[u8; 32], ConvertError> {
        self.digest
            .sha256()
            .ok_or_else(|| self.damaged("its digest is not SHA-256"))
    }

    /// An error for damage in this layer.
    pub(crate) fn damaged(&self, problem: impl std::fmt::Display) -> ConvertError {
        ConvertError::layout(&self.name, problem)
    }

    pub(crate) fn report(&self, input: &LayerInput) -> StoredLayerReport {
        StoredLayerReport {
            digest: self.digest.clone(),
            file_bytes: self.file_bytes,
            diff_id: self.diff_id.clone(),
            source: input.digest.clone(),
            source_bytes: input.size.or(input.blob.length()),
            tar_bytes: self.tar_bytes,
            entries: self.content.entries,
            content_bytes: self.content.file_bytes,
            deduplicated_bytes: self.content.deduplicated_bytes,
            lower_bytes: self.content.lower_bytes,
            made: self.made,
        }
    }
}

/// The windows of an image onto its backings. Two windows are merged if they are adjacent both in
/// the image and in the same backing.
fn windows(image: &Image) -> Result<Vec<LowerWindow>, bcow::Error> {
    let mut windows: Vec<LowerWindow> = Vec::new();
    if image.backings().next().is_none() {
        return Ok(windows);
    }
    for extent in image.extents() {
        let extent = extent?;
        let Mapping::Backing {
            by: ShownBy::Window,
            index,
            offset,
            bytes,
        } = extent.mapping
        else {
            continue;
        };
        match windows.last_mut() {
            Some(last)
                if last.backing == index
                    && last.start + last.bytes == extent.offset
                    && last.address + last.bytes == offset =>
            {
                last.bytes += bytes;
            }
            _ => windows.push(LowerWindow {
                start: extent.offset,
                bytes,
                backing: index,
                address: offset,
            }),
        }
    }
    Ok(windows)
}

//! Copies an index: all its manifests with all their blobs, one image after the other, and then the
//! indexes.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::image::{Others, Place};
use super::send::Sending;
use super::{CopyImage, ImageReport, Storing};
use crate::digest::Digest;
use crate::error::{ConvertError, check_equal, parse_digest};
use crate::index::ImageIndex;
use crate::layout::write::{LayoutForm, LayoutPlace, LayoutWriter};
use crate::layout::{self, Candidate, Descriptor, Form, IMAGE};
use crate::left_out::{Annotations, FromIndex, LeftOut};
use crate::options::{Progress, RunOptions};
use crate::source::Source;
use crate::store::RemoteFiles;

/// An index with images in BCoW form. The other manifests in it, such as attestations, are copied
/// too.
pub struct CopyIndex {
    index: ImageIndex,
    root: Descriptor,
    remote: Option<Arc<dyn RemoteFiles>>,
}

impl CopyIndex {
    /// The index of a layout, as in [`ImageIndex::of_layout`]. `None` also for an index that has no
    /// image in BCoW form, and for images that the layout lists by themselves.
    pub fn of_layout(
        source: &Source,
        scratch: &Path,
        progress: &dyn Progress,
        cancel: Option<&AtomicBool>,
    ) -> Result<Option<CopyIndex>, ConvertError> {
        match ImageIndex::find(source, Form::Bcow, scratch, progress, cancel)? {
            Some(index) => CopyIndex::of(index, None),
            None => Ok(None),
        }
    }

    /// The index of a registry, whose BCoW files `remote` opens. `None` for an index that has no
    /// image in BCoW form.
    pub fn of_registry(
        index: ImageIndex,
        remote: Arc<dyn RemoteFiles>,
    ) -> Result<Option<CopyIndex>, ConvertError> {
        CopyIndex::of(index, Some(remote))
    }

    fn of(
        index: ImageIndex,
        remote: Option<Arc<dyn RemoteFiles>>,
    ) -> Result<Option<CopyIndex>, ConvertError> {
        let Some(root) = index.root().cloned() else {
            return Ok(None);
        };
        let copy = CopyIndex {
            index,
            root,
            remote,
        };
        let images = &copy.index.manifests.images;
        let mut is_bcow = images
            .iter()
            .any(|image| image.descriptor.artifact_type.as_deref() == Some(IMAGE));
        // Some tools that write indexes leave out the type.
        for image in images {
            if is_bcow {
                break;
            }
            let (place, bytes) = copy.document("manifest", &image.descriptor)?;
            let manifest: layout::ManifestDocument = layout::parse(&place, &bytes)?;
            is_bcow = layout::stack_of(&place, &manifest.layers)?.is_some();
        }
        Ok(is_bcow.then_some(copy))
    }

    /// The name in messages.
    pub fn name(&self) -> &str {
        &self.index.name
    }

    /// The parts of the source that a copy to `to` does not have: in a registry, no index has the
    /// annotations of the one that lists it.
    pub fn left_out(&self, to: &LayoutPlace) -> LeftOut {
        let mut left_out = LeftOut::default();
        if let LayoutForm::Registry(_) = to.form {
            left_out.annotations = self.annotations().into_keys().collect();
        }
        left_out
    }

    /// The annotations of the descriptor that leads to the index.
    fn annotations(&self) -> Annotations {
        let mut from_index = FromIndex::default();
        from_index.annotate(self.root.annotations.as_ref());
        from_index.annotations
    }

    /// The manifests to copy.
    fn listed(&self) -> impl Iterator<Item = &Candidate> {
        let manifests = &self.index.manifests;
        manifests.images.iter().chain(&manifests.attestations)
    }

    fn image(&self, listed: &Candidate) -> Result<CopyImage, ConvertError> {
        let descriptor = &listed.descriptor;
        let (place, bytes) = self.document("manifest", descriptor)?;
        layout::check_manifest_type(&place, descriptor)?;
        let place = Place {
            name: format!("{} in {}", descriptor.platform_name(), self.index.name),
            files: &self.index.files,
            remote: self.remote.as_deref(),
        };
        place.image(bytes, Others::Taken)
    }

    /// A manifest or an index, whose digest must be one that layouts and registries can have as the
    /// name of the copy.
    fn document(
        &self,
        kind: &str,
        descriptor: &Descriptor,
    ) -> Result<(String, Vec<u8>), ConvertError> {
        let (place, bytes) = layout::manifest_bytes(&self.index.files, kind, descriptor)?;
        let found = Digest::of(&bytes).to_string();
        check_equal(&place, "digest", &descriptor.digest, &found)?;
        Ok((place, bytes))
    }
}

/// Copies an index. It gets its entry in the layout's index, or its tag, after all that it lists.
pub fn copy_index(
    index: &CopyIndex,
    to: &LayoutPlace,
    options: &RunOptions,
    progress: &dyn Progress,
) -> Result<ImageReport, ConvertError> {
    let writer = LayoutWriter::open(to, options.cancel.clone())?;
    let files = &index.index.files;
    let mut blobs = Vec::new();
    // An index comes after those that it lists.
    let indexes = index.index.manifests.indexes.iter().rev();
    match &to.form {
        LayoutForm::Registry(upload) => {
            let sending = Sending::new(&**upload, options, progress);
            for listed in index.listed() {
                let image = index.image(listed)?;
                blobs.extend(sending.blobs(&image)?);
                for other in &image.others {
                    blobs.push(sending.other(other, files, &writer)?);
                }
                sending.store(&image.manifest, &listed.descriptor)?;
            }
            for nested in indexes {
                let (_, bytes) = index.document("index", nested)?;
                if nested.digest == index.root.digest {
                    sending.name(&bytes, nested)?;
                } else {
                    sending.store(&bytes, nested)?;
                }
            }
        }
        _ => {
            let mut storing = Storing::new(writer, options, progress);
            for listed in index.listed() {
                let image = index.image(listed)?;
                blobs.extend(storing.blobs(&image)?);
                for other in &image.others {
                    blobs.push(storing.other(other, files)?);
                }
                storing.manifest(&image.manifest, &listed.descriptor.media_type)?;
            }
            for nested in indexes {
                let (_, bytes) = index.document("index", nested)?;
                storing.manifest(&bytes, &nested.media_type)?;
            }
            storing.publish(to, |entry| entry.annotations = index.annotations())?;
        }
    }
    let mut seen = HashSet::new();
    blobs.retain(|blob| seen.insert(blob.digest.clone()));
    let digest = |listed: &Candidate| parse_digest(index.name(), &listed.descriptor.digest);
    Ok(ImageReport {
        manifest: parse_digest(index.name(), &index.root.digest)?,
        images: index.listed().map(digest).collect::<Result<_, _>>()?,
        blobs,
    })
}

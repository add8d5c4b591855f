//! Files whose content is wholly in one layer of an image. Other images with this layer share them.
//!
//! A stack has windows onto its layers. A layer is an image too, mostly with the same file at the
//! same path: then the content is in the same extents. If it is not (a hard link to a file of a
//! lower layer, content in several layers), the file is only shared with mounts of the same image.

use std::ptr::addr_eq;
use std::sync::Arc;

use bcow::Mapping;
use bcow_erofs::reader::{ErofsError, ExtentSource, FileExtent, FileType, Filesystem, Inode, Nid};
use bcow_union::{COUNTED_EXTENTS, Image};

use super::slots::{ImageKey, SharedFile};
use crate::error::MountError;

/// Most bytes of the end of a file beside its inode: a block.
const TAIL_BYTES: u64 = 4096;

/// The layers of an image.
pub struct Layers {
    /// The address space of the image, with windows onto the layers.
    pub stack: Arc<bcow::Image>,
    /// The address spaces of the layers, the lowest first; none if only mounts of the same image
    /// are to share files.
    pub files: Vec<Arc<bcow::Image>>,
}

/// The layers, and their slots.
pub(super) struct OpenLayers {
    stack: Arc<bcow::Image>,
    layers: Vec<OpenLayer>,
}

pub(super) struct OpenLayer {
    file: Arc<bcow::Image>,
    pub(super) image: Arc<Image>,
    pub(super) slot: u32,
}

/// Bytes of a layer.
struct Shown<'l> {
    layer: &'l OpenLayer,
    /// The first byte in the address space of the layer.
    offset: u64,
    bytes: u64,
}

impl Layers {
    /// The image and its layers, with their keys. Their errors are those of the image.
    pub(super) fn open(
        &self,
        key: ImageKey,
        image: &Arc<Image>,
    ) -> Result<Vec<(ImageKey, Arc<Image>)>, MountError> {
        let open = |file: &Arc<bcow::Image>| {
            let identity = file.identity_hash();
            let fs = Filesystem::open(file.clone())
                .map_err(|_| MountError::NoSharing("a layer cannot be read"))?;
            let layer = Image::with_errors(Arc::new(fs), Arc::clone(image.errors()));
            Ok((ImageKey { identity, ..key }, Arc::new(layer)))
        };
        let layers = self.files.iter().map(open);
        std::iter::once(Ok((key, Arc::clone(image))))
            .chain(layers)
            .collect()
    }

    /// The layers in their slots.
    pub(super) fn in_slots(self, images: &[(ImageKey, Arc<Image>)], slots: &[u32]) -> OpenLayers {
        let layers = self.files.into_iter().zip(images).zip(slots);
        let layers = layers.map(|((file, (_, image)), &slot)| OpenLayer {
            file,
            image: Arc::clone(image),
            slot,
        });
        OpenLayers {
            stack: self.stack,
            layers: layers.collect(),
        }
    }
}

impl OpenLayers {
    pub(super) fn iter(&self) -> impl Iterator<Item = &OpenLayer> {
        self.layers.iter()
    }

    /// The file of a layer with the content of an inode of the image. `path` gives a path of the
    /// inode.
    pub(super) fn find(
        &self,
        image: &Filesystem,
        nid: Nid,
        path: impl FnOnce() -> Option<Vec<u8>>,
    ) -> Option<SharedFile> {
        if self.layers.is_empty() {
            return None;
        }
        let here = image.inode(nid).ok()?;
        let mut extents = image.extents(&here, 0).take(COUNTED_EXTENTS);
        let layer = extents.find_map(|extent| match extent.ok()?.source {
            ExtentSource::Device { offset } => Some(self.shown(offset)?.layer),
            ExtentSource::Hole => None,
        })?;
        let fs = layer.image.filesystem();
        let there = fs.inode(fs.resolve(&path()?).ok()??).ok()?;
        let is_same = self.is_same((image, &here), layer, (fs, &there));
        SharedFile::new(layer.slot, there.nid).filter(|_| is_same.is_ok_and(|is_same| is_same))
    }

    /// What the stack shows of a layer from byte `at` on.
    fn shown(&self, at: u64) -> Option<Shown<'_>> {
        let extent = self.stack.map(at).ok()?;
        let Mapping::Backing {
            index,
            offset,
            bytes,
            ..
        } = extent.mapping
        else {
            return None;
        };
        let file = Arc::as_ptr(self.stack.backing(index)?);
        let mut layers = self.layers.iter();
        let skip = at - extent.offset;
        Some(Shown {
            layer: layers.find(|layer| addr_eq(file, Arc::as_ptr(&layer.file)))?,
            offset: offset + skip,
            bytes: bytes.checked_sub(skip).filter(|&bytes| bytes > 0)?,
        })
    }

    /// Whether both inodes have the same content, at the same place in the layer.
    fn is_same(
        &self,
        (image, here): (&Filesystem, &Inode),
        layer: &OpenLayer,
        (fs, there): (&Filesystem, &Inode),
    ) -> Result<bool, ErofsError> {
        if there.kind != FileType::Regular || there.size != here.size {
            return Ok(false);
        }
        let extents = image.extents(here, 0).zip(fs.extents(there, 0));
        for (count, (a, b)) in extents.enumerate() {
            let (a, b) = (a?, b?);
            let is_same = match (a.source, b.source) {
                _ if count == COUNTED_EXTENTS || a.length != b.length => false,
                (ExtentSource::Hole, ExtentSource::Hole) => true,
                (ExtentSource::Device { offset: at }, ExtentSource::Device { offset }) => {
                    self.shows(at, layer, offset, a.length)
                        // A stack has its own copies of the ends of files.
                        || a.length <= TAIL_BYTES
                            && content(image, here, a)? == content(fs, there, b)?
                }
                _ => false,
            };
            if !is_same {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Whether the stack shows `length` bytes of a layer from byte `start` on at byte `at`.
    fn shows(&self, at: u64, layer: &OpenLayer, start: u64, length: u64) -> bool {
        let mut done = 0;
        while done < length {
            match self.shown(at + done) {
                Some(shown) if shown.layer.slot == layer.slot && shown.offset == start + done => {
                    done += shown.bytes;
                }
                _ => return false,
            }
        }
        true
    }
}

fn content(fs: &Filesystem, inode: &Inode, extent: FileExtent) -> Result<Vec<u8>, ErofsError> {
    let mut bytes = vec![0; extent.length as usize];
    fs.read(inode, extent.offset, &mut bytes)?;
    Ok(bytes)
}

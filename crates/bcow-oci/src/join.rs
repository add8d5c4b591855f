//! Shows an image and layers above it as one image without a file of its own.
//!
//! The result is a stack, as in a conversion into a layout: the metadata of the merged tree, which
//! is in memory, and a window onto each image. A window shows the whole address space of its image,
//! including that image's own windows.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use bcow::{BlockDevice, Compression, Image, OpenOptions, WriterOptions};
use bcow_erofs::merge::merge;
use bcow_erofs::overlay::{ReadOptions, TreeForm, read_layer};
use bcow_erofs::reader::Filesystem;
use bcow_erofs::tree::LayerTree;
use bcow_erofs::writer::MAX_INLINE;
use rustix::fs::MemfdFlags;
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::content::ContentStats;
use crate::error::ConvertError;
use crate::image_file::{ImagesByDigest, image_error, tree_error};
use crate::metadata::Metadata;
use crate::options::Limits;
use crate::space::BLOCK_BYTES;
use crate::stack::{BlockRange, Merged, StackPart, TAIL_SHIFT, place_regions};

/// An image that takes part.
#[derive(Clone)]
pub struct JoinPart {
    /// Its address space.
    pub image: Arc<Image>,
    /// The name in messages.
    pub name: String,
    /// The form of the image's file system.
    pub form: TreeForm,
}

/// Several images, shown as one.
pub struct Joined {
    /// The address space.
    pub image: Arc<Image>,
    /// The byte of the address space where each part begins, in the order of the parts.
    pub starts: Vec<u64>,
}

/// The identity of several images that are shown as one: a hash of their identities, lowest first.
/// It depends on these only, so that later versions of bcow compute the same value.
pub fn joined_identity(parts: &[[u8; 32]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(b"bcow image with layers\0");
    for part in parts {
        hash.update(part);
    }
    hash.finalize().into()
}

/// Shows `parts`, lowest first, as one image with the fields `described` in its metadata.
pub fn join(
    parts: &[JoinPart],
    described: Map<String, Value>,
    options: &OpenOptions,
) -> Result<Joined, ConvertError> {
    let path = Path::new("memory");
    let in_memory = |error| ConvertError::write("make a file in", path, error);
    let places = place_regions(parts.iter().map(|part| part.image.size()));
    let trees = parts
        .iter()
        .zip(&places)
        .enumerate()
        .map(|(index, (part, place))| tree(part, *place, index))
        .collect::<Result<Vec<_>, _>>()?;
    let names: Vec<String> = parts.iter().map(|part| part.name.clone()).collect();
    let tree = merge(trees).map_err(|error| tree_error(&names, error))?;
    let shown: Vec<StackPart<'_>> = parts
        .iter()
        .map(|part| StackPart {
            image: &part.image,
            // This digest is resolved by `join` only; it must be unique among the parts.
            digest: part.image.identity_hash(),
            bytes: part.image.size(),
        })
        .collect();
    let merged = Merged {
        tree: &tree,
        parts: &shown,
        places: &places,
        options: WriterOptions {
            compression: Compression::None,
            erofs: true,
            ..WriterOptions::default()
        },
        inline_max: MAX_INLINE,
        stats: ContentStats::default(),
        prefetch: None,
        path,
    };
    let file = rustix::fs::memfd_create("bcow", MemfdFlags::CLOEXEC)
        .map_err(|error| in_memory(error.into()))?;
    let file = File::from(file);
    let written = file.try_clone().map_err(in_memory)?;
    let metadata = Metadata::new("bcow", Value::Null, described);
    let stack = merged.write(written, metadata)?;
    let resolver = ImagesByDigest(
        parts
            .iter()
            .map(|part| (part.image.identity_hash(), part.image.clone()))
            .collect(),
    );
    let image = Image::open_with_backings(Arc::new(file), options, &resolver)
        .map_err(|error| image_error(path, error))?;
    let starts = stack.windows.iter();
    Ok(Joined {
        image,
        starts: starts.map(|w| u64::from(w.to) * BLOCK_BYTES).collect(),
    })
}

/// The tree of the part at `index`, with its contents at `place`.
fn tree(part: &JoinPart, place: BlockRange, index: usize) -> Result<LayerTree, ConvertError> {
    let filesystem = Filesystem::open(part.image.clone())
        .map_err(|error| ConvertError::layout(&part.name, error))?;
    let find = |offset: u64, bytes: u64| {
        let end = offset.checked_add(bytes)?;
        let inside = offset.is_multiple_of(BLOCK_BYTES) && end <= place.blocks * BLOCK_BYTES;
        let block = place.first + offset / BLOCK_BYTES;
        inside.then(|| u32::try_from(block).ok())?
    };
    let options = ReadOptions {
        form: part.form,
        place: &find,
        tails: (index as u64) << TAIL_SHIFT,
        max_inodes: Limits::default().max_entries,
    };
    read_layer(&filesystem, &options).map_err(|error| ConvertError::layout(&part.name, error))
}

#[cfg(test)]
mod tests {
    use bcow::{Composer, Composition, MemoryStorage};

    use super::*;

    fn part(name: &str, form: TreeForm, extra: &[u8]) -> JoinPart {
        let mut bytes = include_bytes!("../../../fixtures/erofs/tree.erofs").to_vec();
        bytes.resize(bytes.len().next_multiple_of(4096), 0);
        bytes.extend_from_slice(extra);
        let form_of_file = Composition {
            size: bytes.len() as u64,
            region_shift: 22,
            block_shift: 14,
            compression: Compression::None,
            backings: Vec::new(),
        };
        let storage = Arc::new(MemoryStorage::default());
        let mut composer = Composer::new(storage.clone(), form_of_file).unwrap();
        composer.write_at(0, &bytes).unwrap();
        composer.finish(&Value::Null).unwrap();
        let options = OpenOptions::default();
        let image =
            Image::open_with_backings(storage, &options, &ImagesByDigest(Default::default()));
        JoinPart {
            image: image.unwrap(),
            name: name.to_owned(),
            form,
        }
    }

    /// An upper of the kernel door over an image with layers has blocks that belong to the view of
    /// the joined image. If this test fails, such uppers could not be opened any more: the new
    /// places need a view layout of their own.
    #[test]
    fn places_in_a_joined_image_do_not_change() {
        let parts = [
            part("below", TreeForm::Whole, &[]),
            part("above", TreeForm::Layer, &[7; 4096]),
        ];
        let joined = join(&parts, Map::new(), &OpenOptions::default()).unwrap();
        let mut metadata = vec![0; joined.starts[0] as usize];
        joined.image.read_at(0, &mut metadata).unwrap();
        let hash: [u8; 32] = Sha256::digest(&metadata).into();
        let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
        let expected = "6f075304b9c5c2687efbf30f57036928f9416435df214bc6b40256899500a912";
        assert_eq!(joined.starts, [4 << 20, 8 << 20]);
        assert_eq!(hash, expected);
    }
}

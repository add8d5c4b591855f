//! Joins an image and layers above it: shows them as one image that has no file on a disk.
//!
//! The result is a stack, as in a conversion into a layout. Its file is in memory; it has the
//! metadata of the merged tree, and a window onto each image. A window shows the whole address
//! space of its image, including the windows of that image.

mod kept;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use bcow::{BlockDevice, Compression, Error, Image, Mapping, OpenOptions, WriterOptions};
use bcow_erofs::merge::merge;
use bcow_erofs::overlay::{ReadOptions, TreeForm, read_layer};
use bcow_erofs::reader::Filesystem;
use bcow_erofs::tree::{LayerTree, Tree};
use bcow_erofs::writer::MAX_INLINE;
use rustix::fs::MemfdFlags;
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::content::ContentStats;
use crate::ending::Ending;
use crate::error::ConvertError;
use crate::image_file::{ImagesByDigest, image_error, tree_error};
use crate::metadata::Metadata;
use crate::options::Limits;
use crate::space::{BLOCK_BYTES, Shown};
use crate::stack::{BlockRange, TAIL_SHIFT, Tails, place_regions};

/// One of the images to join.
#[derive(Clone)]
pub struct JoinPart {
    /// The address space of the image.
    pub image: Arc<Image>,
    /// The name of the image in messages.
    pub name: String,
    /// The form of the image's file system.
    pub form: TreeForm,
}

/// The result of [`join()`].
pub struct Joined {
    /// The joined address space.
    pub image: Arc<Image>,
    /// The byte of the address space where each part begins, in the order of the parts.
    pub starts: Vec<u64>,
}

/// The identity of joined images: a hash of the identities of the parts, lowest first. It does not
/// depend on the bytes of the stack, so later versions of bcow compute the same value.
pub fn joined_identity(parts: &[[u8; 32]]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(b"bcow image with layers\0");
    for part in parts {
        hash.update(part);
    }
    hash.finalize().into()
}

/// Joins `parts`, lowest first, into one image. Its metadata has the fields `metadata_fields`.
///
/// With `kept`, the file of the joined image stays at this path, so that a later call need not read
/// and merge the trees again. A file there that is of other parts, damaged, or writable by other
/// users is replaced, also if a later read finds the damage. If the host cannot store the file, it
/// is in memory.
pub fn join(
    parts: &[JoinPart],
    metadata_fields: Map<String, Value>,
    options: &OpenOptions,
    kept: Option<&Path>,
) -> Result<Joined, ConvertError> {
    let resolver = ImagesByDigest(
        parts
            .iter()
            .map(|part| (part.image.identity_hash(), part.image.clone()))
            .collect(),
    );
    let places = place_regions(parts.iter().map(|part| part.image.size()));
    let joined = |image: Arc<Image>| {
        let starts = starts(&image, parts, &places)?;
        Some(Joined { image, starts })
    };
    let source = Arc::new(JoinSource {
        parts: parts.to_owned(),
        places: places.clone(),
        fields: metadata_fields,
    });
    let open = |storage| Image::open_with_backings(storage, options, &resolver);
    if let Some(path) = kept
        && let Some(joined) = kept::open(path, &source, open).and_then(joined)
    {
        return Ok(joined);
    }
    let tree = source.tree()?;
    if let Some(path) = kept {
        match kept::make(path, &source, &tree) {
            Ok(()) => {
                if let Some(joined) = kept::open(path, &source, open).and_then(joined) {
                    return Ok(joined);
                }
            }
            Err(error) => tracing::warn!("cannot keep merged layers: {error}"),
        }
    }
    let file = source.write_in_memory(&tree, &source.fields)?;
    let failed = |error| image_error(Path::new(MEMORY), error);
    let image = open(Arc::new(file)).map_err(failed)?;
    joined(image).ok_or_else(|| failed(Error::Inconsistent("it does not show its parts".into())))
}

/// The name of a file in memory in messages.
const MEMORY: &str = "memory";

/// What a joined image is made of.
struct JoinSource {
    parts: Vec<JoinPart>,
    places: Vec<BlockRange>,
    /// Fields of the metadata.
    fields: Map<String, Value>,
}

impl JoinSource {
    /// Reads and merges the trees.
    fn tree(&self) -> Result<Tree, ConvertError> {
        let parts = self.parts.iter().zip(&self.places).enumerate();
        let trees = parts
            .map(|(index, (part, place))| part_tree(part, *place, index))
            .collect::<Result<Vec<_>, _>>()?;
        let names: Vec<String> = self.parts.iter().map(|part| part.name.clone()).collect();
        merge(trees).map_err(|error| tree_error(&names, error))
    }

    /// Writes the file; `path` is for messages. Equal parts give equal bytes.
    fn write(
        &self,
        tree: &Tree,
        file: File,
        path: &Path,
        fields: &Map<String, Value>,
    ) -> Result<(), ConvertError> {
        let shown = self
            .parts
            .iter()
            .zip(&self.places)
            .map(|(part, place)| Shown {
                first_block: place.first,
                bytes: part.image.size(),
                // Only the resolver of the join resolves this digest. The parts must have different
                // ones.
                digest: part.image.identity_hash(),
                size: part.image.size(),
            });
        let ending = Ending {
            tree,
            tails: &Tails(self.parts.iter().map(|part| &*part.image).collect()),
            shown: &shown.collect::<Vec<_>>(),
            as_devices: false,
            inline_max: MAX_INLINE,
            stats: ContentStats::default(),
            prefetch: None,
            path,
        };
        let options = WriterOptions {
            compression: Compression::None,
            erofs: true,
            ..WriterOptions::default()
        };
        let metadata = Metadata::new("bcow", Value::Null, fields.clone());
        ending.write_stack(file, options, metadata).map(drop)
    }

    fn write_in_memory(
        &self,
        tree: &Tree,
        fields: &Map<String, Value>,
    ) -> Result<File, ConvertError> {
        let path = Path::new(MEMORY);
        let memory_error = |error| ConvertError::write("make a file in", path, error);
        let file = rustix::fs::memfd_create("bcow", MemfdFlags::CLOEXEC)
            .map_err(|error| memory_error(error.into()))?;
        let file = File::from(file);
        let written = file.try_clone().map_err(memory_error)?;
        self.write(tree, written, path, fields)?;
        Ok(file)
    }
}

/// Where the parts begin: the last one ends with the image. `None` if the image does not show them
/// there.
fn starts(image: &Image, parts: &[JoinPart], places: &[BlockRange]) -> Option<Vec<u64>> {
    let (Some(last), Some(place)) = (parts.last(), places.last()) else {
        return Some(Vec::new());
    };
    let end = image.size().checked_sub(last.image.size())?;
    let first = end.checked_sub(place.first * BLOCK_BYTES)?;
    let starts = places.iter().map(|place| first + place.first * BLOCK_BYTES);
    let starts: Vec<u64> = starts.collect();
    let shows = |at: u64, start: u64| {
        let extent = image.map(at).ok();
        extent.is_some_and(|extent| match extent.mapping {
            Mapping::Backing { offset, .. } => {
                at.checked_sub(extent.offset).map(|behind| offset + behind) == Some(at - start)
            }
            _ => false,
        })
    };
    let is_there = |(part, &start): (&JoinPart, &u64)| {
        let ends = [start, start + part.image.size().saturating_sub(1)];
        ends.into_iter().all(|at| shows(at, start))
    };
    parts.iter().zip(&starts).all(is_there).then_some(starts)
}

/// Reads the tree of the part `index`. The content of the part is at the blocks `place`.
fn part_tree(part: &JoinPart, place: BlockRange, index: usize) -> Result<LayerTree, ConvertError> {
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
    use bcow::format::hex;
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

    /// The disk of an upper of the kernel driver has blocks that match the view of the joined
    /// image. If this test fails, existing uppers over an image with layers can no longer be
    /// opened: the new addresses need a new version of the layout of views.
    #[test]
    fn addresses_in_a_joined_image_do_not_change() {
        let parts = [
            part("below", TreeForm::Whole, &[]),
            part("above", TreeForm::Layer, &[7; 4096]),
        ];
        let joined = join(&parts, Map::new(), &OpenOptions::default(), None).unwrap();
        let mut metadata = vec![0; joined.starts[0] as usize];
        joined.image.read_at(0, &mut metadata).unwrap();
        let hash = hex(&Sha256::digest(&metadata));
        let expected = "6f075304b9c5c2687efbf30f57036928f9416435df214bc6b40256899500a912";
        assert_eq!(joined.starts, [4 << 20, 8 << 20]);
        assert_eq!(hash, expected);
    }

    #[test]
    fn a_kept_file_is_used_as_long_as_it_is_of_these_parts() {
        use std::os::unix::fs::{MetadataExt, PermissionsExt};
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("merged.bcow");
        let below = part("below", TreeForm::Whole, &[]);
        let parts = [below.clone(), part("above", TreeForm::Layer, &[7; 4096])];
        let others = [below, part("above", TreeForm::Layer, &[8; 4096])];
        let content = |joined: &Joined| {
            let mut bytes = vec![0; joined.image.size() as usize];
            joined.image.read_at(0, &mut bytes).unwrap();
            bytes
        };
        let in_memory = join(&parts, Map::new(), &OpenOptions::default(), None).unwrap();
        let kept = |parts: &[JoinPart]| {
            let options = OpenOptions::default();
            let joined = join(parts, Map::new(), &options, Some(&path)).unwrap();
            (joined, path.metadata().unwrap().ino())
        };
        let (first, file) = kept(&parts);
        assert_eq!(first.starts, in_memory.starts);
        assert!(content(&first) == content(&in_memory));
        let (again, same) = kept(&parts);
        assert_eq!((again.starts, same), (in_memory.starts.clone(), file));
        // Of other parts.
        let (other, replaced) = kept(&others);
        assert_ne!(replaced, file);
        assert!(content(&other) != content(&in_memory));
        let (back, _) = kept(&parts);
        assert!(content(&back) == content(&in_memory));
        // Damaged in any byte, for this join or for reads after it.
        let bytes = std::fs::read(&path).unwrap();
        let mut replaced = [0, 0];
        for at in (0..bytes.len()).step_by((bytes.len() / 100).max(1)) {
            for (is_open, replaced) in replaced.iter_mut().enumerate() {
                std::fs::write(&path, &bytes).unwrap();
                let opened = (is_open == 1).then(|| kept(&parts).0);
                let file = std::fs::File::options().write(true).open(&path).unwrap();
                std::os::unix::fs::FileExt::write_all_at(&file, &[!bytes[at]], at as u64).unwrap();
                let read = opened.unwrap_or_else(|| kept(&parts).0);
                assert!(content(&read) == content(&in_memory), "byte {at}");
                // Padding and the second header are not read.
                *replaced += usize::from(std::fs::read(&path).unwrap() == bytes);
            }
        }
        assert!(
            replaced.iter().all(|&replaced| replaced > 0),
            "{replaced:?}"
        );
        // Truncated, and writable by others.
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let (repaired, _) = kept(&parts);
        assert!(content(&repaired) == content(&in_memory));
        let file_before = path.metadata().unwrap().ino();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        assert_ne!(kept(&parts).1, file_before);
        // Another file is not replaced.
        std::fs::write(&path, "a letter").unwrap();
        assert!(content(&kept(&parts).0) == content(&in_memory));
        assert_eq!(std::fs::read(&path).unwrap(), b"a letter");
        // No file can be made there.
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        let options = OpenOptions::default();
        let joined = join(&parts, Map::new(), &options, Some(&path)).unwrap();
        assert!(content(&joined) == content(&in_memory));
    }
}

//! The stack: the metadata of the merged file system, and a window onto each layer.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bcow::format::{BackingEntry, BackingName};
use bcow::{
    BackingResolver, BlockDevice, Error, Image, ImageWriter, OpenOptions, WriterOptions, Written,
    verify_written,
};
use bcow_erofs::merge::merge;
use bcow_erofs::overlay::{ReadOptions, TreeForm, read_layer};
use bcow_erofs::tree::{LayerTree, TailSource, Tree};
use bcow_erofs::writer::{ContentWindow, Device, Plan, WriteError, WriteOptions, device_table};

use super::lower::REGION_BYTES;
use super::stored::StoredLayer;
use super::{StackReport, hex};
use crate::content::{BLOCK_BYTES, ContentStats};
use crate::conversion::{INLINE_MAX, emit, image_error, tree_error, unfit, writer_options};
use crate::error::ConvertError;
use crate::layout::write::{LayoutWriter, NewBlob};
use crate::metadata::Metadata;
use crate::options::ConvertOptions;
use crate::parallel;

/// The shift of the layer's number in the address of a tail. EROFS addresses have 44 bits (16 TiB).
pub(crate) const TAIL_SHIFT: u32 = 44;

/// A stack that was written.
pub(crate) struct Stack {
    blob: NewBlob,
    written: Written,
    entries: u64,
}

/// Location of a layer in the address space of the stack, in blocks from the start of the windows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub first: u64,
    pub blocks: u64,
}

/// Merges `layers`, lowest first, and writes the stack. `names` are the layers' names in messages.
pub(crate) fn write(
    layers: &[&StoredLayer],
    names: &[String],
    metadata: Metadata,
    layout: &LayoutWriter,
    options: &ConvertOptions,
) -> Result<Stack, ConvertError> {
    let path: PathBuf = layout.directory().to_owned();
    let places = places(layers.iter().map(|layer| layer.own_bytes));
    let end = places.last().map_or(0, |last| last.first + last.blocks);
    let trees = read_trees(layers, &places, end, options)?;
    let tree = merge(trees).map_err(|e| tree_error(names, e))?;
    let parts = layers
        .iter()
        .map(|layer| {
            Ok(Part {
                image: &layer.image,
                digest: layer.sha256()?,
                bytes: layer.own_bytes,
            })
        })
        .collect::<Result<Vec<_>, ConvertError>>()?;
    let mut stats = ContentStats::default();
    for layer in layers {
        stats.content_bytes += layer.info.content_bytes;
        stats.deduplicated_bytes += layer.info.deduplicated_bytes;
        stats.lower_bytes += layer.info.lower_bytes;
    }
    let output = layout.new_blob()?;
    let merged = Merged {
        tree: &tree,
        parts: &parts,
        places: &places,
        options: writer_options(options, options.threads.max(1))?,
        inline_max: INLINE_MAX,
        stats,
        path: &path,
    };
    let stack = merged.write(output.file()?, metadata)?;
    let blob = layout.finish(output)?;
    Ok(Stack {
        blob,
        written: stack.written,
        entries: stack.entries,
    })
}

/// An image whose first bytes a window of the stack shows.
pub(crate) struct Part<'p> {
    pub image: &'p Arc<Image>,
    /// The digest by which the stack names the image.
    pub digest: [u8; 32],
    /// Number of bytes in the window.
    pub bytes: u64,
}

/// A merged tree, and the images with the content of its files.
pub(crate) struct Merged<'m> {
    /// Contents have block addresses counted from the start of the windows, within the [`Place`] of
    /// their part. The offset of a tail has the number of its part in the bits from [`TAIL_SHIFT`]
    /// on.
    pub tree: &'m Tree,
    pub parts: &'m [Part<'m>],
    /// The locations of the parts.
    pub places: &'m [Place],
    pub options: WriterOptions,
    /// Longest inline tail, in bytes.
    pub inline_max: u16,
    /// Statistics of the content, for the metadata.
    pub stats: ContentStats,
    /// The path in messages.
    pub path: &'m Path,
}

/// A stack that was written.
pub(crate) struct WrittenStack {
    pub written: Written,
    /// Inodes of the stack's tree.
    pub entries: u64,
    /// The windows onto the parts, in their order.
    pub windows: Vec<ContentWindow>,
}

impl Merged<'_> {
    /// Writes the stack.
    pub(crate) fn write(
        self,
        file: File,
        mut metadata: Metadata,
    ) -> Result<WrittenStack, ConvertError> {
        let Merged {
            parts, path, tree, ..
        } = self;
        let failed = |error| image_error(path, error);
        let mut writer_options = self.options;
        writer_options.metadata_first = true;
        // The kernel mounts each plain layer as a device of the file system.
        let devices = match writer_options.plain && !parts.is_empty() {
            true => parts.len() as u16,
            false => 0,
        };
        let mut writer = ImageWriter::create(file, writer_options).map_err(failed)?;
        let mut start = writer.begin_metadata().map_err(failed)?;
        let no_device = Device {
            blocks: 0,
            start: 0,
        };
        start += device_table(&vec![no_device; devices.into()]).len() as u64;
        let write_options = WriteOptions {
            metadata_start: start,
            inline_max: self.inline_max,
        };
        let plan = Plan::new(tree, &write_options).map_err(|e| unfit(path, e))?;
        let metadata_end = start + plan.metadata_bytes();
        let first = metadata_end.next_multiple_of(REGION_BYTES) / BLOCK_BYTES;
        let windows = windows(self.places, first).map_err(|e| unfit(path, e))?;
        if devices > 0 {
            let devices: Vec<Device> = windows
                .iter()
                .map(|window| Device {
                    blocks: window.blocks,
                    start: window.to,
                })
                .collect();
            writer.append(&device_table(&devices)).map_err(failed)?;
        }
        let plan = plan
            .with_windows(windows.clone())
            .map_err(|e| unfit(path, e))?
            .with_device_table(devices);
        let tails = Tails(parts);
        emit(&plan, &tails, &mut writer, path)?;
        for (part, window) in parts.iter().zip(&windows) {
            let backing = writer.add_backing(BackingEntry {
                name: BackingName::Digest(part.digest),
                size: part.image.size(),
            });
            let found = writer
                .append_window(backing, 0, part.bytes)
                .map_err(failed)?;
            debug_assert_eq!(found, u64::from(window.to) * BLOCK_BYTES);
        }
        let entries = plan.inodes();
        metadata.content(entries, self.stats, start);
        // If the layers are devices, the first device ends with the metadata.
        let total = match devices {
            0 => writer.position(),
            _ => metadata_end,
        };
        let superblock = plan.superblock(total / BLOCK_BYTES);
        let written = writer
            .finish(&superblock, &metadata.into_json())
            .map_err(failed)?;
        Ok(WrittenStack {
            written,
            entries,
            windows,
        })
    }
}

impl Stack {
    /// Reads the stack back and checks its file system.
    pub(crate) fn verify(
        &self,
        layers: &[&StoredLayer],
        threads: usize,
    ) -> Result<(), ConvertError> {
        let wrong = |error: Error| ConvertError::Verify(Box::new(error));
        verify_written(&self.written, threads).map_err(wrong)?;
        let mut images: HashMap<[u8; 32], Arc<Image>> = HashMap::new();
        for layer in layers {
            images.insert(layer.sha256()?, layer.image.clone());
        }
        let image = Image::open_with_backings(
            Arc::new(self.blob.file()?),
            &OpenOptions::default(),
            &Known(images),
        )
        .map_err(wrong)?;
        crate::verify::file_system(image)
    }

    pub(crate) fn report(&self) -> StackReport {
        StackReport {
            digest: self.blob.digest.clone(),
            file_bytes: self.blob.size,
            merkle_root: hex(&self.written.merkle_root()),
            entries: self.entries,
            size: self.written.size(),
        }
    }

    pub(crate) fn into_blob(self) -> NewBlob {
        self.blob
    }
}

/// Open layers by digest.
pub(crate) struct Known(pub HashMap<[u8; 32], Arc<Image>>);

impl BackingResolver for Known {
    fn resolve(&self, backing: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, Error> {
        Ok(match &backing.name {
            BackingName::Digest(digest) => {
                let image = self.0.get(digest).cloned();
                image.map(|image| image as Arc<dyn BlockDevice>)
            }
            BackingName::FileName { .. } => None,
        })
    }
}

/// Places layers of these lengths one after the other, each at a region boundary.
pub(crate) fn places(lengths: impl Iterator<Item = u64>) -> Vec<Place> {
    let mut next: u64 = 0;
    lengths
        .map(|bytes| {
            let first = next;
            let blocks = bytes / BLOCK_BYTES;
            next = first + bytes.next_multiple_of(REGION_BYTES) / BLOCK_BYTES;
            Place { first, blocks }
        })
        .collect()
}

/// The windows onto the layers, the first of them at block `first`.
fn windows(places: &[Place], first: u64) -> Result<Vec<ContentWindow>, WriteError> {
    let too_large = |end: u64| WriteError::TooLarge {
        start: first * BLOCK_BYTES,
        end: end.saturating_mul(BLOCK_BYTES),
    };
    places
        .iter()
        .map(|place| {
            let to = first + place.first;
            let end = to + place.blocks;
            match (
                u32::try_from(place.first),
                u32::try_from(to),
                u32::try_from(place.blocks),
            ) {
                (Ok(from), Ok(to), Ok(blocks)) if end < u64::from(u32::MAX) => {
                    Ok(ContentWindow { from, to, blocks })
                }
                _ => Err(too_large(end)),
            }
        })
        .collect()
}

/// Reads the layers' trees. Addresses are relative to the start of the windows.
fn read_trees(
    layers: &[&StoredLayer],
    places: &[Place],
    end: u64,
    options: &ConvertOptions,
) -> Result<Vec<LayerTree>, ConvertError> {
    let order: Vec<usize> = (0..layers.len()).collect();
    let by_digest: HashMap<[u8; 32], usize> = layers
        .iter()
        .enumerate()
        .map(|(i, layer)| Ok((layer.sha256()?, i)))
        .collect::<Result<_, ConvertError>>()?;
    let stop = AtomicBool::new(false);
    parallel::run(&order, options.threads.max(1), &stop, |i| {
        let layer = layers[i];
        let lower = lower_layers(layer, i, &by_digest)?;
        let place = |offset: u64, bytes: u64| {
            let (place, offset) = match offset.checked_add(bytes)? <= layer.own_bytes {
                true => (places[i], offset),
                false => lower
                    .iter()
                    .find(|(window, _)| {
                        offset >= window.start && offset + bytes <= window.start + window.bytes
                    })
                    .map(|&(window, below)| {
                        (places[below], window.address + (offset - window.start))
                    })?,
            };
            let (first, blocks) = (offset / BLOCK_BYTES, bytes / BLOCK_BYTES);
            let inside = offset.is_multiple_of(BLOCK_BYTES) && first + blocks <= place.blocks;
            let block = place.first + first;
            (inside && block < end).then(|| u32::try_from(block).ok())?
        };
        let read = ReadOptions {
            form: TreeForm::Layer,
            place: &place,
            tails: (i as u64) << TAIL_SHIFT,
            max_inodes: options.limits.max_entries.saturating_add(1),
        };
        read_layer(&layer.filesystem()?, &read).map_err(|error| layer.damaged(&error))
    })
}

/// The windows of a layer, each with the index of the layer that it shows, which must be a lower
/// one.
fn lower_layers(
    layer: &StoredLayer,
    index: usize,
    by_digest: &HashMap<[u8; 32], usize>,
) -> Result<Vec<(super::stored::LowerWindow, usize)>, ConvertError> {
    let backings: Vec<&BackingEntry> = layer.image.backings().collect();
    layer
        .windows
        .iter()
        .map(|window| {
            let entry = backings[window.backing as usize];
            let BackingName::Digest(digest) = &entry.name else {
                return Err(layer.damaged(&"it names a layer by file name"));
            };
            match by_digest.get(digest) {
                Some(&below) if below < index => Ok((*window, below)),
                _ => Err(layer.damaged(&format!(
                    "it needs layer {}, which is not below it",
                    entry.name
                ))),
            }
        })
        .collect()
}

/// Reads the tails of all layers from the layers' metadata.
struct Tails<'a>(&'a [Part<'a>]);

impl TailSource for Tails<'_> {
    fn read_tail(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let part = self
            .0
            .get((offset >> TAIL_SHIFT) as usize)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let at = offset & ((1 << TAIL_SHIFT) - 1);
        part.image.read_at(at, buf).map_err(io::Error::other)
    }
}

//! The stack: the merged file system's metadata, and a window onto each layer.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bcow::format::{BackingEntry, BackingName};
use bcow::{
    BackingResolver, BlockDevice, Error, Image, ImageWriter, OpenOptions, Written, verify_written,
};
use bcow_erofs::merge::merge;
use bcow_erofs::overlay::{ReadOptions, read_layer};
use bcow_erofs::tree::{LayerTree, TailSource};
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

/// Bytes of a layer that a tail can be named by: EROFS addresses reach to 16 TiB.
const TAIL_SHIFT: u32 = 44;

/// A stack that was written.
pub(crate) struct Stack {
    blob: NewBlob,
    written: Written,
    entries: u64,
}

/// A layer in the address space of the stack, in blocks from the start of the windows.
#[derive(Debug, Clone, Copy)]
struct Place {
    first: u64,
    blocks: u64,
}

/// Merges `layers`, lowest first, and writes the stack. `names` are for messages.
pub(crate) fn write(
    layers: &[&StoredLayer],
    names: &[String],
    mut metadata: Metadata,
    layout: &LayoutWriter,
    options: &ConvertOptions,
) -> Result<Stack, ConvertError> {
    let path: PathBuf = layout.directory().to_owned();
    let failed = |error| image_error(&path, error);
    let places = places(layers);
    let end = places.last().map_or(0, |last| last.first + last.blocks);
    let trees = read_trees(layers, &places, end, options)?;
    let tree = merge(trees).map_err(|e| tree_error(names, e))?;

    let mut writer_options = writer_options(options, options.threads.max(1))?;
    writer_options.metadata_first = true;
    let output = layout.new_blob()?;
    let mut writer = ImageWriter::create(output.file()?, writer_options).map_err(failed)?;
    let mut start = writer.begin_metadata().map_err(failed)?;
    // A plain layer is a device that the kernel can mount.
    let devices = match options.plain && !layers.is_empty() {
        true => layers.len() as u16,
        false => 0,
    };
    let table_bytes = device_table(&vec![
        Device {
            blocks: 0,
            start: 0
        };
        devices.into()
    ])
    .len();
    start += table_bytes as u64;
    let write_options = WriteOptions {
        metadata_start: start,
        inline_max: INLINE_MAX,
    };
    let plan = Plan::new(&tree, &write_options).map_err(|e| unfit(&path, e))?;
    let metadata_end = start + plan.metadata_bytes();
    let first = metadata_end.next_multiple_of(REGION_BYTES) / BLOCK_BYTES;
    let windows = windows(&places, first).map_err(|e| unfit(&path, e))?;
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
        .map_err(|e| unfit(&path, e))?
        .with_device_table(devices);
    let tails = Tails(layers);
    emit(&plan, &tails, &mut writer, &path)?;
    for (layer, window) in layers.iter().zip(&windows) {
        let backing = writer.add_backing(BackingEntry {
            name: BackingName::Digest(layer.sha256()?),
            size: layer.image.size(),
        });
        let found = writer
            .append_window(backing, 0, layer.own_bytes)
            .map_err(failed)?;
        debug_assert_eq!(found, u64::from(window.to) * BLOCK_BYTES);
    }
    let entries = plan.inodes();
    let mut stats = ContentStats::default();
    for layer in layers {
        stats.content_bytes += layer.info.content_bytes;
        stats.deduplicated_bytes += layer.info.deduplicated_bytes;
        stats.lower_bytes += layer.info.lower_bytes;
    }
    metadata.content(entries, stats, start);
    // With devices beside it, the first one ends with the metadata.
    let total = match devices {
        0 => writer.position(),
        _ => metadata_end,
    };
    let superblock = plan.superblock(total / BLOCK_BYTES);
    let written = writer
        .finish(&superblock, &metadata.into_json())
        .map_err(failed)?;
    let blob = layout.finish(output)?;
    Ok(Stack {
        blob,
        written,
        entries,
    })
}

impl Stack {
    /// Reads the stack back, and walks its file system.
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

/// Layers that are open.
struct Known(HashMap<[u8; 32], Arc<Image>>);

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

/// One layer behind the other, each from a region on.
fn places(layers: &[&StoredLayer]) -> Vec<Place> {
    let mut next: u64 = 0;
    layers
        .iter()
        .map(|layer| {
            let first = next;
            let blocks = layer.own_bytes / BLOCK_BYTES;
            next = first + layer.own_bytes.next_multiple_of(REGION_BYTES) / BLOCK_BYTES;
            Place { first, blocks }
        })
        .collect()
}

/// The layers in the address space, whose windows begin with block `first`.
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

/// Reads the layers' trees, with addresses counted from the start of the windows.
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
            place: &place,
            tails: (i as u64) << TAIL_SHIFT,
            max_inodes: options.limits.max_entries.saturating_add(1),
        };
        read_layer(&layer.filesystem()?, &read).map_err(|error| layer.damaged(&error))
    })
}

/// The windows of a layer, and which layer of the image each shows. It must be a lower one.
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

/// The tails of all layers, in the layers' own metadata.
struct Tails<'a>(&'a [&'a StoredLayer]);

impl TailSource for Tails<'_> {
    fn read_tail(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let layer = self
            .0
            .get((offset >> TAIL_SHIFT) as usize)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let at = offset & ((1 << TAIL_SHIFT) - 1);
        layer.image.read_at(at, buf).map_err(io::Error::other)
    }
}

//! The stack of an image's layers, in a layout.

use std::collections::HashMap;
use std::sync::atomic::AtomicBool;

use bcow::format::{BackingEntry, BackingName};
use bcow::{BlockDevice, Written};
use bcow_erofs::merge::merge;
use bcow_erofs::overlay::{ReadOptions, TreeForm, read_layer};
use bcow_erofs::tree::LayerTree;

use super::StackReport;
use super::stored::{LowerWindow, StoredLayer};
use crate::content::ContentStats;
use crate::digest::hex;
use crate::ending::Ending;
use crate::error::ConvertError;
use crate::image_file::{tree_error, writer_options};
use crate::layout::write::{LayoutWriter, NewBlob};
use crate::metadata::Metadata;
use crate::options::ConvertOptions;
use crate::parallel;
use crate::space::{BLOCK_BYTES, INLINE_MAX, Shown};
use crate::stack::{BlockRange, TAIL_SHIFT, Tails, place_regions};

/// A stack that was written.
pub(crate) struct Stack {
    pub blob: NewBlob,
    pub written: Written,
    pub report: StackReport,
}

/// Merges `layers`, lowest first, and writes the stack. `names` are the layers' names in messages.
pub(crate) fn write(
    layers: &[&StoredLayer],
    names: &[String],
    metadata: Metadata,
    layout: &LayoutWriter,
    options: &ConvertOptions,
) -> Result<Stack, ConvertError> {
    let places = place_regions(layers.iter().map(|layer| layer.own_bytes));
    let end = places.last().map_or(0, |last| last.first + last.blocks);
    let trees = read_trees(layers, &places, end, options)?;
    let tree = merge(trees).map_err(|e| tree_error(names, e))?;
    let shown = layers.iter().zip(&places).map(|(layer, place)| {
        Ok(Shown {
            first_block: place.first,
            bytes: layer.own_bytes,
            digest: layer.sha256()?,
            size: layer.image.size(),
        })
    });
    let shown = shown.collect::<Result<Vec<_>, ConvertError>>()?;
    let mut stats = ContentStats::default();
    for layer in layers {
        stats.content_bytes += layer.content.file_bytes;
        stats.deduplicated_bytes += layer.content.deduplicated_bytes;
        stats.lower_bytes += layer.content.lower_bytes;
    }
    let output = layout.new_blob()?;
    let ending = Ending {
        tree: &tree,
        tails: &Tails(layers.iter().map(|layer| &*layer.image).collect()),
        shown: &shown,
        as_devices: options.plain,
        inline_max: INLINE_MAX,
        stats,
        prefetch: options.prefetch.as_ref(),
        path: layout.directory(),
    };
    let writer_options = writer_options(options, options.threads.max(1))?;
    let written = ending.write_stack(output.file()?, writer_options, metadata)?;
    let blob = layout.finish(output)?;
    let report = StackReport {
        digest: blob.digest.clone(),
        file_bytes: blob.size,
        merkle_root: hex(&written.merkle_root()),
        entries: tree.len() as u64,
        size: written.size(),
    };
    Ok(Stack {
        blob,
        written,
        report,
    })
}

/// Reads the layers' trees. Addresses are relative to the start of the windows.
fn read_trees(
    layers: &[&StoredLayer],
    places: &[BlockRange],
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
            let (place, offset) = if offset.checked_add(bytes)? <= layer.own_bytes {
                (places[i], offset)
            } else {
                lower
                    .iter()
                    .find(|(window, _)| {
                        offset >= window.start && offset + bytes <= window.start + window.bytes
                    })
                    .map(|&(window, below)| {
                        (places[below], window.address + (offset - window.start))
                    })?
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
        read_layer(&layer.filesystem()?, &read).map_err(|error| layer.damaged(error))
    })
}

/// The windows of a layer, each with the index of the layer that it shows, which must be a lower
/// one.
fn lower_layers(
    layer: &StoredLayer,
    index: usize,
    by_digest: &HashMap<[u8; 32], usize>,
) -> Result<Vec<(LowerWindow, usize)>, ConvertError> {
    let backings: Vec<&BackingEntry> = layer.image.backings().collect();
    layer
        .windows
        .iter()
        .map(|window| {
            let entry = backings[window.backing as usize];
            let BackingName::Digest(digest) = &entry.name else {
                return Err(layer.damaged("it names a layer by file name"));
            };
            match by_digest.get(digest) {
                Some(&below) if below < index => Ok((*window, below)),
                _ => Err(layer.damaged(format!(
                    "it needs layer {}, which is not below it",
                    entry.name
                ))),
            }
        })
        .collect()
}

//! Writes a stack: the metadata of a merged file system, and a window onto each of its images.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use bcow::format::{BackingEntry, BackingName};
use bcow::{BlockDevice, Image, ImageWriter, WriterOptions, Written};
use bcow_erofs::tree::{TailSource, Tree};
use bcow_erofs::writer::{ContentWindow, Device, Plan, WriteError, WriteOptions, device_table};

use crate::content::ContentStats;
use crate::error::ConvertError;
use crate::image_file::{emit, image_error, plan_error};
use crate::metadata::Metadata;
use crate::prefetch::Prefetch;
use crate::space::{BLOCK_BYTES, REGION_BYTES};

/// The shift of the layer's number in the address of a tail. EROFS addresses have 44 bits (16 TiB).
pub(crate) const TAIL_SHIFT: u32 = 44;

/// An image whose first bytes a window of the stack shows.
pub(crate) struct StackPart<'p> {
    pub image: &'p Arc<Image>,
    /// The digest by which the stack names the image.
    pub digest: [u8; 32],
    /// Number of bytes in the window.
    pub bytes: u64,
}

/// A merged tree, and the images with the content of its files.
pub(crate) struct Merged<'m> {
    /// Contents have block addresses counted from the start of the windows, within the
    /// [`BlockRange`] of their part. The offset of a tail has the number of its part in the bits
    /// from [`TAIL_SHIFT`] on.
    pub tree: &'m Tree,
    pub parts: &'m [StackPart<'m>],
    /// The locations of the parts.
    pub places: &'m [BlockRange],
    pub options: WriterOptions,
    /// Longest inline tail, in bytes.
    pub inline_max: u16,
    /// Statistics of the content, for the metadata.
    pub stats: ContentStats,
    /// What a start reads.
    pub prefetch: Option<&'m Prefetch>,
    /// The path in messages.
    pub path: &'m Path,
}

/// A stack that was written.
pub(crate) struct WrittenStack {
    pub written: Written,
    /// Inodes of the stack's tree.
    pub entries: u64,
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
        let devices =
            if writer_options.plain && !parts.is_empty() { parts.len() as u16 } else { 0 };
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
        let plan = Plan::new(tree, &write_options).map_err(|e| plan_error(path, e))?;
        let metadata_end = start + plan.metadata_bytes();
        let first = metadata_end.next_multiple_of(REGION_BYTES) / BLOCK_BYTES;
        let windows = windows(self.places, first).map_err(|e| plan_error(path, e))?;
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
            .map_err(|e| plan_error(path, e))?
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
        if let Some(prefetch) = self.prefetch {
            metadata.prefetch(prefetch.describe(tree, &plan)?);
        }
        // If the layers are devices, the first device ends with the metadata.
        let total = match devices {
            0 => writer.position(),
            _ => metadata_end,
        };
        let superblock = plan.superblock(total / BLOCK_BYTES);
        let written = writer
            .finish(&superblock, &metadata.into_json())
            .map_err(failed)?;
        Ok(WrittenStack { written, entries })
    }
}

/// Location of a layer in the address space of the stack, in blocks from the start of the windows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockRange {
    pub first: u64,
    pub blocks: u64,
}

/// Places layers of these lengths one after the other, each at a region boundary.
pub(crate) fn place_regions(lengths: impl Iterator<Item = u64>) -> Vec<BlockRange> {
    let mut next: u64 = 0;
    lengths
        .map(|bytes| {
            let first = next;
            let blocks = bytes / BLOCK_BYTES;
            next = first + bytes.next_multiple_of(REGION_BYTES) / BLOCK_BYTES;
            BlockRange { first, blocks }
        })
        .collect()
}

/// The windows onto the layers, the first of them at block `first`.
fn windows(places: &[BlockRange], first: u64) -> Result<Vec<ContentWindow>, WriteError> {
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

/// Reads the tails of all layers from the layers' metadata.
struct Tails<'a>(&'a [StackPart<'a>]);

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

//! Writes a stack: the metadata of a merged file system, and a window onto each of its images.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use bcow::{BlockDevice, Image, ImageWriter, WriterOptions, Written};
use bcow_erofs::tree::{TailSource, Tree};

use crate::content::ContentStats;
use crate::ending::Ending;
use crate::error::ConvertError;
use crate::image_file::image_error;
use crate::metadata::Metadata;
use crate::prefetch::Prefetch;
use crate::space::{BLOCK_BYTES, REGION_BYTES, Shown};

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

impl Merged<'_> {
    /// Writes the stack.
    pub(crate) fn write(self, file: File, metadata: Metadata) -> Result<Written, ConvertError> {
        let mut options = self.options;
        options.metadata_first = true;
        let as_devices = options.plain;
        let writer = ImageWriter::create(file, options);
        let shown = self.parts.iter().zip(self.places);
        let shown: Vec<Shown> = shown
            .map(|(part, place)| Shown {
                first_block: place.first,
                bytes: part.bytes,
                digest: part.digest,
                size: part.image.size(),
            })
            .collect();
        let ending = Ending {
            tree: self.tree,
            tails: &Tails(self.parts),
            shown: &shown,
            as_devices,
            inline_max: self.inline_max,
            stats: self.stats,
            prefetch: self.prefetch,
            path: self.path,
        };
        let writer = writer.map_err(|error| image_error(self.path, error))?;
        ending.write(writer, metadata)
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

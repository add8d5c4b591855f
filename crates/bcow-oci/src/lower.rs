//! References from a layer to content that lower layers of the image have.
//!
//! A layer with such references has windows onto those lower layers behind its own metadata.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use bcow::format::{BackingEntry, BackingName};
use bcow::{BlockDevice, Error, Image, ImageWriter};
use bcow_erofs::reader::{ErofsError, ExtentSource, FileType, Filesystem, Inode};
use bcow_erofs::writer::ContentWindow;

use crate::space::{BLOCK_BYTES, INLINE_MAX, LOWER_FROM, PIECE_BYTES, REGION_BYTES};

/// The pieces of the lower layers by their BLAKE3 hash.
#[derive(Clone, Default)]
pub(crate) struct LowerIndex {
    pieces: HashMap<[u8; 32], LowerPiece>,
    layers: Vec<LowerLayer>,
}

/// Location of a piece.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LowerPiece {
    /// Index of the layer.
    pub layer: u32,
    /// Its first block.
    pub start: u32,
    /// Bytes at the end of the piece that are stored inline, beside an inode, and not in blocks.
    pub tail: u16,
}

#[derive(Debug, Clone, Copy)]
struct LowerLayer {
    digest: [u8; 32],
    /// Size of the layer's address space in bytes.
    size: u64,
    /// Bytes of the address space that are the layer's own content, not a window.
    own: u64,
    /// Block number of the layer's first byte.
    first: u32,
}

impl LowerIndex {
    /// Adds a layer: reads all of its own content, which ends at byte `content_end`; its windows,
    /// if it has any, start at `own`. Layers are added lowest first; of equal pieces the lowest
    /// layer's is used.
    ///
    /// A layer is not added if there are no block numbers left for it.
    pub(crate) fn add(
        &mut self,
        image: &Arc<Image>,
        digest: [u8; 32],
        own: u64,
        content_end: u64,
    ) -> Result<(), ErofsError> {
        let first = self.layers.last().map_or(u64::from(LOWER_FROM), |last| {
            u64::from(last.first) + last.own.next_multiple_of(REGION_BYTES) / BLOCK_BYTES
        });
        let end = first + own.div_ceil(BLOCK_BYTES);
        let (Ok(first), true) = (u32::try_from(first), end < u64::from(u32::MAX)) else {
            return Ok(());
        };
        let layer = self.layers.len() as u32;
        self.layers.push(LowerLayer {
            digest,
            size: image.size(),
            own,
            first,
        });
        let fs = Filesystem::open(image.clone())?;
        let mut pieces = Pieces {
            fs: &fs,
            content_end,
            layer,
            first,
            buffer: Vec::new(),
            index: self,
        };
        let mut pending = vec![fs.root()];
        // The layer was read as a tree before, which ensures that each directory occurs once.
        while let Some(nid) = pending.pop() {
            let inode = fs.inode(nid)?;
            match inode.kind {
                FileType::Directory => fs.read_dir(&inode, 0, &mut |entry| {
                    let known = matches!(entry.name, b"." | b"..");
                    if !known && matches!(entry.kind, FileType::Directory | FileType::Regular) {
                        pending.push(entry.nid);
                    }
                    std::ops::ControlFlow::Continue(())
                })?,
                _ => pieces.file(&inode)?,
            }
        }
        Ok(())
    }

    pub(crate) fn find(&self, key: &[u8; 32]) -> Option<LowerPiece> {
        self.pieces.get(key).copied()
    }

    /// The layers with these indexes.
    pub(crate) fn used(&self, layers: &BTreeSet<u32>) -> LowerUsed {
        LowerUsed(layers.iter().map(|&i| self.layers[i as usize]).collect())
    }
}

struct Pieces<'a> {
    fs: &'a Filesystem,
    content_end: u64,
    layer: u32,
    first: u32,
    buffer: Vec<u8>,
    index: &'a mut LowerIndex,
}

impl Pieces<'_> {
    /// Splits a file into pieces in the same way as the converter.
    fn file(&mut self, inode: &Inode) -> Result<(), ErofsError> {
        const PIECE: u64 = PIECE_BYTES as u64;
        let mut at = 0;
        while at < inode.size
            && let Some(extent) = self.fs.extents(inode, at).next().transpose()?
        {
            let length = (inode.size - at).min(PIECE);
            match extent.source {
                // A hole can be longer than any number of pieces.
                ExtentSource::Hole => {
                    let end = at + extent.length;
                    at = (at + PIECE).max(end - end % PIECE);
                    continue;
                }
                ExtentSource::Device { offset } => {
                    let in_blocks = extent.length.min(length);
                    let tail = length - in_blocks;
                    if self.is_piece(inode, at, offset, in_blocks, tail) {
                        self.take(inode, at, length, offset, tail as u16)?;
                    }
                }
            }
            at += length;
        }
        Ok(())
    }

    /// Whether a piece is contiguous in this layer's own content, except for a tail.
    fn is_piece(&self, inode: &Inode, at: u64, offset: u64, in_blocks: u64, tail: u64) -> bool {
        let is_own = offset.is_multiple_of(BLOCK_BYTES) && offset + in_blocks <= self.content_end;
        let has_tail = tail <= INLINE_MAX.into()
            && in_blocks.is_multiple_of(BLOCK_BYTES)
            && at + in_blocks + tail == inode.size;
        is_own && (tail == 0 || has_tail)
    }

    fn take(
        &mut self,
        inode: &Inode,
        at: u64,
        length: u64,
        offset: u64,
        tail: u16,
    ) -> Result<(), ErofsError> {
        self.buffer.resize(length as usize, 0);
        self.fs.read(inode, at, &mut self.buffer)?;
        let piece = LowerPiece {
            layer: self.layer,
            // The piece is within the layer's own bytes, all of which have block numbers.
            start: self.first + (offset / BLOCK_BYTES) as u32,
            tail,
        };
        let key = *blake3::hash(&self.buffer).as_bytes();
        self.index.pieces.entry(key).or_insert(piece);
        Ok(())
    }
}

/// The lower layers that a layer refers to, lowest first.
#[derive(Default)]
pub(crate) struct LowerUsed(Vec<LowerLayer>);

impl LowerUsed {
    /// Places the windows in an address space whose own content ends at byte `end`.
    pub(crate) fn windows(self, end: u64) -> LowerWindows {
        let mut next = end;
        let place = |layer: LowerLayer| {
            let start = next.next_multiple_of(REGION_BYTES);
            next = start + layer.own;
            (layer, start)
        };
        LowerWindows(self.0.into_iter().map(place).collect())
    }
}

/// Lower layers and the addresses of their windows.
pub(crate) struct LowerWindows(Vec<(LowerLayer, u64)>);

impl LowerWindows {
    /// The windows in blocks, for the addresses of the file system.
    pub(crate) fn content(&self) -> Vec<ContentWindow> {
        let window = |&(layer, start): &(LowerLayer, u64)| ContentWindow {
            from: layer.first,
            // A window beyond the addressable blocks is refused when its end is checked.
            to: u32::try_from(start / BLOCK_BYTES).unwrap_or(u32::MAX),
            blocks: (layer.own / BLOCK_BYTES) as u32,
        };
        self.0.iter().map(window).collect()
    }

    /// Appends the windows.
    pub(crate) fn append(&self, writer: &mut ImageWriter) -> Result<(), Error> {
        for (layer, start) in &self.0 {
            let backing = writer.add_backing(BackingEntry {
                name: BackingName::Digest(layer.digest),
                size: layer.size,
            });
            let found = writer.append_window(backing, 0, layer.own)?;
            if found != *start {
                return Err(Error::Unsupported(format!(
                    "a window at byte {found} that was to be at byte {start}"
                )));
            }
        }
        Ok(())
    }
}

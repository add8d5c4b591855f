//! References from a layer to content of the lower layers of its image.
//!
//! The index finds a piece (see [`crate::content`]) in a lower layer by its hash. A layer that
//! refers to such pieces has windows onto the lower layers, behind its own metadata.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use bcow::BlockDevice;
use bcow_erofs::reader::{ErofsError, ExtentSource, FileType, Filesystem, Inode};

use crate::space::{BLOCK_BYTES, FIRST_LOWER_BLOCK, INLINE_MAX, PIECE_BYTES, REGION_BYTES, Shown};

/// The pieces of the lower layers, by BLAKE3 hash.
#[derive(Clone, Default)]
pub(crate) struct LowerIndex {
    pieces: HashMap<[u8; 32], LowerPiece>,
    /// Their windows show the own content and metadata of the layers.
    layers: Vec<Shown>,
}

/// The location of a piece in the lower layers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LowerPiece {
    /// Index of the layer.
    pub layer: u32,
    /// Number of its first block. The block numbers of lower layers begin at
    /// [`FIRST_LOWER_BLOCK`].
    pub start: u32,
    /// Bytes at the end of the piece that are not in these blocks. A reference stores a copy of
    /// them inline.
    pub tail: u16,
}

impl LowerIndex {
    /// Adds a layer. Reads the whole content of the layer itself, which ends at byte `content_end`.
    /// The windows of the layer, if it has any, start at `own_bytes`.
    ///
    /// The caller adds the lowest layer first. Of equal pieces, the index keeps the first one. A
    /// layer for which there are not enough block numbers is not added.
    pub(crate) fn add(
        &mut self,
        image: Arc<dyn BlockDevice>,
        digest: [u8; 32],
        own_bytes: u64,
        content_end: u64,
    ) -> Result<(), ErofsError> {
        let behind = |last: &Shown| {
            last.first_block + last.bytes.next_multiple_of(REGION_BYTES) / BLOCK_BYTES
        };
        let last = self.layers.last();
        let first_block = last.map_or(FIRST_LOWER_BLOCK.into(), behind);
        let end = first_block + own_bytes.div_ceil(BLOCK_BYTES);
        if end >= u64::from(u32::MAX) {
            return Ok(());
        }
        let layer = self.layers.len() as u32;
        self.layers.push(Shown {
            first_block,
            bytes: own_bytes,
            digest,
            size: image.size(),
        });
        let fs = Filesystem::open(image)?;
        let mut indexer = PieceIndexer {
            fs: &fs,
            content_end,
            layer,
            first_block: first_block as u32,
            buffer: Vec::new(),
            index: self,
        };
        // A damaged layer can have a directory in itself, and a file any number of names.
        let mut found = HashSet::from([fs.root()]);
        let mut pending = vec![fs.root()];
        while let Some(nid) = pending.pop() {
            let inode = fs.inode(nid)?;
            match inode.kind {
                FileType::Directory => fs.read_dir(&inode, 0, &mut |entry| {
                    let is_dot = matches!(entry.name, b"." | b"..");
                    let is_read = matches!(entry.kind, FileType::Directory | FileType::Regular);
                    if !is_dot && is_read && found.insert(entry.nid) {
                        pending.push(entry.nid);
                    }
                    std::ops::ControlFlow::Continue(())
                })?,
                _ => indexer.add_file(&inode)?,
            }
        }
        Ok(())
    }

    pub(crate) fn find(&self, key: &[u8; 32]) -> Option<LowerPiece> {
        self.pieces.get(key).copied()
    }

    /// The layers with these indexes, the lowest first.
    pub(crate) fn used(&self, layers: &BTreeSet<u32>) -> Vec<Shown> {
        layers.iter().map(|&i| self.layers[i as usize]).collect()
    }
}

/// Adds the pieces of one layer to the index.
struct PieceIndexer<'a> {
    fs: &'a Filesystem,
    content_end: u64,
    layer: u32,
    first_block: u32,
    buffer: Vec<u8>,
    index: &'a mut LowerIndex,
}

impl PieceIndexer<'_> {
    /// Adds the pieces of a file. The borders of pieces are those of the converter.
    fn add_file(&mut self, inode: &Inode) -> Result<(), ErofsError> {
        const PIECE: u64 = PIECE_BYTES as u64;
        let mut at = 0;
        while at < inode.size
            && let Some(extent) = self.fs.extents(inode, at).next().transpose()?
        {
            let length = (inode.size - at).min(PIECE);
            match extent.source {
                // One step over all pieces that are holes: a file can declare terabytes of holes.
                ExtentSource::Hole => {
                    let end = at + extent.length;
                    at = (at + PIECE).max(end - end % PIECE);
                    continue;
                }
                ExtentSource::Device { offset } => {
                    let in_blocks = extent.length.min(length);
                    let tail = length - in_blocks;
                    if self.is_piece(inode, at, offset, in_blocks, tail) {
                        self.add_piece(inode, at, length, offset, tail as u16)?;
                    }
                }
            }
            at += length;
        }
        Ok(())
    }

    /// Whether the blocks of a piece are contiguous in the layer's own content. A short tail may be
    /// elsewhere.
    fn is_piece(&self, inode: &Inode, at: u64, offset: u64, in_blocks: u64, tail: u64) -> bool {
        let is_own = offset.is_multiple_of(BLOCK_BYTES) && offset + in_blocks <= self.content_end;
        let has_tail = tail <= INLINE_MAX.into()
            && in_blocks.is_multiple_of(BLOCK_BYTES)
            && at + in_blocks + tail == inode.size;
        is_own && (tail == 0 || has_tail)
    }

    fn add_piece(
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
            // The sum is a block number: all blocks of the layer's own content have one.
            start: self.first_block + (offset / BLOCK_BYTES) as u32,
            tail,
        };
        let key = *blake3::hash(&self.buffer).as_bytes();
        self.index.pieces.entry(key).or_insert(piece);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use bcow::{Image, OpenOptions};

    use super::*;
    use crate::{ConvertOptions, convert};

    /// A layer in which the directory "d" contains itself and one file under two names.
    fn damaged_layer() -> Vec<u8> {
        let directory = tempfile::tempdir().unwrap();
        let tree = directory.path().join("tree");
        std::fs::create_dir_all(tree.join("d/sub")).unwrap();
        std::fs::write(tree.join("d/file"), [b'a'; 5000]).unwrap();
        std::fs::hard_link(tree.join("d/file"), tree.join("link")).unwrap();
        let source = crate::Source::Directory(tree.clone());
        let path = directory.path().join("image.bcow");
        convert(&source, &path, &ConvertOptions::default(), &()).unwrap();
        let image = Image::open(&path, &OpenOptions::default()).unwrap();
        let mut bytes = vec![0; image.size() as usize];
        image.read_at(0, &mut bytes).unwrap();
        let fs = Filesystem::open(Arc::new(bytes.clone())).unwrap();
        let nid = |path: &[u8]| fs.resolve(path).unwrap().unwrap().0;
        let (of_directory, of_sub) = (nid(b"d").to_le_bytes(), nid(b"d/sub").to_le_bytes());
        // Directory entries: node, offset of the name, type.
        let entries = bytes.len() - 12;
        for at in 0..entries {
            if bytes[at..at + 8] == of_sub && bytes[at + 10] == 2 {
                bytes[at..at + 8].copy_from_slice(&of_directory);
            }
        }
        bytes
    }

    #[test]
    fn a_directory_in_itself_is_read_once() {
        let layer = damaged_layer();
        let fs = Filesystem::open(Arc::new(layer.clone())).unwrap();
        let inner = fs.resolve(b"d/sub/sub/sub").unwrap();
        assert_eq!(inner, fs.resolve(b"d").unwrap(), "the layer is damaged");
        let bytes = layer.len() as u64;
        let mut index = LowerIndex::default();
        index.add(Arc::new(layer), [1; 32], bytes, bytes).unwrap();
        assert!(index.find(blake3::hash(&[b'a'; 5000]).as_bytes()).is_some());
    }
}

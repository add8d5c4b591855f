//! The Merkle tree of a sealed file (spec section 9): built in one pass, verified in pieces.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bcow_format::{HASH_BYTES, HEADER_AREA_BYTES, Header, MerkleShape, MerkleTree};
use sha2::{Digest, Sha256};

use crate::cache::{FileId, PieceKey};
use crate::storage::Storage;
use crate::{BlockCache, Error, threads};

const LEAF: u8 = 0;
const NODE: u8 = 1;
/// Bytes that one thread reads at a time while it hashes the whole file.
const BATCH_BYTES: u64 = 4 << 20;

type Hash = [u8; HASH_BYTES as usize];

/// The hash of a chunk of the covered bytes (spec section 9). In the first chunk, the canonical
/// header must take the place of the header slots.
pub fn leaf_hash(chunk: &[u8]) -> Hash {
    hash(LEAF, chunk)
}

/// The hash of a piece of a level of the tree, for the level above (spec section 9).
pub fn node_hash(piece: &[u8]) -> Hash {
    hash(NODE, piece)
}

fn hash(prefix: u8, bytes: &[u8]) -> Hash {
    let mut hasher = Sha256::new();
    hasher.update([prefix]);
    hasher.update(bytes);
    hasher.finalize().into()
}

/// Hashes the first `shape.covered_bytes` of `storage`, with `canonical` in place of the header
/// slots. Returns all levels as they are stored; the last 32 bytes are the root.
pub(crate) fn build(
    storage: &dyn Storage,
    shape: &MerkleShape,
    canonical: &[u8; HEADER_AREA_BYTES],
    thread_count: usize,
) -> Result<Vec<u8>, Error> {
    let mut tree = hash_chunks(storage, shape, canonical, thread_count)?;
    for pair in shape.levels.windows(2) {
        let (below, above) = (pair[0], pair[1]);
        let level = tree[below.0 as usize..(below.0 + below.1) as usize].to_vec();
        for piece in level.chunks(shape.chunk_bytes as usize) {
            tree.extend_from_slice(&hash(NODE, piece));
        }
        debug_assert_eq!(tree.len() as u64, above.0 + above.1);
    }
    Ok(tree)
}

/// Level 0: the hashes of all chunks, computed by several threads.
fn hash_chunks(
    storage: &dyn Storage,
    shape: &MerkleShape,
    canonical: &[u8; HEADER_AREA_BYTES],
    thread_count: usize,
) -> Result<Vec<u8>, Error> {
    let batch = BATCH_BYTES.max(shape.chunk_bytes);
    let batches = shape.covered_bytes.div_ceil(batch);
    let hashed = threads::map_indexed(batches, thread_count, |index| {
        let start = index * batch;
        let length = batch.min(shape.covered_bytes - start);
        let mut bytes = vec![0; length as usize];
        storage.read(start, &mut bytes)?;
        if start == 0 {
            bytes[..HEADER_AREA_BYTES].copy_from_slice(canonical);
        }
        let hashes: Vec<u8> = bytes
            .chunks(shape.chunk_bytes as usize)
            .flat_map(|chunk| hash(LEAF, chunk))
            .collect();
        Ok::<_, Error>(hashes)
    })?;
    Ok(hashed.concat())
}

/// Verifies pieces of a file against the root hash of its header.
pub(crate) struct Verifier {
    tree: MerkleTree,
    shape: MerkleShape,
    canonical: [u8; HEADER_AREA_BYTES],
    file: FileId,
    /// Cache for verified pieces of the tree.
    cache: BlockCache,
}

impl Verifier {
    /// Returns `None` if the file has no tree.
    pub(crate) fn new(header: &Header, file: FileId, cache: &BlockCache) -> Option<Self> {
        let tree = header.merkle.clone()?;
        Some(Verifier {
            shape: tree.shape(),
            canonical: header.canonical(),
            tree,
            file,
            cache: cache.clone(),
        })
    }

    /// Fills `buf` with the bytes at `offset` of the file, and verifies every chunk of the range.
    pub(crate) fn read_at(
        &self,
        storage: &dyn Storage,
        offset: u64,
        buf: &mut [u8],
    ) -> Result<(), Error> {
        if buf.is_empty() {
            return Ok(());
        }
        let chunk = self.shape.chunk_bytes;
        let end = offset + buf.len() as u64;
        if end > self.shape.covered_bytes {
            return Err(Error::OutOfRange {
                offset,
                length: buf.len() as u64,
                size: self.shape.covered_bytes,
            });
        }
        let start = offset / chunk * chunk;
        let padded_end = end.next_multiple_of(chunk).min(self.shape.covered_bytes);
        let mut bytes = vec![0; (padded_end - start) as usize];
        storage.read(start, &mut bytes)?;
        let slots = (start == 0).then(|| {
            let slots: [u8; HEADER_AREA_BYTES] = std::array::from_fn(|i| bytes[i]);
            bytes[..HEADER_AREA_BYTES].copy_from_slice(&self.canonical);
            slots
        });
        for (index, piece) in (start / chunk..).zip(bytes.chunks(chunk as usize)) {
            if self.expected(storage, 0, index)? != hash(LEAF, piece) {
                let start = index * chunk;
                return Err(Error::Merkle {
                    start,
                    end: start + piece.len() as u64,
                });
            }
        }
        if let Some(slots) = slots {
            bytes[..HEADER_AREA_BYTES].copy_from_slice(&slots);
        }
        let skip = (offset - start) as usize;
        buf.copy_from_slice(&bytes[skip..skip + buf.len()]);
        Ok(())
    }

    /// The hash that the tree has for piece `index` of the level below `level`, verified up to the
    /// root.
    fn expected(&self, storage: &dyn Storage, level: usize, index: u64) -> Result<Hash, Error> {
        let place = index * HASH_BYTES;
        let piece_index = place / self.shape.chunk_bytes;
        let piece = self.piece(storage, level, piece_index)?;
        let at = (place % self.shape.chunk_bytes) as usize;
        let mut hash = Hash::default();
        hash.copy_from_slice(&piece[at..at + HASH_BYTES as usize]);
        Ok(hash)
    }

    /// The bytes of piece `index` of a level of the tree, verified up to the root.
    pub(crate) fn piece(
        &self,
        storage: &dyn Storage,
        level: usize,
        index: u64,
    ) -> Result<Arc<Vec<u8>>, Error> {
        let key = PieceKey {
            file: self.file,
            level,
            index,
        };
        self.cache.piece(key, || {
            let range = self.piece_range(level, index);
            let mut bytes = vec![0; (range.end - range.start) as usize];
            storage.read(range.start, &mut bytes)?;
            let right = if level + 1 == self.shape.levels.len() {
                bytes == self.tree.root
            } else {
                self.expected(storage, level + 1, index)? == hash(NODE, &bytes)
            };
            if !right {
                return Err(Error::Merkle {
                    start: range.start,
                    end: range.end,
                });
            }
            Ok(bytes)
        })
    }

    /// Whether `chunk` matches the tree's hash of chunk `index`. The tree is read from `storage`;
    /// `chunk` may come from another copy of the file.
    pub(crate) fn matches(
        &self,
        storage: &dyn Storage,
        index: u64,
        mut chunk: Vec<u8>,
    ) -> Result<bool, Error> {
        if index == 0 {
            chunk[..HEADER_AREA_BYTES].copy_from_slice(&self.canonical);
        }
        Ok(self.expected(storage, 0, index)? == hash(LEAF, &chunk))
    }

    /// The positions of the levels of the tree.
    pub(crate) fn shape(&self) -> &MerkleShape {
        &self.shape
    }

    /// The place of a piece of the tree in the file.
    pub(crate) fn piece_range(&self, level: usize, index: u64) -> Range<u64> {
        let (level_offset, level_bytes) = self.shape.levels[level];
        let start = index * self.shape.chunk_bytes;
        let end = level_bytes.min(start + self.shape.chunk_bytes);
        let base = self.tree.offset + level_offset;
        base + start..base + end
    }

    /// Verifies the whole tree against its root, and with `chunks` every chunk of the file against
    /// the tree. Returns the first few mismatches, in file order.
    pub(crate) fn check_all(
        &self,
        storage: &dyn Storage,
        chunks: bool,
        thread_count: usize,
    ) -> Result<Vec<Error>, Error> {
        const MAX_MISMATCHES: usize = 64;
        let per_batch = (BATCH_BYTES / self.shape.chunk_bytes).max(1);
        let total = self.shape.chunks();
        let count = AtomicUsize::new(0);
        let found = threads::map_indexed(total.div_ceil(per_batch), thread_count, |batch| {
            let mut found = Vec::new();
            let range = batch * per_batch..((batch + 1) * per_batch).min(total);
            for index in range {
                if count.load(Ordering::Relaxed) > MAX_MISMATCHES {
                    break;
                }
                let start = index * self.shape.chunk_bytes;
                let outcome = if chunks {
                    let length = self.shape.chunk_bytes.min(self.shape.covered_bytes - start);
                    self.read_at(storage, start, &mut vec![0; length as usize])
                } else {
                    self.expected(storage, 0, index).map(drop)
                };
                match outcome {
                    Ok(()) => {}
                    Err(error @ Error::Merkle { .. }) => {
                        found.push(error);
                        count.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(error) => return Err(error),
                }
            }
            Ok(found)
        })?;
        let found = found.into_iter().flatten();
        let mut mismatches: Vec<_> = found.take(MAX_MISMATCHES).collect();
        // One bad piece of the tree fails all chunks below it; report it once.
        mismatches.dedup_by_key(|error| match error {
            Error::Merkle { start, .. } => *start,
            _ => u64::MAX,
        });
        Ok(mismatches)
    }
}

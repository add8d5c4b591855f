//! The chunks of a file and of its hash tree, in one numbering.
//!
//! Level 0 has the chunks of the bytes that the tree covers; level k+1 has the chunks of level k of
//! the tree (spec section 9). Each chunk has a hash in the level above, the one chunk of the top
//! level has the root. The top level of the stored tree is the root itself, and is never fetched.

use bcow::format::{HASH_BYTES, MerkleTree};

/// A hash of the tree.
pub(crate) type Hash = [u8; HASH_BYTES as usize];

/// The place of all chunks.
#[derive(Debug)]
pub(crate) struct Chunks {
    chunk_bytes: u64,
    /// The covered bytes, then the levels of the tree without the last.
    levels: Vec<Level>,
    root: Hash,
    /// Where the root is stored.
    root_offset: u64,
}

#[derive(Debug, Clone, Copy)]
struct Level {
    offset: u64,
    bytes: u64,
}

/// A chunk: its level, and its index in the level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Chunk {
    pub(crate) level: usize,
    pub(crate) index: u64,
}

impl Chunk {
    pub(crate) const FIRST: Chunk = Chunk { level: 0, index: 0 };

    /// The chunk of the same level, `count` behind this one.
    pub(crate) fn after(self, count: u64) -> Chunk {
        Chunk {
            level: self.level,
            index: self.index + count,
        }
    }
}

/// Where the hash of a chunk is.
pub(crate) enum HashPlace {
    Root,
    /// In a chunk of the level above, at this byte.
    In(Chunk, usize),
}

impl Chunks {
    pub(crate) fn new(tree: &MerkleTree) -> Self {
        let shape = tree.shape();
        let mut levels = vec![Level {
            offset: 0,
            bytes: shape.covered_bytes,
        }];
        let mut stored = shape.levels.iter().map(|&(offset, bytes)| Level {
            offset: tree.offset + offset,
            bytes,
        });
        // `MerkleShape` has one level at least.
        let root_offset = stored.next_back().map_or(tree.offset, |level| level.offset);
        levels.extend(stored);
        Chunks {
            chunk_bytes: shape.chunk_bytes,
            levels,
            root: tree.root,
            root_offset,
        }
    }

    /// The chunk that contains a byte of the file; `None` if the byte belongs to the root.
    pub(crate) fn at(&self, offset: u64) -> Option<Chunk> {
        if offset >= self.root_offset {
            return None;
        }
        let level = self
            .levels
            .iter()
            .rposition(|level| level.offset <= offset)?;
        Some(Chunk {
            level,
            index: (offset - self.levels[level].offset) / self.chunk_bytes,
        })
    }

    pub(crate) fn root(&self) -> &Hash {
        &self.root
    }

    pub(crate) fn root_offset(&self) -> u64 {
        self.root_offset
    }

    pub(crate) fn start(&self, chunk: Chunk) -> u64 {
        self.levels[chunk.level].offset + chunk.index * self.chunk_bytes
    }

    /// Length of a chunk in bytes; the last of a level can be shorter.
    pub(crate) fn length(&self, chunk: Chunk) -> usize {
        let rest = self.levels[chunk.level].bytes - chunk.index * self.chunk_bytes;
        self.chunk_bytes.min(rest) as usize
    }

    /// The number of chunks from this one on that are in its level, and whose hashes are in one
    /// chunk.
    pub(crate) fn siblings(&self, chunk: Chunk) -> u64 {
        let in_level = self.levels[chunk.level].bytes.div_ceil(self.chunk_bytes);
        let per_parent = self.chunk_bytes / HASH_BYTES;
        let parent_end = (chunk.index / per_parent + 1) * per_parent;
        in_level.min(parent_end) - chunk.index
    }

    pub(crate) fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    pub(crate) fn hash_place(&self, chunk: Chunk) -> HashPlace {
        if chunk.level + 1 == self.levels.len() {
            return HashPlace::Root;
        }
        let place = chunk.index * HASH_BYTES;
        let parent = Chunk {
            level: chunk.level + 1,
            index: place / self.chunk_bytes,
        };
        HashPlace::In(parent, (place % self.chunk_bytes) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunks(covered: u64) -> Chunks {
        Chunks::new(&MerkleTree {
            offset: covered,
            chunk_shift: 12,
            root: [7; 32],
        })
    }

    #[test]
    fn a_file_of_one_chunk_has_its_hash_as_root() {
        let chunks = chunks(4096);
        assert_eq!(chunks.at(4095), Some(Chunk::FIRST));
        assert_eq!(chunks.at(4096), None);
        assert!(matches!(chunks.hash_place(Chunk::FIRST), HashPlace::Root));
    }

    #[test]
    fn every_byte_has_its_chunk() {
        // 129 chunks: level 0 of the tree has 129 hashes in two chunks, level 1 has two hashes.
        let covered = 128 * 4096 + 10;
        let chunks = chunks(covered);
        let chunk = |level, index| Some(Chunk { level, index });
        assert_eq!(chunks.at(covered - 1), chunk(0, 128));
        assert_eq!(
            chunks.length(Chunk {
                level: 0,
                index: 128
            }),
            10
        );
        assert_eq!(chunks.at(covered), chunk(1, 0));
        assert_eq!(chunks.at(covered + 4096), chunk(1, 1));
        assert_eq!(chunks.length(Chunk { level: 1, index: 1 }), 32);
        assert_eq!(chunks.at(covered + 4096 + 32), chunk(2, 0));
        assert_eq!(chunks.length(Chunk { level: 2, index: 0 }), 64);
        assert_eq!(chunks.at(covered + 4096 + 32 + 64), None);
        assert_eq!(
            chunks.siblings(Chunk {
                level: 0,
                index: 100
            }),
            28
        );
        assert_eq!(
            chunks.siblings(Chunk {
                level: 0,
                index: 128
            }),
            1
        );
    }

    #[test]
    fn hashes_lie_in_the_level_above() {
        let chunks = chunks(129 * 4096);
        match chunks.hash_place(Chunk {
            level: 0,
            index: 128,
        }) {
            HashPlace::In(parent, at) => {
                assert_eq!((parent, at), (Chunk { level: 1, index: 1 }, 0));
            }
            HashPlace::Root => panic!("a hash in level 1"),
        }
        assert!(matches!(
            chunks.hash_place(Chunk { level: 2, index: 0 }),
            HashPlace::Root
        ));
    }
}

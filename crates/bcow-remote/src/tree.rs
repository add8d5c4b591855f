//! The chunks of a file and of its Merkle tree, in one numbering.
//!
//! Level 0 has the chunks of the bytes that the tree covers; level k+1 has the chunks of level k of
//! the tree (spec section 9). Each chunk has a hash in the level above, the one chunk of the top
//! level has the root. The top level of the stored tree is the root itself, and is never fetched.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use bcow::format::{HASH_BYTES, HEADER_AREA_BYTES, MerkleShape, MerkleTree};

/// log2 of the chunk size in the files that `bcow` writes.
const USUAL_CHUNK_SHIFT: u8 = 14;

/// A hash of the tree.
pub(crate) type Hash = [u8; HASH_BYTES as usize];

/// The root hash of a file: of its Merkle tree (spec section 9).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Root(pub [u8; 32]);

impl FromStr for Root {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.strip_prefix("sha256:").unwrap_or(text);
        let bytes = data_encoding::HEXLOWER_PERMISSIVE
            .decode(text.as_bytes())
            .map_err(|_| "it is not hexadecimal")?;
        bytes
            .try_into()
            .map(Root)
            .map_err(|_| "it does not have 64 digits")
    }
}

impl fmt::Display for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&data_encoding::HEXLOWER.encode(&self.0))
    }
}

impl fmt::Debug for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// What is known of a file before it is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Its root hash. A file with another one is not opened.
    pub root: Root,
    /// Its length, if that is known. A wrong length costs requests, and nothing else.
    pub file_bytes: Option<u64>,
}

impl From<Root> for Expected {
    fn from(root: Root) -> Self {
        Expected {
            root,
            file_bytes: None,
        }
    }
}

impl Expected {
    /// The place of all chunks, if the length is known and the file has chunks of the usual size.
    pub(crate) fn chunks(&self) -> Option<Chunks> {
        let file_bytes = self.file_bytes.filter(|&bytes| bytes < 1 << 62)?;
        let with_tree = |covered_bytes| {
            let shape = MerkleShape::new(covered_bytes, USUAL_CHUNK_SHIFT);
            covered_bytes + shape.total_bytes()
        };
        // A file with more covered bytes is longer.
        let (mut least, mut most) = (1, file_bytes);
        while least < most {
            let middle = least + (most - least) / 2;
            if with_tree(middle) < file_bytes { least = middle + 1 } else { most = middle }
        }
        (least > 0 && with_tree(least) == file_bytes).then(|| {
            Chunks::new(&MerkleTree {
                offset: least,
                chunk_shift: USUAL_CHUNK_SHIFT,
                root: self.root.0,
            })
        })
    }
}

/// The place of all chunks.
#[derive(Debug)]
pub(crate) struct Chunks {
    chunk_bytes: u64,
    /// The covered bytes, then the levels of the tree without the last.
    levels: Vec<Range<u64>>,
    root: Hash,
    /// Where the root is stored.
    root_offset: u64,
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
        let mut stored = shape.levels.iter().map(|&(offset, bytes)| {
            let start = tree.offset + offset;
            start..start + bytes
        });
        // `MerkleShape` has one level at least.
        let root_offset = stored.next_back().map_or(tree.offset, |level| level.start);
        let covered = 0..shape.covered_bytes;
        let levels = std::iter::once(covered).chain(stored).collect();
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
            .rposition(|level| level.start <= offset)?;
        Some(Chunk {
            level,
            index: (offset - self.levels[level].start) / self.chunk_bytes,
        })
    }

    pub(crate) fn root(&self) -> &Hash {
        &self.root
    }

    pub(crate) fn root_offset(&self) -> u64 {
        self.root_offset
    }

    pub(crate) fn start(&self, chunk: Chunk) -> u64 {
        self.levels[chunk.level].start + chunk.index * self.chunk_bytes
    }

    /// Length of a chunk in bytes; the last of a level can be shorter.
    pub(crate) fn length(&self, chunk: Chunk) -> usize {
        let rest = self.levels[chunk.level].end - self.start(chunk);
        self.chunk_bytes.min(rest) as usize
    }

    /// The number of chunks from this one on that are in its level, and whose hashes are in one
    /// chunk.
    pub(crate) fn siblings(&self, chunk: Chunk) -> u64 {
        let in_level = self.count(chunk.level);
        let per_parent = self.per_parent();
        let parent_end = (chunk.index / per_parent + 1) * per_parent;
        in_level.min(parent_end) - chunk.index
    }

    /// The number of chunks of a level.
    pub(crate) fn count(&self, level: usize) -> u64 {
        let Range { start, end } = self.levels[level];
        (end - start).div_ceil(self.chunk_bytes)
    }

    /// The number of chunks whose hashes are in one chunk.
    pub(crate) fn per_parent(&self) -> u64 {
        self.chunk_bytes / HASH_BYTES
    }

    /// The number of levels.
    pub(crate) fn levels(&self) -> usize {
        self.levels.len()
    }

    /// The bytes of the file that a level takes up.
    pub(crate) fn level_range(&self, level: usize) -> Range<u64> {
        self.levels[level].clone()
    }

    /// The chunks of a level that the bytes from `start` to before `end` of the file touch: the
    /// first one, and the number.
    pub(crate) fn touched(&self, level: usize, start: u64, end: u64) -> Option<(Chunk, u64)> {
        let own = &self.levels[level];
        let (start, end) = (start.max(own.start), end.min(own.end));
        if start >= end {
            return None;
        }
        let index = (start - own.start) / self.chunk_bytes;
        let count = (end - own.start).div_ceil(self.chunk_bytes) - index;
        Some((Chunk { level, index }, count))
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

/// Whether a chunk has this hash. The header slots in the first chunk count as `canonical`: the
/// tree does not cover all of their bytes.
pub(crate) fn matches(
    chunk: Chunk,
    bytes: &[u8],
    hash: &Hash,
    canonical: &[u8; HEADER_AREA_BYTES],
) -> bool {
    let found = match chunk {
        Chunk::FIRST if bytes.len() < HEADER_AREA_BYTES => return false,
        Chunk::FIRST => {
            let mut covered = bytes.to_vec();
            covered[..HEADER_AREA_BYTES].copy_from_slice(canonical);
            bcow::leaf_hash(&covered)
        }
        Chunk { level: 0, .. } => bcow::leaf_hash(bytes),
        _ => bcow::node_hash(bytes),
    };
    found == *hash
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
    fn length_of_a_file_gives_the_place_of_its_tree() {
        for covered in [
            1,
            16384,
            16385,
            3 << 20,
            (512 << 14) + 1,
            380 << 20,
            1 << 40,
        ] {
            let tree = MerkleTree {
                offset: covered,
                chunk_shift: USUAL_CHUNK_SHIFT,
                root: [7; 32],
            };
            let expected = |file_bytes| Expected {
                root: Root([7; 32]),
                file_bytes: Some(file_bytes),
            };
            let file_bytes = covered + tree.shape().total_bytes();
            let found = expected(file_bytes).chunks().expect("a length of a file");
            assert_eq!(found.level_range(0), 0..covered);
            assert_eq!(found.root_offset(), Chunks::new(&tree).root_offset());
        }
        for wrong in [0, 1, 32, 16384 + 33, u64::MAX] {
            let expected = Expected {
                root: Root([7; 32]),
                file_bytes: Some(wrong),
            };
            assert!(expected.chunks().is_none(), "{wrong}");
        }
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

//! The layout of the Merkle tree (spec section 9). The crate `bcow` does the hashing.

/// Size of a hash in bytes.
pub const HASH_BYTES: u64 = 32;

/// The positions of the levels of a tree over `covered_bytes`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MerkleShape {
    /// Chunk size in bytes.
    pub chunk_bytes: u64,
    /// Number of bytes that level 0 hashes.
    pub covered_bytes: u64,
    /// Offset from the start of the tree and length of each level in bytes, lowest level first. The
    /// last level is one hash.
    pub levels: Vec<(u64, u64)>,
}

impl MerkleShape {
    /// The layout of a tree over `covered_bytes` (at least 1) with chunks of `2^chunk_shift` bytes.
    pub fn new(covered_bytes: u64, chunk_shift: u8) -> Self {
        let chunk_bytes = 1 << chunk_shift;
        let mut levels = Vec::new();
        let (mut offset, mut below) = (0, covered_bytes);
        loop {
            let bytes = below.div_ceil(chunk_bytes).max(1) * HASH_BYTES;
            levels.push((offset, bytes));
            offset += bytes;
            if bytes == HASH_BYTES {
                break;
            }
            below = bytes;
        }
        MerkleShape {
            chunk_bytes,
            covered_bytes,
            levels,
        }
    }

    /// Length of all levels in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.levels.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Number of chunks that level 0 hashes.
    pub fn chunks(&self) -> u64 {
        self.covered_bytes.div_ceil(self.chunk_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_chunk_is_a_tree_of_one_hash() {
        assert_eq!(MerkleShape::new(4096, 12).levels, [(0, 32)]);
    }

    #[test]
    fn levels_shrink_by_hashes_per_chunk() {
        let shape = MerkleShape::new(129 * 4096 + 1, 12);
        assert_eq!(
            shape.levels,
            [(0, 130 * 32), (130 * 32, 64), (130 * 32 + 64, 32)]
        );
    }
}

//! The checksums of metadata: CRC32C without the final inversion, begun with a seed.

use crc_fast::{CrcAlgorithm, Digest};
use zerocopy::IntoBytes;

use crate::format::SuperBlock;

/// A state of the checksum. The state after some bytes is the seed of what follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Checksum(pub u32);

impl Checksum {
    /// The seed of a file system: the checksum of its UUID.
    pub fn of_file_system(uuid: &[u8; 16]) -> Checksum {
        Checksum(u32::MAX).with(uuid)
    }

    /// The checksum that belongs into a superblock.
    pub fn of_superblock(superblock: &SuperBlock) -> Checksum {
        let covered = size_of::<SuperBlock>() - size_of::<u32>();
        Checksum(u32::MAX).with(&superblock.as_bytes()[..covered])
    }

    /// The state after further bytes.
    pub fn with(self, bytes: &[u8]) -> Checksum {
        let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(self.0));
        digest.update(bytes);
        Checksum(!(digest.finalize() as u32))
    }

    /// The seed of what belongs to an inode of generation 0.
    pub fn of_inode(self, number: u32) -> Checksum {
        self.of_generation(number, 0)
    }

    /// The seed of what belongs to an inode.
    pub fn of_generation(self, number: u32, generation: u32) -> Checksum {
        self.with(&number.to_le_bytes())
            .with(&generation.to_le_bytes())
    }

    /// The lower and the upper half, as most structures store them.
    pub fn halves(self) -> (u16, u16) {
        (self.0 as u16, (self.0 >> 16) as u16)
    }
}

/// A state of the checksum of a transaction in a journal: CRC32 with the most significant bit
/// first, without a final inversion.
#[derive(Clone, Copy)]
pub(crate) struct BigEndianChecksum(pub u32);

impl BigEndianChecksum {
    /// The state before the first byte.
    pub const NEW: Self = Self(u32::MAX);

    /// The state after further bytes.
    pub fn with(self, bytes: &[u8]) -> Self {
        let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Mpeg2, u64::from(self.0));
        digest.update(bytes);
        Self(digest.finalize() as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::Checksum;

    #[test]
    fn checksum_continues_from_its_seed() {
        let whole = Checksum(u32::MAX).with(b"123456789");
        assert_eq!(!whole.0, 0xe306_9283);
        assert_eq!(Checksum(u32::MAX).with(b"1234").with(b"56789"), whole);
    }
}

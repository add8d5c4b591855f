//! Address types, so that the compiler finds mixed-up addresses.

use std::fmt;

/// An offset in the address space, in bytes (logical block address).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Lba(pub u64);

/// An offset in the file, in bytes (upper block address).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Uba(pub u64);

/// log2 of a block size in bytes, 12 to 24.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockShift(u8);

impl BlockShift {
    /// Blocks of 4 KiB.
    pub const MIN: BlockShift = BlockShift(12);
    /// Blocks of 16 MiB.
    pub const MAX: BlockShift = BlockShift(24);

    /// Returns `None` if the shift is outside the limits of spec section 16.
    pub fn new(shift: u8) -> Option<Self> {
        (Self::MIN.0..=Self::MAX.0)
            .contains(&shift)
            .then_some(BlockShift(shift))
    }

    /// The shift for blocks of `bytes`; `None` if that is not a power of two within the limits.
    pub fn from_bytes(bytes: u32) -> Option<Self> {
        bytes
            .is_power_of_two()
            .then(|| Self::new(bytes.trailing_zeros() as u8))
            .flatten()
    }

    /// The exponent.
    pub fn get(self) -> u8 {
        self.0
    }

    /// Block size in bytes.
    pub fn bytes(self) -> u32 {
        1 << self.0
    }
}

impl fmt::Display for Lba {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Uba {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

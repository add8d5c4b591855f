//! Feature masks (spec section 4).

use crate::FormatError;

/// The feature masks of a file. A reader must know the bits of `incompatible`; a writer must also
/// know the bits of `read_only_compatible`; the bits of `compatible` are only informative.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features {
    /// A reader refuses a file with unknown bits.
    pub incompatible: u64,
    /// A program must not write to a file with unknown bits.
    pub read_only_compatible: u64,
    /// Programs ignore unknown bits.
    pub compatible: u64,
}

/// Bits of [`Features::incompatible`].
pub mod incompatible {
    /// Blocks may be zstd frames.
    pub const ZSTD: u64 = 1 << 0;
    /// Absent regions and blocks are read from backing 0.
    pub const BACKING: u64 = 1 << 1;
    /// A record log may contain mappings that are newer than the tables.
    pub const RECORDS: u64 = 1 << 2;
    /// Root entries may be windows.
    pub const WINDOWS: u64 = 1 << 3;
    /// Every stored block is raw and has UBA = LBA.
    pub const PLAIN: u64 = 1 << 4;
    /// Entries may be fragments.
    pub const FRAGMENTS: u64 = 1 << 5;
    /// Backings may be views of images.
    pub const VIEWS: u64 = 1 << 6;
    /// Backings may be named by URL.
    pub const URLS: u64 = 1 << 7;
    pub(super) const KNOWN: u64 =
        ZSTD | BACKING | RECORDS | WINDOWS | PLAIN | FRAGMENTS | VIEWS | URLS;
}

/// Bits of [`Features::read_only_compatible`].
pub mod read_only_compatible {
    /// The file has a Merkle tree.
    pub const MERKLE: u64 = 1 << 0;
}

/// Bits of [`Features::compatible`].
pub mod compatible {
    /// The address space contains an EROFS file system.
    pub const EROFS: u64 = 1 << 0;
}

impl Features {
    /// Returns an error for unknown incompatible bits.
    pub fn check_readable(&self) -> Result<(), FormatError> {
        let unknown = self.incompatible & !incompatible::KNOWN;
        if unknown != 0 {
            return Err(FormatError::UnknownFeature {
                bit: unknown.trailing_zeros(),
            });
        }
        Ok(())
    }

    /// Whether an incompatible bit is set.
    pub fn has_incompatible(&self, bit: u64) -> bool {
        self.incompatible & bit != 0
    }

    /// Whether a compatible bit is set.
    pub fn has_compatible(&self, bit: u64) -> bool {
        self.compatible & bit != 0
    }

    /// Names of the set bits, in mask and bit order. An unknown bit has a name such as
    /// `compatible-17`.
    pub fn names(&self) -> Vec<String> {
        let incompatible = "zstd backing records windows plain fragments views urls";
        let read_only = self.read_only_compatible;
        // Each mask, and the names of its bits in their order.
        let known = [
            ("incompatible", self.incompatible, incompatible),
            ("read-only-compatible", read_only, "merkle"),
            ("compatible", self.compatible, "erofs"),
        ];
        let mut names = Vec::new();
        for (mask, bits, known) in known {
            for bit in (0..64).filter(|bit| bits >> bit & 1 == 1) {
                names.push(match known.split(' ').nth(bit) {
                    Some(name) => name.to_owned(),
                    None => format!("{mask}-{bit}"),
                });
            }
        }
        names
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_incompatible_bit_is_refused_by_number() {
        let features = Features {
            incompatible: 1 | 1 << 40,
            ..Features::default()
        };
        assert_eq!(
            features.check_readable(),
            Err(FormatError::UnknownFeature { bit: 40 })
        );
    }

    #[test]
    fn names_tell_known_and_unknown_bits() {
        let features = Features {
            incompatible: incompatible::ZSTD,
            read_only_compatible: read_only_compatible::MERKLE,
            compatible: compatible::EROFS | 1 << 17,
        };
        assert_eq!(
            features.names(),
            ["zstd", "merkle", "erofs", "compatible-17"]
        );
    }
}

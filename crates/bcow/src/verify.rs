//! What reads verify.

/// Verification of reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Verify {
    /// Verifies the CRC32C of every table and block; detects accidental changes.
    #[default]
    Checksums,
    /// Verifies the Merkle tree too; detects deliberate changes, if the root hash is known to be
    /// right. A file without a tree is rejected.
    Merkle,
}

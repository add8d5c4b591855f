//! The BCoW file format: bytes to validated structures and back. No I/O.

/// Why bytes are not valid BCoW structures.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Not a BCoW file.
    #[error("not a BCoW file")]
    NotBcow,
}

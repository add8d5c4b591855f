//! What can go wrong with a BCoW file, kept apart by what a caller would do about it.

use std::io;

/// Failure to open, read, write or check a BCoW file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The host failed to read or write.
    #[error("cannot {action} at byte {offset}: {source}")]
    Io {
        /// What was being done: "read", "write", "sync".
        action: &'static str,
        /// Byte offset in the file.
        offset: u64,
        /// The host's error.
        source: io::Error,
    },
    /// The file is not what the specification allows.
    #[error(transparent)]
    Format(#[from] bcow_format::FormatError),
    /// A stored block does not hold what its table entry promises.
    #[error("block at byte {logical} of the address space (stored at byte {stored}): {problem}")]
    BadBlock {
        /// First byte of the block in the address space.
        logical: u64,
        /// First byte of the stored block in the file.
        stored: u64,
        /// What is wrong with it.
        problem: BlockProblem,
    },
    /// A part of the file does not hash to what the Merkle tree promises.
    #[error("bytes {start}..{end} of the file do not match the Merkle tree")]
    Merkle {
        /// First byte of the chunk.
        start: u64,
        /// End of the chunk.
        end: u64,
    },
    /// The content needs a backing that was not given.
    #[error("backing {name} is needed at byte {logical} of the address space and is not available")]
    MissingBacking {
        /// How the file names its backing (`sha256:...`).
        name: String,
        /// Where it was needed.
        logical: u64,
    },
    /// A backing is not the one that the file names.
    #[error("backing {name} has an address space of {found} bytes, the file says {expected}")]
    WrongBacking {
        /// How the file names its backing.
        name: String,
        /// Bytes the file says.
        expected: u64,
        /// Bytes it has.
        found: u64,
    },
    /// Something is wrong in a backing, or with reading it.
    #[error("backing {name}: {source}")]
    InBacking {
        /// How the file names its backing.
        name: String,
        /// What, in the backing's own places.
        source: Box<Error>,
    },
    /// A read beyond the end of the address space.
    #[error("bytes {offset}+{length} lie beyond the end of the address space ({size} bytes)")]
    OutOfRange {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        length: u64,
        /// Size of the address space.
        size: u64,
    },
    /// A barrier failed before: what the host kept of the writes before it is unknown, so that nothing more is written.
    #[error("no more is written to this file: {cause}")]
    WriteRefused {
        /// The failure.
        cause: String,
    },
    /// A bug of this program: what it knows of the open file contradicts itself. Nothing was
    /// written for it.
    #[error("{0}: this is a bug in bcow")]
    Inconsistent(String),
    /// The caller asked a writer for something the format cannot hold.
    #[error("{0}")]
    Unsupported(String),
}

/// What is wrong with a stored block.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlockProblem {
    /// The stored bytes have another checksum than the table entry says.
    #[error("checksum is {found:#010x}, the table says {expected:#010x}")]
    Checksum {
        /// CRC32C from the table entry.
        expected: u32,
        /// CRC32C of the bytes.
        found: u32,
    },
    /// The bytes are no valid zstd frame of the block's size.
    #[error("does not decompress: {0}")]
    Decompress(String),
}

impl Error {
    /// The stable code of what is wrong with the file (spec section 12), if it is the file that is wrong.
    pub fn code(&self) -> Option<&'static str> {
        match self {
            Error::Format(error) => Some(error.code()),
            Error::BadBlock { problem, .. } => Some(match problem {
                BlockProblem::Checksum { .. } => "block-crc",
                BlockProblem::Decompress(_) => "block-data",
            }),
            Error::Merkle { .. } => Some("merkle"),
            Error::WrongBacking { .. } => Some("backing-entry"),
            Error::InBacking { source, .. } => source.code(),
            Error::Io { .. }
            | Error::MissingBacking { .. }
            | Error::OutOfRange { .. }
            | Error::WriteRefused { .. }
            | Error::Inconsistent(_)
            | Error::Unsupported(_) => None,
        }
    }

    /// The error itself, out of however many backings it happened in.
    pub fn innermost(&self) -> &Error {
        match self {
            Error::InBacking { source, .. } => source.innermost(),
            other => other,
        }
    }

    /// Says which backing this happened in.
    pub(crate) fn in_backing(self, name: &bcow_format::BackingName) -> Self {
        Error::InBacking {
            name: name.to_string(),
            source: Box::new(self),
        }
    }

    pub(crate) fn io(action: &'static str, offset: u64, source: io::Error) -> Self {
        Error::Io {
            action,
            offset,
            source,
        }
    }
}

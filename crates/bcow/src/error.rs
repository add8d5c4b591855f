//! Errors of BCoW files, in variants by the possible reaction of a caller.

use std::io;

/// An error while a BCoW file is opened, read, written or checked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The host failed to read or write.
    #[error("cannot {action}{}: {source}", at_byte(action, *offset))]
    Io {
        /// The failed operation: "read", "write", "sync", "compress".
        action: &'static str,
        /// Byte offset in the file; 0 for an operation on the whole file.
        offset: u64,
        /// The error of the host.
        source: io::Error,
    },
    /// The file violates the specification.
    #[error(transparent)]
    Format(#[from] bcow_format::FormatError),
    /// A stored block does not match its table entry.
    #[error("block at byte {logical} of the address space (stored at byte {stored}): {problem}")]
    BadBlock {
        /// First byte of the block in the address space.
        logical: u64,
        /// First byte of the stored block in the file.
        stored: u64,
        /// The mismatch.
        problem: BlockProblem,
    },
    /// A part of the file does not match the Merkle tree.
    #[error("bytes {start}..{end} of the file do not match the Merkle tree")]
    Merkle {
        /// First byte of the chunk.
        start: u64,
        /// End of the chunk.
        end: u64,
    },
    /// The content needs a backing that is not available.
    #[error("backing {name} is needed at byte {logical} of the address space and is not available")]
    MissingBacking {
        /// Name of the backing in the file: a file name or a digest (`sha256:...`).
        name: String,
        /// Address at which the backing was needed.
        logical: u64,
    },
    /// A backing differs from the one that the file names.
    #[error("backing {name} has an address space of {found} bytes, the file says {expected}")]
    WrongBacking {
        /// Name of the backing in the file.
        name: String,
        /// Size in bytes that the file records.
        expected: u64,
        /// Size in bytes of the backing.
        found: u64,
    },
    /// An error in a backing, or in a read of it.
    #[error("backing {name}: {source}")]
    InBacking {
        /// Name of the backing in the file.
        name: String,
        /// The error, with addresses of the backing.
        source: Box<Error>,
    },
    /// A read beyond the end of the address space.
    #[error("bytes {offset}+{length} lie beyond the end of the address space ({size} bytes)")]
    OutOfRange {
        /// First byte of the read.
        offset: u64,
        /// Length of the read in bytes.
        length: u64,
        /// Size of the address space.
        size: u64,
    },
    /// An earlier barrier failed, or a write that cannot be undone. The state of earlier writes on
    /// the host is unknown, so the file is not written any more.
    #[error("no more is written to this file: {cause}")]
    WriteRefused {
        /// The text of that failure.
        cause: String,
    },
    /// A bug of this program: its state of the open file contradicts itself. Nothing was written
    /// because of it.
    #[error("{0}: this is a bug in bcow")]
    Inconsistent(String),
    /// The caller requested something that the format or this version does not support.
    #[error("{0}")]
    Unsupported(String),
}

/// Operations without a place in the file: their errors name no offset.
const WHOLE_FILE: [&str; 4] = ["compress", "get the length", "open", "sync"];

fn at_byte(action: &str, offset: u64) -> String {
    if WHOLE_FILE.contains(&action) {
        String::new()
    } else {
        format!(" at byte {offset}")
    }
}

/// The mismatch between a stored block and its table entry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BlockProblem {
    /// The stored bytes have another checksum than the table entry.
    #[error("checksum is {found:#010x}, the table says {expected:#010x}")]
    Checksum {
        /// CRC32C from the table entry.
        expected: u32,
        /// CRC32C of the bytes.
        found: u32,
    },
    /// The bytes are not a valid zstd frame of the size of the block.
    #[error("does not decompress: {0}")]
    Decompress(String),
}

impl Error {
    /// The stable code of the problem (spec section 12); `None` if the file itself is not at fault.
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

    /// The error without the backings around it.
    pub fn innermost(&self) -> &Error {
        match self {
            Error::InBacking { source, .. } => source.innermost(),
            other => other,
        }
    }

    /// Adds the name of the backing in which the error occurred.
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

//! Errors of a partial file, and the errno that a program gets for each.

use std::path::PathBuf;

use rustix::io::Errno;

use crate::account::LimitReached;
use crate::errors::ErrorKind;
use crate::host::errno_of;

/// Why an operation on a partial file failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum PartialError {
    /// The host failed.
    #[error("cannot {action}: {errno}")]
    Host {
        /// The action that failed.
        action: &'static str,
        /// The host's errno.
        errno: Errno,
    },
    #[error("cannot read the lower file at byte {offset}: {errno}")]
    Lower {
        /// The offset of the read, in bytes.
        offset: u64,
        errno: Errno,
    },
    /// The upper's size limit leaves no room.
    #[error(transparent)]
    NoSpace(#[from] LimitReached),
    /// The stored data of the partial file is damaged.
    #[error("{}: at byte {offset}: {damage}", file.display())]
    Damaged {
        /// The damaged file.
        file: PathBuf,
        /// The offset of the damage in the file, in bytes.
        offset: u64,
        damage: Damage,
    },
    /// The mark on the host's file has a value that this version does not support.
    #[error(
        "the mark of the partial file has an unsupported block size of 2 to the power of \
         {block_shift}"
    )]
    Unsupported {
        /// log2 of the block size in bytes.
        block_shift: u8,
    },
    /// The mark's limit is larger than the lower file: the mark belongs to a partial file of
    /// another file.
    #[error("the mark of the partial file covers {limit} bytes of a lower file of {size} bytes")]
    OtherLower {
        /// The limit in the mark, in bytes.
        limit: u64,
        /// The size of the lower file, in bytes.
        size: u64,
    },
    /// An earlier barrier failed. It is unknown which of the writes before it are on the disk, so
    /// all later writes are refused.
    #[error("writes to this file are refused since a sync failed: {errno}")]
    Refused {
        /// The errno of the failed barrier.
        errno: Errno,
    },
    /// The file would be larger than the host or the format supports.
    #[error("byte {end} is beyond the maximum file size")]
    TooLarge {
        /// The requested end, in bytes.
        end: u64,
    },
}

/// Damage of a stored map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// The map is missing, but the mark says that it exists.
    #[error("the map of the partial file is missing")]
    Missing,
    /// An object that is not a regular file has the map's name: a link, a directory, a device.
    #[error("the map of the partial file is not a regular file")]
    NoFile,
    /// The file does not begin with a valid header of a map.
    #[error("not a map of a partial file, or its header is damaged")]
    Header,
    #[error("the map belongs to partial file {found:016x}, not to {expected:016x}")]
    Other {
        /// The number of this partial file.
        expected: u64,
        /// The partial file number in the map.
        found: u64,
    },
    /// The map belongs to a partial file of another lower file.
    #[error("the map covers a file of {found} blocks, not of {expected}")]
    Blocks {
        /// Blocks of this lower file.
        expected: u64,
        /// Blocks according to the map.
        found: u64,
    },
    #[error("unknown map version {0}")]
    Version(u8),
    /// The map has an unsupported block size: log2 of the bytes.
    #[error("unsupported block size of 2^{0} bytes")]
    BlockShift(u8),
    /// A record's checksum does not match, or its fields are invalid.
    #[error("a record of the map is damaged")]
    Record,
    #[error("a record of the map names a block beyond the end of the lower file")]
    Range,
    /// Durable records are missing at the end of the map.
    #[error("the map is truncated: it had {expected} records")]
    Cut {
        /// The number of records that must exist.
        expected: u64,
    },
}

impl PartialError {
    /// Converts an error of the host during `action`.
    pub fn host(action: &'static str) -> impl Fn(std::io::Error) -> PartialError + Copy {
        move |error| PartialError::Host {
            action,
            errno: errno_of(&error),
        }
    }

    /// The errno that a program gets. Only this function decides it.
    pub fn errno(&self) -> Errno {
        match self {
            PartialError::Host { errno, .. } => *errno,
            PartialError::NoSpace(_) => Errno::NOSPC,
            PartialError::TooLarge { .. } => Errno::FBIG,
            // The cause does not matter to a program: the content of this file cannot be read or
            // written.
            PartialError::Lower { .. }
            | PartialError::Damaged { .. }
            | PartialError::Unsupported { .. }
            | PartialError::OtherLower { .. }
            | PartialError::Refused { .. } => Errno::IO,
        }
    }

    /// The kind of the error for the report; `None` for errors that are reported elsewhere, and for
    /// mistakes of a program.
    pub fn kind(&self) -> Option<ErrorKind> {
        match self {
            // The image has already reported this error.
            PartialError::Lower { .. } | PartialError::TooLarge { .. } => None,
            // The operation may succeed later, when removed files have freed space. If it does not,
            // the answer to the request is reported.
            error if error.is_no_space() => None,
            PartialError::Damaged { .. }
            | PartialError::Unsupported { .. }
            | PartialError::OtherLower { .. } => Some(ErrorKind::UpperDamage),
            PartialError::Host { .. } | PartialError::NoSpace(_) | PartialError::Refused { .. } => {
                Some(ErrorKind::of_errno(self.errno()).unwrap_or(ErrorKind::UpperIo))
            }
        }
    }

    /// Whether the error is a lack of space, on the host or under the size limit.
    pub fn is_no_space(&self) -> bool {
        matches!(self.errno(), Errno::NOSPC | Errno::DQUOT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_host_stays_a_full_host_and_a_bad_lower_is_an_input_output_error() {
        let full = std::io::Error::from_raw_os_error(Errno::NOSPC.raw_os_error());
        assert_eq!(PartialError::host("write")(full).errno(), Errno::NOSPC);
        let lower = PartialError::Lower {
            offset: 4096,
            errno: Errno::NODEV,
        };
        assert_eq!(lower.errno(), Errno::IO);
        assert_eq!(PartialError::TooLarge { end: 1 << 63 }.errno(), Errno::FBIG);
    }
}

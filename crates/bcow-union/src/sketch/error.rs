//! What can go wrong with a sketch, and what a program is told of it.

use std::path::PathBuf;
use std::sync::Arc;

use rustix::io::Errno;

use crate::account::NoSpace;
use crate::errors::ErrorKind;

/// Why an operation on a sketch failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum SketchError {
    /// The host failed.
    #[error("cannot {action}: {errno}")]
    Host {
        /// What was being done.
        action: &'static str,
        /// The host's answer.
        errno: Errno,
    },
    /// The lower file could not be read.
    #[error("cannot read the lower file at byte {offset}: {errno}")]
    Lower {
        /// First byte of what was to be read.
        offset: u64,
        /// Why.
        errno: Errno,
    },
    /// The upper's size limit leaves no room.
    #[error(transparent)]
    NoSpace(#[from] NoSpace),
    /// What is stored of the sketch is not what was written.
    #[error("{}: at byte {offset}: {damage}", file.display())]
    Damaged {
        /// The file that is damaged.
        file: PathBuf,
        /// Where in it.
        offset: u64,
        /// What is wrong.
        damage: Damage,
    },
    /// The mark on the host's file asks for something that this version does not know.
    #[error("the mark of the sketch has {what} {value}, which this version does not know")]
    Unsupported {
        /// Which of its fields.
        what: &'static str,
        /// What it says.
        value: u64,
    },
    /// The mark says that more of the lower file shows than it has: it is the mark of another file's sketch.
    #[error("the mark of the sketch shows {limit} bytes of a lower file that has {size}")]
    OtherLower {
        /// What the mark says.
        limit: u64,
        /// Bytes of the lower file.
        size: u64,
    },
    /// A barrier failed before: what the host kept of the writes before it is unknown, so that nothing more is written.
    #[error("no more is written to this file since a sync failed: {errno}")]
    Refused {
        /// The sync's failure.
        errno: Errno,
    },
    /// The BCoW file of a packed sketch.
    #[error(transparent)]
    Packed(Arc<bcow::Error>),
    /// The file would be longer than the host or the format can have it.
    #[error("byte {end} lies beyond the largest file there can be")]
    TooLarge {
        /// The end that was asked for.
        end: u64,
    },
}

/// What is wrong with a stored map.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// The file is not there, though the mark says that it is.
    #[error("the map of the sketch is missing")]
    Missing,
    /// Something else has its name: a link, a directory, a device.
    #[error("the map of the sketch is not a regular file")]
    NoFile,
    /// The file does not begin as a map does.
    #[error("this is not a map of a sketch, or its header is damaged")]
    Header,
    /// It is a map, but of another sketch.
    #[error("this is the map of sketch {found:016x}, not {expected:016x}")]
    Other {
        /// The sketch it should be of.
        expected: u64,
        /// The sketch it is of.
        found: u64,
    },
    /// It is the map of a sketch of another lower file.
    #[error("this is the map of a sketch of a file of {found} blocks, not {expected}")]
    Blocks {
        /// Blocks of the lower file.
        expected: u64,
        /// Blocks that the map says.
        found: u64,
    },
    /// The map is of a newer kind.
    #[error("version {0} of the map is not known")]
    Version(u8),
    /// Blocks of another size.
    #[error("blocks of 2^{0} bytes are not known")]
    BlockShift(u8),
    /// A record has another checksum than it says, or has no sense.
    #[error("a record of the map is damaged")]
    Record,
    /// A record is about blocks that the file never had.
    #[error("a record of the map is about a block beyond the end of the lower file")]
    Range,
    /// Records are gone that were there.
    #[error("the map was cut off: it had {expected} records")]
    Cut {
        /// How many there were.
        expected: u64,
    },
}

impl SketchError {
    /// A failure of the host to do this.
    pub fn host(action: &'static str, error: &std::io::Error) -> SketchError {
        SketchError::Host {
            action,
            errno: errno_of(error),
        }
    }

    /// What a program is told: the one place where that is decided.
    pub fn errno(&self) -> Errno {
        match self {
            SketchError::Host { errno, .. } => *errno,
            SketchError::NoSpace(_) => Errno::NOSPC,
            SketchError::TooLarge { .. } => Errno::FBIG,
            // Whatever is the matter below, it is this file's content that cannot be had.
            SketchError::Lower { .. }
            | SketchError::Damaged { .. }
            | SketchError::Unsupported { .. }
            | SketchError::OtherLower { .. }
            | SketchError::Refused { .. } => Errno::IO,
            SketchError::Packed(error) => match &**error {
                bcow::Error::Io { source, .. } => errno_of(source),
                _ => Errno::IO,
            },
        }
    }

    /// What kind of error it is; `None` of those that are reported elsewhere, or are a program's mistake.
    pub fn kind(&self) -> Option<ErrorKind> {
        match self {
            // The image has reported it.
            SketchError::Lower { .. } | SketchError::TooLarge { .. } => None,
            // It may yet be done, when what was removed has made room; if not, the request's answer is reported.
            error if error.is_no_space() => None,
            SketchError::Damaged { .. }
            | SketchError::Unsupported { .. }
            | SketchError::OtherLower { .. } => Some(ErrorKind::UpperDamage),
            SketchError::Packed(error)
                if !matches!(
                    **error,
                    bcow::Error::Io { .. } | bcow::Error::WriteRefused { .. }
                ) =>
            {
                Some(ErrorKind::UpperDamage)
            }
            SketchError::Host { .. }
            | SketchError::NoSpace(_)
            | SketchError::Refused { .. }
            | SketchError::Packed(_) => {
                Some(ErrorKind::of_errno(self.errno()).unwrap_or(ErrorKind::UpperIo))
            }
        }
    }

    /// Whether there was no room, on the host or by the limit.
    pub fn is_no_space(&self) -> bool {
        matches!(self.errno(), Errno::NOSPC | Errno::DQUOT)
    }
}

impl From<bcow::Error> for SketchError {
    fn from(error: bcow::Error) -> Self {
        SketchError::Packed(Arc::new(error))
    }
}

/// The error number of an error, which errors of our own making lack.
fn errno_of(error: &std::io::Error) -> Errno {
    match Errno::from_io_error(error) {
        Some(errno) => errno,
        None if error.kind() == std::io::ErrorKind::StorageFull => Errno::NOSPC,
        None => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_host_stays_a_full_host_and_a_bad_lower_is_an_input_output_error() {
        let full = std::io::Error::from_raw_os_error(Errno::NOSPC.raw_os_error());
        assert_eq!(SketchError::host("write", &full).errno(), Errno::NOSPC);
        let packed = bcow::Error::Io {
            action: "write",
            offset: 0,
            source: std::io::ErrorKind::StorageFull.into(),
        };
        assert!(SketchError::from(packed).is_no_space());
        let lower = SketchError::Lower {
            offset: 4096,
            errno: Errno::NODEV,
        };
        assert_eq!(lower.errno(), Errno::IO);
        assert_eq!(SketchError::TooLarge { end: 1 << 63 }.errno(), Errno::FBIG);
    }
}

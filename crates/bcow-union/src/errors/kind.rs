//! The kinds of errors, and the kind of an errno.

use rustix::io::Errno;

/// Kind of an error. The names are stable, because metrics and statistics contain them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum ErrorKind {
    /// Bytes of the image do not match its checksums, or are malformed.
    ImageDamage,
    /// The host failed to read the image's file.
    ImageIo,
    /// The image needs a feature that this version does not support.
    ImageUnsupported,
    /// A file or a mark in the upper is damaged.
    UpperDamage,
    /// The host failed to read or write the upper.
    UpperIo,
    /// No space: the host's file system is full, or a limit of the upper is reached.
    NoSpace,
    /// The process has too little memory or too few descriptors.
    Resources,
}

impl ErrorKind {
    /// All kinds, in the order of their numbers.
    pub const ALL: [ErrorKind; 7] = [
        ErrorKind::ImageDamage,
        ErrorKind::ImageIo,
        ErrorKind::ImageUnsupported,
        ErrorKind::UpperDamage,
        ErrorKind::UpperIo,
        ErrorKind::NoSpace,
        ErrorKind::Resources,
    ];

    /// The stable name.
    pub fn name(self) -> &'static str {
        match self {
            ErrorKind::ImageDamage => "image-damage",
            ErrorKind::ImageIo => "image-io",
            ErrorKind::ImageUnsupported => "image-unsupported",
            ErrorKind::UpperDamage => "upper-damage",
            ErrorKind::UpperIo => "upper-io",
            ErrorKind::NoSpace => "no-space",
            ErrorKind::Resources => "resources",
        }
    }

    /// The kind of an errno of the host with which a request of a writable mount fails. `None` for
    /// an errno that reports a mistake of the program, such as `ENOENT`.
    pub fn of_errno(errno: Errno) -> Option<ErrorKind> {
        match errno {
            Errno::NOSPC | Errno::DQUOT => Some(ErrorKind::NoSpace),
            Errno::NOMEM | Errno::MFILE | Errno::NFILE => Some(ErrorKind::Resources),
            // Many file systems of the host become read-only after an error.
            Errno::IO | Errno::ROFS | Errno::NODEV | Errno::NOTCONN | Errno::TIMEDOUT => {
                Some(ErrorKind::UpperIo)
            }
            _ => None,
        }
    }

    /// Whether the host failed to read or write.
    pub(super) fn is_io(self) -> bool {
        matches!(self, ErrorKind::ImageIo | ErrorKind::UpperIo)
    }

    /// Whether the error is a shortage, which concerns the whole mount and not one file.
    pub(super) fn is_shortage(self) -> bool {
        matches!(self, ErrorKind::NoSpace | ErrorKind::Resources)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_kinds_are_unique_and_in_the_order_of_their_numbers() {
        let names: std::collections::HashSet<_> =
            ErrorKind::ALL.iter().map(|kind| kind.name()).collect();
        assert_eq!(names.len(), ErrorKind::ALL.len());
        for (index, kind) in ErrorKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, index);
        }
    }
}

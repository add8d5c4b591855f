//! The conversion of errors of the image to errnos and to kinds of errors. No other file does it.

use bcow_erofs::reader::ErofsError;
use rustix::io::Errno;

use crate::errors::ErrorKind;

/// The errno for a failed read of the image.
///
/// Damage is always `EIO`: the file exists and the operation is permitted. An error of the host
/// keeps its own errno where a program can react to it.
pub fn errno(error: &ErofsError) -> Errno {
    match error {
        ErofsError::Device(error) => device_errno(error),
        ErofsError::NotErofs { .. }
        | ErofsError::TooSmall { .. }
        | ErofsError::SuperblockChecksum { .. }
        | ErofsError::Superblock { .. }
        | ErofsError::Inode { .. }
        | ErofsError::Directory { .. }
        | ErofsError::Xattr { .. } => Errno::IO,
        // Valid as far as this reader can tell, but not supported. The kernel's EROFS gives the
        // same errno.
        ErofsError::UnsupportedFeature { .. }
        | ErofsError::UnsupportedValue { .. }
        | ErofsError::UnsupportedInode { .. } => Errno::OPNOTSUPP,
        ErofsError::WrongKind { .. } => Errno::INVAL,
        ErofsError::TooManyLinks => Errno::LOOP,
        // Both enums are non-exhaustive: a new variant is damage until this match names it.
        _ => Errno::IO,
    }
}

fn device_errno(error: &bcow::Error) -> Errno {
    match error.innermost() {
        bcow::Error::Io { source, .. } => match Errno::from_io_error(source) {
            // These errors describe the state of the host, not the file.
            Some(errno @ (Errno::NOMEM | Errno::STALE | Errno::TIMEDOUT)) => errno,
            _ => Errno::IO,
        },
        bcow::Error::Format(_)
        | bcow::Error::BadBlock { .. }
        | bcow::Error::Merkle { .. }
        | bcow::Error::MissingBacking { .. }
        // The file system refers to blocks beyond the end of the image.
        | bcow::Error::OutOfRange { .. }
        => Errno::IO,
        bcow::Error::Unsupported(_) => Errno::OPNOTSUPP,
        _ => Errno::IO,
    }
}

/// The kind of a failed read of the image.
pub fn kind(error: &ErofsError) -> ErrorKind {
    match error {
        ErofsError::Device(error) => match error.innermost() {
            bcow::Error::Io { .. } => ErrorKind::ImageIo,
            bcow::Error::Unsupported(_) => ErrorKind::ImageUnsupported,
            _ => ErrorKind::ImageDamage,
        },
        ErofsError::UnsupportedFeature { .. }
        | ErofsError::UnsupportedValue { .. }
        | ErofsError::UnsupportedInode { .. } => ErrorKind::ImageUnsupported,
        _ => ErrorKind::ImageDamage,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    fn host(errno: Errno) -> ErofsError {
        ErofsError::Device(bcow::Error::Io {
            action: "read",
            offset: 0,
            source: errno.into(),
        })
    }

    #[test]
    fn damage_is_eio() {
        let error = ErofsError::Device(bcow::Error::OutOfRange {
            offset: 1,
            length: 1,
            size: 1,
        });
        assert_eq!(errno(&error), Errno::IO);
    }

    #[test]
    fn host_error_is_eio_unless_a_program_could_use_it() {
        assert_eq!(errno(&host(Errno::STALE)), Errno::STALE);
        assert_eq!(errno(&host(Errno::NOENT)), Errno::IO);
        let end = ErofsError::Device(bcow::Error::Io {
            action: "read",
            offset: 0,
            source: io::ErrorKind::UnexpectedEof.into(),
        });
        assert_eq!(errno(&end), Errno::IO);
    }
}

//! The conversion of errors to the error numbers of the protocol. No other module does this.

use bcow::Error;

use crate::proto::{Command, Errno};

/// A request that failed.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) errno: Errno,
    /// The message for the client.
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(errno: Errno, message: impl Into<String>) -> Self {
        Failure {
            errno,
            message: message.into(),
        }
    }

    /// Converts an error of the device for a reply to `command`.
    pub(crate) fn of_device(command: Command, error: &Error) -> Self {
        // Do not disclose the names of backing files to the client.
        let inner = error.innermost();
        let message = match inner {
            Error::MissingBacking { .. } | Error::WrongBacking { .. } => {
                "a backing file cannot be used".to_owned()
            }
            other => other.to_string(),
        };
        Failure::new(errno(command, inner), message)
    }
}

fn errno(command: Command, error: &Error) -> Errno {
    match error {
        Error::OutOfRange { .. } => out_of_range(command),
        Error::Io { source, .. } => of_host(source),
        Error::Unsupported(_) => Errno::NotSupported,
        _ => Errno::Io,
    }
}

/// The error number for a range beyond the end of the device.
pub(crate) fn out_of_range(command: Command) -> Errno {
    match command {
        Command::Write | Command::WriteZeroes => Errno::NoSpace,
        _ => Errno::Invalid,
    }
}

fn of_host(error: &std::io::Error) -> Errno {
    use rustix::io::Errno as Host;
    match Host::from_io_error(error) {
        Some(Host::NOSPC | Host::DQUOT | Host::FBIG) => Errno::NoSpace,
        Some(Host::NOMEM) => Errno::NoMemory,
        Some(Host::PERM | Host::ACCESS | Host::ROFS) => Errno::Perm,
        Some(Host::OPNOTSUPP) => Errno::NotSupported,
        Some(_) => Errno::Io,
        None => match error.kind() {
            std::io::ErrorKind::StorageFull
            | std::io::ErrorKind::QuotaExceeded
            | std::io::ErrorKind::FileTooLarge => Errno::NoSpace,
            std::io::ErrorKind::OutOfMemory => Errno::NoMemory,
            _ => Errno::Io,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io;

    fn host(source: io::Error) -> Error {
        Error::Io {
            action: "write",
            offset: 0,
            source,
        }
    }

    #[test]
    fn a_full_disk_stays_a_full_disk() {
        for error in [
            io::Error::from_raw_os_error(28),
            io::Error::from_raw_os_error(122),
            io::ErrorKind::StorageFull.into(),
        ] {
            let failure = Failure::of_device(Command::Write, &host(error));
            assert_eq!(failure.errno, Errno::NoSpace);
        }
    }

    #[test]
    fn what_has_no_number_of_its_own_is_an_io_error() {
        for number in [5, 9, 116] {
            let error = host(io::Error::from_raw_os_error(number));
            assert_eq!(
                Failure::of_device(Command::Read, &error).errno,
                Errno::Io,
                "{number}"
            );
        }
    }

    #[test]
    fn beyond_the_end_depends_on_the_command() {
        let error = Error::OutOfRange {
            offset: 1,
            length: 2,
            size: 2,
        };
        assert_eq!(
            Failure::of_device(Command::Read, &error).errno,
            Errno::Invalid
        );
        assert_eq!(
            Failure::of_device(Command::Write, &error).errno,
            Errno::NoSpace
        );
    }

    #[test]
    fn names_of_backings_stay_inside() {
        let error = Error::InBacking {
            name: "secret".into(),
            source: Box::new(Error::MissingBacking {
                name: "secret-too".into(),
                logical: 0,
            }),
        };
        let failure = Failure::of_device(Command::Read, &error);
        assert!(!failure.message.contains("secret"), "{}", failure.message);
    }
}

//! Errors of mounts: making, serving, growing and ending them.

use std::io;
use std::path::{Path, PathBuf};

/// A failure to make, serve, grow or end a mount. [`MountError::hint`] returns advice for errors
/// that the user can correct.
///
/// The *driver* of a mount is what answers its requests: a file system in this process (FUSE
/// driver) or one of the kernel (kernel driver).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// A mount option that bcow does not know.
    #[error("unknown mount option {0:?}")]
    UnknownOption(String),
    /// A known mount option with an invalid value.
    #[error("mount option {option:?}: {problem}")]
    BadOption {
        /// The option as the user wrote it.
        option: String,
        /// The problem with the value.
        problem: &'static str,
    },
    /// An option of writable mounts, given for a mount without an upper.
    #[error("mount option {0:?} needs an upper")]
    NoUpper(&'static str),
    #[error("mount option {0:?} is for mounts without an upper")]
    OnlyWithoutUpper(&'static str),
    /// A known option that bcow does not support.
    #[error("mount option {option:?} is not supported: {reason}")]
    UnsupportedOption {
        /// The option as the user wrote it.
        option: String,
        /// Why bcow does not support the option.
        reason: &'static str,
    },
    /// Mounts of a process cannot share files.
    #[error("cannot share files: {0}")]
    NoSharing(&'static str),
    #[error("mount option {0:?} is for root only")]
    RootOnly(&'static str),
    #[error("cannot open /dev/fuse")]
    NoDevice(#[source] io::Error),
    #[error("cannot use mountpoint {}", path.display())]
    Mountpoint {
        /// The mountpoint as given.
        path: PathBuf,
        /// The host's error.
        source: io::Error,
    },
    #[error("mountpoint {} is not a directory", .0.display())]
    NotADirectory(PathBuf),
    #[error("{} is the root directory", .0.display())]
    RootDirectory(PathBuf),
    /// A bcow mount is already at this mountpoint.
    #[error("a BCoW image is already mounted at {}", .0.display())]
    AlreadyMounted(PathBuf),
    #[error("cannot mount at {}", path.display())]
    Refused {
        /// The mountpoint.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// `fusermount3` refused to mount or unmount.
    #[error("fusermount3 refused {}: {message}", path.display())]
    Helper {
        /// The mountpoint.
        path: PathBuf,
        /// The helper's message.
        message: String,
    },
    /// `fusermount3` cannot be run.
    #[error("cannot run fusermount3")]
    NoHelper(#[source] io::Error),
    #[error("I/O on /dev/fuse failed")]
    Session(#[source] io::Error),
    /// The upper could not be flushed completely at the end of the mount, or before another process
    /// takes the mount over.
    #[error("cannot flush all writes to the upper {}", upper.display())]
    Close {
        upper: PathBuf,
        /// The first error.
        source: io::Error,
    },
    /// The upper or the disk of a mount has no name any more, so nothing can read the changes.
    #[error("{} was removed while it was mounted: all its changes are lost", .0.display())]
    Removed(PathBuf),
    /// The disk of a mount could not be closed completely at the end of the mount.
    #[error("cannot flush all writes to the disk {}", disk.display())]
    CloseDisk {
        /// The file of the disk.
        disk: PathBuf,
        source: bcow::Error,
    },
    /// The option `rw` for a sealed disk, or for an image.
    #[error("{} is sealed, and never changes", .0.display())]
    SealedDisk(PathBuf),
    /// A write or a flush of a mount with the kernel driver failed before the end of the mount.
    #[error("not all written data is in the disk {}", disk.display())]
    LostWrites {
        /// The file of the disk.
        disk: PathBuf,
        /// The first error.
        source: io::Error,
    },
    #[error("cannot grow the disk that is mounted at {}", path.display())]
    GrowDisk {
        /// The mountpoint.
        path: PathBuf,
        /// The host's error.
        source: io::Error,
    },
    #[error("cannot read the disk")]
    ReadDisk(#[source] bcow::Error),
    #[error("cannot write to {} while the kernel mounts its file system", disk.display())]
    WriteDisk {
        /// The file of the disk.
        disk: PathBuf,
        /// The first error.
        source: io::Error,
    },
    #[error(transparent)]
    Snapshot(bcow::operation::SnapshotError),
    #[error(transparent)]
    RemoveSnapshot(bcow::operation::RemoveError),
    /// A step of a mount with the kernel driver failed.
    #[error(transparent)]
    Kernel(#[from] bcow_mount::Error),
    /// A known mount option that does not exist with the driver of the mount.
    #[error("mount option {option:?} is not supported with the {driver} driver")]
    NotWithDriver {
        /// The name of the option, without its value.
        option: &'static str,
        /// The driver: `FUSE` or `kernel`.
        driver: &'static str,
    },
    /// An operation that belongs to no other variant failed, for example the start of a process or
    /// of a thread.
    #[error("cannot {action}")]
    Process {
        /// The operation, as words that follow "cannot".
        action: &'static str,
        /// The host's error.
        source: io::Error,
    },
    #[error("cannot read the ledger of the disk: {0}")]
    Ledger(#[source] io::Error),
    /// No file system is mounted at this path.
    #[error("nothing is mounted at {}", .0.display())]
    NotMounted(PathBuf),
    /// Another type of file system is mounted at this path.
    #[error("{} is a mount of type {fs_type}, not a BCoW mount", path.display())]
    ForeignMount {
        /// The mountpoint.
        path: PathBuf,
        /// File-system type as in `/proc/self/mountinfo`.
        fs_type: String,
    },
    /// Files or directories of the mount are in use.
    #[error("{} is in use", .0.display())]
    Busy(PathBuf),
    /// The kernel refused to unmount.
    #[error("cannot unmount {}", path.display())]
    Unmount {
        /// The mountpoint.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
}

impl MountError {
    /// Makes the error of `action`, words that follow "cannot", of the host's error.
    pub(crate) fn process<E: Into<io::Error>>(action: &'static str) -> impl Fn(E) -> Self {
        move |error| MountError::Process {
            action,
            source: error.into(),
        }
    }

    pub(crate) fn close_disk(disk: &Path) -> impl Fn(bcow::Error) -> Self {
        move |source| MountError::CloseDisk {
            disk: disk.to_owned(),
            source,
        }
    }

    pub(crate) fn no_thread() -> Self {
        MountError::process("start a thread")(io::Error::from(io::ErrorKind::OutOfMemory))
    }

    /// Advice for the user, if there is any.
    pub fn hint(&self) -> Option<&str> {
        match self {
            MountError::UnknownOption(_) => Some("`bcow mount --help` lists the options"),
            MountError::NoUpper(_) => Some(
                "`--upper DIR` names the directory that takes the changes; without an upper, a \
                 mount is read-only",
            ),
            MountError::UnsupportedOption { option, .. } if option == "allow_root" => Some(
                "use allow_other: the kernel then checks every access against the file's \
                 permissions",
            ),
            MountError::RootOnly(_) => Some("mount as root to have set-user-ID files or devices"),
            MountError::NoDevice(source) if source.kind() == io::ErrorKind::NotFound => Some(
                "load the kernel module with `modprobe fuse`; in a container, pass the device with \
                 `--device /dev/fuse`",
            ),
            MountError::Helper { message, .. } if message.contains("user_allow_other") => Some(
                "add the line `user_allow_other` to /etc/fuse.conf, or mount without allow_other",
            ),
            MountError::Helper { message, .. } if message.contains("no write access") => {
                Some("an ordinary user can mount only on a directory that the user can write to")
            }
            MountError::NoHelper(source) if source.kind() == io::ErrorKind::NotFound => Some(
                "ordinary users mount through fusermount3: install the package fuse3, or mount as \
                 root",
            ),
            MountError::GrowDisk { source, .. } if source.kind() == io::ErrorKind::Unsupported => {
                Some("an older version of bcow serves the mount: unmount it, and mount it again")
            }
            MountError::WriteDisk { source, .. }
                if matches!(
                    source.kind(),
                    io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
                ) =>
            {
                Some("free some space where the disk is, and mount it again: no data is lost")
            }
            MountError::RootDirectory(_) => Some(
                "name another directory: programs would still use the files below, and no path \
                 would lead to the mount to end it",
            ),
            MountError::Kernel(error) => error.hint(),
            MountError::AlreadyMounted(_) => Some("unmount it first with `bcow umount`"),
            MountError::Busy(_) => Some(
                "`bcow umount --lazy` detaches the mount now, and the mount ends with its last \
                 user",
            ),
            _ => None,
        }
    }
}

//! Why a file system could not be mounted or unmounted.

use std::io;
use std::path::PathBuf;

/// Failure to mount or unmount. The host's error is the `source`; [`MountError::hint`] says what to do about it, where something can be done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MountError {
    /// An option that this mount does not have.
    #[error("unknown mount option {0:?}")]
    UnknownOption(String),
    /// An option that this mount has, with a value it cannot take.
    #[error("mount option {option:?}: {problem}")]
    BadOption {
        /// The option as the user wrote it.
        option: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// An option of writable mounts, for one that is not.
    #[error("mount option {0:?} needs an upper")]
    NoUpper(&'static str),
    /// A known option that asks for what there is not.
    #[error("mount option {option:?} is not supported: {reason}")]
    UnsupportedOption {
        /// The option as the user wrote it.
        option: String,
        /// Why not.
        reason: &'static str,
    },
    /// Only root may have this.
    #[error("mount option {0:?} is for root only")]
    RootOnly(&'static str),
    /// The FUSE device cannot be opened.
    #[error("cannot open /dev/fuse")]
    NoDevice(#[source] io::Error),
    /// The mountpoint cannot be used.
    #[error("cannot use mountpoint {}", path.display())]
    Mountpoint {
        /// The mountpoint as given.
        path: PathBuf,
        /// The host's error.
        source: io::Error,
    },
    /// The mountpoint is something else than a directory.
    #[error("mountpoint {} is not a directory", .0.display())]
    NotADirectory(PathBuf),
    /// A BCoW image is mounted there already.
    #[error("a BCoW image is already mounted at {}", .0.display())]
    AlreadyMounted(PathBuf),
    /// The kernel refused the mount.
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
        /// What it said.
        message: String,
    },
    /// `fusermount3` cannot be run.
    #[error("cannot run fusermount3")]
    NoHelper(#[source] io::Error),
    /// The conversation with the kernel failed.
    #[error("the conversation with the kernel failed")]
    Session(#[source] io::Error),
    /// What was written could not be made durable at the end.
    #[error("cannot make durable all that was written to the upper {}", upper.display())]
    Close {
        /// The upper.
        upper: PathBuf,
        /// The first error that there was.
        source: io::Error,
    },
    /// A process could not be started or its files not arranged.
    #[error("cannot {action}")]
    Process {
        /// What was being done.
        action: &'static str,
        /// The host's error.
        source: io::Error,
    },
    /// Nothing is mounted there.
    #[error("nothing is mounted at {}", .0.display())]
    NotMounted(PathBuf),
    /// Something else is mounted there.
    #[error("what is mounted at {} is no BCoW image but {fs_type}", path.display())]
    ForeignMount {
        /// The mountpoint.
        path: PathBuf,
        /// File-system type, as `/proc/self/mountinfo` has it.
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
    /// What the user could do, where there is something.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            MountError::UnknownOption(_) => Some("`bcow mount --help` lists the options"),
            MountError::NoUpper(_) => Some(
                "`--upper DIR` names the directory that takes the changes; without it a mount is read-only",
            ),
            MountError::UnsupportedOption { option, .. } if option == "allow_root" => Some(
                "use allow_other: the kernel then checks every access against the file's permissions",
            ),
            MountError::RootOnly(_) => Some("mount as root to have set-user-ID files or devices"),
            MountError::NoDevice(source) if source.kind() == io::ErrorKind::NotFound => Some(
                "load the kernel module with `modprobe fuse`; in a container, pass the device with `--device /dev/fuse`",
            ),
            MountError::Helper { message, .. } if message.contains("user_allow_other") => Some(
                "add the line `user_allow_other` to /etc/fuse.conf, or mount without allow_other",
            ),
            MountError::Helper { message, .. } if message.contains("no write access") => {
                Some("an ordinary user can mount only on a directory that is theirs")
            }
            MountError::NoHelper(source) if source.kind() == io::ErrorKind::NotFound => Some(
                "ordinary users mount through fusermount3: install the package fuse3, or mount as root",
            ),
            MountError::AlreadyMounted(_) => Some("unmount it first with `bcow umount`"),
            MountError::Busy(_) => Some(
                "`fuser -vm DIR` shows by whom; `bcow umount --lazy` detaches it now and ends it with its last user",
            ),
            _ => None,
        }
    }
}

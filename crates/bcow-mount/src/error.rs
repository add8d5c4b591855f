//! Errors of kernel mounts.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

/// A failure to make a loop device, a hidden mount, or a mount of a file system of the kernel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    #[error("cannot open /dev/fuse")]
    NoFuse(#[source] io::Error),
    /// A step on the way to a detached FUSE mount failed.
    #[error("cannot {action} for a FUSE mount without a path")]
    Hidden {
        /// The step, to follow "cannot".
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The control device of the loop driver cannot be used.
    #[error("cannot {action} /dev/loop-control")]
    Control {
        /// The step, to follow "cannot".
        action: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    #[error("no loop device in /dev is free")]
    NoFreeDevice,
    #[error("cannot {action} {}", device.display())]
    Loop {
        /// The step, to follow "cannot".
        action: &'static str,
        device: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    #[error("cannot read {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The host's error.
        source: io::Error,
    },
    /// The content is not a file system that can be mounted with the kernel driver.
    #[error("it holds {found}, not ext4, xfs or btrfs")]
    NoFileSystem {
        /// What it holds.
        found: &'static str,
    },
    /// The process may not mount file systems of block devices.
    #[error("this process may not mount {kind}: it lacks CAP_SYS_ADMIN outside user namespaces")]
    NotPermitted {
        /// The file system.
        kind: &'static str,
    },
    /// The kernel refused the mount.
    #[error("cannot mount its {kind} at {}{}", target.display(), messages(log))]
    Mount {
        /// The file system.
        kind: &'static str,
        /// The mountpoint.
        target: PathBuf,
        /// The kernel's messages on this mount.
        log: Vec<String>,
        /// The kernel's error.
        source: io::Error,
    },
    /// A mounted file system does not grow.
    #[error("cannot grow the mounted {kind}")]
    Grow {
        /// The file system.
        kind: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// Another process, which mounts for this one, had the error.
    #[error("{message}")]
    OfOtherProcess {
        message: String,
        /// The kernel's error.
        source: io::Error,
        /// See [`Error::hint`].
        hint: Option<String>,
    },
    /// The loop device serves another file by now.
    #[error("{} is no longer the device of the mount", device.display())]
    Replaced { device: PathBuf },
}

fn messages(log: &[String]) -> String {
    match log {
        [] => String::new(),
        log => format!(" ({})", log.join("; ")),
    }
}

impl Error {
    pub(crate) fn of_loop(action: &'static str, device: &Path) -> impl Fn(Errno) -> Error {
        move |errno| Error::Loop {
            action,
            device: device.to_owned(),
            source: errno.into(),
        }
    }

    pub(crate) fn hidden(action: &'static str) -> impl Fn(Errno) -> Error {
        move |errno| Error::Hidden {
            action,
            source: errno.into(),
        }
    }

    /// Advice for the user, if there is any.
    pub fn hint(&self) -> Option<&str> {
        match self {
            Error::OfOtherProcess { hint, .. } => hint.as_deref(),
            Error::NoFuse(source) if source.kind() == io::ErrorKind::NotFound => Some(
                "load the kernel module with `modprobe fuse`; in a container, pass the device with \
                 `--device /dev/fuse`",
            ),
            Error::Control { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                Some("load the kernel module with `modprobe loop`")
            }
            Error::NotPermitted { .. } => Some(
                "run it as root of the host, outside `unshare -r` and rootless containers; a \
                 container needs the capability (`--cap-add SYS_ADMIN`)",
            ),
            Error::NoFreeDevice => Some(
                "`losetup` lists the devices in use; a container needs the nodes of free devices \
                 in its /dev",
            ),
            Error::Mount { source, .. } if source.raw_os_error() == Some(ENODEV) => {
                Some("this kernel does not have that file system; is a module missing?")
            }
            Error::Grow {
                kind: "ext4",
                source,
            } if source.raw_os_error() == Some(EPERM) => Some(
                "Linux asks for CAP_SYS_RESOURCE to grow an ext4, and refuses one with errors; \
                 containers often lack the capability",
            ),
            Error::Mount { .. } | Error::Grow { .. } => Some("`dmesg` shows the kernel's reason"),
            _ => None,
        }
    }
}

const EPERM: i32 = Errno::PERM.raw_os_error();
const ENODEV: i32 = Errno::NODEV.raw_os_error();

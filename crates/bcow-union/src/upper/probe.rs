//! Probes what the host lets this user do in an upper.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities};

use super::work::unlink;
use super::{Attribute, Names, Namespace, Ownership, XattrMode};

/// The name of the test file in the work directory.
const PROBE: &[u8] = b"probe";
/// The name of an attribute that no file has.
const TRUSTED: &[u8] = b"trusted.bcow.probe";
/// The inode number of the initial user namespace (`PROC_USER_INIT_INO` in Linux).
const FIRST_USER_NAMESPACE: u64 = 0xefff_fffd;
/// The overflow user id, 65534, in a container. A user that can chown files to it has a sufficient
/// range of user ids.
const OVERFLOW_ID: u32 = 65534;

/// The operation that the host refused.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refused {
    /// Extended attributes.
    Attributes,
    Whiteouts(Errno),
    /// Another operation.
    Io(Errno),
}

/// Determines how marks and owners can be stored in files of the directory `work`, and whether
/// whiteouts can be created.
pub(super) fn probe(work: BorrowedFd<'_>) -> Result<Names, Refused> {
    unlink(work, PROBE).map_err(Refused::Io)?;
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file =
        rustix::fs::openat(work, PROBE, flags, Mode::from_raw_mode(0o600)).map_err(Refused::Io)?;
    let names = namespace(file.as_fd()).map(|namespace| Names {
        namespace,
        ownership: ownership(file.as_fd()),
    });
    unlink(work, PROBE).map_err(Refused::Io)?;
    let names = names?;
    whiteout(work).map_err(Refused::Whiteouts)?;
    unlink(work, PROBE).map_err(Refused::Io)?;
    Ok(names)
}

fn namespace(file: BorrowedFd<'_>) -> Result<Namespace, Refused> {
    let file = Attribute::Open(file);
    let set = |name: &[u8]| file.set(name, b"y", XattrMode::Any);
    match set(TRUSTED) {
        Ok(()) => return Ok(Namespace::Trusted),
        Err(Errno::PERM | Errno::ACCESS | Errno::NOTSUP) => {}
        Err(errno) => return Err(Refused::Io(errno)),
    }
    match set(b"user.bcow.probe") {
        Ok(()) => Ok(Namespace::User),
        Err(Errno::NOTSUP | Errno::PERM | Errno::ACCESS) => Err(Refused::Attributes),
        Err(errno) => Err(Refused::Io(errno)),
    }
}

/// Whether this user sees attributes of `trusted.*`. For other users the kernel hides them without
/// an error, and reports EPERM only on a change. Nothing is changed.
pub(super) fn can_read_trusted(file: BorrowedFd<'_>) -> Result<bool, Errno> {
    match Attribute::Open(file).remove(TRUSTED) {
        Ok(()) | Err(Errno::NODATA) => Ok(true),
        Err(Errno::NOTSUP) => Ok(false),
        // The cause can also be that the file or its file system is read-only.
        Err(Errno::PERM | Errno::ACCESS | Errno::ROFS) => has_sys_admin(),
        Err(errno) => Err(errno),
    }
}

/// Whether this thread has CAP_SYS_ADMIN in the initial user namespace.
fn has_sys_admin() -> Result<bool, Errno> {
    let capable = capabilities(None)?
        .effective
        .contains(CapabilitySet::SYS_ADMIN);
    Ok(capable
        && match rustix::fs::stat("/proc/self/ns/user") {
            Ok(stat) => stat.st_ino == FIRST_USER_NAMESPACE,
            // A kernel without user namespaces.
            Err(Errno::NOENT) => true,
            Err(errno) => return Err(errno),
        })
}

fn ownership(file: BorrowedFd<'_>) -> Ownership {
    let overflow = (Uid::from_raw(OVERFLOW_ID), Gid::from_raw(OVERFLOW_ID));
    let given = rustix::process::geteuid().is_root()
        && rustix::fs::fchown(file, Some(overflow.0), Some(overflow.1)).is_ok();
    if given { Ownership::Native } else { Ownership::Override }
}

fn whiteout(work: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::fs::mknodat(work, PROBE, FileType::CharacterDevice, Mode::empty(), 0)
}

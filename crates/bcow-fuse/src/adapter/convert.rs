//! Conversions between fuser's types and those of the union.

use std::time::SystemTime;

use bcow_erofs::tree::Timestamp;
use bcow_union::fs::{Allocate, Attributes, Caller, Privileges, RenameMode, SetTime, XattrMode};
use fuser::{FileAttr, INodeNo, RenameFlags, Request, TimeOrNow, WriteFlags};

use super::{NO_INODE, file_type, system_time};

/// The permission bits of a mode, without the file type.
pub(super) fn permissions(mode: u32) -> u16 {
    (mode & 0o7777) as u16
}

pub(super) fn caller(request: &Request, umask: u32) -> Caller {
    Caller {
        uid: request.uid(),
        gid: request.gid(),
        pid: request.pid(),
        umask: umask & 0o777,
    }
}

/// Returns `None` for unknown flags and for RENAME_WHITEOUT. RENAME_WHITEOUT leaves a device 0:0
/// behind, which in an upper would hide the name.
pub(super) fn rename_how(flags: RenameFlags) -> Option<RenameMode> {
    match flags {
        flags if flags.is_empty() => Some(RenameMode::Replace),
        RenameFlags::RENAME_NOREPLACE => Some(RenameMode::NoReplace),
        RenameFlags::RENAME_EXCHANGE => Some(RenameMode::Exchange),
        _ => None,
    }
}

pub(super) fn set_how(flags: i32) -> Option<XattrMode> {
    match flags {
        0 => Some(XattrMode::Any),
        libc::XATTR_CREATE => Some(XattrMode::Create),
        libc::XATTR_REPLACE => Some(XattrMode::Replace),
        _ => None,
    }
}

pub(super) fn allocate_how(mode: i32) -> Option<Allocate> {
    const PUNCH_AND_KEEP: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    const ZERO_AND_KEEP: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
    match mode {
        0 => Some(Allocate::Extend),
        libc::FALLOC_FL_KEEP_SIZE => Some(Allocate::KeepSize),
        PUNCH_AND_KEEP => Some(Allocate::PunchHole),
        libc::FALLOC_FL_ZERO_RANGE => Some(Allocate::ZeroExtend),
        ZERO_AND_KEEP => Some(Allocate::ZeroKeep),
        _ => None,
    }
}

pub(super) fn privileges_of_writer(flags: WriteFlags) -> Privileges {
    if flags.contains(WriteFlags::FUSE_WRITE_KILL_SUIDGID) {
        Privileges::Drop
    } else if flags.contains(WriteFlags::FUSE_WRITE_CACHE) {
        // The kernel writes pages back. It removed the set-id bits when the program wrote to the
        // pages.
        Privileges::KeepAll
    } else {
        Privileges::Keep
    }
}

/// Removes the names of `trusted.` attributes from a list of names that each end with a zero byte.
pub(super) fn without_trusted(names: &[u8]) -> Vec<u8> {
    names
        .split_inclusive(|&byte| byte == 0)
        .filter(|name| !name.starts_with(b"trusted."))
        .flatten()
        .copied()
        .collect()
}

pub(super) fn encoded(attributes: Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(attributes.node.0),
        size: attributes.size,
        blocks: attributes.sectors,
        atime: system_time(attributes.atime),
        mtime: system_time(attributes.mtime),
        ctime: system_time(attributes.ctime),
        kind: file_type(attributes.kind),
        perm: attributes.permissions,
        nlink: attributes.nlink,
        uid: attributes.uid,
        gid: attributes.gid,
        rdev: attributes.rdev,
        ..NO_INODE
    }
}

pub(super) fn decoded_time(time: TimeOrNow) -> SetTime {
    match time {
        TimeOrNow::Now => SetTime::Now,
        TimeOrNow::SpecificTime(time) => SetTime::At(timestamp(time)),
    }
}

/// The time that the kernel sent, from a time that fuser decoded. Before 1970, the kernel counts
/// nanoseconds forward from the second, but fuser subtracts them.
fn timestamp(time: SystemTime) -> Timestamp {
    let whole = |seconds: u64| i64::try_from(seconds).unwrap_or(i64::MAX);
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => Timestamp {
            seconds: whole(after.as_secs()),
            nanoseconds: after.subsec_nanos(),
        },
        Err(error) => {
            let before = error.duration();
            Timestamp {
                seconds: -whole(before.as_secs()),
                nanoseconds: before.subsec_nanos(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn trusted_names_are_left_out() {
        let names = b"user.a\0trusted.b\0user.trusted.\0";
        assert_eq!(without_trusted(names), b"user.a\0user.trusted.\0");
        assert_eq!(without_trusted(b""), b"");
    }

    #[test]
    fn time_to_set_is_what_the_kernel_meant() {
        let after = SystemTime::UNIX_EPOCH + Duration::new(5, 7);
        let meant = |seconds, nanoseconds| Timestamp {
            seconds,
            nanoseconds,
        };
        assert_eq!(timestamp(after), meant(5, 7));
        // -2 s and 0.8 s, as fuser combines them.
        let before = SystemTime::UNIX_EPOCH - Duration::new(2, 800_000_000);
        assert_eq!(timestamp(before), meant(-2, 800_000_000));
        assert_eq!(system_time(meant(-2, 800_000_000)), {
            SystemTime::UNIX_EPOCH - Duration::from_millis(1200)
        });
    }
}

//! Between FUSE's protocol and the file systems: decoding and encoding, no meaning of its own.
//!
//! [`readonly`] is for an image alone, [`writable`] for an image under an upper; here is what they share.

mod convert;
mod privileges;
pub(crate) mod readonly;
mod reply;
pub(crate) mod writable;

use std::ffi::OsStr;
use std::time::{Duration, SystemTime};

use bcow_erofs::reader::FileType;
use bcow_erofs::tree::{DeviceNumber, Timestamp};
use bcow_union::NodeId;
use fuser::{FileAttr, Generation, INodeNo, InitFlags, KernelConfig};

use crate::stats::STATS_XATTR;

/// How long the kernel may trust a name or attribute it was told: for good. An image's content cannot change, and
/// that of a writable mount only through the kernel.
/// (Years rather than the largest number, which some kernels mistake for a time in the past.)
const FOREVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// An inode keeps its number for as long as the mount exists, so there is one generation.
const GENERATION: Generation = Generation(0);

/// Reading ahead that we would like; the kernel offers 128 KiB, and root can raise it.
const READAHEAD_BYTES: u32 = 1 << 20;

/// Requests the kernel may have under way on nobody's behalf, which is readahead and writing back. Its default of 12
/// starves several streams at once.
const BACKGROUND_REQUESTS: u16 = 64;

/// Agrees with the kernel on how to talk: what it has of `more` and of what every mount wants, and the sizes that hold for every
/// mount. Returns what it has of all.
fn negotiate(config: &mut KernelConfig, more: InitFlags) -> InitFlags {
    let wanted = more
        | InitFlags::FUSE_PARALLEL_DIROPS
        | InitFlags::FUSE_CACHE_SYMLINKS
        | InitFlags::FUSE_DO_READDIRPLUS
        | InitFlags::FUSE_READDIRPLUS_AUTO
        | InitFlags::FUSE_EXPLICIT_INVAL_DATA
        | InitFlags::FUSE_NO_OPEN_SUPPORT;
    let offered = config.capabilities();
    // Adding what was offered cannot fail.
    let _ = config.add_capabilities(wanted & offered);
    if let Err(most) = config.set_max_readahead(READAHEAD_BYTES) {
        let _ = config.set_max_readahead(most);
    }
    let _ = config.set_max_background(BACKGROUND_REQUESTS);
    tracing::debug!(
        "the kernel offers {offered:?}, of which {:?} is used",
        wanted & offered
    );
    offered
}

fn id(ino: INodeNo) -> NodeId {
    NodeId(ino.0)
}

/// Whether an attribute is the mount's own.
fn is_stats(node: NodeId, name: &OsStr) -> bool {
    node == NodeId::ROOT && name == STATS_XATTR
}

/// Attributes of no inode.
const NOBODY: FileAttr = FileAttr {
    ino: INodeNo(0),
    size: 0,
    blocks: 0,
    atime: SystemTime::UNIX_EPOCH,
    mtime: SystemTime::UNIX_EPOCH,
    ctime: SystemTime::UNIX_EPOCH,
    crtime: SystemTime::UNIX_EPOCH,
    kind: fuser::FileType::RegularFile,
    perm: 0,
    nlink: 0,
    uid: 0,
    gid: 0,
    rdev: 0,
    blksize: 4096,
    flags: 0,
};

/// What a listing says of a damaged inode, which must not hide its neighbours: the kernel shows the name but does not take
/// over attributes with an impossible size; whoever looks at the file asks for them again, and gets the error.
fn damaged(ino: INodeNo, kind: FileType) -> FileAttr {
    FileAttr {
        ino,
        kind: file_type(kind),
        size: u64::MAX,
        ..NOBODY
    }
}

fn file_type(kind: FileType) -> fuser::FileType {
    match kind {
        FileType::Regular => fuser::FileType::RegularFile,
        FileType::Directory => fuser::FileType::Directory,
        FileType::Symlink => fuser::FileType::Symlink,
        FileType::CharDevice => fuser::FileType::CharDevice,
        FileType::BlockDevice => fuser::FileType::BlockDevice,
        FileType::Fifo => fuser::FileType::NamedPipe,
        FileType::Socket => fuser::FileType::Socket,
    }
}

/// The kernel's 32-bit form (`new_encode_dev`): 12 bits of major between 8 and 12 bits of minor.
fn encode_device(device: DeviceNumber) -> u32 {
    (device.minor & 0xff) | (device.major << 8) | ((device.minor & !0xff) << 12)
}

/// Times that `SystemTime` cannot hold become 1970; there are none such in 64-bit seconds on Linux.
fn system_time(time: Timestamp) -> SystemTime {
    let seconds = Duration::from_secs(time.seconds.unsigned_abs());
    let whole = if time.seconds < 0 {
        SystemTime::UNIX_EPOCH.checked_sub(seconds)
    } else {
        SystemTime::UNIX_EPOCH.checked_add(seconds)
    };
    whole
        .and_then(|whole| whole.checked_add(Duration::from_nanos(time.nanoseconds.into())))
        .unwrap_or(SystemTime::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_number_is_encoded_as_the_kernel_decodes_it() {
        let encode = |major, minor| encode_device(DeviceNumber { major, minor });
        assert_eq!(encode(1, 3), 0x103);
        assert_eq!(encode(0xfff, 0xfffff), 0xffff_ffff);
        assert_eq!(encode(8, 0x12345), 0x1230_0845);
    }

    #[test]
    fn time_before_1970_keeps_its_nanoseconds() {
        let time = system_time(Timestamp {
            seconds: -2,
            nanoseconds: 800_000_000,
        });
        let before = SystemTime::UNIX_EPOCH.duration_since(time).unwrap();
        assert_eq!(before, Duration::from_millis(1200));
    }

    #[test]
    fn extreme_times_do_not_panic() {
        for seconds in [i64::MIN, i64::MAX] {
            system_time(Timestamp {
                seconds,
                nanoseconds: 999_999_999,
            });
        }
    }
}

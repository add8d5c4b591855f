//! The adapters between the FUSE protocol and the file systems. They only decode and encode.
//!
//! [`readonly`] serves an image alone, [`writable`] an image with an upper, [`disk`] a disk, and
//! [`shared_files`] the files that mounts share. This module has their common parts.
//!
//! fuser answers the requests that an adapter does not implement with ENOSYS, and the kernel sends
//! no more of their kind. So a close needs no request FLUSH: no data of a file waits for it. An
//! image without an upper has no dirty data, so FSYNC and FSYNCDIR need no request either.

mod convert;
pub(crate) mod disk;
mod privileges;
pub(crate) mod readonly;
mod reply;
pub(crate) mod shared_files;
pub(crate) mod sharing;
pub(crate) mod writable;

use std::ffi::OsStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bcow_erofs::reader::FileType;
use bcow_erofs::tree::Timestamp;
use bcow_union::NodeId;
use fuser::{FileAttr, Generation, INodeNo, InitFlags, KernelConfig};

use crate::request_threads::{Kind, RequestThreads, Turn};
use crate::stats::{MountStats, Operation, Running, STATS_XATTR};

/// How long the kernel may cache a name or an attribute: without a limit in practice. The content
/// of an image cannot change, and that of a writable mount changes only through the kernel. Ten
/// years, because some kernels take the largest number for a time in the past.
const FOREVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// An inode keeps its number for as long as the mount exists, so one generation is enough.
const GENERATION: Generation = Generation(0);

/// The readahead size that bcow requests. The kernel offers 128 KiB, and root can raise it.
const READAHEAD_BYTES: u32 = 1 << 20;

/// Limit of background requests in flight: readahead and writeback. The kernel's default of 12
/// slows down several parallel streams.
const BACKGROUND_REQUESTS: u16 = 64;

/// Negotiates with the kernel: enables the flags in `more` and the flags of every mount, as far as
/// the kernel offers them, and sets the limits of every mount. Returns the enabled flags.
fn negotiate(config: &mut KernelConfig, more: InitFlags) -> InitFlags {
    let wanted = more
        | InitFlags::FUSE_PARALLEL_DIROPS
        | InitFlags::FUSE_CACHE_SYMLINKS
        | InitFlags::FUSE_DO_READDIRPLUS
        | InitFlags::FUSE_READDIRPLUS_AUTO
        | InitFlags::FUSE_EXPLICIT_INVAL_DATA
        | InitFlags::FUSE_NO_OPEN_SUPPORT;
    let offered = config.capabilities();
    let enabled = wanted & offered;
    // Cannot fail: the kernel has offered these flags.
    let _ = config.add_capabilities(enabled);
    if let Err(most) = config.set_max_readahead(READAHEAD_BYTES) {
        let _ = config.set_max_readahead(most);
    }
    let _ = config.set_max_background(BACKGROUND_REQUESTS);
    tracing::debug!("the kernel offers {offered:?}, of which {enabled:?} is used");
    enabled
}

/// A request that this thread answers. The drop ends the measurement, and then the thread may be
/// parked.
struct Answering<'a> {
    _running: Running<'a>,
    _turn: Turn<'a>,
}

impl<'a> Answering<'a> {
    fn begin(
        request_threads: &'a Arc<RequestThreads>,
        stats: &'a Arc<MountStats>,
        operation: Operation,
        node: NodeId,
    ) -> Self {
        let kind = match operation {
            Operation::Sync => Kind::Slow,
            _ => Kind::Brief,
        };
        // The turn first: from then on another thread can be called.
        let turn = request_threads.begin(kind);
        Answering {
            _running: stats.time(operation, node),
            _turn: turn,
        }
    }
}

/// Set in the second number of a node: see [`sharing`]. No node id has this bit.
const ALIAS: u64 = 1 << 63;

/// Whether a number is the second one of its node.
fn is_alias(ino: INodeNo) -> bool {
    ino.0 & ALIAS != 0
}

/// The node with this number.
fn id(ino: INodeNo) -> NodeId {
    NodeId(ino.0 & !ALIAS)
}

/// Whether this is [`STATS_XATTR`] of the root directory.
fn is_stats(node: NodeId, name: &OsStr) -> bool {
    node == NodeId::ROOT && name == STATS_XATTR
}

/// Placeholder attributes without an inode.
const NO_INODE: FileAttr = FileAttr {
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

/// The attributes of a damaged inode in a listing, which must not hide the other entries. The
/// kernel shows the name but rejects attributes with an impossible size. When a program uses the
/// file, the kernel requests the attributes again and gets the error.
fn damaged(ino: INodeNo, kind: FileType) -> FileAttr {
    FileAttr {
        ino,
        kind: file_type(kind),
        size: u64::MAX,
        ..NO_INODE
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

/// Converts a time. A time that `SystemTime` cannot represent becomes 1970; with 64-bit seconds on
/// Linux this does not happen.
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

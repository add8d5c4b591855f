//! Between FUSE's protocol and [`ImageFs`]: decoding and encoding, no meaning of its own.

use std::cell::RefCell;
use std::ffi::OsStr;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, SystemTime};

use bcow_erofs::reader::{FileType, Inode};
use bcow_erofs::tree::{DeviceNumber, Timestamp};
use fuser::{
    AccessFlags, FileAttr, FileHandle, Generation, INodeNo, InitFlags, KernelConfig, LockOwner,
    OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyXattr, Request,
};
use rustix::io::Errno;

use crate::fs::{ImageFs, Node, Seek, TrustedNames, Wish};
use crate::node::NodeId;
use crate::options::Permissions;

/// How long the kernel may trust a name or attribute it was told: for good, as the content cannot change.
/// (Years rather than the largest number, which some kernels mistake for a time in the past.)
const FOREVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// An inode keeps its number for as long as the image exists, so there is one generation.
const GENERATION: Generation = Generation(0);

/// Reading ahead that we would like; the kernel offers 128 KiB, and root can raise it.
const READAHEAD_BYTES: u32 = 1 << 20;

/// Requests the kernel may have under way on nobody's behalf, which is readahead. Its default of 12 starves
/// several streams at once.
const BACKGROUND_REQUESTS: u16 = 64;

thread_local! {
    /// Where a thread puts together what it replies with.
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// The file system as fuser wants it.
pub(crate) struct Adapter {
    fs: ImageFs,
    permissions: Permissions,
    /// Whether the kernel opens files and directories without asking.
    opens: Opens,
}

#[derive(Debug, Clone, Copy)]
struct Opens {
    files_unasked: bool,
    directories_unasked: bool,
}

impl Adapter {
    pub(crate) fn new(fs: ImageFs, permissions: Permissions) -> Self {
        Adapter {
            fs,
            permissions,
            opens: Opens {
                files_unasked: false,
                directories_unasked: false,
            },
        }
    }
}

impl fuser::Filesystem for Adapter {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let offered = config.capabilities();
        let mut wanted = InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_CACHE_SYMLINKS
            | InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_READDIRPLUS_AUTO
            | InitFlags::FUSE_EXPLICIT_INVAL_DATA
            | InitFlags::FUSE_ASYNC_DIO
            | InitFlags::FUSE_NO_OPEN_SUPPORT
            | InitFlags::FUSE_NO_OPENDIR_SUPPORT;
        // Where the kernel decides by mode it shall know the ACLs too. The flag implies that it decides.
        if self.permissions == Permissions::ByMode {
            wanted |= InitFlags::FUSE_POSIX_ACL;
        }
        // Adding what was offered cannot fail.
        let _ = config.add_capabilities(wanted & offered);
        self.opens = Opens {
            files_unasked: offered.contains(InitFlags::FUSE_NO_OPEN_SUPPORT),
            directories_unasked: offered.contains(InitFlags::FUSE_NO_OPENDIR_SUPPORT),
        };
        if let Err(most) = config.set_max_readahead(READAHEAD_BYTES) {
            let _ = config.set_max_readahead(most);
        }
        let _ = config.set_max_background(BACKGROUND_REQUESTS);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.fs.lookup(NodeId(parent.0), name.as_bytes()) {
            Ok(Some(node)) => reply.entry(&FOREVER, &attributes(&node), GENERATION),
            // Node 0 says: not there, and you may remember that.
            Ok(None) => reply.entry(&FOREVER, &NOBODY, GENERATION),
            Err(errno) => reply.error(to_fuser(errno)),
        }
    }

    fn getattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        match self.fs.node(NodeId(ino.0)) {
            Ok(node) => reply.attr(&FOREVER, &attributes(&node)),
            Err(errno) => reply.error(to_fuser(errno)),
        }
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        match self.fs.read_link(NodeId(ino.0)) {
            Ok(target) => reply.data(&target),
            Err(errno) => reply.error(to_fuser(errno)),
        }
    }

    /// ENOSYS means: open without asking, keep the page cache, and do not tell about closing.
    fn open(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        if self.opens.files_unasked {
            reply.error(fuser::Errno::ENOSYS);
        } else {
            reply.opened(FileHandle(0), fuser::FopenFlags::FOPEN_KEEP_CACHE);
        }
    }

    fn read(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        // The reply goes out from inside the read, while the block it lends is held.
        let mut reply = Some(reply);
        let result = SCRATCH.with_borrow_mut(|scratch| {
            self.fs.read(NodeId(ino.0), offset, size, scratch, |bytes| {
                if let Some(reply) = reply.take() {
                    reply.data(bytes);
                }
            })
        });
        if let (Err(errno), Some(reply)) = (result, reply) {
            reply.error(to_fuser(errno));
        }
    }

    fn opendir(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        if self.opens.directories_unasked {
            reply.error(fuser::Errno::ENOSYS);
        } else {
            reply.opened(
                FileHandle(0),
                fuser::FopenFlags::FOPEN_KEEP_CACHE | fuser::FopenFlags::FOPEN_CACHE_DIR,
            );
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        cookie: u64,
        mut reply: ReplyDirectory,
    ) {
        let result = self.fs.read_dir(NodeId(ino.0), cookie, &mut |entry| {
            let full = reply.add(
                INodeNo(entry.node.0),
                entry.next_cookie,
                file_type(entry.kind),
                OsStr::from_bytes(entry.name),
            );
            if full {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        match result {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(to_fuser(errno)),
        }
    }

    fn readdirplus(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        cookie: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let result = self.fs.read_dir(NodeId(ino.0), cookie, &mut |entry| {
            let attributes = match self.fs.node(entry.node) {
                Ok(node) => attributes(&node),
                // One damaged inode must not hide its neighbours. The kernel shows the name but does not
                // take over attributes with an impossible size; whoever looks at the file asks for them
                // again, and gets the error.
                Err(_) => FileAttr {
                    ino: INodeNo(entry.node.0),
                    kind: file_type(entry.kind),
                    size: u64::MAX,
                    ..NOBODY
                },
            };
            let full = reply.add(
                attributes.ino,
                entry.next_cookie,
                OsStr::from_bytes(entry.name),
                &FOREVER,
                &attributes,
                GENERATION,
            );
            if full {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        match result {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(to_fuser(errno)),
        }
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let figures = self.fs.statistics();
        reply.statfs(
            figures.blocks,
            0,
            0,
            figures.inodes,
            0,
            figures.block_bytes,
            255,
            figures.block_bytes,
        );
    }

    fn getxattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        name: &OsStr,
        size: u32,
        reply: ReplyXattr,
    ) {
        reply_sized(self.fs.xattr(NodeId(ino.0), name.as_bytes()), size, reply);
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let trusted = match request.uid() {
            0 => TrustedNames::Shown,
            _ => TrustedNames::Hidden,
        };
        reply_sized(self.fs.xattr_names(NodeId(ino.0), trusted), size, reply);
    }

    fn access(&self, _request: &Request, ino: INodeNo, mask: AccessFlags, reply: ReplyEmpty) {
        let wishes = [
            (AccessFlags::W_OK, Wish::Write),
            (AccessFlags::X_OK, Wish::Execute),
            (AccessFlags::empty(), Wish::Read),
        ];
        let result = wishes
            .into_iter()
            .filter(|(flag, _)| mask.contains(*flag))
            .try_for_each(|(_, wish)| self.fs.access(NodeId(ino.0), wish));
        match result {
            Ok(()) => reply.ok(),
            Err(errno) => reply.error(to_fuser(errno)),
        }
    }

    /// Closing needs no word from us; ENOSYS spares the kernel asking again.
    fn flush(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.error(fuser::Errno::ENOSYS);
    }

    /// There is nothing to write back.
    fn fsync(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    /// There is nothing to write back.
    fn fsyncdir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn lseek(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let seek = match whence {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return reply.error(fuser::Errno::EINVAL),
        };
        let Ok(offset) = u64::try_from(offset) else {
            return reply.error(fuser::Errno::ENXIO);
        };
        match self.fs.seek(NodeId(ino.0), offset, seek) {
            // File sizes fit an i64, or the inode was refused.
            Ok(found) => reply.offset(found as i64),
            Err(errno) => reply.error(to_fuser(errno)),
        }
    }
}

/// Answers as `getxattr` and `listxattr` want it: the size, or the bytes if there is room for them.
fn reply_sized(result: Result<Vec<u8>, Errno>, room: u32, reply: ReplyXattr) {
    match result {
        // At most 64 KiB, by the format.
        Ok(bytes) if room == 0 => reply.size(bytes.len() as u32),
        Ok(bytes) if bytes.len() <= room as usize => reply.data(&bytes),
        Ok(_) => reply.error(fuser::Errno::ERANGE),
        Err(errno) => reply.error(to_fuser(errno)),
    }
}

fn to_fuser(errno: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(errno.raw_os_error())
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

fn attributes(node: &Node) -> FileAttr {
    let Inode {
        kind,
        permissions,
        uid,
        gid,
        size,
        nlink,
        mtime,
        rdev,
        ..
    } = node.inode;
    // EROFS keeps one time; the kernel shows it as all three too.
    let time = system_time(mtime);
    FileAttr {
        ino: INodeNo(node.id.0),
        size,
        blocks: node.sectors,
        atime: time,
        mtime: time,
        ctime: time,
        kind: file_type(kind),
        perm: permissions,
        nlink,
        uid,
        gid,
        rdev: rdev.map_or(0, encode_device),
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

//! The adapter of a disk that is shown as one file, for a loop device.
//!
//! The loop device opens the file once and sends direct reads and writes, so the kernel caches no
//! pages of the file. It caches the attributes, of which only a setattr request changes any.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::SystemTime;

use bcow::operation::LiveDisk;
use bcow::{BlockDevice, Disk, Ledger, Space, WritableDevice};
use bcow_union::NodeId;
use bcow_union::errors::{ErrorKind, ErrorLog, Failure};
use fuser::{
    BsdFileFlags, FileAttr, FileHandle, FopenFlags, INodeNo, InitFlags, KernelConfig, LockOwner,
    OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite,
    ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use rustix::io::Errno;

use super::{BACKGROUND_REQUESTS, NO_INODE, id, is_stats, reply};
use crate::buffers;
use crate::disk::{Barriers, Device, Lifetime};
use crate::first_messages::{self, FirstMessages};
use crate::stats::{MountStats, Operation, Running};

/// The inode number of the file. That of the directory is [`NodeId::ROOT`].
const FILE: INodeNo = INodeNo(2);
/// Largest write request in bytes. Larger requests are not faster and need more kernel memory.
const WRITE_BYTES: u32 = 1 << 20;
/// The flags of the protocol that this adapter requests from the kernel.
pub(crate) const FLAGS: InitFlags = InitFlags::FUSE_ASYNC_DIO;
/// The block size of the file in bytes. The loop device gets it by statfs, and announces it as the
/// granularity of discards.
const BLOCK_BYTES: u32 = 4096;

/// Implements fuser's trait for a disk.
pub(crate) struct DiskFile {
    /// The name of the file.
    pub(crate) name: String,
    pub(crate) device: Device,
    pub(crate) barriers: Barriers,
    pub(crate) stats: Arc<MountStats>,
    pub(crate) errors: Arc<ErrorLog>,
    pub(crate) lifetime: Arc<Lifetime>,
    /// The first messages of the threads, if another process can continue with a disk.
    pub(crate) first_messages: Option<Arc<FirstMessages>>,
}

impl DiskFile {
    fn begin(&self, operation: Operation, node: NodeId) -> Running<'_> {
        self.stats.time(operation, node)
    }

    fn size(&self) -> u64 {
        self.device.block_device().size()
    }

    fn directory(&self) -> FileAttr {
        FileAttr {
            ino: INodeNo(NodeId::ROOT.0),
            kind: fuser::FileType::Directory,
            perm: 0o500,
            nlink: 2,
            ..NO_INODE
        }
    }

    fn file(&self) -> FileAttr {
        let size = self.size();
        FileAttr {
            ino: FILE,
            size,
            blocks: size.div_ceil(512),
            kind: fuser::FileType::RegularFile,
            perm: match self.device {
                Device::Writable(_) => 0o600,
                Device::ReadOnly(_) => 0o400,
            },
            nlink: 1,
            mtime: SystemTime::UNIX_EPOCH,
            ..NO_INODE
        }
    }

    /// Records the failure of a request at `offset`, and converts it to an errno.
    fn failed(&self, operation: Operation, offset: Option<u64>, error: &bcow::Error) -> Errno {
        let errno = errno(error);
        let kind = match (error.innermost(), operation) {
            (bcow::Error::Unsupported(_), _) => ErrorKind::ImageUnsupported,
            (bcow::Error::Io { .. }, Operation::Read) => match ErrorKind::of_errno(errno) {
                Some(ErrorKind::Resources) => ErrorKind::Resources,
                _ => ErrorKind::ImageIo,
            },
            (bcow::Error::Io { .. } | bcow::Error::WriteRefused { .. }, _) => {
                ErrorKind::of_errno(errno).unwrap_or(ErrorKind::UpperIo)
            }
            _ => ErrorKind::ImageDamage,
        };
        let failure = Failure {
            kind,
            inode: FILE.0,
            action: operation.action(),
            offset,
            cause: error,
        };
        self.errors.report(&failure, || vec!["the disk".to_owned()]);
        if operation != Operation::Read {
            self.lifetime.lose(errno);
            if let Device::Writable(disk) = &self.device {
                // The page exists, so this does not fail. It is only for the report at the end.
                let set_lost = |ledger: &Ledger| ledger.set_lost(errno.raw_os_error());
                let _ = disk.with(|disk| disk.ledger().map(set_lost));
            }
        }
        errno
    }

    /// Runs `change`, a write or a flush, on the disk, and records its failure.
    fn change(
        &self,
        operation: Operation,
        offset: Option<u64>,
        change: impl FnOnce(&LiveDisk) -> Result<(), bcow::Error>,
    ) -> Result<(), Errno> {
        match &self.device {
            Device::Writable(disk) => {
                change(disk).map_err(|error| self.failed(operation, offset, &error))
            }
            // The loop device is read-only, so the kernel sends no such request.
            Device::ReadOnly(_) => Err(Errno::ROFS),
        }
    }

    /// Grows the disk to `bytes` bytes. A file system above it still has its old size.
    fn grow(&self, bytes: u64) -> Result<(), Errno> {
        let Device::Writable(disk) = &self.device else {
            return Err(Errno::ROFS);
        };
        match bytes {
            _ if bytes < disk.size() || !bytes.is_multiple_of(BLOCK_BYTES.into()) => {
                Err(Errno::INVAL)
            }
            _ if bytes > disk.with(Disk::largest_size) => Err(Errno::FBIG),
            _ if bytes == disk.size() => Ok(()),
            // An error leaves the disk as it was, so no data is lost.
            _ => disk.with(|disk| disk.resize(bytes)).map_err(|error| {
                tracing::warn!("cannot grow the disk to {bytes} bytes: {error}");
                errno(&error)
            }),
        }
    }
}

/// The errno for a failed request to a disk.
fn errno(error: &bcow::Error) -> Errno {
    match error.innermost() {
        bcow::Error::Io { source, .. } => match Errno::from_io_error(source) {
            Some(errno @ (Errno::NOSPC | Errno::DQUOT | Errno::NOMEM)) => errno,
            _ => Errno::IO,
        },
        _ => Errno::IO,
    }
}

impl fuser::Filesystem for DiskFile {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // Without FUSE_ASYNC_DIO, the loop device would wait for each request before the next one.
        // The flag can leave stale pages in the page cache of a file (see the writable adapter).
        // This file has none, because all its requests are direct.
        let _ = config.add_capabilities(FLAGS & config.capabilities());
        let _ = config.set_max_write(if self.first_messages.is_some() {
            buffers::WRITE_BYTES_IN_POOL
        } else {
            WRITE_BYTES
        });
        let _ = config.set_max_background(BACKGROUND_REQUESTS);
        Ok(())
    }

    fn forget(&self, request: &Request, node: INodeNo, _count: u64) {
        if let Some(first) = &self.first_messages
            && first_messages::is_first(node)
        {
            first.arrive();
            buffers::make_present(request);
        }
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let is_file = id(parent) == NodeId::ROOT && name.as_bytes() == self.name.as_bytes();
        reply::found(Ok(is_file.then(|| self.file())), reply);
    }

    fn getattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        let attributes = match ino {
            FILE => self.file(),
            _ => self.directory(),
        };
        reply::attributes(Ok(attributes), reply);
    }

    /// Grows the disk. Only the size can be set; see [`crate::growth`].
    fn setattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let _running = self.begin(Operation::SetAttributes, id(ino));
        let set = match (size, mode.or(uid).or(gid)) {
            (Some(size), None) if ino == FILE => self.grow(size).map(|()| self.file()),
            _ => Err(Errno::PERM),
        };
        reply::attributes(set, reply);
    }

    fn open(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // Without FOPEN_NOFLUSH, each close of the file sends a FLUSH request and waits for the
        // reply. If this process is killed while it has the file open, the kernel closes the file
        // and would wait forever, because no thread is left to reply.
        let flags = FopenFlags::FOPEN_DIRECT_IO
            | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES
            | FopenFlags::FOPEN_NOFLUSH;
        if self.lifetime.open() {
            reply.opened(FileHandle(0), flags)
        } else {
            reply.error(fuser::Errno::EBUSY)
        }
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.lifetime.release();
        reply.ok();
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
        let _running = self.begin(Operation::Read, id(ino));
        let length = u64::from(size).min(self.size().saturating_sub(offset));
        reply::read(reply, |scratch, send| {
            scratch.resize(length as usize, 0);
            self.device
                .block_device()
                .read_at(offset, scratch)
                .map_err(|error| self.failed(Operation::Read, Some(offset), &error))?;
            send(scratch);
            Ok(())
        });
    }

    fn write(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let _running = self.begin(Operation::Write, id(ino));
        let written = self.change(Operation::Write, Some(offset), |disk| {
            disk.write_at(offset, data)
        });
        // A request has at most WRITE_BYTES.
        reply::written(written.map(|()| data.len() as u32), reply);
    }

    fn fsync(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        let _running = self.begin(Operation::Sync, id(ino));
        let flushed = match (self.barriers, &self.device) {
            (Barriers::Off, _) | (_, Device::ReadOnly(_)) => Ok(()),
            (Barriers::On, Device::Writable(_)) => {
                self.change(Operation::Sync, None, |disk| disk.flush())
            }
        };
        reply::empty(flushed, reply);
    }

    /// Discards and writes of zeros. The loop device sends a discard as a hole. It also sends a
    /// write of zeros as a hole, unless the space must stay allocated. So a hole must read as
    /// zeros.
    fn fallocate(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let _running = self.begin(Operation::Allocate, id(ino));
        let space = match mode & !libc::FALLOC_FL_KEEP_SIZE {
            libc::FALLOC_FL_PUNCH_HOLE => Space::Free,
            libc::FALLOC_FL_ZERO_RANGE => Space::Keep,
            _ => return reply.error(fuser::Errno::EOPNOTSUPP),
        };
        let length = length.min(self.size().saturating_sub(offset));
        let zeroed = self.change(Operation::Allocate, Some(offset), |disk| {
            disk.write_zeroes(offset, length, space)
        });
        if zeroed.is_ok() && space == Space::Free && self.barriers == Barriers::On {
            self.lifetime.discard();
        }
        reply::empty(zeroed, reply);
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let blocks = self.size() / u64::from(BLOCK_BYTES);
        reply.statfs(blocks, 0, 0, 2, 0, BLOCK_BYTES, 255, BLOCK_BYTES);
    }

    fn getxattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        name: &OsStr,
        size: u32,
        reply: ReplyXattr,
    ) {
        if is_stats(id(ino), name) {
            reply::sized(self.stats.for_xattr(), size, reply)
        } else {
            // Not a failure of the mount: the kernel asks for attributes of its own.
            reply.error(fuser::Errno::ENODATA)
        }
    }
}

//! The adapter of an image that is mounted by itself.

use std::ffi::OsStr;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;

use bcow_erofs::reader::Inode;
use bcow_union::NodeId;
use fuser::{
    AccessFlags, FileAttr, FileHandle, INodeNo, InitFlags, KernelConfig, LockOwner, OpenFlags,
    ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek,
    ReplyOpen, ReplyStatfs, ReplyXattr, Request,
};

use super::{
    FOREVER, GENERATION, NOBODY, damaged, encode_device, file_type, is_stats, negotiate,
    reply_bytes, reply_empty, reply_read, reply_seek, reply_sized, system_time, to_fuser,
};
use crate::fs::{ImageFs, Node, TrustedNames, Wish};
use crate::options::Permissions;
use crate::stats::{MountStats, Operation};

/// The file system as fuser wants it.
pub(crate) struct ReadOnly {
    fs: ImageFs,
    stats: Arc<MountStats>,
    permissions: Permissions,
    /// Whether the kernel opens files and directories without asking.
    opens: Opens,
}

#[derive(Debug, Clone, Copy)]
struct Opens {
    files_unasked: bool,
    directories_unasked: bool,
}

impl ReadOnly {
    pub(crate) fn new(fs: ImageFs, stats: Arc<MountStats>, permissions: Permissions) -> Self {
        ReadOnly {
            fs,
            stats,
            permissions,
            opens: Opens {
                files_unasked: false,
                directories_unasked: false,
            },
        }
    }
}

impl fuser::Filesystem for ReadOnly {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
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
        let offered = negotiate(config, wanted);
        self.opens = Opens {
            files_unasked: offered.contains(InitFlags::FUSE_NO_OPEN_SUPPORT),
            directories_unasked: offered.contains(InitFlags::FUSE_NO_OPENDIR_SUPPORT),
        };
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _running = self.stats.time(Operation::Lookup);
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
        let _running = self.stats.time(Operation::Stat);
        match self.fs.node(NodeId(ino.0)) {
            Ok(node) => reply.attr(&FOREVER, &attributes(&node)),
            Err(errno) => reply.error(to_fuser(errno)),
        }
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        let _running = self.stats.time(Operation::ReadLink);
        reply_bytes(self.fs.read_link(NodeId(ino.0)), reply);
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
        let _running = self.stats.time(Operation::Read);
        reply_read(reply, |scratch, send| {
            self.fs.read(NodeId(ino.0), offset, size, scratch, send)
        });
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
        let _running = self.stats.time(Operation::ReadDirectory);
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
        let _running = self.stats.time(Operation::ReadDirectory);
        let result = self.fs.read_dir(NodeId(ino.0), cookie, &mut |entry| {
            let attributes = match self.fs.node(entry.node) {
                Ok(node) => attributes(&node),
                Err(_) => damaged(INodeNo(entry.node.0), entry.kind),
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
        let _running = self.stats.time(Operation::StatFs);
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
        let _running = self.stats.time(Operation::GetXattr);
        let node = NodeId(ino.0);
        let value = match is_stats(node, name) {
            true => self.stats.for_xattr(),
            false => self.fs.xattr(node, name.as_bytes()),
        };
        reply_sized(value, size, reply);
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let _running = self.stats.time(Operation::GetXattr);
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
        reply_empty(result, reply);
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
        let _running = self.stats.time(Operation::Seek);
        reply_seek(offset, whence, reply, |offset, seek| {
            self.fs.seek(NodeId(ino.0), offset, seek)
        });
    }
}

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

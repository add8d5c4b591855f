//! The adapter of an image without an upper.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bcow_union::NodeId;
use bcow_union::fs::Attributes;
use fuser::{
    AccessFlags, FileAttr, FileHandle, FopenFlags, INodeNo, InitFlags, KernelConfig, LockOwner,
    OpenFlags, ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry,
    ReplyLseek, ReplyOpen, ReplyStatfs, ReplyXattr, Request,
};

use super::convert::encoded;
use super::{Answering, FOREVER, damaged, id, is_stats, negotiate, reply};
use crate::fs::{AccessKind, ImageFs, Node, TrustedNames};
use crate::options::{MountOptions, Permissions};
use crate::owners::Owners;
use crate::request_threads::RequestThreads;
use crate::stats::{MountStats, Operation};

/// Implements fuser's trait for an [`ImageFs`].
pub(crate) struct ReadOnly {
    fs: ImageFs,
    stats: Arc<MountStats>,
    request_threads: Arc<RequestThreads>,
    permissions: Permissions,
    owners: Owners,
    /// Whether the kernel opens files and directories without a request.
    opens: Opens,
    /// The flags of the protocol that are in use, for a process that takes the mount over.
    agreed: Arc<AtomicU64>,
}

#[derive(Debug, Clone, Copy)]
struct Opens {
    files_unasked: bool,
    directories_unasked: bool,
}

impl ReadOnly {
    pub(crate) fn new(
        fs: ImageFs,
        stats: Arc<MountStats>,
        request_threads: Arc<RequestThreads>,
        options: &MountOptions,
        agreed: Arc<AtomicU64>,
    ) -> Self {
        ReadOnly {
            fs,
            stats,
            request_threads,
            permissions: options.permissions(),
            owners: options.owners().clone(),
            opens: Opens {
                files_unasked: false,
                directories_unasked: false,
            },
            agreed,
        }
    }

    fn begin(&self, operation: Operation, node: NodeId) -> Answering<'_> {
        Answering::begin(&self.request_threads, &self.stats, operation, node)
    }
}

impl fuser::Filesystem for ReadOnly {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let mut wanted = InitFlags::FUSE_NO_OPENDIR_SUPPORT | InitFlags::FUSE_ASYNC_DIO;
        // If the kernel checks the mode, it must also see the ACLs. The flag makes the kernel check
        // the mode.
        if self.permissions == Permissions::ByMode {
            wanted |= InitFlags::FUSE_POSIX_ACL;
        }
        let enabled = negotiate(config, wanted);
        self.agreed.store(enabled.bits(), Ordering::Relaxed);
        self.opens = Opens {
            files_unasked: enabled.contains(InitFlags::FUSE_NO_OPEN_SUPPORT),
            directories_unasked: enabled.contains(InitFlags::FUSE_NO_OPENDIR_SUPPORT),
        };
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _running = self.begin(Operation::Lookup, id(parent));
        let found = self.fs.lookup(id(parent), name.as_bytes());
        let shown = found.map(|found| found.map(|node| attributes(node, &self.owners)));
        reply::found(shown, reply);
    }

    fn getattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        let _running = self.begin(Operation::Stat, id(ino));
        let node = self.fs.node(id(ino));
        reply::attributes(node.map(|node| attributes(node, &self.owners)), reply);
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        let _running = self.begin(Operation::ReadLink, id(ino));
        reply::bytes(self.fs.read_link(id(ino)), reply);
    }

    fn open(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply::opened(
            self.opens.files_unasked,
            FopenFlags::FOPEN_KEEP_CACHE,
            reply,
        );
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
        reply::read(reply, |scratch, send| {
            self.fs.read(id(ino), offset, size, scratch, send)
        });
    }

    fn opendir(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let flags = FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_CACHE_DIR;
        reply::opened(self.opens.directories_unasked, flags, reply);
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        cookie: u64,
        reply: ReplyDirectory,
    ) {
        let _running = self.begin(Operation::ReadDirectory, id(ino));
        reply::listing(reply, |each| self.fs.read_dir(id(ino), cookie, each));
    }

    fn readdirplus(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        cookie: u64,
        reply: ReplyDirectoryPlus,
    ) {
        let _running = self.begin(Operation::ReadDirectory, id(ino));
        reply::listing_plus(reply, |each| {
            self.fs.read_dir(id(ino), cookie, &mut |entry| {
                let attributes = match self.fs.node(entry.node) {
                    Ok(node) => attributes(node, &self.owners),
                    Err(_) => damaged(INodeNo(entry.node.0), entry.kind),
                };
                each(entry.name, entry.next_cookie, &attributes, FOREVER)
            })
        });
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let _running = self.begin(Operation::StatFs, NodeId::ROOT);
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
        let _running = self.begin(Operation::GetXattr, id(ino));
        let node = id(ino);
        let value = if is_stats(node, name) {
            self.stats.for_xattr()
        } else {
            self.fs
                .xattr(node, name.as_bytes())
                .map(|value| self.owners.shown_xattr(name.as_bytes(), value))
        };
        reply::sized(value, size, reply);
    }

    fn listxattr(&self, request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let _running = self.begin(Operation::GetXattr, id(ino));
        let trusted = match request.uid() {
            0 => TrustedNames::Shown,
            _ => TrustedNames::Hidden,
        };
        reply::sized(self.fs.xattr_names(id(ino), trusted), size, reply);
    }

    fn access(&self, _request: &Request, ino: INodeNo, mask: AccessFlags, reply: ReplyEmpty) {
        let wishes = [
            (AccessFlags::W_OK, AccessKind::Write),
            (AccessFlags::X_OK, AccessKind::Execute),
            (AccessFlags::empty(), AccessKind::Read),
        ];
        let result = wishes
            .into_iter()
            .filter(|(flag, _)| mask.contains(*flag))
            .try_for_each(|(_, wish)| self.fs.access(id(ino), wish));
        reply::empty(result, reply);
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
        let _running = self.begin(Operation::Seek, id(ino));
        reply::seek(offset, whence, reply, |offset, seek| {
            self.fs.seek(id(ino), offset, seek)
        });
    }
}

fn attributes(node: Node, owners: &Owners) -> FileAttr {
    let attributes = Attributes::of_inode(node.id, &node.inode, node.sectors);
    encoded(owners.shown(attributes))
}

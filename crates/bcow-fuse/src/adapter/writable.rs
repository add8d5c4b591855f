//! The adapter of an image with an upper.
//!
//! Files need no open request (FUSE_NO_OPEN_SUPPORT), unless the mount shares files: each request
//! names its node, and bcow keeps no state per open file (in a mount that shares files, it counts
//! them). The kernel itself handles locks and checks permissions (`default_permissions`).

use std::ffi::OsStr;
use std::io;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use bcow_union::NodeId;
use bcow_union::fs::{Attributes, Changes, EntryPlus, New, RequestId, SyncScope, UnionFs};
use fuser::{
    BsdFileFlags, CopyFileRangeFlags, FileAttr, FileHandle, FopenFlags, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs,
    ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use parking_lot::{RwLock, RwLockReadGuard};
use rustix::io::Errno;

use super::convert::{
    allocate_how, caller, decoded_time, encoded, permissions, privileges_of_writer, rename_how,
    set_how, without_trusted,
};
use super::privileges::{drop_set_gid, drop_set_id, drop_set_id_of_content, validity};
use super::sharing::{self, Opening, Sharing};
use super::{Answering, FOREVER, GENERATION, damaged, id, is_alias, is_stats, negotiate, reply};
use crate::buffers;
use crate::first_messages::{self, FirstMessages};
use crate::options::{MountOptions, WriteCache};
use crate::owners::Owners;
use crate::request_threads::{Kind, RequestThreads};
use crate::stats::{MountStats, Operation};

/// Largest write request in bytes. Larger requests are not faster and need more kernel memory.
const WRITE_BYTES: u32 = 1 << 20;

/// Most bytes that one copy_file_range request copies. The program calls again for the rest, and
/// can be interrupted in between. The reply has 32 bits.
const COPY_BYTES: u64 = 1 << 30;

/// Implements fuser's trait for a [`UnionFs`].
pub(crate) struct Writable {
    fs: Arc<UnionFs>,
    stats: Arc<MountStats>,
    request_threads: Arc<RequestThreads>,
    write_cache: WriteCache,
    owners: Owners,
    /// Whether the kernel opens files without a request.
    opens_unasked: bool,
    /// Whether the kernel leaves the clearing of set-id bits to bcow.
    drops_set_id: bool,
    /// Only for a mount that shares files.
    sharing: Option<Sharing>,
    gate: Gate,
    /// The flags of the protocol that are in use, for a process that takes the mount over.
    agreed: Arc<AtomicU64>,
    /// The first messages of the threads, if another process can take the mount over.
    first_messages: Option<Arc<FirstMessages>>,
}

/// Passes the requests of a mount, except while a snapshot is taken, and until another process
/// shall take the mount over. A request that waits here when the process ends was not executed, and
/// the kernel sends it to the other process.
///
/// Each request holds the lock shared while it is executed, except for the ends of descriptors and
/// nodes, which change no file that has a name. It is acquired before all locks of the file system.
pub(crate) type Gate = Arc<RwLock<()>>;

impl Writable {
    pub(crate) fn new(
        fs: Arc<UnionFs>,
        stats: Arc<MountStats>,
        request_threads: Arc<RequestThreads>,
        options: &MountOptions,
        gate: Gate,
        agreed: Arc<AtomicU64>,
        sharing: Option<Sharing>,
    ) -> Self {
        let first_messages = fs.ledger().map(|_| Arc::default());
        Writable {
            fs,
            stats,
            request_threads,
            write_cache: options.write_cache(),
            owners: options.owners().clone(),
            opens_unasked: false,
            drops_set_id: false,
            sharing,
            gate,
            agreed,
            first_messages,
        }
    }

    /// The first messages of its threads, if another process can take the mount over.
    pub(crate) fn first_messages(&self) -> Option<Arc<FirstMessages>> {
        self.first_messages.clone()
    }

    fn make(
        &self,
        request: &Request,
        umask: u32,
        (parent, name, mode): (INodeNo, &OsStr, u32),
        new: &New<'_>,
    ) -> Result<Attributes, Errno> {
        let caller = self.owners.caller(caller(request, umask))?;
        let request = request_id(request);
        let (parent, name, permissions) = (id(parent), name.as_bytes(), permissions(mode));
        self.fs
            .with_room(|fs| fs.make_requested(request, &caller, parent, name, permissions, new))
    }

    fn shown(&self, attributes: Attributes) -> FileAttr {
        encoded(self.owners.shown(attributes))
    }

    /// The attributes for an entry. Their number is the one by which the kernel is to know the
    /// node.
    fn entry(&self, attributes: Attributes) -> FileAttr {
        let shown = self.shown(attributes);
        match self.sharing {
            Some(_) => Sharing::entry(&self.fs, shown),
            None => shown,
        }
    }

    /// How long the kernel may cache the attributes of a number at most.
    fn longest_validity(&self, ino: INodeNo, shown: &FileAttr) -> Duration {
        match self.sharing {
            Some(_) => Sharing::longest_validity(&self.fs, ino, shown),
            None => FOREVER,
        }
    }

    /// Replies to a request by the number `ino`.
    fn reply_attributes(&self, ino: INodeNo, set: Result<Attributes, Errno>, reply: ReplyAttr) {
        let shown = set.map(|found| self.shown(found));
        let longest = shown.as_ref();
        let longest = longest.map_or(FOREVER, |shown| self.longest_validity(ino, shown));
        reply::attributes_within(shown, longest, reply);
    }

    /// Replies with an entry that can be known to the kernel already.
    fn reply_entry(&self, found: Result<Option<Attributes>, Errno>, reply: ReplyEntry) {
        let shown = found.map(|found| found.map(|found| self.entry(found)));
        let longest = match &shown {
            Ok(Some(shown)) => self.longest_validity(shown.ino, shown),
            _ => FOREVER,
        };
        reply::found_within(shown, longest, reply);
    }

    /// How a descriptor of a new file is opened.
    fn open_new(&self, attributes: &Attributes, flags: i32) -> Result<Option<Opening>, Errno> {
        let open = |sharing: &Sharing| {
            sharing.open(&self.fs, INodeNo(attributes.node.0), OpenFlags(flags))
        };
        self.sharing.as_ref().map(open).transpose()
    }

    /// The attributes of a node are changed by the number `ino`.
    fn changed(&self, ino: INodeNo) {
        if let Some(sharing) = &self.sharing {
            sharing.changed(&self.fs, ino);
        }
    }

    /// Replies to a request that has changed names of nodes.
    fn reply_names(
        &self,
        changed: Result<impl IntoIterator<Item = NodeId>, Errno>,
        reply: ReplyEmpty,
    ) {
        let done = changed.map(|nodes| {
            for node in nodes {
                self.changed(INodeNo(node.0));
            }
        });
        reply::empty(done, reply);
    }

    fn forget_node(&self, node: NodeId, count: u64) {
        self.fs.forget_and(node, count, || {
            if let Some(sharing) = &self.sharing {
                sharing.forgotten(&self.fs, node);
            }
        });
    }

    /// Whether programs that have opened this number read the image, although the file has changed.
    fn is_outdated(&self, ino: INodeNo) -> bool {
        self.sharing.is_some() && Sharing::is_outdated(&self.fs, ino)
    }

    /// Before a FALLOCATE or COPY_FILE_RANGE.
    fn drop_set_id_of_content(&self, request: &Request, node: NodeId) -> Result<(), Errno> {
        if self.drops_set_id {
            drop_set_id_of_content(&self.fs, &self.owners, request, node)
        } else {
            Ok(())
        }
    }

    /// Changes the content of a file, and keeps its modification time if the kernel sends it.
    fn change_content<T>(
        &self,
        node: NodeId,
        mut change: impl FnMut(&UnionFs) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        self.fs.with_room(|fs| match self.write_cache {
            WriteCache::Back => fs.with_kernel_time(node, &mut change),
            WriteCache::Through => change(fs),
        })
    }

    /// The kernel receives the attributes of a new file.
    fn time_is_sent(&self, attributes: &Attributes) {
        if self.write_cache == WriteCache::Back {
            self.fs.set_kernel_time(attributes);
        }
    }

    fn begin(&self, operation: Operation, node: NodeId) -> Passing<'_> {
        Passing {
            _answering: Answering::begin(&self.request_threads, &self.stats, operation, node),
            _passing: self.gate.read(),
        }
    }

    /// Receives the first message of a thread.
    fn receive_first(&self, request: &Request, first: &FirstMessages) {
        first.arrive();
        // Parks the thread if it is not needed: it needs no pages then.
        drop(self.request_threads.begin(Kind::Brief));
        buffers::make_present(request);
    }
}

/// A request that this thread executes.
struct Passing<'a> {
    _passing: RwLockReadGuard<'a, ()>,
    _answering: Answering<'a>,
}

/// The number of a request. The highest bit says that the kernel sends it again
/// (FUSE_UNIQUE_RESEND of linux/fuse.h).
fn request_id(request: &Request) -> RequestId {
    const RESENT: u64 = 1 << 63;
    let number = request.unique().0;
    RequestId {
        number: number & !RESENT,
        is_resent: number & RESENT != 0,
    }
}

impl fuser::Filesystem for Writable {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // FUSE_ASYNC_DIO is left out. The kernel invalidates the pages that a direct write covers
        // before the write, and once more after a synchronous write. With the flag, `io_submit`
        // returns before the write is done, and pages that a reader has filled in the meantime stay
        // stale.
        let mut wanted = InitFlags::FUSE_POSIX_ACL
            | InitFlags::FUSE_DONT_MASK
            | InitFlags::FUSE_HANDLE_KILLPRIV_V2;
        if self.write_cache == WriteCache::Back {
            wanted |= InitFlags::FUSE_WRITEBACK_CACHE;
        }
        if self.sharing.is_some() {
            wanted |= InitFlags::FUSE_PASSTHROUGH;
        }
        let offered = negotiate(config, wanted);
        // The hidden mount is on no other file system. The kernel allows a depth of two, so
        // overlayfs can still use this mount.
        let has_depth = config.set_max_stack_depth(1).is_ok();
        match &self.sharing {
            Some(sharing) if has_depth && offered.contains(InitFlags::FUSE_PASSTHROUGH) => {
                sharing.begin(&self.fs);
                self.fs.pass_whole_files();
            }
            _ => self.sharing = None,
        }
        self.agreed.store(offered.bits(), Ordering::Relaxed);
        self.opens_unasked = offered.contains(InitFlags::FUSE_NO_OPEN_SUPPORT);
        self.drops_set_id = offered.contains(InitFlags::FUSE_HANDLE_KILLPRIV_V2);
        let _ = config.set_max_write(if self.first_messages.is_some() {
            buffers::WRITE_BYTES_IN_POOL
        } else {
            WRITE_BYTES
        });
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let _running = self.begin(Operation::Lookup, id(parent));
        self.reply_entry(self.fs.lookup(id(parent), name.as_bytes()), reply);
    }

    fn forget(&self, request: &Request, ino: INodeNo, count: u64) {
        if let Some(first) = &self.first_messages
            && first_messages::is_first(ino)
        {
            return self.receive_first(request, first);
        }
        // A batch of forgets is one request, and each can free a large file.
        let _turn = self.request_threads.begin(Kind::BriefInBatch);
        self.forget_node(id(ino), count);
    }

    fn getattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        let _running = self.begin(Operation::Stat, id(ino));
        self.reply_attributes(ino, self.fs.attributes(id(ino)), reply);
    }

    fn setattr(
        &self,
        request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        // The host file system sets ctime.
        _ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let _running = self.begin(Operation::SetAttributes, id(ino));
        if size.is_some() && self.is_outdated(ino) {
            // The pages are those of the alias, and the kernel must drop them with the size. It
            // looks the path up again.
            return reply.error(fuser::Errno::ESTALE);
        }
        let node = id(ino);
        let (uid, gid) = match self.owners.to_inner(uid, gid) {
            Ok(owners) => owners,
            Err(errno) => return reply.error(reply::to_fuser(errno)),
        };
        let mut changes = Changes {
            permissions: mode.map(permissions),
            uid,
            gid,
            size,
            atime: atime.map(decoded_time),
            mtime: mtime.map(decoded_time),
            drop_privileges: false,
        };
        let ready = if self.drops_set_id {
            drop_set_id(&self.fs, &self.owners, request, node, &mut changes)
        } else {
            Ok(())
        };
        let set = ready.and_then(|()| self.fs.with_room(|fs| fs.set_attributes(node, &changes)));
        self.changed(ino);
        self.reply_attributes(ino, set, reply);
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        let _running = self.begin(Operation::ReadLink, id(ino));
        reply::bytes(self.fs.read_link(id(ino)), reply);
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let _running = self.begin(Operation::MakeNode, id(parent));
        let made = New::of_mode(mode, rdev)
            .and_then(|new| self.make(request, umask, (parent, name, mode), &new))
            .inspect(|attributes| self.time_is_sent(attributes));
        reply::entry(made.map(|found| self.shown(found)), reply);
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        reply: ReplyEntry,
    ) {
        let _running = self.begin(Operation::MakeDirectory, id(parent));
        let made = self.make(request, umask, (parent, name, mode), &New::Directory);
        reply::entry(made.map(|found| self.shown(found)), reply);
    }

    fn unlink(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _running = self.begin(Operation::Unlink, id(parent));
        let request = request_id(request);
        let removed = self
            .fs
            .with_room(|fs| fs.unlink_requested(request, id(parent), name.as_bytes()));
        self.reply_names(removed, reply);
    }

    fn rmdir(&self, request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _running = self.begin(Operation::RemoveDirectory, id(parent));
        let request = request_id(request);
        let removed = self.fs.with_room(|fs| {
            let removed = fs.remove_directory(id(parent), name.as_bytes());
            request.removed(removed, Errno::NOENT)
        });
        reply::empty(removed, reply);
    }

    fn symlink(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        target: &Path,
        reply: ReplyEntry,
    ) {
        let _running = self.begin(Operation::Symlink, id(parent));
        let new = New::Symlink(target.as_os_str().as_bytes());
        let made = self.make(request, 0, (parent, name, 0o777), &new);
        reply::entry(made.map(|found| self.shown(found)), reply);
    }

    fn rename(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let _running = self.begin(Operation::Rename, id(parent));
        let Some(how) = rename_how(flags) else {
            return reply.error(fuser::Errno::EINVAL);
        };
        let renamed = self.fs.with_room(|fs| {
            fs.rename_requested(
                request_id(request),
                (id(parent), name.as_bytes()),
                (id(new_parent), new_name.as_bytes()),
                how,
            )
        });
        self.reply_names(renamed, reply);
    }

    fn link(
        &self,
        request: &Request,
        ino: INodeNo,
        new_parent: INodeNo,
        new_name: &OsStr,
        reply: ReplyEntry,
    ) {
        let _running = self.begin(Operation::Link, id(ino));
        let (request, parent) = (request_id(request), id(new_parent));
        let linked = self
            .fs
            .with_room(|fs| fs.link_requested(request, id(ino), parent, new_name.as_bytes()));
        self.reply_entry(linked.map(Some), reply);
    }

    fn open(&self, _request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let Some(sharing) = &self.sharing else {
            return reply::opened(self.opens_unasked, FopenFlags::FOPEN_KEEP_CACHE, reply);
        };
        let _running = self.begin(Operation::Open, id(ino));
        match sharing.open(&self.fs, ino, flags) {
            Ok(Opening::Ordinary) => {
                reply.opened(sharing::COUNTED, FopenFlags::FOPEN_KEEP_CACHE);
            }
            Ok(Opening::Unchanged(number)) => sharing::opened(number, sharing::UNCHANGED, reply),
            Ok(Opening::Passed(number)) => sharing::opened(number, FileHandle(0), reply),
            Ok(Opening::Again) => reply.error(fuser::Errno::ESTALE),
            Err(errno) => reply.error(reply::to_fuser(errno)),
        }
    }

    fn release(
        &self,
        _request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        if let Some(sharing) = &self.sharing {
            sharing.closed(&self.fs, id(ino), handle);
        }
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
        reply::read(reply, |scratch, send| {
            self.fs.read(id(ino), offset, size, scratch, send)
        });
    }

    fn write(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let _running = self.begin(Operation::Write, id(ino));
        let privileges = privileges_of_writer(write_flags);
        let written =
            self.change_content(id(ino), |fs| fs.write(id(ino), offset, data, privileges));
        reply::written(written, reply);
    }

    fn fsync(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        data_only: bool,
        reply: ReplyEmpty,
    ) {
        let _running = self.begin(Operation::Sync, id(ino));
        let what = if data_only { SyncScope::Data } else { SyncScope::All };
        reply::empty(self.fs.sync(id(ino), what), reply);
    }

    fn opendir(&self, _request: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let _running = self.begin(Operation::OpenDirectory, id(ino));
        match self.fs.open_directory(id(ino)) {
            Ok(handle) => reply.opened(FileHandle(handle), FopenFlags::empty()),
            Err(errno) => reply.error(reply::to_fuser(errno)),
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        cookie: u64,
        reply: ReplyDirectory,
    ) {
        let _running = self.begin(Operation::ReadDirectory, id(ino));
        reply::listing(reply, |each| {
            self.fs.read_directory(id(ino), handle.0, cookie, each)
        });
    }

    fn readdirplus(
        &self,
        request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        cookie: u64,
        reply: ReplyDirectoryPlus,
    ) {
        let _running = self.begin(Operation::ReadDirectory, id(ino));
        reply::listing_plus(reply, |each| {
            let (mut is_first, mut alone) = (true, None);
            let mut each = |entry: EntryPlus<'_>| {
                let attributes = match entry.attributes {
                    Ok(attributes) => self.entry(attributes),
                    Err(node) => damaged(INodeNo(node.0), entry.kind),
                };
                if is_alias(attributes.ino) {
                    // The next request begins with this name.
                    alone = is_first.then(|| sharing::without_attributes(&entry, &attributes));
                    return ControlFlow::Break(());
                }
                is_first = false;
                let longest = self.longest_validity(attributes.ino, &attributes);
                each(entry.name, entry.next_cookie, &attributes, longest)
            };
            let (ino, handle) = (id(ino), handle.0);
            self.fs
                .read_directory_plus(ino, handle, cookie, &mut each)?;
            if let Some(sharing) = &self.sharing {
                sharing.close_left_over(&self.fs);
                if let Some(name) = alone {
                    sharing.list_alone(request, &name);
                }
            }
            Ok(())
        });
    }

    fn releasedir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        reply: ReplyEmpty,
    ) {
        self.fs.close_directory(handle.0);
        reply.ok();
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        let _running = self.begin(Operation::Sync, id(ino));
        reply::empty(self.fs.sync(id(ino), SyncScope::All), reply);
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let _running = self.begin(Operation::StatFs, NodeId::ROOT);
        match self.fs.statistics() {
            Ok(figures) => reply.statfs(
                figures.blocks,
                figures.free,
                figures.available,
                figures.inodes,
                figures.inodes_free,
                figures.block_bytes,
                255,
                figures.block_bytes,
            ),
            Err(errno) => reply.error(reply::to_fuser(errno)),
        }
    }

    fn setxattr(
        &self,
        request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        let _running = self.begin(Operation::SetXattr, id(ino));
        let node = id(ino);
        if is_stats(node, name) {
            return reply.error(fuser::Errno::EPERM);
        }
        let Some(how) = set_how(flags) else {
            return reply.error(fuser::Errno::EINVAL);
        };
        let set = self
            .owners
            .stored_xattr(name.as_bytes(), value)
            .and_then(|stored| {
                let (name, value) = (name.as_bytes(), stored.as_deref().unwrap_or(value));
                self.fs.with_room(|fs| {
                    fs.set_xattr_requested(request_id(request), node, name, value, how)
                })
            })
            .and_then(|()| match name.as_bytes() {
                b"system.posix_acl_access" => drop_set_gid(&self.fs, &self.owners, request, node),
                _ => Ok(()),
            });
        self.changed(ino);
        reply::empty(set, reply);
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
        let names = self
            .fs
            .xattr_names(id(ino))
            .map(|names| match request.uid() {
                0 => names,
                // As in other file systems, only privileged callers see these names.
                _ => without_trusted(&names),
            });
        reply::sized(names, size, reply);
    }

    fn removexattr(&self, request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let _running = self.begin(Operation::SetXattr, id(ino));
        let node = id(ino);
        if is_stats(node, name) {
            return reply.error(fuser::Errno::EPERM);
        }
        let removed = self.fs.with_room(|fs| {
            let removed = fs.remove_xattr(node, name.as_bytes());
            request_id(request).removed(removed, Errno::NODATA)
        });
        self.changed(ino);
        reply::empty(removed, reply);
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        let _running = self.begin(Operation::Create, id(parent));
        let made = self
            .make(request, umask, (parent, name, mode), &New::File)
            .inspect(|attributes| self.time_is_sent(attributes));
        let made = made.and_then(|found| {
            // After an error, the kernel does not get the reference.
            let opening = self.open_new(&found, flags);
            let opening = opening.inspect_err(|_| self.forget_node(found.node, 1))?;
            Ok((opening, self.shown(found)))
        });
        let (opening, attributes) = match made {
            Ok(made) => made,
            Err(errno) => return reply.error(reply::to_fuser(errno)),
        };
        let valid = validity(&attributes).min(self.longest_validity(attributes.ino, &attributes));
        if let (Some(sharing), Some(Opening::Passed(number))) = (&self.sharing, &opening) {
            sharing.created(request, &attributes, valid, *number);
            // fuser must answer, too.
            return reply.error(fuser::Errno::EEXIST);
        }
        reply.created(
            &valid,
            &attributes,
            GENERATION,
            opening.map_or(FileHandle(0), |_| sharing::COUNTED),
            FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH,
        );
    }

    fn fallocate(
        &self,
        request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let _running = self.begin(Operation::Allocate, id(ino));
        let Some(how) = allocate_how(mode) else {
            return reply.error(fuser::Errno::EOPNOTSUPP);
        };
        let allocated = self
            .drop_set_id_of_content(request, id(ino))
            .and_then(|()| {
                self.change_content(id(ino), |fs| fs.allocate(id(ino), offset, length, how))
            });
        reply::empty(allocated, reply);
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
        if self.write_cache == WriteCache::Back {
            // Data that the kernel has not written back yet would look like a hole. After ENOSYS
            // the kernel treats the whole file as data.
            return reply.error(fuser::Errno::ENOSYS);
        }
        reply::seek(offset, whence, reply, |offset, seek| {
            if self.is_outdated(ino) {
                self.fs.seek_in_image(id(ino), offset, seek)
            } else {
                self.fs.seek(id(ino), offset, seek)
            }
        });
    }

    fn copy_file_range(
        &self,
        request: &Request,
        from: INodeNo,
        _handle_from: FileHandle,
        offset_from: u64,
        to: INodeNo,
        _handle_to: FileHandle,
        offset_to: u64,
        length: u64,
        flags: CopyFileRangeFlags,
        reply: ReplyWrite,
    ) {
        let _running = self.begin(Operation::CopyRange, id(to));
        if !flags.is_empty() {
            return reply.error(fuser::Errno::EINVAL);
        }
        if self.is_outdated(from) {
            // The kernel copies what the program reads.
            return reply.error(fuser::Errno::EXDEV);
        }
        let length = length.min(COPY_BYTES);
        let copied = self.drop_set_id_of_content(request, id(to)).and_then(|()| {
            self.change_content(id(to), |fs| {
                fs.copy_range(id(from), offset_from, id(to), offset_to, length)
            })
        });
        // No more bytes are copied than were requested.
        reply::written(copied.map(|copied| copied as u32), reply);
    }
}

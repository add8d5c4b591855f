//! The file system of the store: decodes the requests of the kernel.
//!
//! ```text
//! STORE/<base64 of the reference>/<digest>/diff   a link to the mount
//! STORE/<base64 of the reference>/<digest>/info   the description
//! STORE/<base64 of the reference>/<digest>/blob   the layer of the ordinary image
//! ```
//!
//! An engine reports a use by the creation of `use` in the directory of a layer, and the end of a
//! use by the removal of the directory. Both get ENOENT.
//!
//! The kernel caches neither names nor attributes, so that this process checks at each access
//! whether the layer is still mounted. Only the attributes of the root directory are cached: an
//! engine reads them first, and refuses all work on an error; without the cache, that would happen
//! whenever no process serves the store. Each request that can take long has a thread of its own,
//! which answers it.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, SystemTime};

use bcow_tool::registry::on_one_line;
use fuser::{
    AccessFlags, Errno, FileAttr, FileHandle, FileType, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, OpenAccMode, OpenFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, Request,
};
use parking_lot::Mutex;

use crate::error::Error;
use crate::nodes::{Kind, LayerDirectory, Nodes, ROOT};
use crate::reference::{self, Reference};
use crate::store::Store;

/// Limit of the threads that answer requests at the same time, one for each request.
const MAX_THREADS: usize = 256;

/// The file system.
pub struct Files(Arc<Inner>);

struct Inner {
    store: Arc<Store>,
    /// Protects the list of inodes.
    nodes: Mutex<Nodes>,
    /// Protects the list of open blobs.
    open: Mutex<Open>,
    /// The number of running threads that answer requests.
    threads: Arc<AtomicUsize>,
    started: SystemTime,
}

#[derive(Default)]
struct Open {
    last: u64,
    files: HashMap<u64, Arc<File>>,
}

impl Files {
    /// The file system of a store.
    pub fn new(store: Arc<Store>) -> Self {
        Files(Arc::new(Inner {
            store,
            nodes: Mutex::new(Nodes::new()),
            open: Mutex::default(),
            threads: Arc::default(),
            started: SystemTime::now(),
        }))
    }

    /// Calls `answer` in a new thread, or `refuse` if too many threads are running.
    fn in_thread<R: Send + 'static>(
        &self,
        reply: R,
        answer: impl FnOnce(&Inner, R) + Send + 'static,
        refuse: impl FnOnce(R),
    ) {
        let inner = Arc::clone(&self.0);
        in_thread(
            &self.0.threads,
            reply,
            move |reply| answer(&inner, reply),
            |reply| {
                self.0.store.count_refusal();
                refuse(reply);
            },
        );
    }
}

fn in_thread<R: Send + 'static>(
    threads: &Arc<AtomicUsize>,
    reply: R,
    answer: impl FnOnce(R) + Send + 'static,
    refuse: impl FnOnce(R),
) {
    let Some(running) = Running::begin(threads) else {
        tracing::warn!("{MAX_THREADS} requests are running, another one is refused");
        return refuse(reply);
    };
    // The thread gets the reply through a channel: a thread that cannot start would drop it.
    let (sender, receiver) = mpsc::channel();
    let started = thread::Builder::new().spawn(move || {
        let _running = running;
        if let Ok(reply) = receiver.recv() {
            answer(reply);
        }
    });
    match started {
        // The thread does nothing before it has the reply.
        Ok(_) => drop(sender.send(reply)),
        Err(error) => {
            tracing::warn!("a request is refused: cannot start a thread: {error}");
            refuse(reply);
        }
    }
}

/// Counts a thread that answers a request, also if it panics.
struct Running(Arc<AtomicUsize>);

impl Running {
    /// `None` if too many threads are running.
    fn begin(threads: &Arc<AtomicUsize>) -> Option<Self> {
        let before = threads.fetch_add(1, Ordering::Relaxed);
        let running = Running(Arc::clone(threads));
        (before < MAX_THREADS).then_some(running)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Inner {
    fn kind(&self, ino: INodeNo) -> Option<Kind> {
        self.nodes.lock().get(ino.0)
    }

    /// The inode of a name in a directory; `None` if there is no such name.
    fn look_up(&self, parent: &Kind, name: &[u8]) -> Result<Option<Kind>, Error> {
        Ok(match parent {
            Kind::Root => Reference::decode(name).map(Kind::Image),
            Kind::Image(image) => {
                let Some(digest) = reference::digest(name) else {
                    return Ok(None);
                };
                let layer = self.store.find(image, digest)?;
                layer.map(|layer| {
                    Kind::Layer(Arc::new(LayerDirectory {
                        image: image.clone(),
                        digest: digest.to_owned(),
                        info: layer.info(),
                        layer,
                    }))
                })
            }
            Kind::Layer(layer) => match name {
                b"diff" => {
                    let path = self.store.mount(&layer.image, &layer.layer);
                    path.map(|path| Kind::Diff(path.as_os_str().as_bytes().into()))
                }
                b"info" => Some(Kind::Info(Arc::clone(layer))),
                b"blob" => Some(Kind::Blob(Arc::clone(layer))),
                _ => None,
            },
            Kind::Diff(_) | Kind::Info(_) | Kind::Blob(_) => None,
        })
    }

    /// Whether an engine that pulls may use the layer with this description; the error if it may
    /// not.
    fn require_current(&self, kind: &Kind) -> Result<(), Errno> {
        let Kind::Info(layer) = kind else {
            return Ok(());
        };
        let (image, digest) = (&layer.image, &layer.digest);
        match self.store.is_current(image, digest, &layer.layer) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Errno::ENOENT),
            Err(error) => Err(reported(&error)),
        }
    }

    fn attributes(&self, ino: INodeNo, kind: &Kind) -> FileAttr {
        let (kind, perm, size) = match kind {
            Kind::Root | Kind::Image(_) | Kind::Layer(_) => (FileType::Directory, 0o700, 0),
            Kind::Diff(target) => (FileType::Symlink, 0o777, target.len() as u64),
            Kind::Info(layer) => (FileType::RegularFile, 0o400, layer.info.len() as u64),
            Kind::Blob(layer) => (FileType::RegularFile, 0o400, layer.layer.blob.size),
        };
        FileAttr {
            ino,
            size,
            blocks: size.div_ceil(512),
            atime: self.started,
            mtime: self.started,
            ctime: self.started,
            crtime: self.started,
            kind,
            perm,
            nlink: if kind == FileType::Directory { 2 } else { 1 },
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    fn enter(
        &self,
        parent: INodeNo,
        name: &[u8],
        found: Result<Option<Kind>, Error>,
        reply: ReplyEntry,
    ) {
        let kind = match found {
            Ok(Some(kind)) => kind,
            Ok(None) => return reply.error(Errno::ENOENT),
            Err(error) => return reply.error(reported(&error)),
        };
        let id = self.nodes.lock().enter(parent.0, name, kind.clone());
        let attributes = self.attributes(INodeNo(id), &kind);
        reply.entry(&Duration::ZERO, &attributes, Generation(0));
    }
}

/// Logs why a registry has not answered.
fn reported(error: &Error) -> Errno {
    tracing::error!("{}", on_one_line(error));
    Errno::EIO
}

impl fuser::Filesystem for Files {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        // A lookup that waits for a registry does not delay another one in the same directory.
        let wanted = InitFlags::FUSE_PARALLEL_DIROPS & config.capabilities();
        let _ = config.add_capabilities(wanted);
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let Some(directory) = self.0.kind(parent) else {
            return reply.error(Errno::ENOENT);
        };
        let name = name.as_bytes().to_vec();
        if matches!(directory, Kind::Root) {
            let found = self.0.look_up(&directory, &name);
            return self.0.enter(parent, &name, found, reply);
        }
        self.in_thread(
            reply,
            move |inner, reply| {
                let found = inner.look_up(&directory, &name);
                inner.enter(parent, &name, found, reply);
            },
            |reply| reply.error(Errno::EAGAIN),
        );
    }

    fn forget(&self, _request: &Request, ino: INodeNo, lookups: u64) {
        self.0.nodes.lock().forget(ino.0, lookups);
    }

    /// An engine that pulls calls stat(2) on `info`, and pulls the layer as usual after an error.
    /// An engine that already uses the layer opens `info` without that call. The kernel sends no
    /// handle for stat(2), nor for fstat(2).
    fn getattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        match (self.0.kind(ino), handle) {
            (Some(kind @ Kind::Info(_)), None) => self.in_thread(
                reply,
                move |inner, reply| match inner.require_current(&kind) {
                    Ok(()) => reply.attr(&kind.valid_for(), &inner.attributes(ino, &kind)),
                    Err(errno) => reply.error(errno),
                },
                |reply| reply.error(Errno::EAGAIN),
            ),
            (Some(kind), _) => reply.attr(&kind.valid_for(), &self.0.attributes(ino, &kind)),
            (None, _) => reply.error(Errno::ENOENT),
        }
    }

    /// As `getattr`: newer engines test for existence by access(2).
    fn access(&self, _request: &Request, ino: INodeNo, mask: AccessFlags, reply: ReplyEmpty) {
        match self.0.kind(ino) {
            Some(_) if mask.contains(AccessFlags::W_OK) => reply.error(Errno::EROFS),
            Some(kind @ Kind::Info(_)) => self.in_thread(
                reply,
                move |inner, reply| match inner.require_current(&kind) {
                    Ok(()) => reply.ok(),
                    Err(errno) => reply.error(errno),
                },
                |reply| reply.error(Errno::EAGAIN),
            ),
            Some(_) => reply.ok(),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        match self.0.kind(ino) {
            Some(Kind::Diff(target)) => reply.data(&target),
            _ => reply.error(Errno::EINVAL),
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        // The names of images and layers are not listed: the store does not know them.
        let inside: &[(&str, FileType)] = match self.0.kind(ino) {
            Some(Kind::Layer(_)) => &[
                ("diff", FileType::Symlink),
                ("info", FileType::RegularFile),
                ("blob", FileType::RegularFile),
            ],
            Some(Kind::Root | Kind::Image(_)) => &[],
            _ => return reply.error(Errno::ENOTDIR),
        };
        let own = [(".", FileType::Directory), ("..", FileType::Directory)];
        let all = own.iter().chain(inside).enumerate();
        for (index, (name, kind)) in all.skip(usize::try_from(offset).unwrap_or(usize::MAX)) {
            // The numbers of the entries are not known before a lookup.
            if reply.add(INodeNo(ROOT), index as u64 + 1, *kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn open(&self, _request: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        if flags.acc_mode() != OpenAccMode::O_RDONLY {
            return reply.error(Errno::EROFS);
        }
        match self.0.kind(ino) {
            Some(Kind::Info(_)) => reply.opened(FileHandle(0), FopenFlags::empty()),
            Some(Kind::Blob(layer)) => self.in_thread(
                reply,
                move |inner, reply| match inner.store.blob(&layer.image, &layer.layer) {
                    Some(file) => {
                        let mut open = inner.open.lock();
                        open.last += 1;
                        let handle = open.last;
                        open.files.insert(handle, Arc::new(file));
                        drop(open);
                        reply.opened(FileHandle(handle), FopenFlags::empty());
                    }
                    None => reply.error(Errno::EIO),
                },
                |reply| reply.error(Errno::EAGAIN),
            ),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn read(
        &self,
        _request: &Request,
        ino: INodeNo,
        handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if let Some(Kind::Info(layer)) = self.0.kind(ino) {
            let info = &layer.info;
            let start = usize::try_from(offset).map_or(info.len(), |start| start.min(info.len()));
            let end = start.saturating_add(size as usize).min(info.len());
            return reply.data(&info[start..end]);
        }
        let file = self.0.open.lock().files.get(&handle.0).cloned();
        let Some(file) = file else {
            return reply.error(Errno::EIO);
        };
        let mut bytes = vec![0; size as usize];
        let mut filled = 0;
        while filled < bytes.len() {
            match file.read_at(&mut bytes[filled..], offset + filled as u64) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return reply.error(Errno::EIO),
            }
        }
        reply.data(&bytes[..filled]);
    }

    fn release(
        &self,
        _request: &Request,
        _ino: INodeNo,
        handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.0.open.lock().files.remove(&handle.0);
        reply.ok();
    }

    fn create(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let layer = match self.0.kind(parent) {
            Some(Kind::Layer(layer)) if name == "use" => layer,
            _ => return reply.error(Errno::EROFS),
        };
        self.in_thread(
            reply,
            move |inner, reply| {
                let added = inner.store.add(&layer.image, &layer.digest, &layer.layer);
                reply.error(added.map_or(Errno::EIO, |()| Errno::ENOENT));
            },
            |reply| reply.error(Errno::EAGAIN),
        );
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (image, digest) = match (self.0.kind(parent), reference::digest(name.as_bytes())) {
            (Some(Kind::Image(image)), Some(digest)) => (image, digest.to_owned()),
            _ => return reply.error(Errno::EROFS),
        };
        self.in_thread(
            reply,
            move |inner, reply| {
                let released = inner.store.release(&image, &digest);
                reply.error(released.map_or(Errno::EIO, |()| Errno::ENOENT));
            },
            |reply| reply.error(Errno::EAGAIN),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn request_that_panics_leaves_the_number_of_running_threads_right() {
        let threads = Arc::<AtomicUsize>::default();
        in_thread(&threads, (), |()| panic!("a defect"), |()| {});
        let start = Instant::now();
        while threads.load(Ordering::Relaxed) > 0 {
            assert!(start.elapsed() < Duration::from_secs(20), "still running");
            thread::yield_now();
        }
    }

    #[test]
    fn request_above_the_limit_is_refused() {
        let threads = Arc::<AtomicUsize>::default();
        let mut running: Vec<Running> = (0..MAX_THREADS)
            .map(|_| Running::begin(&threads).expect("below the limit"))
            .collect();
        let (answered, refused) = (mpsc::channel(), mpsc::channel());
        let ask = || {
            let (answered, refused) = (answered.0.clone(), refused.0.clone());
            in_thread(
                &threads,
                7,
                move |number: u8| answered.send(number).expect("a receiver"),
                move |number| refused.send(number).expect("a receiver"),
            );
        };
        ask();
        assert_eq!(refused.1.recv(), Ok(7));
        running.pop();
        ask();
        assert_eq!(answered.1.recv(), Ok(7));
    }
}

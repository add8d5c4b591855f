//! Files that the mounts of a process share, so that each has one page cache for all of them.
//!
//! Each FUSE mount has inodes of its own, and so page caches of its own. To share them, the process
//! has one more FUSE mount, which no path reaches (the *hidden mount*). Each file of the images is
//! there once. When a program opens an unchanged file in a mount, the mount answers that the kernel
//! shall read the file of the hidden mount instead (passthrough, Linux 6.12). The page cache is
//! that of the hidden file then.
//!
//! An image has a *slot* in the hidden mount, and so has each layer of a stack. The node number of
//! a file has its slot and its inode in the image or layer, so another process that takes the
//! hidden mount over needs nothing else to answer a read. It gets the hidden mount from the
//! [`Keeper`] of this process.

mod layers;
pub(crate) mod slots;
mod workers;

use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bcow_erofs::reader::Nid;
use bcow_mount::HiddenMount;
use bcow_union::Image;
use bcow_union::log::{self, Severity};
use parking_lot::Mutex;
use quick_cache::sync::Cache;

use crate::adapter::shared_files::SharedTree;
use crate::error::MountError;
use crate::request_threads::RequestThreads;
use crate::takeover::{self, duplicate};

pub use layers::Layers;
use layers::OpenLayers;
pub use slots::ImageKey;
use slots::{SharedFile, Slots};
pub use workers::Workers;

/// Hidden files that stay open, at most: a program of an image reads some hundreds of its files
/// when it starts.
const OPEN_FILES: usize = 1024;

/// What the process does outside of this crate for the files that its mounts share.
pub trait Keeper: Send + Sync {
    /// Keeps the hidden mount for a process that takes the mounts over.
    fn keep(&self, handover: &SharedHandover) -> io::Result<()>;

    /// Opens a file of the hidden mount, in another process. This process must not wait for the
    /// hidden mount, which it serves: if it were killed then, the waiting thread could not end, and
    /// so no other process could take over.
    fn open(&self, hidden: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd>;
}

/// What a process needs to take over the hidden mount.
pub struct SharedHandover {
    /// The connection to the kernel.
    pub connection: OwnedFd,
    /// The hidden mount.
    pub hidden: OwnedFd,
    /// The flags of the protocol that are in use.
    pub agreed: u64,
    /// The slot of the next image.
    pub next_slot: u32,
}

/// The files that the mounts of this process share. The hidden mount is made for the first mount
/// that shares files, and lasts as long as the process.
pub struct SharedFiles {
    keeper: Box<dyn Keeper>,
    threads: usize,
    slots: Arc<Slots>,
    reads: Arc<AtomicU64>,
    /// Hidden files by their numbers, which the opener has opened. A further mount of an image does
    /// not wait for the opener then.
    open_files: Cache<u64, Arc<OwnedFd>>,
    /// The lock is held while the hidden mount is made; acquired before that of the slots.
    hidden: Mutex<Option<Arc<Hidden>>>,
}

/// The hidden mount, and its connection to the kernel.
struct Hidden {
    mount: HiddenMount,
    connection: OwnedFd,
    agreed: u64,
}

/// The image of a mount that shares files, and its layers. The drop takes them out of their slots.
pub struct SharedImage {
    files: Arc<SharedFiles>,
    hidden: Arc<Hidden>,
    image: Arc<Image>,
    slot: u32,
    layers: OpenLayers,
}

impl SharedFiles {
    /// No files yet. `threads` threads (at least one) will answer reads.
    pub fn new(keeper: impl Keeper + 'static, threads: usize) -> Arc<Self> {
        Arc::new(SharedFiles {
            keeper: Box::new(keeper),
            threads,
            slots: Arc::default(),
            reads: Arc::default(),
            open_files: Cache::new(OPEN_FILES),
            hidden: Mutex::default(),
        })
    }

    /// The number of reads that were answered.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Takes over the hidden mount of a process that has ended. Until
    /// [`SharedFiles::end_takeover`], reads wait for the mounts whose files they need.
    pub fn take_over(&self, handover: SharedHandover) -> Result<(), MountError> {
        let mut hidden = self.hidden.lock();
        self.slots.begin_takeover(handover.next_slot);
        let mount = HiddenMount::of(handover.hidden);
        let taken = self.serve(mount, handover.connection, Some(handover.agreed))?;
        *hidden = Some(Arc::new(taken));
        Ok(())
    }

    /// All mounts of the process before were taken over or have ended.
    pub fn end_takeover(&self) {
        self.slots.end_takeover();
    }

    /// The image of a new mount.
    pub fn share(
        self: &Arc<Self>,
        key: ImageKey,
        image: &Arc<Image>,
        layers: Layers,
    ) -> Result<SharedImage, MountError> {
        let hidden = self.hidden()?;
        let images = layers.open(key, image)?;
        // Another process that did not know of a slot could use it for another image.
        let slots = self.slots.put(&images, |next_slot| {
            let kept = self.keeper.keep(&hidden.hand_over(next_slot)?);
            kept.map_err(MountError::process("keep the files that mounts share"))
        })?;
        self.shared(hidden, &images, layers, &slots)
    }

    /// The image of a mount that this process takes over, which had these slots.
    pub fn share_again(
        self: &Arc<Self>,
        key: ImageKey,
        image: &Arc<Image>,
        mut layers: Layers,
        slots: &[u32],
    ) -> Result<SharedImage, MountError> {
        let hidden = self.hidden.lock().clone();
        let hidden = hidden.ok_or(MountError::NoSharing("the hidden mount is missing"))?;
        // An earlier version shares no files of layers.
        layers.files.truncate(slots.len().saturating_sub(1));
        let images = layers.open(key, image)?;
        let shared = self.shared(hidden, &images, layers, slots)?;
        for ((key, image), &slot) in images.iter().zip(slots) {
            if !self.slots.put_again(slot, *key, image) {
                return Err(MountError::NoSharing("another image has its place"));
            }
        }
        Ok(shared)
    }

    fn shared(
        self: &Arc<Self>,
        hidden: Arc<Hidden>,
        images: &[(ImageKey, Arc<Image>)],
        layers: Layers,
        slots: &[u32],
    ) -> Result<SharedImage, MountError> {
        let ([(_, image), images @ ..], [slot, slots @ ..]) = (images, slots) else {
            return Err(MountError::NoSharing("its place is unknown"));
        };
        Ok(SharedImage {
            files: Arc::clone(self),
            hidden,
            image: Arc::clone(image),
            slot: *slot,
            layers: layers.in_slots(images, slots),
        })
    }

    /// The hidden mount; made at the first call.
    fn hidden(&self) -> Result<Arc<Hidden>, MountError> {
        let mut hidden = self.hidden.lock();
        if let Some(hidden) = &*hidden {
            return Ok(Arc::clone(hidden));
        }
        let (mount, connection) = HiddenMount::new()?;
        let made = Arc::new(self.serve(mount, connection, None)?);
        *hidden = Some(Arc::clone(&made));
        Ok(made)
    }

    /// Serves a hidden mount, in threads of its own. If another process has served it, the flags
    /// `agreed` are in use, and the kernel sends the requests again that it has not answered.
    fn serve(
        &self,
        mount: HiddenMount,
        connection: OwnedFd,
        agreed: Option<u64>,
    ) -> Result<Hidden, MountError> {
        let ours = duplicate(connection.as_fd())?;
        let (request_threads, config) = RequestThreads::with_settings(self.threads);
        let in_use = Arc::default();
        let tree = SharedTree {
            slots: Arc::clone(&self.slots),
            request_threads,
            reads: Arc::clone(&self.reads),
            agreed: Arc::clone(&in_use),
            opens_unasked: false,
        };
        let session = takeover::session(tree, connection, agreed, config, None)?;
        if !takeover::resend(ours.as_fd())? {
            return Err(MountError::NoSharing("the kernel is before Linux 6.9"));
        }
        let serve = move || {
            if let Err(error) = session.run() {
                let message = format!("the files that mounts share are served no more: {error}");
                log::log(Severity::Error, &message);
            }
        };
        std::thread::Builder::new()
            .name("shared".into())
            .spawn(serve)
            .map_err(MountError::process("start a thread"))?;
        Ok(Hidden {
            mount,
            connection: ours,
            agreed: in_use.load(Ordering::Relaxed),
        })
    }
}

impl fmt::Debug for SharedFiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedFiles")
    }
}

impl Hidden {
    fn hand_over(&self, next_slot: u32) -> Result<SharedHandover, MountError> {
        Ok(SharedHandover {
            connection: duplicate(self.connection.as_fd())?,
            hidden: duplicate(self.mount.as_fd())?,
            agreed: self.agreed,
            next_slot,
        })
    }
}

impl SharedImage {
    /// The slot of the image, and those of its layers, for a process that takes the mount over.
    pub fn slots(&self) -> Vec<u32> {
        let layers = self.layers.iter().map(|layer| layer.slot);
        std::iter::once(self.slot).chain(layers).collect()
    }

    /// The hidden file of an inode of the image. `path` gives a path of the inode.
    pub(crate) fn open(
        &self,
        nid: Nid,
        path: impl FnOnce() -> Option<Vec<u8>>,
    ) -> io::Result<Arc<OwnedFd>> {
        let in_layer = self.layers.find(self.image.filesystem(), nid, path);
        let file = in_layer.or_else(|| SharedFile::new(self.slot, nid));
        let file = file.ok_or(io::ErrorKind::FileTooLarge)?;
        let hidden = self.hidden.mount.as_fd();
        let open = || self.files.keeper.open(hidden, &file.name()).map(Arc::new);
        // Others wait only for the same file.
        let open_files = &self.files.open_files;
        open_files.get_or_insert_with(&file.number(), open)
    }
}

impl Drop for SharedImage {
    fn drop(&mut self) {
        let slots = &self.files.slots;
        slots.remove(self.slot, &self.image);
        for layer in self.layers.iter() {
            slots.remove(layer.slot, &layer.image);
        }
    }
}

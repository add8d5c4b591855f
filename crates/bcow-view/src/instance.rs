//! Writable disks over a view.

use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;

use bcow::chain::{
    FoundView, NoDigests, NoUrls, Opener, Policy, Share, ViewFailure, Views, WantedView,
};
use bcow::format::BackingEntry;
use bcow::{
    BlockDevice, CreateOptions, Disk, Error, Image, Ledger, OpenOptions, Storage, WritableDevice,
};
use bcow_ext4::Reader;

use crate::compare::Device;
use crate::{CachedView, ViewCache, ViewError, ViewedImage};

/// Size of the file system in bytes if the user gives none: free space costs nothing.
pub const DEFAULT_BYTES: u64 = 64 << 30;

/// Makes a disk over `view` in empty storage. `image` is the entry by which the disk finds the
/// image; `create` has the size of the view.
///
/// All disks over a view share its bytes, and a kernel finds file systems by their UUIDs. So the
/// file system on the disk gets its own: the disk stores the block with the superblock.
pub fn create_instance(
    storage: Arc<dyn Storage>,
    view: &CachedView,
    image: BackingEntry,
    create: &CreateOptions,
    open: &OpenOptions,
) -> Result<Disk, ViewError> {
    let device = view.device().clone() as Arc<dyn BlockDevice>;
    let reader = Reader::open(Box::new(Device(device.clone()))).map_err(ViewError::Ext4OfView)?;
    let block = reader
        .first_block_with_uuid(random_uuid()?)
        .map_err(ViewError::Ext4OfView)?;
    let backing = (view.entry(image), device);
    let disk = Disk::create(storage, create, Some(backing), open).map_err(ViewError::Disk)?;
    disk.write_at(0, &block[..]).map_err(ViewError::Disk)?;
    Ok(disk)
}

/// A UUID of version 4, which is for random values.
fn random_uuid() -> Result<[u8; 16], ViewError> {
    let mut uuid = [0; 16];
    getrandom::fill(&mut uuid).map_err(|error| ViewError::Random(error.into()))?;
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    Ok(uuid)
}

/// A disk over a view of an image: its file, and where its view is.
pub struct Instance<'a> {
    pub storage: Arc<dyn Storage>,
    /// The path of the file. Its snapshots are in the same directory.
    pub path: &'a Path,
    pub image: &'a dyn ViewedImage,
    pub cache: &'a ViewCache,
    pub options: &'a OpenOptions,
}

impl Instance<'_> {
    /// Opens the disk, without a look at the name that the file has for the image. Fails if the
    /// disk was made over another image, or over none. With a ledger, as
    /// [`Disk::open_with_ledger`]. Also returns the number of files on the longest path down from
    /// the disk.
    pub fn open(&self, ledger: Option<Arc<Ledger>>) -> Result<(Disk, u32), Error> {
        self.with_opener(|opener| {
            let storage = self.storage.clone();
            let disk = Disk::open_with_ledger(storage, self.options, opener, ledger)?;
            Ok((disk, opener.height()))
        })
    }

    /// Opens the disk for reading. Also returns the files below it, the nearest first; the view is
    /// the last one.
    pub fn read(&self) -> Result<(Arc<Image>, Vec<Arc<Image>>), Error> {
        self.with_opener(|opener| {
            let storage = self.storage.clone();
            let image = Image::open_with_backings(storage, self.options, opener)?;
            let below = opener.files().into_iter().map(|file| file.image);
            Ok((image, below.collect()))
        })
    }

    fn with_opener<T>(
        &self,
        open: impl FnOnce(&Opener<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let views = Given {
            image: self.image,
            cache: self.cache,
            is_found: Cell::new(false),
        };
        let policy = Policy {
            directories: &[],
            digests: &NoDigests,
            urls: &NoUrls,
            views: &views,
            share: Share::Lock,
            options: self.options.clone(),
        };
        let opener = Opener::new(self.path, policy);
        let opened = open(&opener);
        // Also if it opens: what is missing then fails at the first read of it.
        if let Some(problem) = opener.problems().first() {
            return Err(Error::Unsupported(problem.to_string()));
        }
        let opened = opened?;
        if views.is_found.get() {
            Ok(opened)
        } else {
            Err(Error::Unsupported("it is over no view of an image".into()))
        }
    }
}

/// Makes views of a given image.
struct Given<'a> {
    image: &'a dyn ViewedImage,
    cache: &'a ViewCache,
    /// Whether a disk has asked for one.
    is_found: Cell<bool>,
}

impl Views for Given<'_> {
    fn find(&self, _: Option<&Arc<Image>>, wanted: &WantedView) -> Result<FoundView, ViewFailure> {
        self.is_found.set(true);
        Ok(self.cache.find_wanted(self.image, wanted)?.into())
    }

    fn have_image(&self) -> bool {
        true
    }
}

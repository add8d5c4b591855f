//! Writable disks over a view.

use std::sync::Arc;

use bcow::chain::WantedView;
use bcow::format::{BackingEntry, BackingName};
use bcow::{
    BackingResolver, BlockDevice, CreateOptions, Disk, Error, Image, Ledger, OpenOptions, Storage,
    WritableDevice,
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

/// Opens a disk over a view of `image`, without a look at the name that the disk has for the image.
/// Fails if the disk was made over another image, or over none. With a ledger, as
/// [`Disk::open_with_ledger`].
pub fn open_instance(
    storage: Arc<dyn Storage>,
    image: &dyn ViewedImage,
    cache: &ViewCache,
    open: &OpenOptions,
    ledger: Option<Arc<Ledger>>,
) -> Result<Disk, Error> {
    Disk::open_with_ledger(storage, open, &Given { image, cache }, ledger)
}

/// As [`open_instance`], for reading.
pub fn read_instance(
    storage: Arc<dyn Storage>,
    image: &dyn ViewedImage,
    cache: &ViewCache,
    open: &OpenOptions,
) -> Result<Arc<Image>, Error> {
    Image::open_with_backings(storage, open, &Given { image, cache })
}

/// Resolves a view of a given image.
struct Given<'a> {
    image: &'a dyn ViewedImage,
    cache: &'a ViewCache,
}

impl BackingResolver for Given<'_> {
    fn resolve(&self, backing: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, Error> {
        let unsupported = |problem: String| Err(Error::Unsupported(problem));
        let BackingName::View {
            layout, identity, ..
        } = backing.name
        else {
            return unsupported(format!("{} is no view of an image", backing.name));
        };
        let wanted = WantedView {
            layout,
            bytes: backing.size,
            identity,
        };
        match self.cache.find_wanted(self.image, &wanted) {
            Ok(found) => Ok(Some(found.device().clone())),
            Err(error) => unsupported(error.to_string()),
        }
    }
}

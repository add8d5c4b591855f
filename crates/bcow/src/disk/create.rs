//! Creation of a writable file: the checks of its options, and the bytes of an empty one.

use bcow_format::{
    BackingEntry, BackingName, BlockShift, ENTRY_BYTES, Features, Header, MAX_ADDRESS,
    MAX_ROOT_ENTRIES, SECTOR_BYTES, SLOT_BYTES, Section, State, Use, encode_backings, incompatible,
};
use serde_json::json;

use super::open::layout_for_writes;
use super::{Disk, Layout};
use crate::storage::Storage;
use crate::sync::Arc;
use crate::{BlockCache, BlockDevice, Error, Image, Ledger, OneBacking, OpenOptions};

/// log2 of the region size of files with sub-block tables: 4 MiB.
const REGION_SHIFT: u8 = 22;
/// log2 of the largest region size of the format.
const MAX_REGION_SHIFT: u8 = 30;
/// Root entries of a file in the performance layout, if the user gives no block size: at most this
/// many, unless the blocks would be larger than 16 MiB.
const PERFORMANCE_ENTRIES: u64 = 1024;
/// Usual size of the record log in bytes: room for about ten thousand small flushes between two
/// checkpoints. The unused part of the log is a hole in the file.
const LOG_BYTES: u64 = 4 << 20;

/// Properties of a new file.
#[derive(Debug, Clone)]
pub struct CreateOptions {
    /// Size of the address space in bytes, a multiple of 4096.
    pub size: u64,
    /// How the address space is cut into blocks.
    pub layout: Layout,
    /// Block size in bytes: a power of two from 4 KiB to 4 MiB, or to 16 MiB in the performance
    /// layout, where each region is one block. `None`: the layout determines it.
    pub block_bytes: Option<u32>,
    /// Size of the record log in bytes, a multiple of 4096.
    pub log_bytes: u64,
    /// Keys for the metadata section, in addition to `tool` and `options`.
    pub metadata: serde_json::Map<String, serde_json::Value>,
}

impl CreateOptions {
    /// Options for a disk of `size` bytes.
    pub fn disk(size: u64) -> Self {
        CreateOptions {
            size,
            layout: Layout::Auto,
            block_bytes: None,
            log_bytes: LOG_BYTES,
            metadata: serde_json::Map::new(),
        }
    }

    /// Options for a disk with the size and the layout of `image`.
    pub fn like(image: &Image) -> Result<Self, Error> {
        let (layout, block_shift) = layout_for_writes(image)?;
        Ok(CreateOptions {
            layout,
            block_bytes: block_shift.map(BlockShift::bytes),
            ..CreateOptions::disk(image.size())
        })
    }

    /// Checks the options. Returns log2 of the region size.
    fn region_shift(&self) -> Result<u8, Error> {
        check_size(self.size)?;
        let shift = match (self.layout, self.block_shift()?) {
            (Layout::Performance, Some(block_shift)) => block_shift,
            (Layout::Performance, None) => self
                .smallest_shift(PERFORMANCE_ENTRIES, BlockShift::MIN.get())
                .min(self.max_block_shift()),
            (Layout::Auto | Layout::Space, _) => {
                self.smallest_shift(MAX_ROOT_ENTRIES, REGION_SHIFT)
            }
        };
        if self.size.div_ceil(1 << shift) > MAX_ROOT_ENTRIES {
            return Err(Error::Unsupported(format!(
                "{} bytes in blocks of {} bytes: a file has at most {MAX_ROOT_ENTRIES} regions, \
                 and in the performance layout each region is one block",
                self.size,
                1u64 << shift
            )));
        }
        Ok(shift)
    }

    /// The smallest region shift from `least` on with at most `entries` regions; the largest region
    /// shift of the format, if every shift gives more regions.
    fn smallest_shift(&self, entries: u64, least: u8) -> u8 {
        (least..=MAX_REGION_SHIFT)
            .find(|shift| self.size.div_ceil(1 << shift) <= entries)
            .unwrap_or(MAX_REGION_SHIFT)
    }

    /// log2 of the block size that the options contain. Fails if the layout does not allow it.
    fn block_shift(&self) -> Result<Option<u8>, Error> {
        let Some(bytes) = self.block_bytes else {
            return Ok(None);
        };
        let Some(shift) = BlockShift::from_bytes(bytes).map(BlockShift::get) else {
            return Err(Error::Unsupported(format!(
                "blocks of {bytes} bytes: the size must be a power of two from 4096 to 16777216"
            )));
        };
        let largest = self.max_block_shift();
        if shift > largest {
            return Err(Error::Unsupported(format!(
                "blocks of {bytes} bytes: the {} layout has blocks of at most {} bytes",
                self.layout.name(),
                1u64 << largest
            )));
        }
        Ok(Some(shift))
    }

    /// log2 of the largest block size that the layout allows.
    fn max_block_shift(&self) -> u8 {
        match self.layout {
            Layout::Performance => BlockShift::MAX.get(),
            Layout::Auto | Layout::Space => REGION_SHIFT,
        }
    }

    fn metadata(&self) -> serde_json::Value {
        let mut options = json!({ "layout": self.layout.name() });
        if let Some(bytes) = self.block_bytes {
            options["block_size"] = bytes.into();
        }
        let mut metadata = self.metadata.clone();
        metadata.insert(
            "tool".into(),
            concat!("bcow ", env!("CARGO_PKG_VERSION")).into(),
        );
        metadata.insert("options".into(), options);
        metadata.into()
    }
}

impl Disk {
    /// Creates a file in `storage`, which must be empty, and opens it. The caller holds the lock of
    /// the file, and gives the file its name after this function has returned.
    ///
    /// Fails with [`Error::Unsupported`] if the format does not allow these options.
    pub fn create(
        storage: Arc<dyn Storage>,
        options: &CreateOptions,
        backing: Option<(BackingEntry, Arc<dyn BlockDevice>)>,
        open: &OpenOptions,
    ) -> Result<Disk, Error> {
        Disk::create_with_ledger(storage, options, backing, open, None)
    }

    fn create_with_ledger(
        storage: Arc<dyn Storage>,
        options: &CreateOptions,
        backing: Option<(BackingEntry, Arc<dyn BlockDevice>)>,
        open: &OpenOptions,
        ledger: Option<Arc<Ledger>>,
    ) -> Result<Disk, Error> {
        let region_shift = options.region_shift()?;
        let log_bytes = options.log_bytes;
        let mut end = SECTOR_BYTES + log_bytes;
        let mut section = |bytes: &[u8]| -> Result<Section, Error> {
            if bytes.is_empty() {
                return Ok(Section::default());
            }
            let offset = end;
            storage.write(offset, bytes)?;
            end = (offset + bytes.len() as u64).next_multiple_of(SECTOR_BYTES);
            Ok(Section::of(offset, bytes))
        };
        let metadata = section(options.metadata().to_string().as_bytes())?;
        let backings = match &backing {
            Some((entry, _)) => section(&backing_table(entry)?)?,
            None => Section::default(),
        };
        // All entries of the root table are absent, which is all zeros. `set_len` makes these
        // zeros, so no write is needed.
        let root_bytes = options.size.div_ceil(1 << region_shift) as usize * ENTRY_BYTES;
        let root = match root_bytes {
            0 => Section::default(),
            bytes => Section::of(end, &vec![0; bytes]),
        };
        let file_bytes = (end + root_bytes as u64).next_multiple_of(SECTOR_BYTES);
        let mut features = Features {
            incompatible: incompatible::RECORDS,
            ..Features::default()
        };
        if let Some((entry, _)) = &backing {
            features.incompatible |= entry.features();
        }
        let header = Header {
            features,
            file_bytes,
            root,
            metadata,
            backings,
            backing_count: backing.is_some().into(),
            log: (SECTOR_BYTES, log_bytes),
            ..Header::new(Use::Disk, State::Writable, region_shift, options.size)
        };
        storage.set_length("lengthen the file", file_bytes)?;
        for slot in 0..2 {
            storage.write(slot * SLOT_BYTES as u64, &header.encode())?;
        }
        let backing = OneBacking(backing.map(|(_, device)| device));
        // This makes the file durable.
        Disk::open_with_ledger(storage, open, &backing, ledger)
    }

    /// Same as [`Disk::create`], with the properties and the cache of this disk, and over the file
    /// of this disk, which gets the name `name`. The caller has written a checkpoint, and does not
    /// write to this disk any more. `ledger` is an empty one, as for [`Disk::open_with_ledger`].
    ///
    /// The new disk reads through the file, opened for reading, and not through this disk: so all
    /// files below it are in one map, which takes over what this disk knows of those below.
    pub fn create_over(
        &self,
        name: String,
        storage: Arc<dyn Storage>,
        ledger: Option<Arc<Ledger>>,
    ) -> Result<Disk, Error> {
        let entry = BackingEntry {
            name: BackingName::FileName {
                name,
                identity: Some(self.identity_hash()),
            },
            size: self.size(),
        };
        let options = CreateOptions {
            layout: self.inner.layout,
            block_bytes: self.inner.block_shift.map(BlockShift::bytes),
            log_bytes: self.header().log.1,
            ..CreateOptions::disk(entry.size)
        };
        let open = OpenOptions {
            cache: self.inner.cache.clone(),
            ..OpenOptions::default()
        };
        let file = Arc::clone(&self.inner.file.storage);
        let image = Image::open_over(file, &open, self.inner.enter().backing.clone())?;
        if image.identity_hash() != self.identity_hash() {
            let problem = "the file of a disk is not as its last checkpoint";
            return Err(Error::Inconsistent(problem.into()));
        }
        let backing = Some((entry, image as Arc<dyn BlockDevice>));
        Disk::create_with_ledger(storage, &options, backing, &open, ledger)
    }

    /// Same as [`Disk::create`], with a separate cache and without a backing.
    pub fn create_alone(storage: Arc<dyn Storage>, options: &CreateOptions) -> Result<Disk, Error> {
        let open = OpenOptions {
            cache: BlockCache::new(8 << 20),
            ..OpenOptions::default()
        };
        Disk::create(storage, options, None, &open)
    }
}

/// Fails if no address space has this size.
pub(super) fn check_size(size: u64) -> Result<(), Error> {
    if size.is_multiple_of(SECTOR_BYTES) && size <= MAX_ADDRESS {
        return Ok(());
    }
    Err(Error::Unsupported(format!(
        "a size of {size} bytes: it must be a multiple of 4096, and at most 2^48"
    )))
}

/// The backing table of a disk with this backing.
pub(super) fn backing_table(entry: &BackingEntry) -> Result<Vec<u8>, Error> {
    encode_backings(std::slice::from_ref(entry))
        .map_err(|error| Error::Unsupported(error.to_string()))
}

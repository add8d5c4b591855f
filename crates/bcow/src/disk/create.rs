//! Creation of a writable file.

use bcow_format::{
    BackingEntry, BlockShift, ENTRY_BYTES, Features, Header, MAX_ADDRESS, MAX_ROOT_ENTRIES,
    SECTOR_BYTES, SLOT_BYTES, Section, State, Use, crc32c, encode_backings, incompatible,
};
use serde_json::json;

use super::{Disk, Layout};
use crate::storage::Storage;
use crate::sync::Arc;
use crate::{BlockCache, BlockDevice, Error, OneBacking, OpenOptions};

/// log2 of the region size of files with two levels: 4 MiB.
const REGION_SHIFT: u8 = 22;
/// Number of root entries that the performance layout aims at.
const PERFORMANCE_ENTRIES: u64 = 1024;
/// Size of the record log in bytes: room for some ten thousand small flushes between checkpoints.
/// The log is sparse until it is used.
const LOG_BYTES: u64 = 4 << 20;
/// Log size in bytes of a sketch, of which a host may have many.
const SKETCH_LOG_BYTES: u64 = 256 << 10;

/// Properties of a new file.
#[derive(Debug, Clone)]
pub struct CreateOptions {
    /// Size of the address space in bytes, a multiple of 4096.
    pub size: u64,
    /// How the address space is cut into blocks.
    pub layout: Layout,
    /// Block size in bytes, a power of two from 4 KiB; at most 4 MiB (16 MiB in the performance
    /// layout, where blocks are regions).
    pub block_bytes: Option<u32>,
    /// Purpose of the file: a disk or a sketch.
    pub purpose: Use,
    /// Further keys for the metadata section, besides those that record how the file was made.
    pub metadata: serde_json::Map<String, serde_json::Value>,
}

impl CreateOptions {
    /// Options for a disk of `size` bytes.
    pub fn disk(size: u64) -> Self {
        CreateOptions {
            size,
            layout: Layout::Auto,
            block_bytes: None,
            purpose: Use::Disk,
            metadata: serde_json::Map::new(),
        }
    }

    fn region_shift(&self) -> Result<u8, Error> {
        let unsupported = |problem: String| Err(Error::Unsupported(problem));
        if !self.size.is_multiple_of(SECTOR_BYTES) || self.size > MAX_ADDRESS {
            return unsupported(format!(
                "a size of {} bytes: it must be a multiple of 4096, and at most 2^48",
                self.size
            ));
        }
        let largest = match self.layout {
            Layout::Performance => 24,
            Layout::Auto | Layout::Space => REGION_SHIFT,
        };
        let chosen = self.block_shift()?.map(BlockShift::get);
        if let Some(shift) = chosen.filter(|shift| *shift > largest) {
            return unsupported(format!(
                "blocks of {} bytes: the {} layout has at most {}",
                1u64 << shift,
                self.layout.name(),
                1u64 << largest
            ));
        }
        let enough = |entries: u64, least: u8| {
            (least..=30)
                .find(|shift| self.size.div_ceil(1 << shift) <= entries)
                .unwrap_or(30)
        };
        let shift = match (self.layout, chosen) {
            (Layout::Performance, Some(shift)) => shift,
            (Layout::Performance, None) => enough(PERFORMANCE_ENTRIES, 12).min(largest),
            (Layout::Auto | Layout::Space, _) => enough(MAX_ROOT_ENTRIES, REGION_SHIFT),
        };
        if self.size.div_ceil(1 << shift) > MAX_ROOT_ENTRIES {
            return unsupported(format!(
                "{} bytes in blocks of {}: the format has at most {MAX_ROOT_ENTRIES} of them",
                self.size,
                1u64 << shift
            ));
        }
        Ok(shift)
    }

    fn block_shift(&self) -> Result<Option<BlockShift>, Error> {
        let Some(bytes) = self.block_bytes else {
            return Ok(None);
        };
        let shift = (bytes.is_power_of_two())
            .then(|| BlockShift::new(bytes.trailing_zeros() as u8))
            .flatten();
        match shift {
            Some(shift) => Ok(Some(shift)),
            None => Err(Error::Unsupported(format!(
                "blocks of {bytes} bytes: they have a power of two from 4096 to 16777216"
            ))),
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
    /// Creates a file in `storage`, which must be empty, and opens it. The caller holds the lock on
    /// the file, and gives the file its name after this has returned.
    ///
    /// Fails with [`Error::Unsupported`] if the format has no file with these options.
    pub fn create(
        storage: Arc<dyn Storage>,
        options: &CreateOptions,
        backing: Option<(BackingEntry, Arc<dyn BlockDevice>)>,
        open: &OpenOptions,
    ) -> Result<Disk, Error> {
        let region_shift = options.region_shift()?;
        options.block_shift()?;
        let log_bytes = match options.purpose {
            Use::Sketch => SKETCH_LOG_BYTES,
            Use::Image | Use::Disk => LOG_BYTES,
        };
        let io = |action, at| move |source| Error::io(action, at, source);
        let mut end = SECTOR_BYTES + log_bytes;
        let mut section = |bytes: &[u8]| -> Result<Section, Error> {
            if bytes.is_empty() {
                return Ok(Section::default());
            }
            let offset = end;
            storage
                .write_at(offset, bytes)
                .map_err(io("write", offset))?;
            end = (offset + bytes.len() as u64).next_multiple_of(SECTOR_BYTES);
            Ok(Section {
                offset,
                bytes: bytes.len() as u32,
                crc: crc32c(bytes),
            })
        };
        let metadata =
            section(&serde_json::to_vec(&options.metadata()).map_err(|error| {
                Error::Unsupported(format!("metadata that is no JSON: {error}"))
            })?)?;
        let backings = match &backing {
            Some((entry, _)) => section(&backing_table(entry)?)?,
            None => Section::default(),
        };
        // The root table is all zeros, "absent everywhere", which a sparse file has without a
        // write.
        let root_bytes = options.size.div_ceil(1 << region_shift) as usize * ENTRY_BYTES;
        let root = match root_bytes {
            0 => Section::default(),
            bytes => Section {
                offset: end,
                bytes: bytes as u32,
                crc: crc32c(&vec![0; bytes]),
            },
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
            generation: 1,
            features,
            purpose: options.purpose,
            state: State::Writable,
            region_shift,
            size: options.size,
            file_bytes,
            root,
            metadata,
            backings,
            backing_count: backing.is_some().into(),
            merkle: None,
            log: (SECTOR_BYTES, log_bytes),
            free: Section::default(),
        };
        storage
            .set_len(file_bytes)
            .map_err(io("lengthen the file", file_bytes))?;
        for slot in 0..2 {
            storage
                .write_at(slot * SLOT_BYTES as u64, &header.encode())
                .map_err(io("write", slot * SLOT_BYTES as u64))?;
        }
        storage.sync().map_err(io("sync", 0))?;
        Disk::open(
            storage,
            open,
            &OneBacking(backing.map(|(_, device)| device)),
        )
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

/// The backing table of a disk over this backing.
pub(super) fn backing_table(entry: &BackingEntry) -> Result<Vec<u8>, Error> {
    encode_backings(std::slice::from_ref(entry))
        .map_err(|error| Error::Unsupported(error.to_string()))
}

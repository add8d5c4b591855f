//! Opens a file for writing: makes the recovered state durable (spec section 10, "Opening for
//! writing"), and folds the log into the tables.

use std::collections::HashSet;
use std::sync::OnceLock;

use bcow_format::{
    BlockShift, Entry, FreeRange, HEADER_AREA_BYTES, Header, SLOT_BYTES, State, Stored,
    choose_header, decode_free, incompatible, read_only_compatible,
};

use super::blocks::{Blocks, Table};
use super::checkpoint::{Change, MAX_FREE};
use super::committer::Committer;
use super::extents::Extents;
use super::locks::Gate;
use super::regions::{Regions, read_blocks};
use super::resume::Changes;
use super::space::{Space, sectors};
use super::{Disk, DiskConfig, Inner, Layout, Ledger};
use crate::checked::CheckedFile;
use crate::image::Below;
use crate::log::{self, Replayed};
use crate::storage::Storage;
use crate::sync::atomic::{AtomicBool, AtomicU64};
use crate::sync::{Arc, Mutex, lock};
use crate::{BackingResolver, BlockCache, Error, Image, OpenOptions, Verify};

/// Zeros over the start of a dropped record, in bytes (spec section 10, "Opening for writing").
const ERASED_BYTES: usize = 16;

impl Disk {
    /// Opens a file for writing. The caller holds the lock on the file for the lifetime of the
    /// disk.
    ///
    /// All data that was flushed before a crash is present; no repair is necessary. Fails with
    /// [`Error::Unsupported`] if the file is sealed, has no record log, or has features that this
    /// version does not write. Fails with [`Error::MissingBacking`] if `resolver` does not find the
    /// backing that the file names.
    pub fn open(
        storage: Arc<dyn Storage>,
        options: &OpenOptions,
        resolver: &dyn BackingResolver,
    ) -> Result<Disk, Error> {
        Disk::open_with_ledger(storage, options, resolver, None)
    }

    /// Same as [`Disk::open`]. From now on, `ledger`, if there is one, has all changes that no
    /// flush has recorded. If the process is killed, another one that opens the file with this
    /// ledger continues: it finds all data that was written, also without a flush.
    ///
    /// Between the two processes, no other writer may open the file. Fails with
    /// [`Error::Inconsistent`] if the ledger does not belong to the file, or lacks changes, and
    /// with [`Error::WriteRefused`] if the earlier process refused writes. The file is then as
    /// after a crash.
    pub fn open_with_ledger(
        storage: Arc<dyn Storage>,
        options: &OpenOptions,
        resolver: &dyn BackingResolver,
        ledger: Option<Arc<Ledger>>,
    ) -> Result<Disk, Error> {
        let options = OpenOptions {
            verify: Verify::Checksums,
            ..options.clone()
        };
        let image = Image::open_with_backings(Arc::clone(&storage), &options, resolver)?;
        let header = image.header().clone();
        check_writable(&header)?;
        let backing = if header.features.has_incompatible(incompatible::BACKING) {
            Some(backing_of(&image)?)
        } else {
            None
        };
        let changes = match &ledger {
            Some(ledger) => Changes::read(ledger, &header)?,
            None => Changes::default(),
        };
        let replayed = log::replay(&*storage, &header)?;
        persist_recovery(&*storage, &header, &replayed)?;
        let ranges = decode_free(&image.read_section(&header.free)?, &header)?;
        let lists_all_free = ranges.len() < MAX_FREE;
        let committer = Committer::recovered(&image, &replayed, ranges);
        let end = replayed.file_bytes.max(changes.end(&header));
        truncate(&*storage, end)?;
        let free = match ledger {
            // Changes of the ledger may use any of it.
            Some(_) => Extents::default(),
            None => committer.free.clone(),
        };
        let config = DiskConfig::new(&header, backing);
        let (space, cache) = (Space::new(free, end), options.cache.clone());
        let inner = Inner::new(storage, &image, cache, config, committer, space, ledger)?;
        let inner = Arc::new(inner);
        if replayed.tail > 0 {
            inner.fold_log(&image)?;
        }
        if inner.ledger.is_some() {
            let config = inner.enter();
            inner.operation(&config).resume(&changes, lists_all_free)?;
        }
        Ok(Disk { inner })
    }
}

/// Removes the bytes from `end` on, so that bytes which are later added to the file read as zeros.
/// No record, table or change of a ledger names one of them.
fn truncate(storage: &dyn Storage, end: u64) -> Result<(), Error> {
    if storage.length()? > end {
        storage.set_length("truncate the file", end)
    } else {
        Ok(())
    }
}

impl Committer {
    /// The state of a file of which `free` are the free ranges of its header.
    fn recovered(image: &Image, replayed: &Replayed, free: Vec<FreeRange>) -> Self {
        let header = image.header().clone();
        let mut committer = Committer {
            // Both slots have the header, so either is the slot of the newer one.
            slot: 0,
            tail: replayed.tail,
            sequence: replayed.next_sequence,
            file_bytes: header.file_bytes,
            free: Extents::default(),
            logged: Vec::new(),
            logged_bytes: 0,
            small_flushes: 0,
            written_log: 0,
            header,
        };
        for range in free {
            committer
                .free
                .insert(range.start..range.start + range.bytes);
        }
        committer.grow(replayed.file_bytes);
        for stored in image.logged_blocks() {
            committer.free.remove(sectors(stored));
        }
        committer
    }
}

impl Inner {
    fn new(
        storage: Arc<dyn Storage>,
        image: &Image,
        cache: BlockCache,
        config: DiskConfig,
        committer: Committer,
        space: Space,
        ledger: Option<Arc<Ledger>>,
    ) -> Result<Self, Error> {
        let (layout, block_shift) = layout_for_writes(image)?;
        Ok(Inner {
            id: image.file_id(),
            cache,
            region_shift: committer.header.region_shift,
            layout,
            block_shift,
            gate: Gate::new(config),
            regions: Regions::new(image.root().clone()),
            space,
            changed: Default::default(),
            unflushed: AtomicU64::new(0),
            listed_bytes: AtomicU64::new(0),
            is_dirty: AtomicBool::new(false),
            flush_queued: AtomicBool::new(false),
            ahead_queued: AtomicBool::new(false),
            has_new_identity: AtomicBool::new(false),
            failed: OnceLock::new(),
            ledger,
            turns: Default::default(),
            fills: Default::default(),
            incomplete_blocks: Default::default(),
            flushes: AtomicU64::new(0),
            checkpoints: AtomicU64::new(0),
            committer: Mutex::new(committer),
            file: CheckedFile {
                storage,
                verifier: None,
            },
        })
    }

    /// Folds the log of a file into its tables, region by region.
    fn fold_log(&self, image: &Image) -> Result<(), Error> {
        let mut committer = lock(&self.committer);
        let committer = &mut *committer;
        let header = committer.header.clone();
        let mut root = self.regions.root();
        let mut change = Change::default();
        for region in image.logged_regions() {
            let new = blocks_of(image, region)?;
            let old = match read_blocks(&self.file, &header, region, root[region as usize]) {
                // The table is damaged. A record replaces the whole table, or else `Image::open`
                // would have failed. The space that only this table names is leaked.
                Err(error) if error.code().is_some() => Blocks::Whole(Entry::Absent),
                old => old?,
            };
            let kept: HashSet<Stored> = new.iter().filter_map(|entry| entry.stored()).collect();
            let replaced = old.iter().filter_map(|entry| entry.stored());
            let replaced = replaced.filter(|stored| !kept.contains(stored));
            change.freed.extend(replaced.map(sectors));
            let written = self.write_table(region, &new, &mut root, &mut change);
            self.or_free(written, &change)?;
        }
        // A record may use space that an earlier record freed, also for another region.
        let mut freed = Extents::default();
        change.freed.drain(..).for_each(|range| freed.insert(range));
        for stored in image.logged_blocks() {
            freed.remove(sectors(stored));
        }
        change.freed.extend(freed.iter());
        let prepared = self.prepare(committer, header, &root, std::iter::empty(), &mut change);
        let prepared = self.or_free(prepared, &change)?;
        self.switch(committer, prepared)?;
        self.regions.set_root(root);
        self.space.free(change.freed);
        self.write_other_slot(committer)
    }
}

/// The entries of a region according to its table and the log.
fn blocks_of(image: &Image, region: u64) -> Result<Blocks, Error> {
    let header = image.header();
    let start = region << header.region_shift;
    let length = header.region_length(region);
    // The block size does not follow from the length of the first block: that block may be the only
    // one of the region, and short.
    let Some(shift) = image.logged_block_shift(region) else {
        return Ok(Blocks::Whole(image.piece(start)?.entry));
    };
    let mut entries = Vec::new();
    let mut at = start;
    while at < start + length {
        let piece = image.piece(at)?;
        entries.push(piece.entry);
        at = piece.start + piece.length;
    }
    Ok(Blocks::Cut(Table::new(shift, entries)))
}

/// Fails if this version does not write to a file with this header.
fn check_writable(header: &Header) -> Result<(), Error> {
    let unsupported = |problem: &str| Err(Error::Unsupported(problem.to_owned()));
    if header.state == State::Sealed {
        return unsupported("the file is sealed, so it is immutable");
    }
    if header.features.has_incompatible(incompatible::WINDOWS) {
        return unsupported("writing to a file with the feature `windows` is not supported");
    }
    let unknown = header.features.read_only_compatible & !read_only_compatible::MERKLE;
    if unknown != 0 {
        return unsupported(&format!(
            "the file has the unknown feature bit {}, which allows only reads; a newer version of \
             the program is needed for writing",
            unknown.trailing_zeros()
        ));
    }
    if header.log.1 == 0 {
        return unsupported("the file has no record log");
    }
    Ok(())
}

/// The backing of a disk, with all files below it.
fn backing_of(image: &Image) -> Result<Arc<Below>, Error> {
    image.below().cloned().ok_or_else(|| {
        let entry = image.backings().next();
        Error::MissingBacking {
            name: entry.map_or_else(|| "0".to_owned(), |entry| entry.name.to_string()),
            logical: 0,
        }
    })
}

/// The layout and the block size for writes: those with which the file was created, or else the
/// default.
pub(super) fn layout_for_writes(image: &Image) -> Result<(Layout, Option<BlockShift>), Error> {
    let (layout, block) = Layout::recorded(&image.metadata()?);
    // The regions of a file may be too large to be one block each.
    let is_one_block = image.header().region_shift <= BlockShift::MAX.get();
    let layout = layout.filter(|layout| is_one_block || *layout != Layout::Performance);
    Ok((layout.unwrap_or_default(), block))
}

/// Makes the result of the recovery durable, so that every later opening has the same result:
/// overwrites the start of a dropped record, and writes the chosen header to both slots.
fn persist_recovery(
    storage: &dyn Storage,
    header: &Header,
    replayed: &Replayed,
) -> Result<(), Error> {
    let mut area = [0; HEADER_AREA_BYTES];
    storage.read(0, &mut area)?;
    let has_header = |slot: &[u8]| choose_header(slot).is_ok_and(|found| found == *header);
    let slots: Vec<bool> = area.chunks(SLOT_BYTES).map(has_header).collect();
    if replayed.dropped {
        storage.write(header.log.0 + replayed.tail, &[0; ERASED_BYTES])?;
    }
    for (index, has_header) in (0..).zip(&slots) {
        if !has_header {
            storage.write(index * SLOT_BYTES as u64, &header.encode())?;
        }
    }
    storage.make_durable()
}

//! Opens a file for writing. The log is first folded into the tables (spec section 10, "Opening for
//! writing").

use std::collections::HashSet;
use std::sync::OnceLock;

use bcow_format::{
    BlockShift, Entry, HEADER_AREA_BYTES, Header, SLOT_BYTES, State, Stored, choose_header,
    decode_free, incompatible, read_only_compatible,
};

use super::blocks::{Blocks, Table};
use super::checkpoint::Change;
use super::committer::Committer;
use super::extents::Extents;
use super::locks::{Gate, lock};
use super::regions::{Regions, read_blocks};
use super::space::{Space, sectors};
use super::{Backing, Disk, Frame, Inner, Layout};
use crate::log::{self, Replayed};
use crate::storage::Storage;
use crate::sync::atomic::{AtomicBool, AtomicU64};
use crate::sync::{Arc, Mutex};
use crate::{BackingResolver, Error, Image, OpenOptions, Verify};

impl Disk {
    /// Opens a file for writing. The caller holds the lock on the file for the lifetime of the
    /// disk.
    ///
    /// All data that was flushed before a crash is present; no repair is necessary. Fails with
    /// [`Error::Unsupported`] if the file is sealed or has features that this version does not
    /// write, and with [`Error::MissingBacking`] if `resolver` has no backing.
    pub fn open(
        storage: Arc<dyn Storage>,
        options: &OpenOptions,
        resolver: &dyn BackingResolver,
    ) -> Result<Disk, Error> {
        let options = OpenOptions {
            verify: Verify::Checksums,
            ..options.clone()
        };
        let image = Image::open_with_backings(Arc::clone(&storage), &options, resolver)?;
        let header = image.header().clone();
        check_writable(&header)?;
        let backing = match header.features.has_incompatible(incompatible::BACKING) {
            true => Some(backing_of(&image)?),
            false => None,
        };
        let replayed = log::replay(&*storage, &header)?;
        let slot = settle_slots(&*storage, &header, &replayed)?;
        let (layout, block_shift) = layout_of(&image)?;

        let mut free = Extents::default();
        for range in decode_free(&image.read_section(&header.free)?, &header)? {
            free.insert(range.start..range.start + range.bytes);
        }
        let mut committer = Committer {
            slot,
            tail: replayed.tail,
            sequence: replayed.next_sequence,
            file_bytes: header.file_bytes,
            free,
            logged: Vec::new(),
            logged_bytes: 0,
            small_flushes: 0,
            written_log: 0,
            header,
        };
        committer.grow(replayed.file_bytes);
        let logged: Vec<Stored> = image.logged_blocks().collect();
        for stored in &logged {
            committer.free.remove(sectors(*stored));
        }
        // No record or table names the bytes behind the end. Truncation makes sure that new bytes
        // there read as zeros.
        let io = |source| Error::io("cut off the end", replayed.file_bytes, source);
        if storage.len().map_err(io)? > replayed.file_bytes {
            storage.set_len(replayed.file_bytes).map_err(io)?;
        }
        let inner = Inner {
            id: image.file_id(),
            cache: options.cache.clone(),
            region_shift: committer.header.region_shift,
            layout,
            block_shift,
            gate: Gate::new(Frame::new(&committer.header, backing)),
            regions: Regions::new(image.root().clone()),
            space: Space::new(committer.free.clone(), replayed.file_bytes),
            changed: Default::default(),
            unflushed: AtomicU64::new(0),
            listed_bytes: AtomicU64::new(0),
            touched: AtomicBool::new(false),
            flush_queued: AtomicBool::new(false),
            ahead_queued: AtomicBool::new(false),
            marked: AtomicBool::new(false),
            failed: OnceLock::new(),
            turns: Default::default(),
            fills: Default::default(),
            transits: Default::default(),
            flushes: AtomicU64::new(0),
            checkpoints: AtomicU64::new(0),
            committer: Mutex::new(committer),
            file: crate::checked::CheckedFile {
                storage,
                verifier: None,
            },
        };
        if replayed.tail > 0 {
            inner.fold_log(&image)?;
        }
        Ok(Disk {
            inner: Arc::new(inner),
        })
    }
}

impl Inner {
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
                // The table is damaged, but the log needs nothing of it: else the file would not
                // have opened. The space that only this table named is leaked.
                Err(error) if error.code().is_some() => Blocks::Whole(Entry::Absent),
                old => old?,
            };
            let kept: HashSet<Stored> = new.iter().filter_map(|entry| entry.stored()).collect();
            let gone = old.iter().filter_map(|entry| entry.stored());
            let gone = gone.filter(|stored| !kept.contains(stored));
            if !matches!(old, Blocks::Whole(Entry::Table(_))) {
                change.freed.extend(gone.map(sectors));
            }
            let written = self.write_table(region, &new, &mut root, &mut change);
            self.or_free(written, &change)?;
        }
        // A later record may use space that an earlier one freed, even for another region.
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
    // The length of the first block is not enough: it may be the only block, and short.
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

fn check_writable(header: &Header) -> Result<(), Error> {
    let unsupported = |problem: &str| Err(Error::Unsupported(problem.to_owned()));
    if header.state == State::Sealed {
        return unsupported("the file is sealed: it never changes");
    }
    if header.features.has_incompatible(incompatible::WINDOWS) {
        return unsupported("writing to a file with the feature `windows` is not supported");
    }
    let unknown = header.features.read_only_compatible & !read_only_compatible::MERKLE;
    if unknown != 0 {
        return unsupported(&format!(
            "the file has the unknown feature bit {} which allows reading only; a newer program is \
             needed",
            unknown.trailing_zeros()
        ));
    }
    if header.log.1 == 0 {
        return unsupported("the file has no record log");
    }
    Ok(())
}

fn backing_of(image: &Image) -> Result<Backing, Error> {
    let entry = image.backings().next().cloned();
    match (entry, image.backing(0)) {
        (Some(entry), Some(device)) => Ok(Backing {
            entry,
            device: Arc::clone(device),
        }),
        (entry, _) => Err(Error::MissingBacking {
            name: entry.map_or_else(|| "0".to_owned(), |entry| entry.name.to_string()),
            logical: 0,
        }),
    }
}

/// The layout and the block size with which the file was created.
fn layout_of(image: &Image) -> Result<(Layout, Option<BlockShift>), Error> {
    let metadata = image.metadata()?;
    let options = &metadata["options"];
    let layout = options["layout"].as_str().and_then(Layout::from_name);
    let single = image.header().region_shift <= 24 && layout == Some(Layout::Performance);
    let block = options["block_size"]
        .as_u64()
        .filter(|bytes| bytes.is_power_of_two())
        .and_then(|bytes| BlockShift::new(bytes.trailing_zeros() as u8));
    Ok(match layout {
        Some(Layout::Performance) if !single => (Layout::Auto, block),
        Some(layout) => (layout, block),
        None => (Layout::Auto, block),
    })
}

/// Makes the result of the recovery durable, so that no later opening can find another one: undoes
/// a dropped record and writes the chosen header to both slots. Returns the slot of the header.
fn settle_slots(
    storage: &dyn Storage,
    header: &Header,
    replayed: &Replayed,
) -> Result<usize, Error> {
    let io = |action, at| move |source| Error::io(action, at, source);
    let mut area = [0; HEADER_AREA_BYTES];
    storage.read_at(0, &mut area).map_err(io("read", 0))?;
    let holds = |slot: &[u8]| choose_header(slot).is_ok_and(|found| found == *header);
    let slots: Vec<bool> = area.chunks(SLOT_BYTES).map(holds).collect();
    if replayed.dropped {
        let at = header.log.0 + replayed.tail;
        storage.write_at(at, &[0; 16]).map_err(io("write", at))?;
    }
    for (index, holds) in (0..).zip(&slots) {
        if !holds {
            let at = index * SLOT_BYTES as u64;
            storage
                .write_at(at, &header.encode())
                .map_err(io("write", at))?;
        }
    }
    storage.sync().map_err(io("sync", 0))?;
    Ok(0)
}

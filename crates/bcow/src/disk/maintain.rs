//! Changes of a file as a whole: resize, change of the backing, clear, rebuild of the free list.
//!
//! Each change closes the gate, writes all pending changes into the tables, and then writes one
//! checkpoint with a changed header.

use std::ops::Range;

use bcow_format::{
    BackingEntry, BlockShift, Entry, Header, MAX_ADDRESS, MAX_ROOT_ENTRIES, SECTOR_BYTES, Section,
    Stored, Uba, crc32c, incompatible,
};

use super::blocks::{Blocks, CHECKED_SHIFT, Table};
use super::checkpoint::{Change, section_range};
use super::committer::{Committer, Taken};
use super::create::backing_table;
use super::extents::Extents;
use super::locks::{Closed, lock};
use super::region::Region;
use super::regions::read_blocks;
use super::space::sectors;
use super::{Backing, Disk, DiskConfig, Inner, Layout};
use crate::root::Root;
use crate::sync::Arc;
use crate::{BlockDevice, Error};

/// The maximum memory in bytes of the tables that differ from the file in an idle disk.
const MAX_IDLE_BYTES: u64 = 4 << 20;

impl Disk {
    /// Writes all pending changes into the tables, and truncates the file to its content. The file
    /// does not change again until the next write. The next open does not change it either.
    ///
    /// Waits for all operations to end, and makes everything durable.
    pub fn checkpoint_and_truncate(&self) -> Result<(), Error> {
        let inner = &self.inner;
        let mut closed = inner.gate.close();
        let mut committer = lock(&inner.committer);
        inner.apply(&mut closed, &mut committer, |_, _, _| Ok(()))?;
        inner.truncate_to_content(&mut committer)
    }

    /// Releases the tables in memory that the disk can read again from the file. If the other
    /// tables take much memory, this writes a checkpoint first, so that they can be released too.
    pub fn release_memory(&self) -> Result<(), Error> {
        let writes_checkpoint = lock(&self.inner.committer).logged_bytes > MAX_IDLE_BYTES;
        let written = if writes_checkpoint {
            self.checkpoint()
        } else {
            Ok(())
        };
        self.inner.regions.clear_clean();
        written
    }

    /// Changes the size of the address space to `size` bytes. Added space reads as zeros, even
    /// where the backing has data; data that is cut off does not come back if the disk grows again.
    ///
    /// Waits for all operations to end, and makes everything durable. Fails with
    /// [`Error::Unsupported`] if `size` is not a multiple of 4096 bytes, or is too large for the
    /// format or for this file.
    pub fn resize(&self, size: u64) -> Result<(), Error> {
        let inner = &self.inner;
        inner.maintain(|config, committer, next| {
            let old = committer.header.clone();
            check_size(size, old.region_shift)?;
            next.header.size = size;
            inner.resize_root(config, &old, next)
        })
    }

    /// The largest size in bytes that [`Disk::resize`] accepts; it depends on the region size,
    /// which follows from the size at creation.
    pub fn largest_size(&self) -> u64 {
        (MAX_ROOT_ENTRIES << self.inner.region_shift).min(MAX_ADDRESS)
    }

    /// Sets or removes the backing. This changes only the reference: the caller makes sure that the
    /// new backing has the right content.
    pub fn set_backing(
        &self,
        backing: Option<(BackingEntry, Arc<dyn BlockDevice>)>,
    ) -> Result<(), Error> {
        let inner = &self.inner;
        let table = backing.as_ref().map(|(entry, _)| backing_table(entry));
        let table = table.transpose()?;
        inner.maintain(|_, _, next| {
            next.change.freed.push(section_range(&next.header.backings));
            next.header.backings = match &table {
                Some(bytes) => inner.write_section(bytes, &mut next.change)?,
                None => Section::default(),
            };
            next.header.backing_count = backing.is_some().into();
            let bits = &mut next.header.features.incompatible;
            *bits &= !(incompatible::BACKING | incompatible::VIEWS | incompatible::URLS);
            if let Some((entry, _)) = &backing {
                *bits |= entry.features();
            }
            next.backing = backing.map(|(entry, device)| Backing { entry, device });
            Ok(())
        })
    }

    /// Drops all stored data: the disk then reads as its backing, or as zeros.
    pub fn clear(&self) -> Result<(), Error> {
        let inner = &self.inner;
        inner.maintain(|_, committer, next| {
            next.root = Root::absent(next.root.len());
            let mut used = Extents::default();
            used.insert(SECTOR_BYTES..committer.file_bytes);
            for section in sections(&committer.header) {
                used.remove(section);
            }
            next.change.freed.extend(used.iter());
            Ok(())
        })
    }

    /// Rebuilds the free list from the tables, which recovers leaked space. Returns the number of
    /// recovered bytes.
    pub fn rebuild_free_list(&self) -> Result<u64, Error> {
        let inner = &self.inner;
        let mut found = 0;
        inner.maintain(|config, committer, next| {
            let mut lost = Extents::default();
            lost.insert(SECTOR_BYTES..committer.file_bytes);
            for section in sections(&committer.header) {
                lost.remove(section);
            }
            for range in committer.free.iter() {
                lost.remove(range);
            }
            for (region, entry) in next.root.iter() {
                let entries = entry.stored().into_iter();
                entries.map(sectors).for_each(|range| lost.remove(range));
                if let Entry::Table(_) = entry {
                    let blocks = read_blocks(&inner.file, &config.header, region, entry)?;
                    let entries = blocks.iter().filter_map(|entry| entry.stored());
                    entries.map(sectors).for_each(|range| lost.remove(range));
                }
            }
            found = lost.total();
            next.change.freed.extend(lost.iter());
            Ok(())
        })?;
        Ok(found)
    }
}

/// The state of the disk after the change.
struct NextState {
    header: Header,
    root: Root,
    backing: Option<Backing>,
    change: Change,
}

impl Inner {
    /// Applies `change` to the whole file: writes all pending changes, calls `change`, and makes
    /// the result durable with one checkpoint. No other operation runs meanwhile.
    fn maintain(
        self: &Arc<Self>,
        change: impl FnOnce(&DiskConfig, &Committer, &mut NextState) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut closed = self.gate.close();
        let mut committer = lock(&self.committer);
        self.apply(&mut closed, &mut committer, change)?;
        // The change is durable. After a failure here, the next opening truncates the file; if the
        // copy of the header fails, the next write or flush is refused with the cause.
        let _ = self.truncate_to_content(&mut committer);
        Ok(())
    }

    fn apply(
        self: &Arc<Self>,
        closed: &mut Closed<'_, DiskConfig>,
        committer: &mut Committer,
        change: impl FnOnce(&DiskConfig, &Committer, &mut NextState) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let config = Arc::clone(closed.get());
        self.commit(&config, committer)?;
        if let Some(ledger) = &self.ledger {
            // Nothing is pending, and the change may remove the blocks that its records name.
            ledger.drop_before(ledger.tail());
        }
        if committer.tail > 0 {
            self.checkpoint(&config, committer, &Taken::default())?;
        }
        let mut next = NextState {
            header: committer.header.clone(),
            root: self.regions.root(),
            backing: config.backing.as_ref().map(|backing| Backing {
                entry: backing.entry.clone(),
                device: Arc::clone(&backing.device),
            }),
            change: Change::default(),
        };
        let changed = change(&config, committer, &mut next);
        self.or_free(changed, &next.change)?;
        let NextState {
            header,
            root,
            backing,
            mut change,
        } = next;
        let prepared = self.prepare(committer, header, &root, std::iter::empty(), &mut change);
        let prepared = self.or_free(prepared, &change)?;
        self.switch(committer, prepared)?;
        closed.replace(DiskConfig::new(&committer.header, backing));
        self.regions.set_root(root);
        self.regions.clear();
        Ok(())
    }

    /// Ends the change of a file after its checkpoint: makes both header slots equal, and releases
    /// the free space.
    fn truncate_to_content(&self, committer: &mut Committer) -> Result<(), Error> {
        self.write_other_slot(committer)?;
        // Nothing is pending, so all space that the header does not use is free.
        let end = committer.file_bytes;
        let io = |source| Error::io("truncate the file", end, source);
        self.file.storage.set_len(end).map_err(io)?;
        self.punch(&committer.free);
        committer.small_flushes = 0;
        self.space.reset(committer.free.clone(), end);
        Ok(())
    }

    /// Adapts the root table, and the region at the old or the new end, to the new size.
    fn resize_root(
        &self,
        config: &DiskConfig,
        old: &Header,
        next: &mut NextState,
    ) -> Result<(), Error> {
        let shift = old.region_shift;
        let new_size = next.header.size;
        let boundary = old.size.min(new_size);
        let regions = new_size.div_ceil(1 << shift) as usize;
        for (region, entry) in next.root.iter() {
            if region < regions as u64 {
                continue;
            }
            let blocks = read_blocks(&self.file, old, region, entry)?;
            let stored = blocks.iter().filter_map(|entry| entry.stored());
            next.change.freed.extend(stored.map(sectors));
            next.change.freed.extend(
                entry
                    .stored()
                    .filter(|_| matches!(entry, Entry::Table(_)))
                    .map(sectors),
            );
        }
        let backing_has_data = |at: u64| {
            let backing = config.backing.as_ref();
            backing.is_some_and(|backing| backing.entry.size > at)
        };
        let edge = boundary >> shift;
        if boundary & ((1 << shift) - 1) != 0 {
            let lengths = (old.region_length(edge), next.header.region_length(edge));
            let blocks = read_blocks(&self.file, old, edge, next.root[edge as usize])?;
            let resized = ResizedRegion {
                region: Region::new(edge, lengths.0, None),
                old: lengths.0,
                new: lengths.1,
                backing_has_data: backing_has_data(boundary),
            };
            let blocks = self.resize_region(config, resized, blocks, &mut next.change)?;
            self.write_table(edge, &blocks, &mut next.root, &mut next.change)?;
        }
        let before = next.root.len();
        next.root.resize(regions);
        for region in before..regions {
            let start = (region as u64) << shift;
            if backing_has_data(start.max(boundary)) {
                next.root.set(region, Entry::Zero);
            }
        }
        Ok(())
    }

    /// Adapts the entries of the region that contains the smaller one of the old and the new end.
    fn resize_region(
        &self,
        config: &DiskConfig,
        resized: ResizedRegion,
        blocks: Blocks,
        change: &mut Change,
    ) -> Result<Blocks, Error> {
        let grown = if resized.backing_has_data {
            Entry::Zero
        } else {
            Entry::Absent
        };
        let grows = resized.new > resized.old;
        let table = match blocks {
            // The added part of an absent region must not show the backing.
            Blocks::Whole(Entry::Absent) if grows && resized.backing_has_data => {
                if self.layout == Layout::Performance {
                    let entry = self.resize_block(
                        config,
                        &resized,
                        0,
                        self.region_shift,
                        Entry::Absent,
                        change,
                    )?;
                    return Ok(Blocks::Whole(entry));
                }
                let shift = BlockShift::new(CHECKED_SHIFT).unwrap_or(BlockShift::MIN);
                let count = resized.old.div_ceil(shift.bytes().into());
                Table::uniform(shift, count as u32, Entry::Absent)
            }
            Blocks::Whole(entry @ (Entry::Absent | Entry::Zero)) => {
                return Ok(Blocks::Whole(entry));
            }
            Blocks::Whole(entry) => {
                let entry =
                    self.resize_block(config, &resized, 0, self.region_shift, entry, change)?;
                return Ok(Blocks::Whole(entry));
            }
            Blocks::Cut(table) => table,
        };
        let shift = table.shift().get();
        let count = resized.new.div_ceil(1 << shift) as usize;
        let mut entries = table.to_table().entries.into_vec();
        let removed = entries.iter().skip(count).filter_map(Entry::stored);
        change.freed.extend(removed.map(sectors));
        entries.truncate(count);
        let edge = (resized.old.min(resized.new) >> shift) as usize;
        if resized.old.min(resized.new) & ((1 << shift) - 1) != 0 {
            entries[edge] =
                self.resize_block(config, &resized, edge as u32, shift, entries[edge], change)?;
        }
        entries.resize(count, grown);
        Ok(Blocks::Cut(Table::new(table.shift(), entries)))
    }

    /// Adapts the block that contains the smaller one of the old and the new end to its new length.
    fn resize_block(
        &self,
        config: &DiskConfig,
        resized: &ResizedRegion,
        index: u32,
        shift: u8,
        entry: Entry,
        change: &mut Change,
    ) -> Result<Entry, Error> {
        let old_block = super::block_at(u64::from(index) << shift, shift, resized.old);
        let new_block = super::block_at(u64::from(index) << shift, shift, resized.new);
        let grows_over_backing = entry == Entry::Absent
            && resized.backing_has_data
            && new_block.length > old_block.length;
        if entry.stored().is_none() && !grows_over_backing {
            return Ok(entry);
        }
        let kept = old_block.length.min(new_block.length);
        let mut bytes = vec![0; new_block.length as usize];
        self.read_entry(
            config,
            &resized.region,
            &old_block,
            &entry,
            0..kept as u32,
            &mut bytes[..kept as usize],
        )?;
        change.freed.extend(entry.stored().map(sectors));
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(Entry::Zero);
        }
        let section = self.write_section(&bytes, change)?;
        Ok(Entry::Raw(Stored {
            at: Uba(section.offset),
            bytes: section.bytes,
            crc: crc32c(&bytes),
        }))
    }
}

/// A region whose length changes.
struct ResizedRegion {
    region: Region,
    /// The old length in bytes.
    old: u64,
    /// The new length in bytes.
    new: u64,
    /// Whether the backing is longer than the part of the disk that stays. Added space would then
    /// show the backing, so it needs entries for zeros.
    backing_has_data: bool,
}

fn check_size(size: u64, region_shift: u8) -> Result<(), Error> {
    if !size.is_multiple_of(SECTOR_BYTES) || size > MAX_ADDRESS {
        return Err(Error::Unsupported(format!(
            "a size of {size} bytes: it must be a multiple of 4096, and at most 2^48"
        )));
    }
    if size.div_ceil(1 << region_shift) > MAX_ROOT_ENTRIES {
        return Err(Error::Unsupported(format!(
            "{size} bytes: with its regions of {} bytes the file has room for {}",
            1u64 << region_shift,
            MAX_ROOT_ENTRIES << region_shift
        )));
    }
    Ok(())
}

/// The ranges of the file that a header names, except the region tables.
fn sections(header: &Header) -> impl Iterator<Item = Range<u64>> {
    let (log, log_bytes) = header.log;
    [
        log..log + log_bytes,
        section_range(&header.metadata),
        section_range(&header.backings),
        section_range(&header.root),
        section_range(&header.free),
    ]
    .into_iter()
}

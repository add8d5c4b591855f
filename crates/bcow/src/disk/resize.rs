//! Changes of the size of a disk.

use bcow_format::{BlockShift, Entry, Header, MAX_ADDRESS, MAX_ROOT_ENTRIES};

use super::blocks::{Blocks, CHECKED_SHIFT, Table};
use super::checkpoint::Change;
use super::create::check_size;
use super::maintain::NextState;
use super::region::Region;
use super::regions::read_blocks;
use super::space::sectors;
use super::{Disk, Layout, Operation};
use crate::Error;

impl Disk {
    /// Changes the size of the address space to `size` bytes. Added space reads as zeros, even
    /// where the backing has data; data that is cut off does not come back if the disk grows again.
    ///
    /// Waits for all operations to end, and makes everything durable. Fails with
    /// [`Error::Unsupported`] if `size` is not a multiple of 4096 bytes, or is too large for the
    /// format or for this file.
    pub fn resize(&self, size: u64) -> Result<(), Error> {
        self.inner.maintain(|operation, committer, next| {
            let old = committer.header.clone();
            check_size(size)?;
            check_regions(size, old.region_shift)?;
            next.header.size = size;
            operation.resize_root(&old, next)
        })
    }

    /// The largest size in bytes that [`Disk::resize`] accepts; it depends on the region size,
    /// which follows from the size at creation.
    pub fn largest_size(&self) -> u64 {
        (MAX_ROOT_ENTRIES << self.inner.region_shift).min(MAX_ADDRESS)
    }
}

impl Operation<'_> {
    /// Adapts the root table, and the region at the old or the new end, to the new size.
    fn resize_root(self, old: &Header, next: &mut NextState) -> Result<(), Error> {
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
            if let Entry::Table(table) = entry {
                next.change.freed.push(sectors(table));
            }
        }
        let backing_has_data = |at: u64| {
            let backing = self.config.backing.as_ref();
            backing.is_some_and(|below| below.entry().size > at)
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
            let blocks = self.resize_region(resized, blocks, &mut next.change)?;
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
        self,
        resized: ResizedRegion,
        blocks: Blocks,
        change: &mut Change,
    ) -> Result<Blocks, Error> {
        let grown = if resized.backing_has_data { Entry::Zero } else { Entry::Absent };
        let grows = resized.new > resized.old;
        let table = match blocks {
            // The added part of an absent region must not show the backing.
            Blocks::Whole(Entry::Absent) if grows && resized.backing_has_data => {
                if self.layout == Layout::Performance {
                    let entry =
                        self.resize_block(&resized, 0, self.region_shift, Entry::Absent, change)?;
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
                let entry = self.resize_block(&resized, 0, self.region_shift, entry, change)?;
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
                self.resize_block(&resized, edge as u32, shift, entries[edge], change)?;
        }
        entries.resize(count, grown);
        Ok(Blocks::Cut(Table::new(table.shift(), entries)))
    }

    /// Adapts the block that contains the smaller one of the old and the new end to its new length.
    fn resize_block(
        self,
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
        Ok(Entry::Raw(self.write_section(&bytes, change)?.stored()))
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

fn check_regions(size: u64, region_shift: u8) -> Result<(), Error> {
    if size.div_ceil(1 << region_shift) > MAX_ROOT_ENTRIES {
        return Err(Error::Unsupported(format!(
            "{size} bytes: with its regions of {} bytes the file has room for {}",
            1u64 << region_shift,
            MAX_ROOT_ENTRIES << region_shift
        )));
    }
    Ok(())
}

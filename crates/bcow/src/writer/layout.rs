//! The places of stored blocks, and the tables that name them.

use bcow_format::{BlockShift, Entry, SubBlockTable, encode_table};

use super::Appender;
use crate::Error;

/// One stored block, or a run of blocks without stored data.
#[derive(Debug, Clone, Copy)]
pub(super) struct BlockRun {
    /// The entry of each block.
    pub(super) entry: Entry,
    /// The number of blocks: 1 if the entry stores data.
    pub(super) blocks: u64,
    /// CRC32C of a stored block before encoding.
    pub(super) logical_crc: u32,
}

/// Stretches of the address space with one block size each, and all records in order.
#[derive(Debug, Default)]
pub(super) struct Layout {
    /// First byte and block size of each stretch.
    stretches: Vec<(u64, BlockShift)>,
    records: Vec<BlockRun>,
}

/// One block of the layout, or a run of blocks without data.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed {
    pub(super) logical: u64,
    pub(super) shift: BlockShift,
    pub(super) record: BlockRun,
}

impl Layout {
    /// Sets the block size from byte `start` on.
    pub(super) fn begin(&mut self, start: u64, shift: BlockShift) {
        match self.stretches.last_mut() {
            // The last stretch is still empty.
            Some(last) if last.0 == start => last.1 = shift,
            _ => self.stretches.push((start, shift)),
        }
    }

    pub(super) fn fill(&mut self, records: Vec<BlockRun>) {
        self.records = records;
    }

    /// The block size, if there is only one stretch.
    pub(super) fn uniform_shift(&self) -> Option<BlockShift> {
        match self.stretches.as_slice() {
            [(_, shift)] => Some(*shift),
            _ => None,
        }
    }

    pub(super) fn has_zstd(&self) -> bool {
        self.records
            .iter()
            .any(|record| matches!(record.entry, Entry::Zstd(_)))
    }

    /// All blocks and runs, with their addresses.
    pub(super) fn placed(&self) -> impl Iterator<Item = Placed> + '_ {
        let mut stretches = self.stretches.iter().peekable();
        let mut shift = BlockShift::MIN;
        let mut logical = 0;
        self.records.iter().map(move |&record| {
            while let Some((start, next)) = stretches.next_if(|(start, _)| *start <= logical) {
                debug_assert_eq!(*start, logical, "a stretch starts inside a block");
                shift = *next;
            }
            let placed = Placed {
                logical,
                shift,
                record,
            };
            logical += record.blocks << shift.get();
            placed
        })
    }

    /// Writes the sub-block tables and returns the root entries. `fill` is the entry of blocks that
    /// were not appended. A region gets no table if all its blocks have this entry, or if one
    /// record covers it.
    pub(super) fn write_tables(
        &self,
        size: u64,
        region_shift: u8,
        fill: Entry,
        out: &mut Appender<'_>,
    ) -> Result<Vec<Entry>, Error> {
        let regions = size.div_ceil(1 << region_shift);
        let mut root = vec![fill; regions as usize];
        // The current region with a table, and this table.
        let mut open: Option<(u64, SubBlockTable)> = None;
        for placed in self.placed() {
            let BlockRun { entry, blocks, .. } = placed.record;
            if entry == fill {
                continue;
            }
            let end = (placed.logical + (blocks << placed.shift.get())).min(size);
            let mut at = placed.logical;
            while at < end {
                let region = at >> region_shift;
                let start = region << region_shift;
                let length = (size - start).min(1 << region_shift);
                let here = end.min(start + length);
                // A stored block becomes a root entry only if blocks are as large as regions. In a
                // short last region, a smaller block gets a table even if it is the only one.
                let fits_root = entry.stored().is_none() || placed.shift.get() == region_shift;
                if fits_root && at == start && here == start + length {
                    root[region as usize] = entry;
                    at = here;
                    continue;
                }
                if open.as_ref().is_some_and(|(index, _)| *index != region) {
                    close(&mut open, &mut root, out)?;
                }
                let (_, table) = open.get_or_insert_with(|| {
                    let blocks = length.div_ceil(placed.shift.bytes().into());
                    let entries = vec![fill; blocks as usize].into();
                    let table = SubBlockTable {
                        block_shift: placed.shift,
                        entries,
                    };
                    (region, table)
                });
                let block = u64::from(placed.shift.bytes());
                let range = (at - start) / block..(here - start).div_ceil(block);
                table.entries[range.start as usize..range.end as usize].fill(entry);
                at = here;
            }
        }
        close(&mut open, &mut root, out)?;
        Ok(root)
    }
}

fn close(
    open: &mut Option<(u64, SubBlockTable)>,
    root: &mut [Entry],
    out: &mut Appender<'_>,
) -> Result<(), Error> {
    if let Some((region, table)) = open.take() {
        let section = out.section(&encode_table(region, &table))?;
        root[region as usize] = Entry::Table(section.stored());
    }
    Ok(())
}

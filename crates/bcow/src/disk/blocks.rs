//! The entries of a region in memory.

use std::collections::BTreeMap;

use bcow_format::{BlockShift, Entry, SubBlockTable};

/// log2 of the size of blocks with a checksum: 4 KiB.
pub(super) const CHECKED_SHIFT: u8 = 12;
/// Most entries that a region keeps in a map; an array of all entries takes less memory beyond
/// that.
const MAX_SINGLE: usize = 128;
/// Memory of one entry in the map, in bytes.
const SINGLE_BYTES: usize = 64;

/// The entries of a region.
#[derive(Debug, Clone)]
pub(super) enum Blocks {
    /// One entry for the whole region: one block, or absent, or zero.
    Whole(Entry),
    /// The region is cut into blocks.
    Cut(Table),
}

/// One entry for each block of a region.
#[derive(Debug, Clone)]
pub(super) struct Table {
    shift: BlockShift,
    count: u32,
    entries: Entries,
}

#[derive(Debug, Clone)]
enum Entries {
    /// All entries are the same, except a few. So the memory after random first writes into a large
    /// disk is proportional to the number of writes.
    Few {
        others: Entry,
        few: BTreeMap<u32, Entry>,
    },
    All(Box<[Entry]>),
}

impl Blocks {
    /// log2 of the block size: the region size, if the region is one block.
    pub(super) fn shift(&self, region_shift: u8) -> u8 {
        match self {
            Blocks::Whole(_) => region_shift,
            Blocks::Cut(table) => table.shift.get(),
        }
    }

    pub(super) fn entry(&self, index: u32) -> Entry {
        match self {
            Blocks::Whole(entry) => *entry,
            Blocks::Cut(table) => table.entry(index),
        }
    }

    pub(super) fn count(&self) -> u32 {
        match self {
            Blocks::Whole(_) => 1,
            Blocks::Cut(table) => table.count,
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Entry> + '_ {
        (0..self.count()).map(|index| self.entry(index))
    }

    pub(super) fn replace(&mut self, index: u32, entry: Entry) -> Entry {
        match self {
            Blocks::Whole(slot) => std::mem::replace(slot, entry),
            Blocks::Cut(table) => table.replace(index, entry),
        }
    }

    /// Changes each entry `old` into `new`. Returns whether there was one.
    pub(super) fn replace_all(&mut self, old: Entry, new: Entry) -> bool {
        let mut found = false;
        for index in 0..self.count() {
            if self.entry(index) == old {
                self.replace(index, new);
                found = true;
            }
        }
        found
    }

    /// The entry that all blocks share, if no block stores data.
    pub(super) fn uniform(&self) -> Option<Entry> {
        let first = self.entry(0);
        let none_stored = matches!(first, Entry::Absent | Entry::Zero);
        (none_stored && self.iter().all(|entry| entry == first)).then_some(first)
    }

    /// Memory of the entries, in bytes.
    pub(super) fn weight(&self) -> u64 {
        let bytes = match self {
            Blocks::Whole(_) => 0,
            Blocks::Cut(table) => match &table.entries {
                Entries::Few { few, .. } => few.len() * SINGLE_BYTES,
                Entries::All(entries) => entries.len() * size_of::<Entry>(),
            },
        };
        bytes as u64
    }
}

impl Table {
    /// A table of `count` equal entries.
    pub(super) fn uniform(shift: BlockShift, count: u32, entry: Entry) -> Self {
        Table {
            shift,
            count,
            entries: Entries::Few {
                others: entry,
                few: BTreeMap::new(),
            },
        }
    }

    pub(super) fn new(shift: BlockShift, entries: Vec<Entry>) -> Self {
        Table {
            shift,
            count: entries.len() as u32,
            entries: Entries::All(entries.into()),
        }
    }

    pub(super) fn shift(&self) -> BlockShift {
        self.shift
    }

    fn entry(&self, index: u32) -> Entry {
        match &self.entries {
            Entries::Few { others, few } => few.get(&index).copied().unwrap_or(*others),
            Entries::All(entries) => entries[index as usize],
        }
    }

    fn replace(&mut self, index: u32, entry: Entry) -> Entry {
        let all = match &mut self.entries {
            Entries::All(entries) => {
                return std::mem::replace(&mut entries[index as usize], entry);
            }
            Entries::Few { others, few } => {
                if few.len() < MAX_SINGLE || few.contains_key(&index) {
                    return few.insert(index, entry).unwrap_or(*others);
                }
                let mut all = vec![*others; self.count as usize];
                for (index, entry) in few {
                    all[*index as usize] = *entry;
                }
                all
            }
        };
        self.entries = Entries::All(all.into());
        self.replace(index, entry)
    }

    /// The table in the form of the file.
    pub(super) fn to_table(&self) -> SubBlockTable {
        SubBlockTable {
            block_shift: self.shift,
            entries: (0..self.count).map(|index| self.entry(index)).collect(),
        }
    }
}

impl From<SubBlockTable> for Table {
    fn from(table: SubBlockTable) -> Self {
        Table {
            shift: table.block_shift,
            count: table.entries.len() as u32,
            entries: Entries::All(table.entries),
        }
    }
}

#[cfg(test)]
mod tests {
    use bcow_format::{Stored, Uba};

    use super::*;

    fn raw(at: u64) -> Entry {
        Entry::Raw(Stored {
            at: Uba(at),
            bytes: 4096,
            crc: 1,
        })
    }

    #[test]
    fn few_or_all_the_entries_are_the_same() {
        let mut table = Table::uniform(BlockShift::MIN, 1024, Entry::Zero);
        let mut plain = vec![Entry::Zero; 1024];
        for round in 0..600u64 {
            let index = (round * 37 % 512) as u32;
            let before = table.replace(index, raw(round << 12));
            assert_eq!(before, plain[index as usize]);
            plain[index as usize] = raw(round << 12);
        }
        assert_eq!(*table.to_table().entries, plain);
        assert!(matches!(table.entries, Entries::All(_)));
    }

    #[test]
    fn a_region_with_one_block_written_takes_little_memory() {
        let mut blocks = Blocks::Cut(Table::uniform(BlockShift::MIN, 1024, Entry::Absent));
        assert_eq!(blocks.uniform(), Some(Entry::Absent));
        blocks.replace(17, raw(4096));
        assert_eq!(blocks.uniform(), None);
        assert!(blocks.weight() < 100);
    }
}

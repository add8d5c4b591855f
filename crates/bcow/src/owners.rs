//! For one region of the address space of a chain: which file has each block.

use std::ops::Range;

use crate::sync::atomic::{AtomicU8, Ordering};
use crate::sync::{Mutex, MutexGuard, SMALL, lock};

/// Bytes of a block: the smallest one of the format, so that no block of a file is divided.
pub(crate) const BLOCK_BYTES: u64 = 4096;
/// Blocks of a region. It takes a byte of memory for each: 1 KiB for 4 MiB.
pub(crate) const BLOCKS: usize = if SMALL { 4 } else { 1024 };
/// Bytes of a region, independent of the regions of the files.
pub(crate) const REGION_BYTES: u64 = BLOCKS as u64 * BLOCK_BYTES;
/// Most files of a chain with numbers of their own.
pub(crate) const MOST_FILES: usize = 128;

/// No file was found yet.
const UNKNOWN: u8 = u8::MAX;
const HOLE: u8 = UNKNOWN - 1;
const _: () = assert!(MOST_FILES <= HOLE as usize);

/// Where the content of a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Owner {
    /// In the file with this number, counted from 0 for the nearest one. A search that begins there
    /// finds the content; no file above has it.
    File(usize),
    /// In no file, because a backing ends before it: zeros.
    Hole,
}

/// The owners of the blocks of a region, as far as they were searched.
///
/// A byte changes once, from unknown to the owner of the block, and the files do not change. So
/// readers need no lock.
pub(crate) struct Owners {
    owners: [AtomicU8; BLOCKS],
    /// Number of files whose tables were searched. Stored after the owners that they have.
    searched: AtomicU8,
    /// Protects the change of the other fields. It is held while the table of one file after the
    /// other is read. Only locks of the block cache are acquired meanwhile.
    search: Mutex<()>,
}

impl Owners {
    /// Nothing is known.
    pub(crate) fn new() -> Self {
        Owners {
            owners: std::array::from_fn(|_| AtomicU8::new(UNKNOWN)),
            searched: AtomicU8::new(0),
            search: Mutex::new(()),
        }
    }

    /// Bytes of memory.
    pub(crate) fn bytes() -> u64 {
        // With the counters of the `Arc` and the place in the cache.
        size_of::<Self>() as u64 + 64
    }

    /// The owner of the first block of `blocks`, or `None` if it is unknown, and the number of
    /// blocks with the same answer.
    pub(crate) fn run(&self, blocks: Range<usize>) -> (Option<Owner>, usize) {
        let mut owners = self.owners[blocks].iter();
        let load = |owner: &AtomicU8| owner.load(Ordering::Relaxed);
        let first = owners.next().map_or(UNKNOWN, load);
        let count = 1 + owners.take_while(|owner| load(owner) == first).count();
        (decoded(first), count)
    }

    /// Whether the owners of all `blocks` are known.
    pub(crate) fn has(&self, blocks: Range<usize>) -> bool {
        let mut owners = self.owners[blocks].iter();
        owners.all(|owner| owner.load(Ordering::Relaxed) != UNKNOWN)
    }

    /// Begins a search. One thread at a time searches.
    pub(crate) fn search(&self) -> Search<'_> {
        Search {
            owners: self,
            _lock: lock(&self.search),
        }
    }
}

fn decoded(owner: u8) -> Option<Owner> {
    match owner {
        UNKNOWN => None,
        HOLE => Some(Owner::Hole),
        file => Some(Owner::File(file.into())),
    }
}

/// The right to add owners.
pub(crate) struct Search<'a> {
    owners: &'a Owners,
    _lock: MutexGuard<'a, ()>,
}

impl Search<'_> {
    /// What is known so far.
    pub(crate) fn owners(&self) -> &Owners {
        self.owners
    }

    /// Number of files that were searched: the number of the next one.
    pub(crate) fn searched(&self) -> usize {
        self.owners.searched.load(Ordering::Relaxed).into()
    }

    /// All files before this one were searched.
    pub(crate) fn set_searched(&self, files: usize) {
        let files = files.min(MOST_FILES) as u8;
        self.owners.searched.store(files, Ordering::Release);
    }

    /// Makes `owner` the owner of those of the blocks that have none yet.
    pub(crate) fn give(&self, blocks: Range<usize>, owner: Owner) {
        let owner = match owner {
            Owner::File(file) => file.min(MOST_FILES - 1) as u8,
            Owner::Hole => HOLE,
        };
        for block in &self.owners.owners[blocks] {
            if block.load(Ordering::Relaxed) == UNKNOWN {
                block.store(owner, Ordering::Relaxed);
            }
        }
    }

    /// Adds what is known of the same region of the files from number `above` on, which count from
    /// 0 in `known`. `last` is the number of the last file here. Calls `taken` with each block that
    /// got its owner. Returns the number of files that were searched.
    pub(crate) fn take_over(
        &self,
        known: &Owners,
        above: usize,
        last: usize,
        mut taken: impl FnMut(usize),
    ) -> usize {
        // Loaded before the owners: an unknown block is absent in all of these files.
        let searched = known.searched.load(Ordering::Acquire);
        for block in 0..BLOCKS {
            if self.owners.has(block..block + 1) {
                continue;
            }
            match known.run(block..block + 1).0 {
                Some(Owner::File(file)) if above + file <= last => {
                    self.give(block..block + 1, Owner::File(above + file));
                    taken(block);
                }
                // The search goes on in the last file.
                Some(Owner::File(_)) => self.give(block..block + 1, Owner::File(last)),
                Some(Owner::Hole) => self.give(block..block + 1, Owner::Hole),
                None => {}
            }
        }
        (above + usize::from(searched)).min(last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn file(number: usize) -> Option<Owner> {
        Some(Owner::File(number))
    }

    #[test]
    fn a_block_keeps_its_first_owner() {
        let owners = Owners::new();
        let search = owners.search();
        search.give(1..2, Owner::File(0));
        search.give(0..2, Owner::File(1));
        assert!(!owners.has(0..3));
        search.give(1..BLOCKS, Owner::Hole);
        assert!(owners.has(0..BLOCKS));
        assert_eq!(owners.run(0..BLOCKS), (file(1), 1));
        assert_eq!(owners.run(1..BLOCKS), (file(0), 1));
        assert_eq!(owners.run(2..BLOCKS), (Some(Owner::Hole), BLOCKS - 2));
    }

    #[test]
    fn what_is_known_below_is_taken_over_with_other_numbers() {
        let below = Owners::new();
        let search = below.search();
        search.give(0..1, Owner::File(0));
        search.give(1..2, Owner::File(3));
        search.give(2..3, Owner::Hole);
        search.set_searched(4);
        drop(search);
        let owners = Owners::new();
        let search = owners.search();
        search.give(0..1, Owner::File(0));
        let mut taken = Vec::new();
        assert_eq!(search.take_over(&below, 1, 9, |block| taken.push(block)), 5);
        assert_eq!(taken, [1]);
        let runs = [(file(0), 1), (file(4), 1), (Some(Owner::Hole), 1)];
        for (block, run) in (0..).zip(runs) {
            assert_eq!(owners.run(block..BLOCKS), run);
        }
        assert_eq!(owners.run(3..BLOCKS), (None, BLOCKS - 3));
        // A chain of too many files.
        let (short, mut taken) = (Owners::new(), Vec::new());
        let searched = short
            .search()
            .take_over(&below, 1, 2, |block| taken.push(block));
        assert_eq!((searched, taken), (2, vec![0]));
        assert_eq!(short.run(0..BLOCKS), (file(1), 1));
        assert_eq!(short.run(1..BLOCKS), (file(2), 1));
    }
}

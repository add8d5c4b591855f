//! A cache of recently used regions of an open disk, and the root table.

use std::collections::HashMap;
use std::collections::hash_map::Entry as Slot;

use bcow_format::{Entry, Header};

use super::blocks::Blocks;
use super::region::{Region, RegionState};
use crate::Error;
use crate::checked::{CheckedFile, read_table};
use crate::root::Root;
use crate::sync::atomic::Ordering;
use crate::sync::{
    Arc, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard, SMALL, lock, read, write,
};

const SHARDS: u64 = if SMALL { 2 } else { 64 };
/// Limit of cached regions per shard: with 24 KiB for a table of 1024 blocks, some 24 MiB in all. A
/// shard may exceed the limit, because dirty regions cannot be evicted.
const MAX_PER_SHARD: usize = if SMALL { 1 } else { 16 };

pub(super) struct Regions {
    shards: Vec<Mutex<HashMap<u64, Arc<Region>>>>,
    /// The root table as of the newest checkpoint.
    root: RwLock<Root>,
}

/// A region, or the one entry of a region that is not in memory.
pub(super) enum FoundRegion {
    Region(Arc<Region>),
    Whole(Entry),
}

impl Regions {
    pub(super) fn new(root: Root) -> Self {
        Regions {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            root: RwLock::new(root),
        }
    }

    /// The region, for a change.
    pub(super) fn get(&self, index: u64, length: u64) -> Arc<Region> {
        let mut shard = lock(&self.shards[(index % SHARDS) as usize]);
        if shard.len() >= MAX_PER_SHARD && !shard.contains_key(&index) {
            forget_one(&mut shard);
        }
        match shard.entry(index) {
            Slot::Occupied(slot) => {
                slot.get().touch();
                Arc::clone(slot.get())
            }
            Slot::Vacant(slot) => {
                let blocks = match read(&self.root)[index as usize] {
                    Entry::Table(_) => None,
                    entry => Some(Blocks::Whole(entry)),
                };
                Arc::clone(slot.insert(Arc::new(Region::new(index, length, blocks))))
            }
        }
    }

    /// The region, for a read. A region that was never written is not loaded into memory.
    pub(super) fn find(&self, index: u64, length: u64) -> FoundRegion {
        {
            let shard = lock(&self.shards[(index % SHARDS) as usize]);
            if let Some(region) = shard.get(&index) {
                region.touch();
                return FoundRegion::Region(Arc::clone(region));
            }
            let entry = read(&self.root)[index as usize];
            if matches!(entry, Entry::Absent | Entry::Zero) {
                return FoundRegion::Whole(entry);
            }
        }
        FoundRegion::Region(self.get(index, length))
    }

    /// The state of the region, locked shared. Reads the table from the file if necessary.
    pub(super) fn read<'a>(
        &self,
        region: &'a Region,
        file: &CheckedFile,
        header: &Header,
    ) -> Result<RwLockReadGuard<'a, RegionState>, Error> {
        loop {
            let state = read(&region.state);
            if state.blocks.is_some() {
                return Ok(state);
            }
            drop(state);
            drop(self.write(region, file, header)?);
        }
    }

    /// The state of the region, locked exclusively. Reads the table from the file if necessary.
    pub(super) fn write<'a>(
        &self,
        region: &'a Region,
        file: &CheckedFile,
        header: &Header,
    ) -> Result<RwLockWriteGuard<'a, RegionState>, Error> {
        let mut state = write(&region.state);
        if state.blocks.is_none() {
            let entry = read(&self.root)[region.index as usize];
            state.blocks = Some(read_blocks(file, header, region.index, entry)?);
        }
        Ok(state)
    }

    /// A copy of the root table as of the newest checkpoint.
    pub(super) fn root(&self) -> Root {
        read(&self.root).clone()
    }

    /// Replaces the root table after a checkpoint.
    pub(super) fn set_root(&self, root: Root) {
        *write(&self.root) = root;
    }

    /// Evicts all clean regions that no operation uses.
    pub(super) fn clear_clean(&self) {
        for shard in &self.shards {
            let mut shard = lock(shard);
            shard.retain(|_, region| Arc::strong_count(region) > 1 || !region.is_clean());
            shard.shrink_to_fit();
        }
    }

    /// Evicts all regions. The caller knows that the root table and the tables are complete.
    pub(super) fn clear(&self) {
        for shard in &self.shards {
            lock(shard).clear();
        }
    }
}

/// The entries that a root entry names.
pub(super) fn read_blocks(
    file: &CheckedFile,
    header: &Header,
    region: u64,
    entry: Entry,
) -> Result<Blocks, Error> {
    Ok(match entry {
        Entry::Table(stored) => Blocks::Cut(read_table(file, header, region, &stored)?.into()),
        entry => Blocks::Whole(entry),
    })
}

/// Evicts one clean region that has no other user and was not used since the last scan.
fn forget_one(shard: &mut HashMap<u64, Arc<Region>>) {
    let victim = shard
        .iter()
        .find(|(_, region)| {
            Arc::strong_count(region) == 1
                && !region.used.swap(false, Ordering::Relaxed)
                && region.is_clean()
        })
        .map(|(index, _)| *index);
    if let Some(index) = victim {
        shard.remove(&index);
    }
}

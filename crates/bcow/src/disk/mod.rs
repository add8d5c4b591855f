//! A writable file: a sparse, copy-on-write block device over an optional backing.
//!
//! Why it is correct stands in `docs/design.md`, section "Writing and crashing". In short: a write stores its bytes at a place
//! that nothing in the file names yet ([`space`]), then changes an entry in memory ([`region`]). A flush ([`commit`]) writes one
//! record that names the new places, and waits once. When the log is full, a [`checkpoint`] folds the records into tables.
//!
//! # Locks
//!
//! In the order in which they are taken; none is held while another disk's is taken:
//!
//! 1. the [`Gate`], shared by every operation, closed to change the size or the backing;
//! 2. the turn to flush ([`commit::Turns`]), then the [`commit::Committer`]: one record or checkpoint at a time;
//! 3. one [`region::Region`]'s lock: shared to read its blocks or write into them in place, exclusive to change its entries;
//! 4. a shard of [`regions::Regions`], the root table, the list of changed regions, the queue of fills, [`space::Space`]:
//!    leaves, held for a few instructions.
//!
//! A completion of a block ([`transit`]) is the one reader that reads without its region's lock; it
//! compares the transit's identity when it has the lock again.
//!
//! Two regions are never locked at once, and no lock is shared by all writers but the leaves of 4, most of which are sharded.

mod blocks;
mod checkpoint;
mod commit;
mod create;
mod extents;
mod locks;
mod maintain;
mod open;
mod read;
mod region;
mod regions;
mod space;
mod transit;
mod write;

use std::sync::OnceLock;

use bcow_format::{BackingEntry, BlockShift, Entry, Header, Lba, MAX_ADDRESS};

use crate::cache::FileId;
use crate::checked::CheckedFile;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex};
use crate::{BlockCache, BlockDevice, Error};
use commit::{Committer, Turns};
use locks::{Gate, Pass};
use region::{Region, TransitIds};
use regions::Regions;
use space::Space;
use transit::Fills;

pub use create::{CreateOptions, Layout};

/// An open writable file.
///
/// Dropped without [`Disk::close`], it is as after a crash: what was flushed is there when it is opened again.
pub struct Disk {
    inner: Arc<Inner>,
}

/// What a disk did since it was opened, and what it holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Flushes that wrote a record or found nothing to write.
    pub flushes: u64,
    /// Checkpoints.
    pub checkpoints: u64,
    /// Blocks that were written in part and completed from below.
    pub filled_blocks: u64,
    /// Blocks that wait to be completed in the background, about.
    pub waiting_blocks: u64,
    /// Blocks changed since the last flush.
    pub unflushed_blocks: u64,
    /// Bytes of the file that are free to be written again.
    pub free_bytes: u64,
}

struct Inner {
    file: CheckedFile,
    id: FileId,
    cache: BlockCache,
    region_shift: u8,
    layout: Layout,
    /// Block size that the user chose, for regions that are not cut yet.
    block_shift: Option<BlockShift>,
    gate: Gate<Frame>,
    regions: Regions,
    space: Space,
    /// Regions with something pending, by shard of the region's index.
    changed: [Mutex<Vec<Arc<Region>>>; 16],
    /// Blocks pending.
    unflushed: AtomicU64,
    /// Memory that the regions on the list take, about.
    listed_bytes: AtomicU64,
    /// Whether anything was written since the last record, in place or not.
    touched: AtomicBool,
    /// Whether the background was asked to flush.
    flush_queued: AtomicBool,
    /// Whether a record since opening made the file's identity another.
    marked: AtomicBool,
    /// Why no more is written, once a barrier has failed: what the host did with the bytes is unknown from then on.
    failed: OnceLock<String>,
    turns: Turns,
    committer: Mutex<Committer>,
    fills: Fills,
    transits: TransitIds,
    flushes: AtomicU64,
    checkpoints: AtomicU64,
}

/// What all operations rely on.
struct Frame {
    /// For what depends on the size and the features. Its sections may be older than the file's, and its file_bytes is the
    /// most there can be: tables that are read name places that were written since.
    header: Header,
    backing: Option<Backing>,
}

struct Backing {
    entry: BackingEntry,
    device: Arc<dyn BlockDevice>,
}

/// One block, or several neighbours, of a region.
#[derive(Debug, Clone, Copy)]
struct BlockPlace {
    index: u32,
    /// First byte of the block in its region.
    start: u64,
    /// Length of the block in bytes.
    length: u64,
}

impl Disk {
    /// The header as the newest checkpoint wrote it.
    pub fn header(&self) -> Header {
        locks::lock(&self.inner.committer).header.clone()
    }

    /// The backing's entry, if there is one.
    pub fn backing(&self) -> Option<BackingEntry> {
        let frame = self.inner.gate.enter();
        frame.backing.as_ref().map(|backing| backing.entry.clone())
    }

    /// What was done and what there is.
    pub fn statistics(&self) -> Statistics {
        let inner = &self.inner;
        Statistics {
            flushes: inner.flushes.load(Ordering::Relaxed),
            checkpoints: inner.checkpoints.load(Ordering::Relaxed),
            filled_blocks: inner.fills.done(),
            waiting_blocks: inner.fills.waiting(),
            unflushed_blocks: inner.unflushed.load(Ordering::Relaxed),
            free_bytes: inner.space.free_bytes(),
        }
    }

    /// Whether blocks wait to be completed in the background, about.
    pub fn has_waiting(&self) -> bool {
        self.inner.fills.waiting() > 0
    }

    /// Makes everything durable, in tables, so that the next who opens the file has nothing to replay; gives back free
    /// space at the end of the file.
    pub fn close(self) -> Result<(), Error> {
        // Before the gate is closed, at which the filler might be waiting.
        self.inner.fills.stop();
        let closed = self.inner.gate.close();
        self.inner.close(closed.get())
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.inner.fills.stop();
    }
}

impl Inner {
    fn enter(&self) -> Pass<'_, Frame> {
        self.gate.enter()
    }

    fn region(&self, frame: &Frame, index: u64) -> Arc<Region> {
        self.regions.get(index, frame.header.region_length(index))
    }

    /// Refuses to write once a barrier has failed.
    fn check_alive(&self) -> Result<(), Error> {
        match self.failed.get() {
            Some(cause) => Err(Error::WriteRefused {
                cause: cause.clone(),
            }),
            None => Ok(()),
        }
    }

    /// A barrier. Once one failed, the host may have dropped what it could not write, and say nothing of it next time.
    fn barrier(&self) -> Result<(), Error> {
        self.file.storage.sync().map_err(|source| {
            let error = Error::io("sync", 0, source);
            let _ = self.failed.set(error.to_string());
            error
        })
    }

    fn write_storage(&self, at: u64, bytes: &[u8]) -> Result<(), Error> {
        self.file
            .storage
            .write_at(at, bytes)
            .map_err(|source| Error::io("write", at, source))
    }

    /// Puts a region on the list of those that the next record is about.
    fn list(&self, region: &Arc<Region>, weight: u64) {
        if !region.listed.swap(true, Ordering::AcqRel) {
            let shard = region.index as usize % self.changed.len();
            locks::lock(&self.changed[shard]).push(Arc::clone(region));
            self.listed_bytes
                .fetch_add(weight + size_of::<Region>() as u64, Ordering::Relaxed);
        }
    }

    fn lba(&self, region: &Region, at: u64) -> Lba {
        Lba(region.start(self.region_shift) + at)
    }
}

impl Frame {
    fn new(header: &Header, backing: Option<Backing>) -> Self {
        Frame {
            header: Header {
                file_bytes: MAX_ADDRESS,
                ..header.clone()
            },
            backing,
        }
    }

    /// What stands where nothing is stored: the entry that says "zeros" at the least cost.
    fn zeros(&self) -> Entry {
        match self.backing {
            Some(_) => Entry::Zero,
            None => Entry::Absent,
        }
    }

    /// Whether an entry reads as zeros without looking further.
    fn is_zeros(&self, entry: &Entry) -> bool {
        match entry {
            Entry::Zero => true,
            Entry::Absent => self.backing.is_none(),
            _ => false,
        }
    }
}

/// The block of a region of `length` bytes in which the byte `at` lies.
fn place(at: u64, shift: u8, length: u64) -> BlockPlace {
    let index = at >> shift;
    let start = index << shift;
    BlockPlace {
        index: index as u32,
        start,
        length: (length - start).min(1 << shift),
    }
}

/// The pieces of `offset..offset + length` by region: its index, the place in it, and how much.
fn by_region(offset: u64, length: u64, region_shift: u8) -> impl Iterator<Item = (u64, u64, u64)> {
    let end = offset + length;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let region = at >> region_shift;
        let start = region << region_shift;
        let take = (start + (1 << region_shift)).min(end) - at;
        let piece = (region, at - start, take);
        at += take;
        Some(piece)
    })
}

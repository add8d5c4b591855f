//! A writable file: a sparse, copy-on-write block device over an optional backing.
//!
//! `docs/design.md`, section "Writing and crashing", explains why the design is correct. In short:
//! a write stores its bytes at a place that nothing in the file names yet ([`space`]), then changes
//! an entry in memory ([`region`]). A flush ([`commit`]) writes one record that names the new
//! places and makes it durable. When the log is full, a [`checkpoint`] folds the records into
//! tables.
//!
//! # Locks
//!
//! Locks are acquired in this order. A thread that holds a lock of one disk acquires no lock of
//! another disk:
//!
//! 1. the [`Gate`]: each operation holds it shared; a change of the size or the backing closes it;
//! 2. the turn to flush ([`commit::Turns`]), then the [`committer::Committer`]: one record or
//!    checkpoint at a time;
//! 3. the lock of one [`region::Region`]: shared to read blocks or to write into them in place,
//!    exclusive to change entries;
//! 4. leaf locks, held for a few instructions: a shard of [`regions::Regions`], the root table, the
//!    list of changed regions, the queue of fills, [`space::Space`].
//!
//! The completion of a block ([`transit`]) is the only reader that reads blocks of the file without
//! the lock of the region; it compares the identity of the transit after it has acquired the lock
//! again.
//!
//! No thread locks two regions at once. The only exclusive locks that all writers share are the
//! leaf locks of 4, most of which are sharded.

mod ahead;
mod blocks;
mod checkpoint;
mod commit;
mod committer;
mod create;
mod extents;
mod layout;
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
use commit::Turns;
use committer::Committer;
use locks::{Gate, Pass};
use region::{Region, TransitIds};
use regions::Regions;
use space::Space;
use transit::Fills;

pub use create::CreateOptions;
pub use layout::Layout;

/// An open writable file.
///
/// A disk that is dropped without [`Disk::close`] leaves the file as after a crash: the next
/// opening finds all data that was flushed.
pub struct Disk {
    inner: Arc<Inner>,
}

/// Counters since the disk was opened, and its present state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Flushes that succeeded, with or without a record to write.
    pub flushes: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
    /// Partly written blocks that were completed with the old data.
    pub filled_blocks: u64,
    /// Jobs that wait in the background, mostly blocks to complete; approximate.
    pub waiting_blocks: u64,
    /// Blocks changed since the last flush.
    pub unflushed_blocks: u64,
    /// Free bytes inside the file, which later writes reuse.
    pub free_bytes: u64,
    /// Those of them that were filled with zeros, so that a flush of writes there is cheap.
    pub ready_bytes: u64,
}

struct Inner {
    file: CheckedFile,
    id: FileId,
    cache: BlockCache,
    region_shift: u8,
    layout: Layout,
    /// Block size that the user chose, for regions that are not cut into blocks yet.
    block_shift: Option<BlockShift>,
    gate: Gate<Frame>,
    regions: Regions,
    space: Space,
    /// Regions with pending changes, in shards by the index of the region.
    changed: [Mutex<Vec<Arc<Region>>>; 16],
    /// Number of pending blocks.
    unflushed: AtomicU64,
    /// Memory of the regions in `changed`, in bytes; approximate.
    listed_bytes: AtomicU64,
    /// Whether a write changed data since the last record, in place or not.
    touched: AtomicBool,
    /// Whether a flush is queued in the background.
    flush_queued: AtomicBool,
    /// Whether [`Job::WriteAhead`] is queued or running; stays set if its writes fail.
    ///
    /// [`Job::WriteAhead`]: transit::Job::WriteAhead
    ahead_queued: AtomicBool,
    /// Whether a record or checkpoint since the opening has changed the identity of the file.
    marked: AtomicBool,
    /// Cause of the failure after which the disk refuses to write: a barrier failed, or the write
    /// of a header slot, or the undoing of a record. The state of the bytes on the host is unknown
    /// then.
    failed: OnceLock<String>,
    turns: Turns,
    committer: Mutex<Committer>,
    fills: Fills,
    transits: TransitIds,
    flushes: AtomicU64,
    checkpoints: AtomicU64,
}

/// State that all operations share; it changes only while the gate is closed.
struct Frame {
    /// Used for the size and the features. Its sections may be older than those of the file. Its
    /// `file_bytes` is the largest possible value, because tables may name places that were written
    /// after this header.
    header: Header,
    backing: Option<Backing>,
}

struct Backing {
    entry: BackingEntry,
    device: Arc<dyn BlockDevice>,
}

/// A block of a region.
#[derive(Debug, Clone, Copy)]
struct BlockPlace {
    index: u32,
    /// First byte of the block, relative to the region.
    start: u64,
    /// Length of the block in bytes.
    length: u64,
}

impl Disk {
    /// The header as the newest checkpoint wrote it.
    pub fn header(&self) -> Header {
        locks::lock(&self.inner.committer).header.clone()
    }

    /// The entry of the backing, if the disk has one.
    pub fn backing(&self) -> Option<BackingEntry> {
        let frame = self.inner.gate.enter();
        frame.backing.as_ref().map(|backing| backing.entry.clone())
    }

    /// Identity of the file, when another file names it as a backing (spec section 8). It changes
    /// with each flush of a change, and with each checkpoint.
    pub fn identity_hash(&self) -> [u8; 32] {
        let committer = locks::lock(&self.inner.committer);
        crate::identity(&committer.header, committer.sequence - 1)
    }

    /// Returns the counters and the present state.
    pub fn statistics(&self) -> Statistics {
        let inner = &self.inner;
        Statistics {
            flushes: inner.flushes.load(Ordering::Relaxed),
            checkpoints: inner.checkpoints.load(Ordering::Relaxed),
            filled_blocks: inner.fills.done(),
            waiting_blocks: inner.fills.waiting(),
            unflushed_blocks: inner.unflushed.load(Ordering::Relaxed),
            free_bytes: inner.space.free_bytes(),
            ready_bytes: inner.space.ready_bytes(),
        }
    }

    /// Whether jobs wait in the background, mostly blocks to complete; approximate.
    pub fn has_waiting(&self) -> bool {
        self.inner.fills.waiting() > 0
    }

    /// Makes all data durable in tables, so that the next opening has no log to replay, and
    /// releases the free space at the end of the file.
    pub fn close(self) -> Result<(), Error> {
        // Before the gate is closed: the filler may be waiting to enter it, and `stop` joins the
        // filler.
        self.inner.fills.stop();
        let closed = self.inner.gate.close();
        self.inner.close(closed.get())
    }

    /// As [`Disk::close`], for a disk that other threads refer to. Their later operations never
    /// return, so the caller ends the process afterwards.
    pub fn close_for_exit(&self) -> Result<(), Error> {
        self.inner.fills.stop();
        let closed = self.inner.gate.close();
        let result = self.inner.close(closed.get());
        std::mem::forget(closed);
        result
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

    /// Fails with [`Error::WriteRefused`] after a failure that left the state of the file unknown.
    fn check_alive(&self) -> Result<(), Error> {
        match self.failed.get() {
            Some(cause) => Err(Error::WriteRefused {
                cause: cause.clone(),
            }),
            None => Ok(()),
        }
    }

    /// A barrier. After one has failed, all writes are refused: the host may have dropped dirty
    /// pages, and the next sync may report success.
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

    /// Adds a region to the list of regions that the next record covers.
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

    /// The cheapest entry that reads as zeros.
    fn zeros(&self) -> Entry {
        match self.backing {
            Some(_) => Entry::Zero,
            None => Entry::Absent,
        }
    }

    /// Whether an entry reads as zeros without a read of the backing.
    fn is_zeros(&self, entry: &Entry) -> bool {
        match entry {
            Entry::Zero => true,
            Entry::Absent => self.backing.is_none(),
            _ => false,
        }
    }
}

/// The block that holds the byte `at` of a region of `length` bytes.
fn place(at: u64, shift: u8, length: u64) -> BlockPlace {
    let index = at >> shift;
    let start = index << shift;
    BlockPlace {
        index: index as u32,
        start,
        length: (length - start).min(1 << shift),
    }
}

/// Splits `offset..offset + length` by region: index of the region, offset in it, length.
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

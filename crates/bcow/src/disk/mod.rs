//! A writable file: a sparse, copy-on-write block device over an optional backing.
//!
//! `docs/design.md`, section "Writing and crashing", explains why the design is correct. In short:
//! a write stores its bytes at a place to which no table and no record refers yet ([`space`]), then
//! changes an entry in memory ([`region`]). A flush ([`commit`]) writes one record with the new
//! entries, and makes it durable. When the log is full, a [`checkpoint`] writes the tables, and the
//! log begins again. A disk can have a [`ledger`] of the entries that are in no record yet, with
//! which another process continues after this one was killed ([`resume`]).
//!
//! # Locks
//!
//! Locks are acquired in this order. A thread that holds a lock of one disk acquires no lock of
//! another disk:
//!
//! 1. the [`Gate`]: each operation holds it shared; a change of the size or the backing, and the
//!    close, hold it exclusively;
//! 2. the turn to flush ([`commit::Turns`]), then the [`committer::Committer`], whose lock covers
//!    the write of one record or checkpoint;
//! 3. the lock of one [`region::Region`]: shared to read blocks or to write into them in place,
//!    exclusive to change entries;
//! 4. the lock of a region of the map of the files below ([`Below`]), for a search in their tables,
//!    then a lock of the block cache;
//! 5. leaf locks, held for a few instructions: a shard of [`regions::Regions`], the root table, the
//!    list of changed regions, the queue of fills, [`space::Space`].
//!
//! The [`ledger`] has no lock: a record is written, with the lock of its region held, to a place
//! that was reserved before.
//!
//! The completion of a block ([`incomplete`]) is the only operation that reads blocks of the file
//! without the lock of the region. It compares the identity of the incomplete block after it has
//! acquired the lock again.
//!
//! No thread locks two regions at once. The only exclusive locks that all writers share are the
//! leaf locks of item 5. Most of these are sharded.

mod ahead;
mod blocks;
mod checkpoint;
mod commit;
mod committer;
mod create;
mod edit;
mod extents;
mod incomplete;
mod layout;
mod ledger;
mod locks;
mod maintain;
mod open;
mod read;
mod region;
mod regions;
mod resize;
mod resume;
mod space;
mod write;

use std::ops::{Deref, Range};
use std::sync::OnceLock;

use bcow_format::{BackingEntry, BlockShift, Entry, Header, Lba, MAX_ADDRESS};

use crate::cache::FileId;
use crate::checked::CheckedFile;
use crate::device::checked_range;
use crate::image::Below;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, RwLockReadGuard, lock};
use crate::{BlockCache, Error};
use commit::Turns;
use committer::Committer;
use incomplete::Fills;
use region::{IncompleteIds, Region, RegionState};
use regions::Regions;
use space::Space;

pub use create::CreateOptions;
pub use layout::Layout;
pub use ledger::Ledger;
pub(crate) use locks::{Closed, Gate, Pass};

/// An open writable file.
///
/// A disk that is dropped without [`Disk::close`] leaves the file as after a crash. The next
/// opening finds all flushed data.
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
    /// Incomplete blocks that were completed with the old data.
    pub filled_blocks: u64,
    /// Background jobs that have not begun, mostly completions of blocks; approximate.
    pub queued_jobs: u64,
    /// Blocks changed since the last flush.
    pub unflushed_blocks: u64,
    /// Free bytes inside the file. Later writes reuse them.
    pub free_bytes: u64,
    /// The part of `free_bytes` that was filled with zeros: a flush of later writes there changes
    /// no metadata of the host.
    pub zeroed_bytes: u64,
}

struct Inner {
    file: CheckedFile,
    id: FileId,
    cache: BlockCache,
    region_shift: u8,
    layout: Layout,
    /// The block size that the user chose when the disk was created. A region gets it at its first
    /// write.
    block_shift: Option<BlockShift>,
    gate: Gate<DiskConfig>,
    regions: Regions,
    space: Space,
    /// Regions with pending changes, in shards by the index of the region.
    changed: [Mutex<Vec<Arc<Region>>>; 16],
    /// Number of pending blocks.
    unflushed: AtomicU64,
    /// Memory of the regions in `changed`, in bytes; approximate.
    listed_bytes: AtomicU64,
    /// Whether a write changed data since the last record, in place or in a new place.
    is_dirty: AtomicBool,
    /// Whether a flush is queued in the background.
    flush_queued: AtomicBool,
    /// Whether [`Job::WriteAhead`] is queued or running; stays set if its writes fail.
    ///
    /// [`Job::WriteAhead`]: incomplete::Job::WriteAhead
    ahead_queued: AtomicBool,
    /// Whether a record or checkpoint since the opening has changed the identity of the file.
    has_new_identity: AtomicBool,
    /// The cause, if the disk refuses writes: a barrier, the write of a header slot, or the erasure
    /// of a failed record did not succeed. The state of the data on the host is unknown then.
    failed: OnceLock<String>,
    /// The changes that no flush has recorded, for another process.
    ledger: Option<Arc<Ledger>>,
    turns: Turns,
    committer: Mutex<Committer>,
    fills: Fills,
    incomplete_blocks: IncompleteIds,
    flushes: AtomicU64,
    checkpoints: AtomicU64,
}

/// The size, the features and the backing of a disk. They change only while the gate is closed.
struct DiskConfig {
    /// The header, of which only the size and the features are current. The sections of the file
    /// may be newer. `file_bytes` has the largest possible value, because tables may refer to
    /// places that were written after this header.
    header: Header,
    backing: Option<Arc<Below>>,
}

/// An operation on an open disk, whose size and backing do not change meanwhile.
#[derive(Clone, Copy)]
struct Operation<'a> {
    disk: &'a Arc<Inner>,
    config: &'a DiskConfig,
}

impl Deref for Operation<'_> {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        self.disk
    }
}

/// A block of a region.
#[derive(Debug, Clone, Copy)]
struct RegionBlock {
    index: u32,
    /// First byte of the block, relative to the region.
    start: u64,
    /// Length of the block in bytes.
    length: u64,
}

impl Disk {
    /// The header as the newest checkpoint wrote it.
    pub fn header(&self) -> Header {
        lock(&self.inner.committer).header.clone()
    }

    /// The entry of the backing, if the disk has one.
    pub fn backing(&self) -> Option<BackingEntry> {
        let config = self.inner.gate.enter();
        config.backing.as_ref().map(|below| below.entry().clone())
    }

    /// The backing with the files below it.
    pub(crate) fn below(&self) -> Option<Arc<Below>> {
        self.inner.enter().backing.clone()
    }

    /// The cache of the disk and of the files below it.
    pub(crate) fn cache(&self) -> &BlockCache {
        &self.inner.cache
    }

    /// The identity that a file over this one records (spec section 8). It changes with each flush
    /// that writes a record, and with each checkpoint.
    pub fn identity_hash(&self) -> [u8; 32] {
        let committer = lock(&self.inner.committer);
        crate::identity(&committer.header, committer.sequence - 1)
    }

    /// The ledger, if the disk was opened with one.
    pub fn ledger(&self) -> Option<&Ledger> {
        self.inner.ledger.as_deref()
    }

    /// The counters since the opening, and the present state.
    pub fn statistics(&self) -> Statistics {
        let inner = &self.inner;
        Statistics {
            flushes: inner.flushes.load(Ordering::Relaxed),
            checkpoints: inner.checkpoints.load(Ordering::Relaxed),
            filled_blocks: inner.fills.done(),
            queued_jobs: inner.fills.waiting(),
            unflushed_blocks: inner.unflushed.load(Ordering::Relaxed),
            free_bytes: inner.space.free_bytes(),
            zeroed_bytes: inner.space.zeroed_bytes(),
        }
    }

    /// Closes the disk. Writes a checkpoint, so that the next opening has no log to replay, and
    /// releases the free space at the end of the file.
    pub fn close(self) -> Result<(), Error> {
        self.finish()
    }

    /// Same as [`Disk::close`], for a disk that the caller still reads, but does not write to.
    pub(crate) fn finish(&self) -> Result<(), Error> {
        // The filler ends before the gate closes. If the gate closed first, the filler could wait
        // for the gate while `stop` waits for the filler.
        self.inner.fills.stop();
        let closed = self.inner.gate.close();
        self.inner.operation(closed.get()).close()
    }

    /// Same as [`Disk::close`], for a disk to which other threads have references. Their later
    /// operations wait for ever, so the caller ends the process afterwards.
    pub fn close_for_exit(&self) -> Result<(), Error> {
        self.inner.fills.stop();
        let closed = self.inner.gate.close();
        let result = self.inner.operation(closed.get()).close();
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
    fn enter(&self) -> Pass<'_, DiskConfig> {
        self.gate.enter()
    }

    fn operation<'a>(self: &'a Arc<Self>, config: &'a DiskConfig) -> Operation<'a> {
        Operation { disk: self, config }
    }

    /// Fails with [`Error::WriteRefused`] after a failure that left the state of the file unknown.
    fn check_not_failed(&self) -> Result<(), Error> {
        match self.failed.get() {
            Some(cause) => Err(Error::WriteRefused {
                cause: cause.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Makes all written bytes durable. After a failure, the disk refuses all writes: the host may
    /// have dropped dirty pages, and the next sync may falsely succeed.
    fn barrier(&self) -> Result<(), Error> {
        let synced = self.file.storage.make_durable();
        synced.inspect_err(|error| self.refuse_writes(error))
    }

    /// Refuses all later writes: the state of the file is unknown after this error.
    fn refuse_writes(&self, error: &Error) {
        let _ = self.failed.set(error.to_string());
        if let Some(ledger) = &self.ledger {
            ledger.refuse();
        }
    }

    fn write_storage(&self, at: u64, bytes: &[u8]) -> Result<(), Error> {
        self.file.storage.write(at, bytes)
    }

    /// Adds a region to the list of changed regions, which the next record covers.
    fn list(&self, region: &Arc<Region>, weight: u64) {
        if !region.listed.swap(true, Ordering::AcqRel) {
            let shard = region.index as usize % self.changed.len();
            lock(&self.changed[shard]).push(Arc::clone(region));
            self.listed_bytes
                .fetch_add(weight + size_of::<Region>() as u64, Ordering::Relaxed);
        }
    }

    fn lba(&self, region: &Region, at: u64) -> Lba {
        Lba(region.start(self.region_shift) + at)
    }
}

impl Disk {
    /// Runs an operation on this range of the address space.
    fn access<T>(
        &self,
        offset: u64,
        length: u64,
        run: impl FnOnce(Operation<'_>, Range<u64>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let config = self.inner.enter();
        let range = checked_range(offset, length, config.header.size)?;
        run(self.inner.operation(&config), range)
    }
}

impl Operation<'_> {
    fn region(self, index: u64) -> Arc<Region> {
        let length = self.config.header.region_length(index);
        self.regions.get(index, length)
    }

    /// The state of a region, locked shared. Reads the table from the file if necessary.
    fn read_state(self, region: &Region) -> Result<RwLockReadGuard<'_, RegionState>, Error> {
        self.regions.read(region, &self.file, &self.config.header)
    }
}

impl DiskConfig {
    fn new(header: &Header, backing: Option<Arc<Below>>) -> Self {
        DiskConfig {
            header: Header {
                file_bytes: MAX_ADDRESS,
                ..header.clone()
            },
            backing,
        }
    }

    /// The entry that reads as zeros and takes no space. With a backing, an absent entry would read
    /// from it.
    fn zeros(&self) -> Entry {
        match self.backing {
            Some(_) => Entry::Zero,
            None => Entry::Absent,
        }
    }

    /// Whether a block with this entry is zeros, independent of the content of the backing.
    fn is_zeros(&self, entry: &Entry) -> bool {
        match entry {
            Entry::Zero => true,
            Entry::Absent => self.backing.is_none(),
            _ => false,
        }
    }
}

/// The block with the byte `at` of a region. The region has `length` bytes.
fn block_at(at: u64, shift: u8, length: u64) -> RegionBlock {
    let index = at >> shift;
    let start = index << shift;
    RegionBlock {
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

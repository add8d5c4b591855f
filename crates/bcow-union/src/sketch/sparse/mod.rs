//! Sparse sketches: each block at its own offset of a host file with holes, and a map beside the
//! file.
//!
//! The host file has the sketch's full size. A block has one of these states:
//! - *lower*: the block shows the lower file up to `limit`, and zeros behind it. The content of the
//!   host's file at this place is ignored (a crash may have left data there);
//! - *in transit*: some bytes of the block are at their place in the host's file; the other bytes
//!   are the lower file's. The written ranges are known in memory only;
//! - *present*: the host's file has the block. A block stays present until it is truncated. Blocks
//!   that begin at or behind `limit` are always present.
//!
//! `limit` is the number of bytes of the lower file, from its start, that are visible. It begins as
//! the lower file's size. A truncation reduces it to the new size, so that truncated content never
//! becomes visible again. On the disk, the size of the host file limits it too. The order is:
//! truncate the host file, write the mark, and only then let the file grow. After a crash at any
//! point, the file is as it was before or after the truncation.
//!
//! # Locks
//!
//! A thread takes the locks in this order:
//!
//! 1. `map`: taken by flushes;
//! 2. `gate`: shared for reads and writes, exclusive to truncate, to punch holes, and to promote;
//! 3. a stripe: the blocks in transit of a part of the file. Held while a block that is not present
//!    changes;
//! 4. `presence` and `mark`. These are leaves.
//!
//! The locks for the times of the host's file come between `gate` and the stripes.
//!
//! Reads and writes of present blocks need `gate` only.

mod ahead;
mod fill;
mod flush;
mod range;
mod read;
mod write;

use bcow::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use bcow::sync::{Mutex, MutexGuard, RwLock};
use std::fs::File;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Instant;

use rustix::io::Errno;

use super::host::MarkedFile;
use super::locks::{GroupFlush, lock, read, write};
use super::map::Map;
use super::mark::{Fence, MarkState, fit_size, mark_new, size_of};
use super::shared::{Fillable, Shared};
use super::times::Times;
use super::transit::Stripe;
use super::{
    Durability, HeldTimes, KeepSize, Lower, Sketch, SketchError, SketchKind, SketchMark,
    SketchStatus, copy,
};
use crate::Seek;
use crate::account::StoredBlocks;
use crate::blocks::{BLOCK_BYTES, BlockSet};
use crate::host::HostFile;

const STRIPES: usize = 16;
/// The number of adjacent blocks in a stripe.
const UNIT_BLOCKS: u64 = 64;
/// The largest file size on Linux, in bytes.
const MAX_BYTES: u64 = i64::MAX as u64;

/// An open sparse sketch.
pub(super) struct Sparse {
    me: Weak<Sparse>,
    id: u64,
    shared: Arc<Shared>,
    host: Arc<dyn MarkedFile>,
    lower: Arc<dyn Lower>,
    gate: RwLock<Frame>,
    /// The size of the host's file. It shrinks only while `gate` is held exclusively.
    size: AtomicU64,
    presence: RwLock<Presence>,
    stripes: [Mutex<Stripe>; STRIPES],
    in_transit: AtomicU64,
    stored: StoredBlocks,
    mark: Mutex<MarkState>,
    /// Whether the mark's limit is larger than `limit`. The mark must be written before the file
    /// may grow.
    mark_is_stale: AtomicBool,
    map: Mutex<Map>,
    flushes: GroupFlush,
    fence: Fence,
    /// The positions of recent flushes. A leaf.
    ahead: Mutex<ahead::Ahead>,
    times: Times,
    /// Whether the sketch is in the fillers' queue.
    queued: AtomicBool,
    /// Whether the drop releases the sketch's space.
    discarded: AtomicBool,
}

/// The state that all operations depend on.
struct Frame {
    /// The number of bytes of the lower file that are visible where no block is present.
    limit: u64,
    /// Whether the file is a sketch: neither promoted nor removed.
    marked: bool,
}

#[derive(Default)]
struct Presence {
    present: BlockSet,
    /// Present blocks that the map does not list.
    unrecorded: BlockSet,
}

/// The place of a run of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    Lower,
    Transit,
    Host,
}

impl Frame {
    /// The number of blocks whose presence the map records. All blocks behind them are present.
    fn covered(&self) -> u64 {
        self.limit.div_ceil(BLOCK_BYTES)
    }
}

impl Sparse {
    /// Makes a sketch of a metadata copy.
    pub(super) fn create(
        shared: &Arc<Shared>,
        host: Arc<dyn MarkedFile>,
        lower: Arc<dyn Lower>,
    ) -> Result<Arc<Self>, SketchError> {
        let size = lower.size();
        fit_size(
            &*host,
            &StoredBlocks::new(Arc::clone(&shared.account)),
            size,
        )?;
        let mark = SketchMark {
            id: shared.new_id(),
            kind: SketchKind::Sparse,
            block_shift: BLOCK_BYTES.trailing_zeros() as u8,
            map_exists: false,
            lower_limit: size,
            size: 0,
        };
        mark_new(shared, &*host, &mark)?;
        let blocks = lower.size().div_ceil(BLOCK_BYTES);
        let map = Map::new(mark.id, blocks, Arc::clone(&shared.store));
        let present = BlockSet::default();
        Ok(Self::new(shared, host, lower, mark, size, map, present))
    }

    /// Opens the sketch with this mark.
    pub(super) fn open(
        shared: &Arc<Shared>,
        mark: &SketchMark,
        host: Arc<dyn MarkedFile>,
        lower: Arc<dyn Lower>,
    ) -> Result<Arc<Self>, SketchError> {
        if !mark.has_supported_blocks() {
            return Err(SketchError::Unsupported {
                field: "block size of 2 to the power of",
                value: mark.block_shift.into(),
            });
        }
        if mark.lower_limit > lower.size() {
            return Err(SketchError::OtherLower {
                limit: mark.lower_limit,
                size: lower.size(),
            });
        }
        let size = size_of(&*host)?;
        let blocks = lower.size().div_ceil(BLOCK_BYTES);
        let store = Arc::clone(&shared.store);
        let (map, mut present) = match mark.map_exists {
            true => Map::load(mark.id, blocks, store)?,
            false => (Map::new(mark.id, blocks, store), BlockSet::default()),
        };
        let covered = mark.lower_limit.min(size).div_ceil(BLOCK_BYTES);
        present.remove(covered..u64::MAX);
        Ok(Self::new(shared, host, lower, *mark, size, map, present))
    }

    fn new(
        shared: &Arc<Shared>,
        host: Arc<dyn MarkedFile>,
        lower: Arc<dyn Lower>,
        mark: SketchMark,
        size: u64,
        map: Map,
        present: BlockSet,
    ) -> Arc<Self> {
        // A crash may have come after the truncation of the file and before the write of the mark.
        let limit = mark.lower_limit.min(size);
        let counters = &shared.counters;
        counters.open.fetch_add(1, Ordering::Relaxed);
        counters.lower_bytes.fetch_add(limit, Ordering::Relaxed);
        counters.present.fetch_add(present.len(), Ordering::Relaxed);
        Arc::new_cyclic(|me| Sparse {
            me: Weak::clone(me),
            id: mark.id,
            shared: Arc::clone(shared),
            host,
            lower,
            gate: RwLock::new(Frame {
                limit,
                marked: true,
            }),
            size: AtomicU64::new(size),
            presence: RwLock::new(Presence {
                present,
                unrecorded: BlockSet::default(),
            }),
            stripes: Default::default(),
            in_transit: AtomicU64::new(0),
            stored: StoredBlocks::new(Arc::clone(&shared.account)),
            mark: Mutex::new(MarkState::new(mark)),
            mark_is_stale: AtomicBool::new(limit < mark.lower_limit),
            map: Mutex::new(map),
            flushes: GroupFlush::default(),
            fence: Fence::default(),
            ahead: Mutex::default(),
            times: Times::default(),
            queued: AtomicBool::new(false),
            discarded: AtomicBool::new(false),
        })
    }

    fn content(&self) -> &dyn HostFile {
        self.host.content()
    }

    fn stripe(&self, block: u64) -> MutexGuard<'_, Stripe> {
        lock(&self.stripes[(block / UNIT_BLOCKS) as usize % STRIPES])
    }

    /// The place of `block`, and the end of a run for which the answer is the same, up to `end`.
    /// The caller holds the stripe of `block`. A block that is not present does not become present
    /// while its stripe is held.
    fn source(&self, frame: &Frame, stripe: &Stripe, block: u64, end: u64) -> (Source, u64) {
        let covered = frame.covered();
        if block >= covered {
            return (Source::Host, end);
        }
        let unit_end = (block / UNIT_BLOCKS + 1) * UNIT_BLOCKS;
        let end = end.min(covered);
        let (present, until) = read(&self.presence).present.run(block, end);
        if present {
            return (Source::Host, until);
        }
        let until = until.min(unit_end);
        match stripe.range(block..until).next() {
            Some((&first, _)) if first == block => (Source::Transit, block + 1),
            Some((&first, _)) => (Source::Lower, first),
            None => (Source::Lower, until),
        }
    }

    /// The current place of `block`.
    fn find(&self, frame: &Frame, block: u64, end: u64) -> (Source, u64) {
        let covered = frame.covered();
        if block < covered {
            let (present, until) = read(&self.presence).present.run(block, end.min(covered));
            if present {
                return (Source::Host, until);
            }
        }
        self.source(frame, &self.stripe(block), block, end)
    }

    /// Marks blocks as present. What is behind the end of the file counts as zeros.
    fn set_present(&self, blocks: Range<u64>) {
        let bytes = blocks.start * BLOCK_BYTES..blocks.end.saturating_mul(BLOCK_BYTES);
        self.shared
            .written(self.id, bytes, || self.set_recorded_present(blocks));
    }

    /// As [`Sparse::set_present`], for blocks whose bytes are in the ledger already.
    fn set_recorded_present(&self, blocks: Range<u64>) {
        let mut presence = write(&self.presence);
        let newly = presence.present.insert(blocks.clone());
        presence.unrecorded.insert(blocks);
        drop(presence);
        self.shared
            .counters
            .present
            .fetch_add(newly, Ordering::Relaxed);
    }
}

/// The end of a range, if a file can have this size.
fn end_of(offset: u64, length: u64) -> Result<u64, SketchError> {
    let end = offset.saturating_add(length);
    match end <= MAX_BYTES {
        true => Ok(end),
        false => Err(SketchError::TooLarge { end }),
    }
}

impl Sketch for Sparse {
    fn id(&self) -> u64 {
        self.id
    }
    fn kind(&self) -> SketchKind {
        SketchKind::Sparse
    }
    fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, SketchError> {
        self.read(offset, buf)
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<usize, SketchError> {
        self.write(offset, data)
    }
    fn set_size(&self, size: u64) -> Result<(), SketchError> {
        self.resize(size)
    }
    fn zero(&self, offset: u64, length: u64, size: KeepSize) -> Result<(), SketchError> {
        self.make_zero(offset, length, size)
    }
    fn allocate(&self, offset: u64, length: u64, size: KeepSize) -> Result<(), SketchError> {
        self.take_space(offset, length, size)
    }
    fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, SketchError> {
        self.seek_next(offset, what)
    }
    fn settle(&self) -> Result<(), SketchError> {
        self.complete_all(&read(&self.gate))
    }
    fn hold_times(&self, work: HeldTimes<'_>) -> Result<(), Errno> {
        let held = self.times.hold();
        work(held.hidden_change())
    }
    fn flush(&self, how: Durability) -> Result<(), SketchError> {
        match how {
            Durability::Durable => self.flushes.join(|| self.flush_once(how)),
            Durability::Volatile => self.flush_once(how),
        }
    }
    fn quiesce(&self, how: Durability) -> Result<(), SketchError> {
        // An open only reads the host's file.
        self.flush(how)
    }
    fn confirm(&self) -> Result<(), SketchError> {
        match self.discarded.load(Ordering::Acquire) {
            true => Ok(()),
            false => lock(&self.map).confirm(),
        }
    }
    fn is_recorded(&self) -> bool {
        self.has_recorded_all()
    }
    fn status(&self) -> Result<SketchStatus, SketchError> {
        let frame = read(&self.gate);
        let blocks = self.size().div_ceil(BLOCK_BYTES);
        let present = read(&self.presence).present.len();
        Ok(SketchStatus {
            blocks,
            present: present + blocks.saturating_sub(frame.covered()),
            in_transit: self.in_transit.load(Ordering::Relaxed),
            stored_bytes: self
                .content()
                .stored_bytes()
                .map_err(SketchError::host("read the allocated size of a sketch"))?,
        })
    }
    fn is_complete(&self) -> Result<bool, SketchError> {
        Ok(self.covers_lower(&read(&self.gate)))
    }
    fn restore(&self, written: &[Range<u64>]) -> Result<(), SketchError> {
        self.take_written(written)
    }
    fn fail(&self, errno: Errno) {
        self.fence.close(errno);
    }
    fn promote(&self) -> Result<bool, SketchError> {
        self.make_plain()
    }
    fn discard(&self) -> Result<(), SketchError> {
        self.remove_map()
    }
    fn copy_out(&self, to: &File) -> Result<u64, SketchError> {
        copy::copy_out(self, to)
    }
}

impl Fillable for Sparse {
    fn fill_some(&self, most: usize) -> Option<Instant> {
        self.fill_due(most)
    }
}

impl Drop for Sparse {
    fn drop(&mut self) {
        let counters = &self.shared.counters;
        counters.open.fetch_sub(1, Ordering::Relaxed);
        let limit = read(&self.gate).limit;
        counters.lower_bytes.fetch_sub(limit, Ordering::Relaxed);
        let present = read(&self.presence).present.len();
        counters.present.fetch_sub(present, Ordering::Relaxed);
        let left: usize = self.stripes.iter().map(|stripe| lock(stripe).len()).sum();
        self.shared.transit_ended(left as u64);
        let left = match self.discarded.load(Ordering::Acquire) {
            true => self
                .stored
                .release_all(self.content())
                .map_err(SketchError::from),
            false => {
                let released = self.stored.stop_tracking(self.content());
                self.confirm().and(released.map_err(SketchError::from))
            }
        };
        if let Err(error) = left {
            self.shared.log("cannot close a sketch", &error);
        }
        self.shared.unregister(self.id);
    }
}

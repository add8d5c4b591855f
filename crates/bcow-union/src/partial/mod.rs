//! Partial files: files of the upper that store only the written blocks of a lower file.
//!
//! A partial file shows the content of a [`Lower`] file, overlaid by the blocks that were written.
//! It stores only blocks of 4 KiB that were written, at least in part. A write to a part of a block
//! stores these bytes and returns. The rest of the block is copied from the lower file later
//! (*copy-after-write*): by a background thread, or by the read or flush that needs it.
//!
//! The host's file has the full size of the file, with holes, and each block at its own offset. A
//! map beside it lists the blocks that it has. A block has one of these states:
//! - *lower*: the block shows the lower file up to `limit`, and zeros behind it. The content of the
//!   host's file at this place is ignored (a crash may have left data there);
//! - *incomplete*: some bytes of the block are at their place in the host's file; the other bytes
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
//! 3. a stripe: the incomplete blocks of a part of the file. Held while a block that is not present
//!    changes;
//! 4. `presence` and `mark`. These are leaves.
//!
//! The locks for the times of the host's file come between `gate` and the stripes.
//!
//! Reads and writes of present blocks need `gate` only.

mod ahead;
mod error;
mod fill;
mod flush;
pub mod host;
mod incomplete;
pub mod journal;
mod locks;
mod map;
mod mark;
mod options;
mod partials;
mod range;
mod read;
mod reserve;
mod shared;
mod times;
mod write;

use bcow::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use bcow::sync::{Mutex, MutexGuard, RwLock};
use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

use rustix::io::Errno;

use crate::Seek;
use crate::blocks::{BLOCK_BYTES, BlockSet};
use crate::host::{HiddenChange, HostFile};
use host::MarkedFile;
use incomplete::Stripe;
use locks::{GroupFlush, lock, read, write};
use map::Map;
use mark::{Fence, MarkState, fit_size, mark_new, size_of};
use shared::Shared;
use times::Times;

pub use crate::upper::PartialMark;
pub use error::{Damage, PartialError};
pub(crate) use map::{Unreadable, read_map};
pub use options::PartialOptions;
pub use partials::{PartialFigures, Partials};

const STRIPES: usize = 16;
/// The number of adjacent blocks in a stripe.
const UNIT_BLOCKS: u64 = 64;
/// The largest file size on Linux, in bytes.
const MAX_BYTES: u64 = i64::MAX as u64;

/// A file of the image. Its content never changes.
pub trait Lower: Send + Sync {
    /// Size in bytes.
    fn size(&self) -> u64;
    /// Fills `buf` with the bytes at `offset`. The range lies within the file.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Errno>;
    /// The offset of the first byte of data, or of the first byte in a hole, at or behind `offset`;
    /// `None` if the file ends before one. The end of the file counts as a hole (as in lseek(2)).
    fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, Errno>;
}

/// Whether an operation beyond the end of the file changes its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KeepSize {
    /// The size does not change.
    Keep,
    /// The file grows to the end of the range, if it is shorter.
    Grow,
}

/// What a flush guarantees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// All earlier writes are on the disk when the flush returns.
    Durable,
    /// The partial file can be opened again from the data that the host's kernel has. A crash of
    /// the host may lose or damage it.
    Volatile,
}

/// Figures of a partial file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PartialStatus {
    /// Blocks of the whole file, a partial last block included.
    pub blocks: u64,
    /// Blocks that do not need the lower file: written, punched, or beyond its end.
    pub present: u64,
    /// Blocks that were written in part and still need bytes of the lower file.
    pub incomplete: u64,
    /// Bytes that the host file takes on the host's disk.
    pub stored_bytes: u64,
}

/// A partly modified file. All methods can be called from several threads at once. Calls on
/// different blocks run in parallel.
///
/// After a failed operation, each byte of its range has either the old or the new value.
pub struct Partial {
    me: Weak<Partial>,
    id: u64,
    shared: Arc<Shared>,
    host: Arc<dyn MarkedFile>,
    lower: Arc<dyn Lower>,
    gate: RwLock<Frame>,
    /// The size of the host's file. It shrinks only while `gate` is held exclusively.
    size: AtomicU64,
    presence: RwLock<Presence>,
    stripes: [Mutex<Stripe>; STRIPES],
    incomplete: AtomicU64,
    /// The number of the host's inode, once it was read. It does not change.
    inode: OnceLock<u64>,
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
    /// The number of reads and writes by requests, since the file was opened.
    requests: AtomicU64,
    /// Whether the partial file is in the fillers' queue.
    queued: AtomicBool,
    /// Whether space for the next flush is reserved.
    is_reserved: AtomicBool,
    /// The bytes of this reservation.
    reserved_bytes: u64,
    /// Whether the drop releases the partial file's space.
    discarded: AtomicBool,
}

/// The state that all operations depend on.
struct Frame {
    /// The number of bytes of the lower file that are visible where no block is present.
    limit: u64,
    /// Whether the file is a partial file: neither promoted nor removed.
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
enum RunSource {
    Lower,
    Incomplete,
    Host,
}

impl Frame {
    /// The number of blocks whose presence the map records. All blocks behind them are present.
    fn covered(&self) -> u64 {
        self.limit.div_ceil(BLOCK_BYTES)
    }
}

impl Partial {
    /// Makes a partial file of a metadata copy.
    fn create(
        shared: &Arc<Shared>,
        host: Arc<dyn MarkedFile>,
        lower: Arc<dyn Lower>,
    ) -> Result<Arc<Self>, PartialError> {
        let size = lower.size();
        fit_size(&*host, size)?;
        let mark = PartialMark {
            id: shared.new_id(),
            block_shift: BLOCK_BYTES.trailing_zeros() as u8,
            map_exists: false,
            lower_limit: size,
        };
        mark_new(shared, &*host, &mark)?;
        let blocks = lower.size().div_ceil(BLOCK_BYTES);
        let map = Map::new(mark.id, blocks, Arc::clone(&shared.store));
        let present = BlockSet::default();
        Ok(Self::new(shared, host, lower, mark, size, map, present))
    }

    /// Opens the partial file with this mark.
    fn open(
        shared: &Arc<Shared>,
        mark: &PartialMark,
        host: Arc<dyn MarkedFile>,
        lower: Arc<dyn Lower>,
    ) -> Result<Arc<Self>, PartialError> {
        if !mark.has_supported_blocks() {
            return Err(PartialError::Unsupported {
                block_shift: mark.block_shift,
            });
        }
        if mark.lower_limit > lower.size() {
            return Err(PartialError::OtherLower {
                limit: mark.lower_limit,
                size: lower.size(),
            });
        }
        let size = size_of(&*host)?;
        let blocks = lower.size().div_ceil(BLOCK_BYTES);
        let store = Arc::clone(&shared.store);
        let (map, mut present) = if mark.map_exists {
            Map::load(mark.id, blocks, store)?
        } else {
            (Map::new(mark.id, blocks, store), BlockSet::default())
        };
        let covered = mark.lower_limit.min(size).div_ceil(BLOCK_BYTES);
        present.remove(covered..u64::MAX);
        Ok(Self::new(shared, host, lower, *mark, size, map, present))
    }

    fn new(
        shared: &Arc<Shared>,
        host: Arc<dyn MarkedFile>,
        lower: Arc<dyn Lower>,
        mark: PartialMark,
        size: u64,
        map: Map,
        present: BlockSet,
    ) -> Arc<Self> {
        if !mark.map_exists {
            // The first flush creates the map, and must not fail for lack of space.
            let _ = shared.account.measure_map(mark.id, || Ok(0));
        }
        // A crash may have come after the truncation of the file and before the write of the mark.
        let limit = mark.lower_limit.min(size);
        let reserved_bytes = map.most_bytes();
        let counters = &shared.counters;
        counters.open.fetch_add(1, Ordering::Relaxed);
        counters.lower_bytes.fetch_add(limit, Ordering::Relaxed);
        counters.present.fetch_add(present.len(), Ordering::Relaxed);
        Arc::new_cyclic(|me| Partial {
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
            incomplete: AtomicU64::new(0),
            inode: OnceLock::new(),
            mark: Mutex::new(MarkState::new(mark)),
            mark_is_stale: AtomicBool::new(limit < mark.lower_limit),
            map: Mutex::new(map),
            flushes: GroupFlush::default(),
            fence: Fence::default(),
            ahead: Mutex::default(),
            times: Times::default(),
            requests: AtomicU64::new(0),
            queued: AtomicBool::new(false),
            is_reserved: AtomicBool::new(false),
            reserved_bytes,
            discarded: AtomicBool::new(false),
        })
    }

    fn content(&self) -> &dyn HostFile {
        self.host.content()
    }

    /// Updates the counted space of the host's file after a change.
    fn measure(&self) {
        let account = &self.shared.account;
        let measured = if account.is_limited() {
            self.inode()
                .and_then(|inode| account.measure(inode, || self.content().stored_bytes()))
        } else {
            Ok(())
        };
        if let Err(error) = measured {
            // The old figure stays until the next measurement.
            let error = PartialError::host("read its allocated size")(error);
            self.shared.log("cannot count the space of a file", &error);
        }
    }

    fn inode(&self) -> std::io::Result<u64> {
        match self.inode.get() {
            Some(inode) => Ok(*inode),
            None => {
                let inode = self.content().inode()?;
                Ok(*self.inode.get_or_init(|| inode))
            }
        }
    }

    /// Reserves space of the host for the next flush, unless it is reserved. A caller does this
    /// before it changes blocks that no map lists, and once more, without regard to the result,
    /// when [`Presence::unrecorded`] has the blocks: a flush between the two ends the reservation.
    fn expect_flush(&self) -> Result<(), PartialError> {
        if self.is_reserved.load(Ordering::Acquire) {
            return Ok(());
        }
        let reserved = self
            .shared
            .reserve
            .add(self.reserved_bytes, &self.is_reserved);
        reserved.map_err(PartialError::host(
            "reserve space for the map of a partial file",
        ))
    }

    fn stripe(&self, block: u64) -> MutexGuard<'_, Stripe> {
        lock(&self.stripes[(block / UNIT_BLOCKS) as usize % STRIPES])
    }

    /// The place of `block`, and the end of a run for which the answer is the same, up to `end`.
    /// The caller holds the stripe of `block`. A block that is not present does not become present
    /// while its stripe is held.
    fn source(&self, frame: &Frame, stripe: &Stripe, block: u64, end: u64) -> (RunSource, u64) {
        let covered = frame.covered();
        if block >= covered {
            return (RunSource::Host, end);
        }
        let unit_end = (block / UNIT_BLOCKS + 1) * UNIT_BLOCKS;
        let end = end.min(covered);
        let (present, until) = read(&self.presence).present.run(block, end);
        if present {
            return (RunSource::Host, until);
        }
        let until = until.min(unit_end);
        match stripe.range(block..until).next() {
            Some((&first, _)) if first == block => (RunSource::Incomplete, block + 1),
            Some((&first, _)) => (RunSource::Lower, first),
            None => (RunSource::Lower, until),
        }
    }

    /// The current place of `block`.
    fn find(&self, frame: &Frame, block: u64, end: u64) -> (RunSource, u64) {
        let covered = frame.covered();
        if block < covered {
            let (present, until) = read(&self.presence).present.run(block, end.min(covered));
            if present {
                return (RunSource::Host, until);
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

    /// As [`Partial::set_present`], for blocks whose bytes are in the ledger already.
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
fn end_of(offset: u64, length: u64) -> Result<u64, PartialError> {
    let end = offset.saturating_add(length);
    if end <= MAX_BYTES { Ok(end) } else { Err(PartialError::TooLarge { end }) }
}

impl Partial {
    /// The partial file's number in this upper.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Size of the file in bytes.
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }

    /// Completes all incomplete blocks. After that, only the caller's own calls change the host's
    /// file. A caller does this before it reads or sets the file's times, because the completion of
    /// a block changes the time of last modification.
    pub fn settle(&self) -> Result<(), PartialError> {
        self.complete_all(&read(&self.gate))
    }

    /// Calls `work`, which reads or sets the times of the host's file, while no background work is
    /// about to restore a saved time. `work` gets the last change of the host's file that is no
    /// change of the file.
    pub fn hold_times<T>(&self, work: impl FnOnce(Option<HiddenChange>) -> T) -> T {
        let held = self.times.hold();
        work(held.hidden_change())
    }

    /// Figures of the partial file.
    pub fn status(&self) -> Result<PartialStatus, PartialError> {
        let frame = read(&self.gate);
        let blocks = self.size().div_ceil(BLOCK_BYTES);
        let present = read(&self.presence).present.len();
        Ok(PartialStatus {
            blocks,
            present: present + blocks.saturating_sub(frame.covered()),
            incomplete: self.incomplete.load(Ordering::Relaxed),
            stored_bytes: self.content().stored_bytes().map_err(PartialError::host(
                "read the allocated size of a partial file",
            ))?,
        })
    }
}

impl std::fmt::Debug for Partial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Partial file")
            .field("id", &format_args!("{:016x}", self.id))
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        let counters = &self.shared.counters;
        counters.open.fetch_sub(1, Ordering::Relaxed);
        let limit = read(&self.gate).limit;
        counters.lower_bytes.fetch_sub(limit, Ordering::Relaxed);
        let present = read(&self.presence).present.len();
        counters.present.fetch_sub(present, Ordering::Relaxed);
        let left: usize = self.stripes.iter().map(|stripe| lock(stripe).len()).sum();
        self.shared.completion_ended(left as u64);
        if self.is_reserved.load(Ordering::Acquire) {
            self.shared.reserve.remove(self.reserved_bytes);
        }
        if self.discarded.load(Ordering::Acquire) {
            // Before the file is closed: afterwards the host may reuse the inode number.
            if let Ok(inode) = self.inode() {
                self.shared.account.forget(inode);
            }
        } else if let Err(error) = self.confirm() {
            self.shared.log("cannot close a partial file", &error);
        }
        self.shared.unregister(self.id);
    }
}

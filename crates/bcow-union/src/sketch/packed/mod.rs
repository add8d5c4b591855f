//! Packed sketches: a BCoW file on the lower file, for hosts without holes.
//!
//! The BCoW file holds the blocks. The mark holds the size in bytes and the limit of the lower file
//! that is visible. They become durable one after the other, so these rules apply:
//!
//! - Content of the BCoW file behind the size in the mark is not valid. It is zeroed before the
//!   file grows over it.
//! - When the file has grown, a flush makes the content durable first and then writes the new size
//!   into the mark.
//! - When the file is truncated, the mark gets the new size first. Then the BCoW file frees the
//!   rest. After a crash in between, or a loss of unflushed writes, the mark hides the rest.
//! - Until the first flush the mark says that no block is stored, and an open creates the BCoW file
//!   anew. So no operation before the first flush needs a barrier.
//!
//! After a crash, the file has the content of the last flush, truncated to the sizes of all later
//! truncations.

mod device;
mod files;
mod promise;
mod storage;

use bcow::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use bcow::sync::{Mutex, RwLock};
use std::fs::File;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bcow::{BlockDevice, Content, Disk, Space, WritableDevice};
use rustix::io::Errno;

use super::host::MarkedFile;
use super::locks::{GroupFlush, lock, read, write};
use super::mark::{Fence, MarkState, mark_new, restore_copy};
use super::shared::{Fillable, Shared};
use super::times::Times;
use super::{
    Durability, HeldTimes, KeepSize, Lower, Sketch, SketchError, SketchKind, SketchMark,
    SketchStatus, copy,
};
use crate::Seek;
use crate::blocks::BLOCK_BYTES;
use files::Files;
use promise::Promise;
use storage::HostStorage;

pub use device::LowerDevice;

/// The largest address space of the format, in bytes.
const MAX_BYTES: u64 = 1 << 48;

/// Not a valid number of changes.
const NOT_RECORDED: u64 = u64::MAX;

/// An open packed sketch.
pub(super) struct Packed {
    id: u64,
    shared: Arc<Shared>,
    host: Arc<dyn MarkedFile>,
    storage: Arc<HostStorage>,
    promise: Promise,
    lower: Arc<LowerDevice>,
    disk: Disk,
    /// Shared for reads and writes, exclusive to change the size of the file or of its address
    /// space.
    gate: RwLock<Frame>,
    size: AtomicU64,
    /// Whether the address space reads as zeros behind the end of the file.
    is_clean: AtomicBool,
    /// The number of truncations. A flush compares it to detect a truncation during the flush.
    cuts: AtomicU64,
    /// The number of changes.
    changes: AtomicU64,
    /// The times of the host's file. A thread holds them before it takes the gate, and begins a
    /// change after it has taken the gate.
    times: Arc<Times>,
    /// The value of `changes` when the last flush began; [`NOT_RECORDED`] if that flush failed.
    recorded: AtomicU64,
    mark: Mutex<MarkState>,
    flushes: GroupFlush,
    fence: Fence,
    /// Whether the drop releases the sketch's space.
    discarded: AtomicBool,
}

struct Frame {
    /// Whether the file has a name.
    marked: bool,
}

impl Packed {
    /// Makes a sketch of a metadata copy.
    pub(super) fn create(
        shared: &Arc<Shared>,
        host: Arc<dyn MarkedFile>,
        lower: Arc<dyn Lower>,
    ) -> Result<Arc<Self>, SketchError> {
        // The host file's size need not be that of the lower file.
        let size = lower.size();
        if size > MAX_BYTES {
            return Err(SketchError::TooLarge { end: size });
        }
        let mark = SketchMark {
            id: shared.new_id(),
            kind: SketchKind::Packed,
            block_shift: BLOCK_BYTES.trailing_zeros() as u8,
            map_exists: false,
            lower_limit: size,
            size,
        };
        let modified = host.content().times().map(|times| times.modified);
        mark_new(shared, &*host, &mark)?;
        let file = Files::new(shared, host, lower, &mark);
        match file.create_disk(shared, &mark) {
            Ok(disk) => Ok(Self::new(shared, file, disk, mark)),
            Err(error) => {
                if let Err(error) = file.storage.empty(size) {
                    shared.log("cannot undo the creation of a sketch", &error);
                }
                if let Ok(modified) = modified {
                    let _ = file.host.content().set_modified(modified);
                }
                restore_copy(shared, &*file.host);
                Err(error)
            }
        }
    }

    /// Opens the sketch with this mark.
    pub(super) fn open(
        shared: &Arc<Shared>,
        mark: &SketchMark,
        host: Arc<dyn MarkedFile>,
        lower: Arc<dyn Lower>,
    ) -> Result<Arc<Self>, SketchError> {
        if mark.lower_limit > lower.size().min(mark.size) {
            return Err(SketchError::OtherLower {
                limit: mark.lower_limit,
                size: lower.size().min(mark.size),
            });
        }
        if mark.size > MAX_BYTES {
            return Err(SketchError::Unsupported {
                field: "size in bytes of",
                value: mark.size,
            });
        }
        let file = Files::new(shared, host, lower, mark);
        let modified = file.host.content().times().map(|times| times.modified);
        let disk = file.storage.while_opening(|| match mark.map_exists {
            true => {
                file.storage.use_barriers(shared.options.durable);
                let disk = file.open_disk(shared)?;
                // bcow does not write such a mark, but the code below relies on the sizes.
                if disk.size() < mark.size {
                    disk.resize(mark.size.next_multiple_of(BLOCK_BYTES))?;
                }
                Ok(disk)
            }
            false => file.create_disk(shared, mark),
        })?;
        // The writes of an open, after a crash or for a note, are not changes of the content, so
        // the time is restored.
        if let Ok(modified) = modified {
            let _ = file.host.content().set_modified(modified);
        }
        Ok(Self::new(shared, file, disk, *mark))
    }

    fn new(shared: &Arc<Shared>, file: Files, disk: Disk, mark: SketchMark) -> Arc<Self> {
        let counters = &shared.counters;
        counters.open.fetch_add(1, Ordering::Relaxed);
        Arc::new(Packed {
            id: mark.id,
            shared: Arc::clone(shared),
            host: file.host,
            times: Arc::clone(file.storage.times()),
            storage: file.storage,
            promise: Promise::new(Arc::clone(&shared.account)),
            lower: file.lower,
            disk,
            gate: RwLock::new(Frame { marked: true }),
            size: AtomicU64::new(mark.size),
            is_clean: AtomicBool::new(!mark.map_exists),
            cuts: AtomicU64::new(0),
            changes: AtomicU64::new(0),
            recorded: AtomicU64::new(0),
            mark: Mutex::new(MarkState::new(mark)),
            flushes: GroupFlush::default(),
            fence: Fence::default(),
            discarded: AtomicBool::new(false),
        })
    }

    /// Calls `work` when the address space allows the file to reach to `end`.
    fn within<T>(
        &self,
        end: u64,
        work: impl FnOnce() -> Result<T, SketchError>,
    ) -> Result<T, SketchError> {
        loop {
            {
                let _frame = read(&self.gate);
                let _changing = self.times.changing(self.host.content());
                self.fence.check()?;
                let is_clean = self.is_clean.load(Ordering::Acquire);
                if end <= self.size() || is_clean && end <= self.disk.size() {
                    return work();
                }
            }
            let _frame = write(&self.gate);
            let _changing = self.times.changing(self.host.content());
            self.make_room(end)?;
        }
    }

    /// Prepares the address space for a growth up to `end`. The caller holds the gate exclusively.
    fn make_room(&self, end: u64) -> Result<(), SketchError> {
        let most = self.disk.largest_size();
        if end > most {
            return Err(SketchError::TooLarge { end });
        }
        let space = self.disk.size();
        if !self.is_clean.load(Ordering::Acquire) {
            let size = self.size();
            self.disk.write_zeroes(size, space - size, Space::Free)?;
            self.is_clean.store(true, Ordering::Release);
        }
        if end > space {
            let double = space.saturating_mul(2).min(most);
            self.disk
                .resize(end.next_multiple_of(BLOCK_BYTES).max(double))?;
        }
        Ok(())
    }

    /// The content or the size has changed.
    fn changed(&self) {
        self.changes.fetch_add(1, Ordering::AcqRel);
        if let Some(ledger) = self.shared.ledger.get() {
            ledger.changed(self.id);
        }
    }

    fn reach(&self, end: u64) {
        self.size.fetch_max(end, Ordering::AcqRel);
        self.changed();
    }

    fn cut(&self, frame: &Frame, size: u64) -> Result<(), SketchError> {
        let was = self.size();
        let mut state = lock(&self.mark);
        let mark = SketchMark {
            size: size.min(state.written.size),
            lower_limit: size.min(state.written.lower_limit),
            ..state.written
        };
        let changed = frame.marked && state.change(&*self.host, mark)?;
        if changed && mark.map_exists && self.shared.options.durable {
            // The mark must be durable before the BCoW file writes the record that frees the rest,
            // because that record can become durable at any time.
            self.fence.sync(|| self.host.content().sync_all())?;
            state.unsynced = false;
        }
        drop(state);
        self.cuts.fetch_add(1, Ordering::AcqRel);
        self.changed();
        self.lower.cut(size);
        self.size.store(size, Ordering::Release);
        let end = was.next_multiple_of(BLOCK_BYTES);
        if let Err(error) = self.disk.write_zeroes(size, end - size, Space::Free) {
            // The rest is not valid any more. The next growth of the file zeroes it.
            self.shared
                .log("cannot finish a truncation", &SketchError::from(error));
            self.is_clean.store(false, Ordering::Release);
        }
        Ok(())
    }

    /// Extends the file to at least `size` bytes. The caller holds the gate exclusively.
    fn grow(&self, size: u64) -> Result<(), SketchError> {
        if size > self.size() {
            self.make_room(size)?;
            self.reach(size);
        }
        Ok(())
    }

    /// Writes all of `data`. If there is no room for all of it, writes block by block until the
    /// first failure.
    fn write_some(&self, offset: u64, data: &[u8]) -> Result<usize, SketchError> {
        let all = match self.disk.write_at(offset, data) {
            Ok(()) => return Ok(data.len()),
            Err(error) => SketchError::from(error),
        };
        if !all.is_no_space() {
            return Err(all);
        }
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let piece = (BLOCK_BYTES - at % BLOCK_BYTES).min((data.len() - done) as u64) as usize;
            match self.disk.write_at(at, &data[done..done + piece]) {
                Ok(()) => done += piece,
                Err(_) if done > 0 => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(done)
    }

    fn flush_once(&self, how: Durability) -> Result<(), SketchError> {
        self.fence.check()?;
        self.shared.counters.flushes.fetch_add(1, Ordering::Relaxed);
        self.preserve_time(|| self.record())?;
        let mut state = lock(&self.mark);
        if how == Durability::Durable && state.unsynced {
            self.fence.sync(|| self.host.content().sync_all())?;
            state.unsynced = false;
        }
        Ok(())
    }

    /// Flushes the BCoW file, then writes the size into the mark.
    fn record(&self) -> Result<(), SketchError> {
        let (cuts, size) = {
            // The gate keeps truncations out, because a truncation changes one value after the
            // other.
            let _frame = read(&self.gate);
            (self.cuts.load(Ordering::Acquire), self.size())
        };
        self.storage.use_barriers(self.shared.options.durable);
        self.storage.while_flushing(|| self.disk.flush())?;
        self.promise.recorded();
        if !lock(&self.mark).written.map_exists {
            // The file was created without barriers, and `flush` may have had nothing to write.
            self.fence.sync(|| bcow::Storage::sync(&*self.storage))?;
        }
        let frame = read(&self.gate);
        let mut state = lock(&self.mark);
        let mut mark = state.written;
        mark.map_exists = true;
        if cuts == self.cuts.load(Ordering::Acquire) {
            mark.size = size;
        }
        if frame.marked {
            state.change(&*self.host, mark)?;
        }
        Ok(())
    }

    /// Runs `checkpoint`.
    fn fold(
        &self,
        checkpoint: impl FnOnce() -> Result<(), bcow::Error>,
    ) -> Result<(), SketchError> {
        self.preserve_time(|| Ok(self.storage.while_flushing(checkpoint)?))?;
        self.promise.folded();
        Ok(())
    }

    /// Runs `work`, which writes to the host's file without a change of the sketch's content, and
    /// restores the file's time.
    fn preserve_time(
        &self,
        work: impl FnOnce() -> Result<(), SketchError>,
    ) -> Result<(), SketchError> {
        self.times.hold().preserve_time(self.host.content(), work)
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> Result<usize, SketchError> {
        let _frame = read(&self.gate);
        let end = offset.saturating_add(buf.len() as u64).min(self.size());
        if offset >= end {
            return Ok(0);
        }
        let count = (end - offset) as usize;
        self.disk.read_at(offset, &mut buf[..count])?;
        Ok(count)
    }

    /// Calls `each` for the pieces of the file from `from` on, until it returns an answer. The
    /// arguments are the offset and the length of a piece, its content, and its depth in the chain.
    fn pieces<T>(
        &self,
        from: u64,
        mut each: impl FnMut(u64, u64, Content, u32) -> Option<T>,
    ) -> Result<Option<T>, SketchError> {
        let size = self.size();
        let mut at = from;
        while at < size {
            let status = self.disk.status(at, size - at)?;
            if let Some(answer) = each(at, status.length, status.content, status.depth) {
                return Ok(Some(answer));
            }
            at += status.length;
        }
        Ok(None)
    }
}

impl Sketch for Packed {
    fn id(&self) -> u64 {
        self.id
    }
    fn kind(&self) -> SketchKind {
        SketchKind::Packed
    }
    fn size(&self) -> u64 {
        self.size.load(Ordering::Acquire)
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<usize, SketchError> {
        // The read completes blocks in transit. It does not wait for a thread that completes other
        // blocks; that thread most likely restores the time.
        let held = match self.disk.has_queued_jobs() {
            true => self.times.try_hold(),
            false => None,
        };
        match held {
            Some(mut times) => times.preserve_time(self.host.content(), || self.read(offset, buf)),
            None => self.read(offset, buf),
        }
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> Result<usize, SketchError> {
        if data.is_empty() {
            return Ok(0);
        }
        let end = offset.saturating_add(data.len() as u64);
        self.within(end, || {
            let root_bytes = u64::from(self.disk.header().root.bytes);
            let result = self
                .promise
                .charge_for(offset..end, root_bytes, || self.write_some(offset, data));
            let written = *result.as_ref().unwrap_or(&0);
            if written < data.len() && end > self.size() {
                // A part of the data may have been written nevertheless.
                self.is_clean.store(false, Ordering::Release);
            }
            if written > 0 {
                self.reach(offset + written as u64);
            }
            result
        })
    }
    fn set_size(&self, size: u64) -> Result<(), SketchError> {
        let frame = write(&self.gate);
        let _changing = self.times.changing(self.host.content());
        self.fence.check()?;
        match size < self.size() {
            true => self.cut(&frame, size),
            false => self.grow(size),
        }
    }
    fn zero(&self, offset: u64, length: u64, size: KeepSize) -> Result<(), SketchError> {
        let end = offset.saturating_add(length);
        if size == KeepSize::Grow {
            let _frame = write(&self.gate);
            let _changing = self.times.changing(self.host.content());
            self.fence.check()?;
            self.grow(end)?;
        }
        self.within(0, || {
            let size = self.size();
            let end = match end < size {
                true => end,
                // Bytes behind the end are zeros already, or not valid.
                false => size.next_multiple_of(BLOCK_BYTES),
            };
            if offset < end.min(size) {
                self.disk.write_zeroes(offset, end - offset, Space::Free)?;
                self.changed();
            }
            Ok(())
        })
    }
    fn allocate(&self, _: u64, _: u64, _: KeepSize) -> Result<(), SketchError> {
        // The BCoW file chooses the place of a block when the block is written.
        Err(SketchError::Host {
            action: "allocate space for a packed sketch",
            errno: Errno::OPNOTSUPP,
        })
    }
    fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, SketchError> {
        let _frame = read(&self.gate);
        let size = self.size();
        if offset >= size {
            return Ok(None);
        }
        let found = self.pieces(offset, |at, _, content, _| {
            ((content == Content::Data) == (what == Seek::Data)).then_some(at)
        })?;
        Ok(match what {
            Seek::Data => found,
            Seek::Hole => Some(found.unwrap_or(size)),
        })
    }
    fn settle(&self) -> Result<(), SketchError> {
        self.preserve_time(|| Ok(self.disk.settle()?))
    }
    fn hold_times(&self, work: HeldTimes<'_>) -> Result<(), Errno> {
        let held = self.times.hold();
        work(held.hidden_change())
    }
    fn flush(&self, how: Durability) -> Result<(), SketchError> {
        self.flushes.join(|| {
            let changes = self.changes.load(Ordering::Acquire);
            let ledger = self.shared.ledger.get();
            let next_change = ledger.map_or(0, |ledger| ledger.next_change());
            let flushed = self.flush_once(how);
            let recorded = flushed.as_ref().map_or(NOT_RECORDED, |()| changes);
            self.recorded.store(recorded, Ordering::Release);
            if let (Some(ledger), Ok(())) = (ledger, &flushed) {
                ledger.recorded(self.id, next_change);
            }
            flushed
        })
    }
    fn quiesce(&self, how: Durability) -> Result<(), SketchError> {
        self.flush(how)?;
        // Otherwise the next open would fold the log of the BCoW file, which is a write.
        self.fold(|| self.disk.checkpoint_and_truncate())
    }
    fn confirm(&self) -> Result<(), SketchError> {
        // An open accepts the newest record in the log only if its blocks match their checksums, so
        // damage to one of them would look like a crash. Blocks in the tables have no such rule.
        let discarded = self.discarded.load(Ordering::Acquire);
        if discarded || !lock(&self.mark).written.map_exists || !self.is_recorded() {
            return Ok(());
        }
        self.fold(|| self.disk.checkpoint())
    }
    fn is_recorded(&self) -> bool {
        let recorded = self.recorded.load(Ordering::Acquire);
        self.fence.check().is_ok() && recorded == self.changes.load(Ordering::Acquire)
    }
    fn status(&self) -> Result<SketchStatus, SketchError> {
        let _frame = read(&self.gate);
        let mut below = 0;
        self.pieces(0, |_, length, _, depth| {
            below += if depth > 1 { length } else { 0 };
            None::<()>
        })?;
        let blocks = self.size().div_ceil(BLOCK_BYTES);
        Ok(SketchStatus {
            blocks,
            present: blocks.saturating_sub(below.div_ceil(BLOCK_BYTES)),
            in_transit: self.disk.statistics().queued_jobs,
            stored_bytes: self
                .host
                .content()
                .stored_bytes()
                .map_err(SketchError::host("read the allocated size of a sketch"))?,
        })
    }
    fn is_complete(&self) -> Result<bool, SketchError> {
        let _frame = read(&self.gate);
        let below = self.pieces(0, |_, _, _, depth| (depth > 1).then_some(()))?;
        Ok(below.is_none())
    }
    fn restore(&self, _: &[Range<u64>]) -> Result<(), SketchError> {
        Ok(())
    }
    fn fail(&self, errno: Errno) {
        self.fence.close(errno);
        // The next process must know it too.
        self.changed();
    }
    fn promote(&self) -> Result<bool, SketchError> {
        Ok(false)
    }
    fn discard(&self) -> Result<(), SketchError> {
        write(&self.gate).marked = false;
        self.discarded.store(true, Ordering::Release);
        Ok(())
    }
    fn copy_out(&self, to: &File) -> Result<u64, SketchError> {
        copy::copy_out(self, to)
    }
}

impl Fillable for Packed {
    fn fill_some(&self, _: usize) -> Option<Instant> {
        // The BCoW file completes its blocks itself.
        None
    }
}

impl Drop for Packed {
    fn drop(&mut self) {
        self.shared.counters.open.fetch_sub(1, Ordering::Relaxed);
        if self.discarded.load(Ordering::Acquire)
            && let Err(error) = self.storage.release()
        {
            self.shared.log("cannot close a sketch", &error);
        }
        self.shared.unregister(self.id);
    }
}

//! Copy-after-write: a block that was written in part is completed later with the old data.
//!
//! Until then the written bytes are at their place in the file, and only memory has the ranges that
//! were written; no record names the block. A read, a flush, or the background filler completes it.
//! If the host does not store the rest, a read takes it from the old data each time.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use bcow_format::Entry;

use super::region::{IncompleteBlock, Region};
use super::{Inner, Operation, RegionBlock};
use crate::Error;
use crate::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Arc, Condvar, Mutex, SMALL, Weak, lock, thread, wait, wait_timeout};

/// Length of the queue from which a writer completes its partly written block itself.
const MAX_WAITING: usize = if SMALL { 1 } else { 1024 };

/// A disk is at rest when it has written no record for this long.
const REST: Duration = Duration::from_millis(if cfg!(test) { 10 } else { 10_000 });

/// The filler and its queue.
#[derive(Default)]
pub(super) struct Fills {
    queue: Mutex<Queue>,
    /// Signalled when a job is queued and when the queue ends.
    changed: Condvar,
    waiting: AtomicUsize,
    done: AtomicU64,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// When a checkpoint is due.
    rests_at: Option<Instant>,
    /// The thread, which starts with the first job.
    filler: Option<thread::JoinHandle<()>>,
    ended: bool,
}

/// A background job.
pub(super) enum Job {
    /// Complete a block.
    Fill(Arc<Region>, u32),
    /// Flush, because many blocks are pending.
    Flush,
    /// Initialise space for later writes.
    WriteAhead,
    /// Write a checkpoint. After that, damage to the newest record cannot be taken for a power
    /// failure any more, because no record is needed.
    Checkpoint,
}

impl Fills {
    pub(super) fn done(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Number of jobs that the filler has not begun.
    pub(super) fn waiting(&self) -> u64 {
        self.waiting.load(Ordering::Relaxed) as u64
    }

    /// Whether the queue is full, so that writers complete blocks themselves.
    pub(super) fn is_behind(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) >= MAX_WAITING
    }

    /// Drops all queued jobs and waits for the job in progress.
    pub(super) fn stop(&self) {
        let filler = {
            let mut queue = lock(&self.queue);
            queue.ended = true;
            queue.jobs.clear();
            queue.rests_at = None;
            queue.filler.take()
        };
        self.changed.notify_all();
        if let Some(filler) = filler
            && filler.thread().id() != thread::current().id()
        {
            // The panic is a bug, and the panic hook has already reported it.
            let _ = filler.join();
        }
    }
}

impl Inner {
    /// Queues a job for the background.
    pub(super) fn later(self: &Arc<Self>, job: Job) {
        self.queue(|queue| {
            self.fills.waiting.fetch_add(1, Ordering::Relaxed);
            queue.jobs.push_back(job);
            true
        });
    }

    /// Writes a checkpoint in the background when the disk has come to rest.
    pub(super) fn checkpoint_at_rest(self: &Arc<Self>) {
        // A schedule of threads has no time.
        if cfg!(not(feature = "shuttle")) {
            let at = Instant::now() + REST;
            self.queue(|queue| queue.rests_at.replace(at).is_none());
        }
    }

    /// Changes the queue, and wakes the filler if `change` returns `true`.
    fn queue(self: &Arc<Self>, change: impl FnOnce(&mut Queue) -> bool) {
        let fills = &self.fills;
        let mut queue = lock(&fills.queue);
        if queue.ended {
            return;
        }
        if queue.filler.is_none() {
            let disk = Arc::downgrade(self);
            let builder = thread::Builder::new().name("bcow-fill".into());
            // Without the thread, reads and flushes complete the blocks.
            let Ok(filler) = builder.spawn(move || fill_forever(&disk)) else {
                return;
            };
            queue.filler = Some(filler);
        }
        let wakes = change(&mut queue);
        drop(queue);
        if wakes {
            fills.changed.notify_one();
        }
    }

    fn next_job(&self) -> Option<Job> {
        let mut queue = lock(&self.fills.queue);
        loop {
            if queue.ended {
                return None;
            }
            if let Some(job) = queue.jobs.pop_front() {
                self.fills.waiting.fetch_sub(1, Ordering::Relaxed);
                return Some(job);
            }
            let left = |at: Instant| at.saturating_duration_since(Instant::now());
            queue = match queue.rests_at.map(left) {
                None => wait(&self.fills.changed, queue),
                Some(Duration::ZERO) => {
                    queue.rests_at = None;
                    return Some(Job::Checkpoint);
                }
                Some(left) => wait_timeout(&self.fills.changed, queue, left),
            };
        }
    }

    fn work(self: &Arc<Self>, job: Job) {
        let config = self.enter();
        let operation = self.operation(&config);
        // An error is not reported here: the read or flush that needs the block meets it again.
        let _ = match job {
            Job::Fill(region, index) => operation.complete(&region, index),
            Job::Flush => operation.flush(),
            Job::WriteAhead => self.write_ahead(),
            Job::Checkpoint => operation.checkpoint_now(),
        };
    }
}

impl Operation<'_> {
    /// Completes the blocks of a region that are incomplete. Returns the first error.
    pub(super) fn complete_region(self, region: &Arc<Region>) -> Result<(), Error> {
        let incomplete: Vec<u32> = {
            let state = self.read_state(region)?;
            let pending = state.pending.iter();
            pending
                .filter(|(_, pending)| pending.incomplete.is_some())
                .map(|(index, _)| *index)
                .collect()
        };
        let mut outcome = Ok(());
        for index in incomplete {
            outcome = outcome.and(self.complete(region, index));
        }
        outcome
    }

    /// Completes a block, if it is incomplete.
    ///
    /// The old data is read without the lock of the region. Meanwhile another thread may change the
    /// block, and may reuse the place that is read. So the data, or the error of the read, counts
    /// only if the same block is still incomplete when the lock is held again; else the block is
    /// examined again.
    pub(super) fn complete(self, region: &Arc<Region>, index: u32) -> Result<(), Error> {
        loop {
            let (incomplete, shift) = {
                let state = self.read_state(region)?;
                let Some(incomplete) = state.incomplete(index) else {
                    return Ok(());
                };
                (incomplete.clone(), state.blocks().shift(self.region_shift))
            };
            let block = region.block(index, shift);
            let old = self.read_gaps(region, &block, &incomplete);
            let mut edit = self.edit(region)?;
            let state = &mut edit.state;
            let same = |now: &&IncompleteBlock| now.id == incomplete.id;
            let Some(incomplete) = state.incomplete(index).filter(same) else {
                continue;
            };
            let old = old?;
            let gaps = incomplete.written.gaps(block.length as u32);
            // Gaps only shrink while a block is incomplete, so every gap was read.
            let Some(pieces) = gaps.iter().map(|gap| piece_of(&old, gap)).collect() else {
                debug_assert!(false, "a gap of an incomplete block grew");
                continue;
            };
            let pieces: Vec<&[u8]> = pieces;
            let Entry::Open(stored) = state.blocks().entry(index) else {
                return Err(Error::Inconsistent(format!(
                    "the block at byte {} is incomplete, but has no place in the file",
                    self.lba(region, block.start).0
                )));
            };
            for (gap, bytes) in gaps.iter().zip(pieces) {
                self.write_storage(stored.at.0 + u64::from(gap.start), bytes)?;
            }
            edit.complete(index);
            self.fills.done.fetch_add(1, Ordering::Relaxed);
            return edit.finish();
        }
    }

    /// Reads a part of an incomplete block, from `at` of the region on, without completing the
    /// block: written bytes from the file, and others from the old data. Returns `false` if this
    /// block was completed meanwhile. For the locks, see [`Operation::complete`].
    pub(super) fn read_incomplete(
        self,
        region: &Region,
        index: u32,
        at: u64,
        buf: &mut [u8],
    ) -> Result<bool, Error> {
        let (incomplete, shift) = {
            let state = self.read_state(region)?;
            let Some(incomplete) = state.incomplete(index) else {
                return Ok(false);
            };
            (incomplete.clone(), state.blocks().shift(self.region_shift))
        };
        let block = region.block(index, shift);
        let old = self.read_gaps(region, &block, &incomplete);
        let state = self.read_state(region)?;
        let same = |now: &&IncompleteBlock| now.id == incomplete.id;
        let (Some(incomplete), Entry::Open(stored)) = (
            state.incomplete(index).filter(same),
            state.blocks().entry(index),
        ) else {
            return Ok(false);
        };
        let old = old?;
        let first = (at - block.start) as u32;
        let end = first + buf.len() as u32;
        let read_written = |range: Range<u32>, buf: &mut [u8]| {
            // The file may end before a part that was not written.
            if range.is_empty() {
                Ok(())
            } else {
                self.read_stored(stored.at.0 + u64::from(range.start), buf)
            }
        };
        let mut done = first;
        for gap in incomplete.written.gaps(block.length as u32) {
            let gap = gap.start.clamp(done, end)..gap.end.clamp(done, end);
            let (from, to) = ((gap.start - first) as usize, (gap.end - first) as usize);
            read_written(done..gap.start, &mut buf[(done - first) as usize..from])?;
            done = gap.end;
            if gap.is_empty() {
                continue;
            }
            // Gaps only shrink while a block is incomplete, so every gap was read.
            let Some(bytes) = piece_of(&old, &gap) else {
                debug_assert!(false, "a gap of an incomplete block grew");
                return Ok(false);
            };
            buf[from..to].copy_from_slice(bytes);
        }
        read_written(done..end, &mut buf[(done - first) as usize..])?;
        Ok(true)
    }

    /// Reads the old data of those parts of a block that were not written.
    fn read_gaps(
        self,
        region: &Region,
        block: &RegionBlock,
        incomplete: &IncompleteBlock,
    ) -> Result<Vec<Gap>, Error> {
        let gaps = incomplete.written.gaps(block.length as u32).into_iter();
        gaps.map(|range| {
            let mut bytes = vec![0; range.len()];
            let entry = &incomplete.source;
            self.read_entry(region, block, entry, range.clone(), &mut bytes)?;
            Ok(Gap { range, bytes })
        })
        .collect()
    }
}

/// A part of a block that was not written, and its old data.
struct Gap {
    range: Range<u32>,
    bytes: Vec<u8>,
}

/// The old data of `range`, if all of it was read.
fn piece_of<'a>(read: &'a [Gap], range: &Range<u32>) -> Option<&'a [u8]> {
    let has = |gap: &&Gap| gap.range.start <= range.start && range.end <= gap.range.end;
    let gap = read.iter().find(has)?;
    let from = (range.start - gap.range.start) as usize;
    Some(&gap.bytes[from..from + range.len()])
}

fn fill_forever(disk: &Weak<Inner>) {
    loop {
        // The disk ends the queue before it is dropped, so this reference is not the last one for
        // long.
        let Some(disk) = disk.upgrade() else {
            return;
        };
        let Some(job) = disk.next_job() else {
            return;
        };
        disk.work(job);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CreateOptions, Disk, MemoryStorage, NoBackings, OpenOptions, WritableDevice};

    #[test]
    fn a_disk_at_rest_needs_no_record() {
        let storage = Arc::new(MemoryStorage::default());
        let disk = Disk::create_alone(storage.clone(), &CreateOptions::disk(1 << 20)).unwrap();
        disk.write_at(0, &[7; 4096]).unwrap();
        disk.flush().unwrap();
        let log = disk.header().log.0;
        while disk.statistics().checkpoints == 0 {
            thread::yield_now();
        }
        // The process is killed, and then the record is damaged.
        let mut bytes = storage.to_vec();
        drop(disk);
        bytes[log as usize..][..100].fill(0);
        let damaged = Arc::new(MemoryStorage::new(bytes));
        let disk = Disk::open(damaged, &OpenOptions::default(), &NoBackings).unwrap();
        let mut read = [0; 4096];
        crate::BlockDevice::read_at(&disk, 0, &mut read).unwrap();
        assert_eq!(read, [7; 4096]);
    }
}

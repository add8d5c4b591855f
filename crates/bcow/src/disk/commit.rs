//! Flush: one record, made durable (spec section 10, "Commit").

use std::io;
use std::ops::Range;

use bcow_format::{Entry, LogMapping, Record, Stored, crc32c, encode_record, record_bytes};

use super::blocks::CHECKED_SHIFT;
use super::committer::{Committer, Taken};
use super::extents::Extents;
use super::region::Region;
use super::space::sectors;
use super::{Disk, Inner, Operation};
use crate::Error;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, Condvar, Mutex, lock, wait, write};

/// A region that is newer in the log than in its table stays in memory until the next checkpoint. A
/// flush writes a checkpoint when these regions take more than this many bytes.
const MAX_LOGGED_BYTES: u64 = 48 << 20;
/// Memory counted for each such region in addition to its table, in bytes.
const REGION_BYTES: u64 = 512;
/// Free runs of at least this many bytes are punched out of the file.
const PUNCH_BYTES: u64 = 128 << 10;

/// Serialises flushes. All callers that arrive during a flush share the next flush.
#[derive(Default)]
pub(super) struct Turns {
    state: Mutex<Turn>,
    ended: Condvar,
}

#[derive(Default)]
struct Turn {
    begun: u64,
    done: u64,
    running: bool,
    /// The error of the newest finished turn.
    failed: Option<(io::ErrorKind, String)>,
}

impl Turns {
    /// Returns after a `work` that began after this call: run here, or by another thread that waits
    /// for the same turn.
    fn take(&self, work: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let mut state = lock(&self.state);
        // A running turn may have begun too early to see the writes of the caller.
        let mine = state.begun + 1;
        loop {
            if state.done >= mine {
                return match &state.failed {
                    None => Ok(()),
                    Some((kind, text)) => {
                        let source = io::Error::new(*kind, text.clone());
                        Err(Error::io("flush, that is to write", 0, source))
                    }
                };
            }
            if !state.running {
                break;
            }
            state = wait(&self.ended, state);
        }
        state.running = true;
        state.begun += 1;
        let turn = state.begun;
        drop(state);
        let outcome = work();
        let mut state = lock(&self.state);
        state.running = false;
        state.done = turn;
        state.failed = outcome.as_ref().err().map(|error| {
            let kind = match error.innermost() {
                Error::Io { source, .. } => source.kind(),
                _ => io::ErrorKind::Other,
            };
            (kind, error.to_string())
        });
        drop(state);
        self.ended.notify_all();
        outcome
    }
}

impl Disk {
    /// Makes everything durable in tables, so that the next opening has no log to replay.
    pub fn checkpoint(&self) -> Result<(), Error> {
        self.inner.operation(&self.inner.enter()).checkpoint_now()
    }
}

impl Operation<'_> {
    pub(super) fn flush(self) -> Result<(), Error> {
        self.check_not_failed()?;
        self.turns.take(|| self.commit(&mut lock(&self.committer)))
    }

    pub(super) fn checkpoint_now(self) -> Result<(), Error> {
        let mut committer = lock(&self.committer);
        self.commit(&mut committer)?;
        if committer.tail == 0 {
            return Ok(());
        }
        self.checkpoint(&mut committer, &Taken::default())
    }

    /// Flushes, writes a checkpoint, and truncates the file to its content.
    pub(super) fn close(self) -> Result<(), Error> {
        self.checkpoint_now()?;
        let committer = lock(&self.committer);
        self.file
            .storage
            .set_length("truncate the file", committer.file_bytes)?;
        self.punch(&committer.free);
        self.barrier()
    }

    /// Completes the incomplete blocks, then records all complete pending blocks.
    pub(super) fn commit(self, committer: &mut Committer) -> Result<(), Error> {
        self.check_not_failed()?;
        self.flush_queued.store(false, Ordering::Release);
        let is_dirty = self.is_dirty.swap(false, Ordering::AcqRel);
        // A region is listed before the ledger has its change. So all changes in front of this
        // place are taken now, or were replaced.
        let noted = self.ledger.as_ref().map(|ledger| ledger.tail());
        let mut taken = Taken::default();
        let incomplete = self.take(&mut taken);
        let outcome = if is_dirty || !taken.mappings.is_empty() {
            self.publish(committer, &taken)
        } else {
            Ok(())
        };
        if outcome.is_err() {
            self.put_back(&taken);
            self.is_dirty.store(true, Ordering::Release);
        }
        outcome.and(incomplete)?;
        if let (Some(ledger), Some(noted)) = (&self.ledger, noted) {
            ledger.drop_before(noted);
        }
        self.disk.note_flush(committer, &taken);
        self.flushes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Takes the pending blocks of all changed regions. A block that cannot be completed stays
    /// pending; the first such error is returned after everything else has been taken.
    fn take(self, taken: &mut Taken) -> Result<(), Error> {
        let mut outcome = Ok(());
        self.listed_bytes.store(0, Ordering::Relaxed);
        for shard in &self.changed {
            let changed = std::mem::take(&mut *lock(shard));
            for region in changed {
                region.listed.store(false, Ordering::Release);
                let took = self.take_region(&region, taken);
                if took.is_err() {
                    self.list(&region, 0);
                }
                outcome = outcome.and(took);
            }
        }
        outcome
    }

    fn take_region(self, region: &Arc<Region>, taken: &mut Taken) -> Result<(), Error> {
        let outcome = self.complete_region(region);
        let header = &self.config.header;
        let mut state = self.regions.write(region, &self.file, header)?;
        let checked = state.blocks().shift(self.region_shift) == CHECKED_SHIFT;
        let before = state.pending.len();
        state.take_for_record(
            region.start(self.region_shift),
            self.region_shift,
            |entry| match entry {
                Entry::Open(stored) if checked => self.with_checksum(stored),
                entry => Ok(entry),
            },
            &mut taken.mappings,
        )?;
        taken.blocks += (before - state.pending.len()) as u64;
        taken.regions.push(Arc::clone(region));
        if !state.pending.is_empty() {
            self.list(region, 0);
        }
        outcome
    }

    /// The recorded entry of a block that was written in parts.
    fn with_checksum(self, stored: Stored) -> Result<Entry, Error> {
        let mut block = vec![0; stored.bytes as usize];
        self.read_stored(stored.at.0, &mut block)?;
        Ok(Entry::Raw(Stored {
            crc: crc32c(&block),
            ..stored
        }))
    }

    /// Makes the taken blocks durable: as a record if the log has room for one, else as a
    /// checkpoint.
    fn publish(self, committer: &mut Committer, taken: &Taken) -> Result<(), Error> {
        // An open block has no checksum that would reveal missing data, so its data must be durable
        // before a record names it.
        let opened = |mapping: &LogMapping| matches!(mapping.entry, Entry::Open(_));
        let needs_barrier = taken.mappings.iter().any(opened);
        let bytes = record_bytes(taken.mappings.len()) as u64;
        let fits = bytes <= committer.header.log.1 - committer.tail
            && committer.logged_bytes <= MAX_LOGGED_BYTES;
        if !fits {
            // The first barrier of the checkpoint covers the blocks too.
            return self.checkpoint(committer, taken);
        }
        if needs_barrier {
            self.barrier()?;
        }
        let file_bytes = taken
            .used()
            .map(|range| range.end)
            .fold(committer.file_bytes, u64::max);
        let record = Record {
            sequence: committer.sequence,
            file_bytes,
            mappings: taken.mappings.clone(),
        };
        let bytes = encode_record(&record, &committer.header);
        let at = committer.header.log.0 + committer.tail;
        self.write_storage(at, &bytes)
            .inspect_err(|error| self.unwrite(at, error))?;
        self.write_log_ahead(committer, bytes.len() as u64);
        self.barrier()?;
        committer.tail += bytes.len() as u64;
        committer.sequence += 1;
        self.has_new_identity.store(true, Ordering::Release);

        let mut freed = Vec::new();
        for region in &taken.regions {
            let mut state = write(&region.state);
            let before = state.logged;
            freed.extend(state.freed_by_record());
            state.record_is_durable();
            if state.logged && !before {
                committer.logged.push(Arc::clone(region));
            }
            let weight = state.blocks().weight() + REGION_BYTES;
            committer.logged_bytes += weight.saturating_sub(state.counted);
            state.counted = weight.max(state.counted);
        }
        self.unflushed.fetch_sub(taken.blocks, Ordering::Relaxed);
        committer.grow(file_bytes);
        taken.used().for_each(|range| committer.free.remove(range));
        let mut given_up = Extents::default();
        for freed in &freed {
            let range = sectors(freed.stored);
            committer.free.insert(range.clone());
            if freed.given_up {
                given_up.insert(range);
            }
        }
        self.punch(&given_up);
        let freed = freed.iter().map(|freed| sectors(freed.stored));
        self.space.free_punched(freed, punched(&given_up));
        self.disk.checkpoint_at_rest();
        Ok(())
    }
}

impl Inner {
    /// Overwrites the start of a record that could not be written as a whole, and makes that
    /// durable. A later replay must not accept the record: its blocks are pending again, its places
    /// may be allocated to other blocks, and an open block has no checksum to tell the difference.
    /// If this fails too, the disk refuses writes.
    fn unwrite(&self, at: u64, error: &Error) {
        let undone = self
            .write_storage(at, &[0; 16])
            .and_then(|()| self.barrier());
        if undone.is_err() {
            self.refuse_writes(error);
        }
    }

    /// Makes the taken blocks pending again.
    fn put_back(&self, taken: &Taken) {
        let mut freed = Vec::new();
        let mut again = 0;
        for region in &taken.regions {
            again += write(&region.state).record_failed(&mut freed);
            self.list(region, 0);
        }
        self.unflushed
            .fetch_sub(taken.blocks - again, Ordering::Relaxed);
        self.space.free(freed.into_iter().map(sectors));
    }

    /// Punches long free runs out of the file. The space of overwritten blocks is not punched,
    /// because writes reuse it soon.
    pub(super) fn punch(&self, free: &Extents) {
        for run in punched(free) {
            // An error is harmless: the host keeps the space until the bytes are written again.
            let _ = self.file.storage.punch(run.start, run.end - run.start);
        }
    }
}

/// The ranges that are long enough to be punched.
pub(super) fn punched(free: &Extents) -> impl Iterator<Item = Range<u64>> + '_ {
    free.iter().filter(|run| run.end - run.start >= PUNCH_BYTES)
}

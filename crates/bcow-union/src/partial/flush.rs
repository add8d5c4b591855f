//! Flush and promotion of a partial file.
//!
//! The order is: the data of a block, then the map's record of the block, then the mark that says
//! that the map exists.

use bcow::sync::atomic::Ordering;

use super::locks::{lock, read, write};
use super::map::Barriers;
use super::{Durability, Frame, Partial, PartialError, PartialMark};
use crate::blocks::BlockSet;

impl Partial {
    /// Completes all incomplete blocks and records them, so that the partial file can be opened
    /// again with all earlier writes.
    pub fn flush(&self, how: Durability) -> Result<(), PartialError> {
        match how {
            Durability::Durable => self.flushes.join(|| self.flush_once(how)),
            Durability::Volatile => self.flush_once(how),
        }
    }

    /// Records durably how much of the partial file is durable, so that a later open does not take
    /// damage for a crash. A user calls this before it closes the partial file. Does nothing if the
    /// record is up to date, or if some changes are not recorded.
    pub fn confirm(&self) -> Result<(), PartialError> {
        if self.discarded.load(Ordering::Acquire) {
            Ok(())
        } else {
            lock(&self.map).confirm()
        }
    }

    fn flush_once(&self, how: Durability) -> Result<(), PartialError> {
        let result = match self.try_flush(how) {
            Err(error) if error.is_no_space() => {
                self.shared.reserve.free();
                self.try_flush(how)
            }
            result => result,
        };
        let presence = read(&self.presence);
        let has_ended = presence.unrecorded.is_empty()
            && self.incomplete.load(Ordering::Acquire) == 0
            && result.is_ok()
            && self.is_reserved.swap(false, Ordering::AcqRel);
        drop(presence);
        if has_ended {
            self.shared.reserve.remove(self.reserved_bytes);
        }
        result
    }

    fn try_flush(&self, how: Durability) -> Result<(), PartialError> {
        // A later flush relies on the records of this one, so flushes do not overtake each other.
        let mut map = lock(&self.map);
        self.fence.check()?;
        self.shared.counters.flushes.fetch_add(1, Ordering::Relaxed);
        // The gate is not held during barriers. If the file is truncated in the meantime, the map
        // lists blocks beyond the end as present. This is harmless, because those entries are
        // ignored.
        let frame = read(&self.gate);
        let marked = frame.marked;
        // After an error, the flush still completes and records the other blocks.
        let completed = self.complete_all(&frame);
        if how == Durability::Durable {
            self.complete_ahead(&frame);
        }
        let (new, all) = self.take_unrecorded(map.wants_all());
        drop(frame);
        if how == Durability::Durable
            && let Err(error) = self.sync_host()
        {
            self.return_unrecorded(&new);
            return Err(error);
        }
        // The host stores some metadata of a file only when it writes back the data.
        self.measure();
        if !marked {
            return completed;
        }
        let barriers = match how {
            Durability::Durable => Barriers::Use,
            Durability::Volatile => Barriers::None,
        };
        if !new.is_empty() || map.has_dirty_tail() {
            let blocks = all.as_ref().unwrap_or(&new);
            match map.record(blocks, barriers) {
                Ok(rewritten) => {
                    let compacted = &self.shared.counters.maps_compacted;
                    compacted.fetch_add(u64::from(rewritten), Ordering::Relaxed);
                }
                Err(error) => {
                    self.return_unrecorded(&new);
                    return Err(error);
                }
            }
        }
        if how == Durability::Durable {
            map.sync()?;
        }
        if map.exists() {
            self.mark_map()?;
        }
        if how == Durability::Durable {
            self.sync_mark()?;
        }
        drop(map);
        completed
    }

    /// Whether the partial file can be closed and opened again without the loss of a write: the map
    /// and the mark record its whole state, and no barrier has failed.
    pub fn is_recorded(&self) -> bool {
        let map = lock(&self.map);
        let frame = read(&self.gate);
        let is_recorded = || {
            self.incomplete.load(Ordering::Acquire) == 0
                && read(&self.presence).unrecorded.is_empty()
                && !map.has_dirty_tail()
                // Without the mark, the next open ignores the map.
                && (!map.exists() || lock(&self.mark).written.map_exists)
                && (map.is_synced() || !self.shared.options.durable)
        };
        self.fence.check().is_ok() && (!frame.marked || is_recorded())
    }

    /// Takes the present blocks that the map does not list; also returns all present blocks if
    /// `wants_all`.
    fn take_unrecorded(&self, wants_all: bool) -> (BlockSet, Option<BlockSet>) {
        let mut presence = write(&self.presence);
        let new = std::mem::take(&mut presence.unrecorded);
        let all = wants_all.then(|| presence.present.clone());
        (new, all)
    }

    fn return_unrecorded(&self, new: &BlockSet) {
        write(&self.presence).unrecorded.extend(new);
    }

    /// Makes the content durable, and also the mark if it is not durable.
    fn sync_host(&self) -> Result<(), PartialError> {
        if lock(&self.mark).unsynced {
            return self.sync_mark();
        }
        self.fence.sync(|| self.content().sync_data())
    }

    fn sync_mark(&self) -> Result<(), PartialError> {
        let mut state = lock(&self.mark);
        if state.unsynced {
            self.fence.sync(|| self.content().sync_all())?;
            state.unsynced = false;
        }
        Ok(())
    }

    /// Sets the flag of the mark that says that the map exists.
    fn mark_map(&self) -> Result<(), PartialError> {
        self.times.hold().preserve_time(self.content(), || {
            let mut state = lock(&self.mark);
            let mark = PartialMark {
                map_exists: true,
                ..state.written
            };
            state.change(&*self.host, mark)
        })
    }

    /// Whether the partial file does not need the lower file any more.
    pub fn is_complete(&self) -> bool {
        self.covers_lower(&read(&self.gate))
    }

    fn covers_lower(&self, frame: &Frame) -> bool {
        read(&self.presence).present.len() == frame.covered()
    }

    /// Makes a plain file of a partial file that is complete. Returns whether the host's file is a
    /// plain file now. Open users of the partial file continue to work.
    pub fn promote(&self) -> Result<bool, PartialError> {
        let mut map = lock(&self.map);
        let mut frame = write(&self.gate);
        if !frame.marked {
            return Ok(true);
        }
        self.fence.check()?;
        if !self.covers_lower(&frame) {
            return Ok(false);
        }
        let durable = self.shared.options.durable;
        if durable {
            self.fence.sync(|| self.content().sync_data())?;
        }
        self.host
            .remove_marks()
            .map_err(PartialError::host("remove the marks of a partial file"))?;
        self.detach_lower(&mut frame);
        if durable {
            // The map is still needed until the removal of the marks is durable: later fdatasync
            // calls on the plain file need not include the marks.
            self.fence.sync(|| self.content().sync_all())?;
        }
        if let Err(error) = map.remove() {
            // A later fsck of the upper reports and removes the leaked map.
            self.shared
                .log("cannot remove the map of a promoted partial file", &error);
        }
        self.measure();
        let promotions = &self.shared.counters.promotions;
        promotions.fetch_add(1, Ordering::Relaxed);
        drop(frame);
        drop(map);
        Ok(true)
    }

    /// Removes the map, because the file has lost its last name. Open users of the partial file
    /// continue to work.
    pub fn discard(&self) -> Result<(), PartialError> {
        let mut map = lock(&self.map);
        let mut frame = write(&self.gate);
        frame.marked = false;
        drop(frame);
        self.discarded.store(true, Ordering::Release);
        let removed = map.remove();
        drop(map);
        removed
    }

    /// Makes the partial file behave as a plain file.
    fn detach_lower(&self, frame: &mut Frame) {
        let counters = &self.shared.counters;
        counters
            .lower_bytes
            .fetch_sub(frame.limit, Ordering::Relaxed);
        frame.limit = 0;
        frame.marked = false;
        let mut presence = write(&self.presence);
        counters
            .present
            .fetch_sub(presence.present.len(), Ordering::Relaxed);
        presence.present = BlockSet::default();
        presence.unrecorded = BlockSet::default();
    }
}

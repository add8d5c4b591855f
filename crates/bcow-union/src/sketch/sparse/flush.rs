//! Making a sparse sketch durable; making a plain file of it.
//!
//! A block is recorded in the map when it is on the disk. The map is what the mark promises; so it is there first.

use bcow::sync::atomic::Ordering;

use super::super::blocks::BlockSet;
use super::super::locks::{lock, read, write};
use super::super::map::Barriers;
use super::super::{Durability, SketchError, SketchMark};
use super::{Frame, Sparse};

impl Sparse {
    pub(super) fn flush_once(&self, how: Durability) -> Result<(), SketchError> {
        // Whoever comes later relies on what is recorded here, so nobody passes.
        let mut map = lock(&self.map);
        self.fence.check()?;
        self.shared.counters.flushes.fetch_add(1, Ordering::Relaxed);
        // Not held during barriers. Should the file be cut in the meantime, the map says of blocks that are gone that they are
        // present, which nobody will ask.
        let frame = read(&self.gate);
        let marked = frame.marked;
        // What can be completed and recorded is, also if something else cannot.
        let completed = self.complete_all(&frame);
        if how == Durability::Durable {
            self.go_ahead(&frame);
        }
        let (new, all) = self.take_unrecorded(map.wants_all());
        drop(frame);
        if how == Durability::Durable
            && let Err(error) = self.sync_host()
        {
            self.give_back(&new);
            return Err(error);
        }
        if !marked {
            return completed;
        }
        let barriers = match how {
            Durability::Durable => Barriers::Use,
            Durability::Volatile => Barriers::None,
        };
        if !new.is_empty() || map.is_spoilt() {
            let blocks = all.as_ref().unwrap_or(&new);
            match map.record(blocks, barriers) {
                Ok(rewritten) => {
                    let compacted = &self.shared.counters.maps_compacted;
                    compacted.fetch_add(u64::from(rewritten), Ordering::Relaxed);
                }
                Err(error) => {
                    self.give_back(&new);
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

    /// Whether nothing is known in memory only.
    pub(super) fn has_recorded_all(&self) -> bool {
        let map = lock(&self.map);
        let frame = read(&self.gate);
        let is_recorded = || {
            self.in_transit.load(Ordering::Acquire) == 0
                && read(&self.presence).unrecorded.is_empty()
                && !map.is_spoilt()
                // Without the mark nobody looks for the map.
                && (!map.exists() || lock(&self.mark).written.map_exists)
                && (map.is_synced() || !self.shared.options.durable)
        };
        self.fence.check().is_ok() && (!frame.marked || is_recorded())
    }

    /// The blocks that the map does not have, which it is about to get; and all that are present, if wanted.
    fn take_unrecorded(&self, wants_all: bool) -> (BlockSet, Option<BlockSet>) {
        let mut presence = write(&self.presence);
        let new = std::mem::take(&mut presence.unrecorded);
        let all = wants_all.then(|| presence.present.clone());
        (new, all)
    }

    fn give_back(&self, new: &BlockSet) {
        write(&self.presence).unrecorded.extend(new);
    }

    /// Makes the content durable, and the mark if it is not.
    fn sync_host(&self) -> Result<(), SketchError> {
        if lock(&self.mark).unsynced {
            return self.sync_mark();
        }
        self.fence.sync(|| self.content().sync_data())
    }

    fn sync_mark(&self) -> Result<(), SketchError> {
        let mut state = lock(&self.mark);
        if state.unsynced {
            self.fence.sync(|| self.content().sync_all())?;
            state.unsynced = false;
        }
        Ok(())
    }

    /// Has the mark say that there is a map.
    fn mark_map(&self) -> Result<(), SketchError> {
        let mut state = lock(&self.mark);
        let mark = SketchMark {
            map_exists: true,
            ..state.written
        };
        state.change(&*self.host, mark).map(drop)
    }

    /// Whether nothing of the lower file shows.
    pub(super) fn lacks_nothing(&self, frame: &Frame) -> bool {
        read(&self.presence).present.len() == frame.covered()
    }

    pub(super) fn make_plain(&self) -> Result<bool, SketchError> {
        let mut map = lock(&self.map);
        let mut frame = write(&self.gate);
        if !frame.marked {
            return Ok(true);
        }
        self.fence.check()?;
        if !self.lacks_nothing(&frame) {
            return Ok(false);
        }
        let durable = self.shared.options.durable;
        if durable {
            self.fence.sync(|| self.content().sync_data())?;
        }
        self.host
            .remove_marks()
            .map_err(|error| SketchError::host("remove the marks of a sketch", &error))?;
        self.leave(&mut frame);
        if durable {
            // Before it is durable that there is no mark, the map is needed: syncs of a plain file do not care for marks.
            self.fence.sync(|| self.content().sync_all())?;
        }
        if let Err(error) = map.remove() {
            // The next check of the upper finds it.
            self.shared.log("a map that nobody needs", &error);
        }
        if let Err(error) = self.stored.let_go(self.content()) {
            self.shared.log("the space of a plain file", &error);
        }
        let promotions = &self.shared.counters.promotions;
        promotions.fetch_add(1, Ordering::Relaxed);
        drop(frame);
        drop(map);
        Ok(true)
    }

    /// The file has no name any more.
    pub(super) fn forget_map(&self) -> Result<(), SketchError> {
        let mut map = lock(&self.map);
        let mut frame = write(&self.gate);
        frame.marked = false;
        drop(frame);
        self.discarded.store(true, Ordering::Release);
        let removed = map.remove();
        drop(map);
        removed
    }

    /// It is a file like any other from now on.
    fn leave(&self, frame: &mut Frame) {
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

//! The background thread: every few seconds it flushes sketches with new data, promotes complete
//! ones, and closes idle descriptors. It also syncs a full batch.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};

use super::content::set_plain;
use super::nodes::{Content, Node, Place, State, Upper};
use super::{UnionFs, promote};
use crate::sketch::{Durability, Sketch, SketchKind};

/// Upper bound of the time that written data of a sketch waits for a flush; the default commit
/// interval of ext4.
const INTERVAL: Duration = Duration::from_secs(5);

/// Descriptors of an open sketch: its host file and its map.
const DESCRIPTORS_OF_SKETCH: usize = 2;

/// Upper bound of the nodes in the queue. Further ones are found at the next interval.
const MAX_WAITING: usize = 1024;

/// Open sketches, by id. The table keeps a sketch after the kernel forgot its node: otherwise
/// unflushed data, data that could not be made durable, and the record of a failed barrier would be
/// lost.
#[derive(Debug, Default)]
pub(super) struct OpenSketches {
    /// Held to find, add or remove a sketch, and to close an unused one.
    open: Mutex<HashMap<u64, Open>>,
}

/// A sketch, and the node whose content it is if the kernel holds that node.
pub(super) type Open = (Arc<dyn Sketch>, Weak<Node>);

impl OpenSketches {
    pub(super) fn get(&self, id: u64) -> Option<Arc<dyn Sketch>> {
        self.open
            .lock()
            .get(&id)
            .map(|(sketch, _)| Arc::clone(sketch))
    }

    pub(super) fn add(&self, id: u64, sketch: &Arc<dyn Sketch>, node: Weak<Node>) {
        self.open.lock().insert(id, (Arc::clone(sketch), node));
    }

    pub(super) fn remove(&self, id: u64) {
        let removed = self.open.lock().remove(&id);
        drop(removed);
    }

    /// Iterates over the sketches that are open now. Only the current one is referenced, so that
    /// the others can be closed meanwhile.
    pub(super) fn all(&self) -> impl Iterator<Item = Open> + '_ {
        let ids: Vec<u64> = self.open.lock().keys().copied().collect();
        ids.into_iter()
            .filter_map(|id| self.open.lock().get(&id).cloned())
    }

    /// Closes a sketch if only this table and the caller reference it and all its data is recorded.
    fn drop_unused(&self, sketch: Arc<dyn Sketch>) {
        let mut open = self.open.lock();
        // The lock keeps other threads from taking the sketch out of the table. Without it, one
        // could write to the sketch now, or miss it in the table and open it a second time.
        if Arc::strong_count(&sketch) == 2 && sketch.is_recorded() {
            open.remove(&sketch.id());
        }
        drop(sketch);
    }

    /// Closes the sketch of a node if only this table and the node reference it and all its data is
    /// recorded, and removes it from the node. The caller holds the lock of the node's state. Gives
    /// whether the sketch was closed.
    fn close(&self, content: &mut Content) -> bool {
        let Content::Sketch(sketch) = content else {
            return false;
        };
        let mut open = self.open.lock();
        let is_idle = Arc::strong_count(sketch) == 2
            && open.contains_key(&sketch.id())
            && sketch.is_recorded();
        if is_idle {
            open.remove(&sketch.id());
            *content = Content::Unknown;
        }
        is_idle
    }
}

/// The background thread and its requests.
#[derive(Debug, Default)]
pub(super) struct Background {
    /// Held only to add or to take requests.
    requests: Mutex<Requests>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Requests {
    to_promote: Vec<Arc<Node>>,
    finish_batch: bool,
    stop: bool,
}

impl Background {
    /// Requests the promotion of a complete sketch.
    pub(super) fn request_promotion(&self, node: &Arc<Node>) {
        if node.is_waiting.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut requests = self.requests.lock();
        match requests.to_promote.len() < MAX_WAITING {
            true => requests.to_promote.push(Arc::clone(node)),
            false => node.is_waiting.store(false, Ordering::Release),
        }
        drop(requests);
        self.changed.notify_one();
    }

    /// Requests the sync of the batch.
    pub(super) fn finish_batch(&self) {
        self.requests.lock().finish_batch = true;
        self.changed.notify_one();
    }

    /// Stops the thread, if it was started. The caller handles the pending requests.
    pub(super) fn stop(&self) {
        self.requests.lock().stop = true;
        self.changed.notify_one();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }

    /// Waits for a request or until `until`; `None` if the thread must stop.
    fn wait(&self, until: Instant) -> Option<(Vec<Arc<Node>>, bool)> {
        let mut requests = self.requests.lock();
        loop {
            if requests.stop {
                return None;
            }
            let left = until.saturating_duration_since(Instant::now());
            if !requests.to_promote.is_empty() || requests.finish_batch || left.is_zero() {
                let nodes = std::mem::take(&mut requests.to_promote);
                return Some((nodes, std::mem::take(&mut requests.finish_batch)));
            }
            self.changed.wait_for(&mut requests, left);
        }
    }
}

impl Drop for UnionFs {
    fn drop(&mut self) {
        self.background.stop();
    }
}

impl UnionFs {
    pub(super) fn start_background(self: &Arc<Self>) -> std::io::Result<()> {
        let union = Arc::downgrade(self);
        let background = Arc::clone(&self.background);
        let thread = std::thread::Builder::new()
            .name("union".into())
            .spawn(move || run(&background, &union))?;
        *self.background.thread.lock() = Some(thread);
        Ok(())
    }

    pub(super) fn run_periodic(&self) {
        // Errors were logged. A sketch with unflushed data stays open, and a later fsync meets the
        // error again.
        let pass = self.ledger.as_ref().map(|ledger| ledger.begin_pass());
        let waiting = std::mem::take(&mut *self.unrecorded.lock());
        let flushed = self.flush_sketches(self.durability());
        if let (Ok(()), Some(pass)) = (flushed, pass) {
            pass.succeeded();
        }
        for node in waiting {
            self.release_recorded(node);
        }
        for (sketch, node) in self.open_sketches.all() {
            match (sketch.is_complete(), node.upgrade()) {
                (Ok(true), Some(node)) => self.promote_if_complete(&node),
                _ => self.open_sketches.drop_unused(sketch),
            }
        }
        self.finish_batch_logged();
        self.table.purge();
        self.limit_descriptors();
    }

    /// Keeps a node that the kernel forgot, if its sketch has changes that no flush has recorded: a
    /// process that takes over the mount finds the sketch by the node. Gives the node otherwise.
    pub(super) fn keep_unrecorded(&self, node: Arc<Node>) -> Option<Arc<Node>> {
        if self.ledger.is_none() {
            return Some(node);
        }
        let is_recorded = match &node.read_state().content {
            Content::Sketch(sketch) => sketch.is_recorded(),
            _ => true,
        };
        match is_recorded {
            true => Some(node),
            false => {
                self.unrecorded.lock().push(node);
                None
            }
        }
    }

    /// Drops a node that was kept for its sketch, if a flush has recorded all changes.
    fn release_recorded(&self, node: Arc<Node>) {
        // The kernel has looked it up again. Its next forget releases the node; that of a removed
        // file, which is never kept, may have done so already.
        if self.table.is_held(node.id) || node.is_removed.load(Ordering::Acquire) {
            return self.table.drop_node(node);
        }
        if let Some(node) = self.keep_unrecorded(node) {
            self.end_tracking(&node);
            self.table.drop_node(node);
        }
    }

    fn finish_batch_logged(&self) {
        if let Err(errno) = self.finish_batch() {
            self.host_failed(b"", "cannot sync the files that were copied up", errno);
        }
    }

    /// Makes a plain file of a sketch that needs no bytes of the image any more.
    pub(super) fn promote_if_complete(&self, node: &Arc<Node>) {
        node.is_waiting.store(false, Ordering::Release);
        let mut state = node.write_state();
        let Content::Sketch(sketch) = &state.content else {
            return;
        };
        // The file cannot be looked up again. Its space is given back when the sketch is closed.
        if node.is_removed.load(Ordering::Acquire) {
            return;
        }
        let sketch = Arc::clone(sketch);
        match self.promote(node, &state, &*sketch) {
            Ok(promote::Promoted::No) => return,
            Ok(promote::Promoted::InPlace) => {}
            Ok(promote::Promoted::Replaced(file, host_inode)) => {
                if let Some(upper) = &mut state.upper {
                    upper.file = Some(Arc::new(file));
                    upper.is_fully_open = true;
                    upper.host_inode = host_inode;
                }
            }
            // The file stays a sketch and reads the same bytes.
            Err(errno) => {
                self.request_failed(node.id, "be made a plain file of the upper", errno);
                return;
            }
        }
        set_plain(&mut state);
        drop(state);
        self.open_sketches.remove(sketch.id());
    }

    /// Flushes all open sketches. Tries each of them, and gives the first error.
    pub(super) fn flush_sketches(&self, how: Durability) -> Result<(), Errno> {
        let mut result = Ok(());
        for (sketch, node) in self.open_sketches.all() {
            if let Err(error) = sketch.flush(how) {
                let errno = match node.upgrade() {
                    Some(node) => self.content_failed(&node, error),
                    None => error.errno(),
                };
                result = result.and(Err(errno));
            }
        }
        result
    }

    /// Records for each open sketch how much of its map is durable.
    pub(super) fn confirm_sketches(&self) {
        for (sketch, node) in self.open_sketches.all() {
            // A failure loses no data.
            if let Err(error) = sketch.confirm()
                && let Some(node) = node.upgrade()
            {
                self.content_failed(&node, error);
            }
        }
    }

    /// Closes idle descriptors if nodes and their sketches hold too many.
    pub(super) fn limit_descriptors(&self) {
        let limit = self.descriptors_limit.load(Ordering::Relaxed);
        if self.descriptors_held() <= limit {
            return;
        }
        self.close_idle_descriptors(false);
        // Most of them belong to sketches with unflushed data.
        if self.descriptors_held() > limit / 2 {
            self.close_idle_descriptors(true);
        }
        // If most descriptors are in use, another attempt soon would close few.
        let most = self.max_descriptors.max(2 * self.descriptors_held());
        self.descriptors_limit.store(most, Ordering::Relaxed);
    }

    /// Closes descriptors that are not in use. Those of sketches with unflushed data are closed
    /// only if `flush` is set, after a flush.
    fn close_idle_descriptors(&self, flush: bool) {
        for (sketch, node) in self.open_sketches.all() {
            if node.strong_count() > 0 {
                continue;
            }
            if flush && !sketch.is_recorded() {
                let _ = sketch.flush(self.durability());
            }
            self.open_sketches.drop_unused(sketch);
        }
        let mut held = 0;
        self.table.for_each(&mut |node| {
            // A thread that uses the node is not interrupted.
            let Some(mut state) = node.try_write_state() else {
                held += 1;
                return;
            };
            let can_be_found_again = match node.place() {
                Place::At { .. } => true,
                Place::Root | Place::Nowhere => false,
            };
            if can_be_found_again {
                self.close_sketch(&mut state, flush);
            }
            match &mut state.upper {
                // A thread that holds the file may be about to remove the name by which it would be
                // opened again.
                Some(Upper {
                    file: Some(file),
                    in_batch: false,
                    ..
                }) if !can_be_found_again || Arc::strong_count(file) > 1 => held += 1,
                Some(Upper {
                    file: file @ Some(_),
                    is_fully_open,
                    in_batch: false,
                    ..
                }) => {
                    *file = None;
                    *is_fully_open = false;
                }
                Some(Upper { file: Some(_), .. }) => held += 1,
                _ => {}
            }
        });
        self.descriptors.store(held, Ordering::Relaxed);
    }

    /// Upper bound of the descriptors that nodes and open sketches hold.
    fn descriptors_held(&self) -> usize {
        let sketches = usize::try_from(self.sketches.open_count()).unwrap_or(usize::MAX);
        self.descriptors
            .load(Ordering::Relaxed)
            .saturating_add(sketches.saturating_mul(DESCRIPTORS_OF_SKETCH))
    }

    /// Closes the sketch of a node that can be opened again, if all its data is recorded. The
    /// caller holds the lock of the node's state.
    fn close_sketch(&self, state: &mut State, flush: bool) {
        let Content::Sketch(sketch) = &state.content else {
            return;
        };
        if flush && !sketch.is_recorded() {
            // A sketch that cannot be flushed stays open, and a later fsync meets the error again.
            let _ = sketch.flush(self.durability());
        }
        let (kind, size) = (sketch.kind(), sketch.size());
        if self.open_sketches.close(&mut state.content)
            && let Some(upper) = &mut state.upper
        {
            upper.is_partial = true;
            upper.is_sketch = true;
            upper.packed_size = (kind == SketchKind::Packed).then_some(size);
        }
    }
}

fn run(background: &Background, union: &Weak<UnionFs>) {
    let mut next = Instant::now() + INTERVAL;
    // A waiting thread holds no strong reference to the union. The drop of the union stops the
    // thread.
    while let Some((nodes, finish_batch)) = background.wait(next) {
        let Some(union) = union.upgrade() else {
            return;
        };
        for node in nodes {
            union.promote_if_complete(&node);
            union.table.drop_node(node);
        }
        if finish_batch {
            union.finish_batch_logged();
        }
        if Instant::now() >= next {
            union.run_periodic();
            next = Instant::now() + INTERVAL;
        }
    }
}

/// Upper bound of the descriptors that nodes may hold: half of the process's limit, which is first
/// raised to its hard limit.
pub(super) fn max_descriptors() -> usize {
    let limits = rustix::process::getrlimit(Resource::Nofile);
    if limits.current != limits.maximum {
        let raised = Rlimit {
            current: limits.maximum,
            maximum: limits.maximum,
        };
        let _ = rustix::process::setrlimit(Resource::Nofile, raised);
    }
    match rustix::process::getrlimit(Resource::Nofile).current {
        Some(most) => usize::try_from(most / 2).unwrap_or(usize::MAX).max(64),
        None => 1 << 19,
    }
}

//! The background thread of a union. Every few seconds, it flushes partial files with new data,
//! promotes complete partial files to plain files, and closes idle descriptors. On request, it
//! promotes a partial file or syncs a full batch at once.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use rustix::io::Errno;

use super::UnionFs;
use super::nodes::{Content, Node, NodeState};
use super::plain::set_plain;
use crate::partial::{Durability, Partial};

/// Time between two periodic runs: written data of a partial file waits about this long for a
/// flush. The value is the default commit interval of ext4.
const PERIOD: Duration = Duration::from_secs(5);

/// Blocks that are copied at once to complete a partial file. An unmount waits for them.
const BLOCKS_AT_ONCE: u64 = 256;

/// A partial file is completed only if the host has as many times the space that it needs.
const SPARE: u64 = 10;

/// Upper bound of the nodes in the queue. The next periodic run finds further complete partial
/// files.
const MAX_QUEUED: usize = 1024;

/// The background thread, and the requests to it.
#[derive(Debug, Default)]
pub(super) struct Background {
    /// Held only to add or to take requests.
    requests: Mutex<Requests>,
    /// Notified after each new request.
    changed: Condvar,
    /// Held by the thread while it works, and by a snapshot.
    working: Mutex<()>,
    /// The thread, until it is stopped. Held only to set or to take the handle.
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Requests {
    to_promote: Vec<Arc<Node>>,
    sync_batch: bool,
    stop: bool,
}

impl Background {
    /// Requests the promotion of the complete partial file of a node. Ignores the request if the
    /// queue is full.
    pub(super) fn request_promotion(&self, node: &Arc<Node>) {
        if node.is_queued.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut requests = self.requests.lock();
        if requests.to_promote.len() < MAX_QUEUED {
            requests.to_promote.push(Arc::clone(node))
        } else {
            node.is_queued.store(false, Ordering::Release)
        }
        drop(requests);
        self.changed.notify_one();
    }

    pub(super) fn request_batch_sync(&self) {
        self.requests.lock().sync_batch = true;
        self.changed.notify_one();
    }

    /// Waits for the end of the work in progress. None begins before the result is dropped.
    pub(super) fn pause(&self) -> MutexGuard<'_, ()> {
        self.working.lock()
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

    /// Waits for a request, at most until `until`. Returns the nodes to promote, and whether the
    /// batch must be synced; `None` if the thread must stop.
    fn wait(&self, until: Instant) -> Option<(Vec<Arc<Node>>, bool)> {
        let mut requests = self.requests.lock();
        loop {
            if requests.stop {
                return None;
            }
            let left = until.saturating_duration_since(Instant::now());
            if !requests.to_promote.is_empty() || requests.sync_batch || left.is_zero() {
                let nodes = std::mem::take(&mut requests.to_promote);
                return Some((nodes, std::mem::take(&mut requests.sync_batch)));
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
    /// Starts the background thread. Without it, only syncs, flushes and the close complete what
    /// was written.
    pub fn start_background(self: &Arc<Self>) -> std::io::Result<()> {
        let union = Arc::downgrade(self);
        let background = Arc::clone(&self.background);
        let thread = std::thread::Builder::new()
            .name("union".into())
            .spawn(move || run(&background, &union))?;
        *self.background.thread.lock() = Some(thread);
        Ok(())
    }

    /// Flushes, promotes and closes partial files, syncs the batch, and closes idle descriptors.
    pub(super) fn run_periodic(&self) {
        // `flush_partials` logs errors. A partial file with unflushed data stays open, and a later
        // fsync returns the error.
        let pass = self.ledger.as_ref().map(|ledger| ledger.begin_pass());
        let waiting = std::mem::take(&mut *self.unrecorded.lock());
        let _ = self.restore_all_kept();
        self.record_kept();
        let flushed = self.flush_partials(self.durability());
        if let (Ok(()), Some(pass)) = (flushed, pass) {
            pass.succeeded();
        }
        for node in waiting {
            self.release_recorded(node);
        }
        for (partial, node) in self.open_partials.all() {
            match (partial.is_complete(), node.upgrade()) {
                (true, Some(node)) => self.promote_if_complete(&node),
                _ => self.open_partials.drop_unused(partial),
            }
        }
        self.finish_batch_logged();
        self.table.purge();
        self.limit_descriptors();
        self.drop_late_opens();
    }

    /// Takes a node that the kernel forgot. If its partial file has changes that no flush has
    /// recorded, puts the node into `unrecorded`: a process that takes over the mount finds the
    /// partial file by the node. Otherwise returns the node.
    pub(super) fn keep_unrecorded(&self, node: Arc<Node>) -> Option<Arc<Node>> {
        if self.ledger.is_none() {
            return Some(node);
        }
        let is_recorded = match &node.read_state().content {
            Content::Partial(partial) => partial.is_recorded(),
            _ => true,
        };
        if is_recorded {
            Some(node)
        } else {
            self.unrecorded.lock().push(node);
            None
        }
    }

    /// Drops a node of `unrecorded` if a flush has recorded all changes of its partial file.
    fn release_recorded(&self, node: Arc<Node>) {
        // The kernel has looked up the node again, and its next forget releases the node. The node
        // of a removed file does not go into `unrecorded`; its forget may have released it already.
        if self.table.is_held(node.id) || node.is_removed.load(Ordering::Acquire) {
            return self.table.drop_node(node);
        }
        if let Some(node) = self.keep_unrecorded(node) {
            self.drop_orphan(&node);
            self.measure_if_open(&node);
            self.table.drop_node(node);
        }
    }

    /// Syncs the batch, and logs an error.
    fn finish_batch_logged(&self) {
        if let Err(errno) = self.finish_batch() {
            self.host_failed(b"", "cannot sync the files that were copied up", errno);
        }
    }

    /// Copies some blocks into a partial file that programs read and write often, so that the
    /// kernel can use it itself ([`super::backings`]) after the next flush. Returns whether there
    /// was such a file.
    pub(super) fn complete_some(&self) -> bool {
        if !self.passes_whole_files() {
            return false;
        }
        for (partial, node) in self.open_partials.all() {
            let is_removed = |node: Arc<Node>| node.is_removed.load(Ordering::Acquire);
            let Some(blocks) = partial.worth_completing() else {
                continue;
            };
            let room = self.statistics().map_or(0, |figures| figures.available);
            if node.upgrade().is_none_or(is_removed) || room / SPARE < blocks {
                continue;
            }
            // A read of the file meets an error again.
            if partial.complete_some(BLOCKS_AT_ONCE).is_err() {
                partial.is_not_worth_completing();
            }
            return true;
        }
        false
    }

    /// Promotes the partial file of a node to a plain file, if it needs no bytes of the image any
    /// more.
    pub(super) fn promote_if_complete(&self, node: &Arc<Node>) {
        node.is_queued.store(false, Ordering::Release);
        let mut state = node.write_state();
        let Content::Partial(partial) = &state.content else {
            return;
        };
        // No lookup can find the file again. Its space is released when the partial file is closed.
        if node.is_removed.load(Ordering::Acquire) {
            return;
        }
        let partial = Arc::clone(partial);
        match self.promote(node, &state, &partial) {
            Ok(true) => {}
            Ok(false) => return,
            // The file stays a partial file, with the same content.
            Err(errno) => {
                self.request_failed(node.id, "be made a plain file of the upper", errno);
                return;
            }
        }
        set_plain(&mut state);
        drop(state);
        self.open_partials.remove(partial.id());
    }

    /// Makes a plain file of a partial file, if it is complete. Returns whether it is plain now.
    /// The caller holds the lock of the node's state.
    fn promote(&self, node: &Node, state: &NodeState, partial: &Partial) -> Result<bool, Errno> {
        if !partial.is_complete() {
            return Ok(false);
        }
        let failed = |error| self.content_failed(node, error);
        partial.settle().map_err(failed)?;
        let promote = || partial.promote().map_err(failed);
        let upper = state.upper.as_ref();
        let Some((upper, file)) = upper.and_then(|upper| Some((upper, upper.file.as_ref()?)))
        else {
            return promote();
        };
        upper.take_hidden_change(partial);
        upper.hiding_change(file, promote)
    }

    /// Flushes all open partial files, also after an error. Returns the first error.
    pub(super) fn flush_partials(&self, how: Durability) -> Result<(), Errno> {
        let mut result = Ok(());
        for (partial, node) in self.open_partials.all() {
            if let Err(error) = partial.flush(how) {
                let errno = match node.upgrade() {
                    Some(node) => self.content_failed(&node, error),
                    None => error.errno(),
                };
                result = result.and(Err(errno));
            }
        }
        result
    }

    /// Records for each open partial file how much of it is durable.
    pub(super) fn confirm_partials(&self) {
        for (partial, node) in self.open_partials.all() {
            // A failure loses no data, but a later open may not detect a loss.
            if let Err(error) = partial.confirm()
                && let Some(node) = node.upgrade()
            {
                self.content_failed(&node, error);
            }
        }
    }
}

/// The main function of the background thread.
fn run(background: &Background, union: &Weak<UnionFs>) {
    let mut next = Instant::now() + PERIOD;
    let mut wake = next;
    // The thread holds no strong reference to the union while it waits. The drop of the union stops
    // the thread.
    while let Some((nodes, sync_batch)) = background.wait(wake) {
        let Some(union) = union.upgrade() else {
            return;
        };
        let _working = background.working.lock();
        for node in nodes {
            union.promote_if_complete(&node);
            union.table.drop_node(node);
        }
        if sync_batch {
            union.finish_batch_logged();
        }
        if Instant::now() >= next {
            union.run_periodic();
            next = Instant::now() + PERIOD;
        }
        // The processor and the disk are free for others for at least half of the time.
        let begun = Instant::now();
        let is_again = union.complete_some();
        wake = if is_again { next.min(Instant::now() + begun.elapsed()) } else { next };
    }
}

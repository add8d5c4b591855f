//! The state that the sketches of an instance share: the account, the directory of maps, the
//! background threads (fillers), and counters.

use bcow::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use bcow::sync::thread::{self, JoinHandle};
use bcow::sync::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::ops::Range;
use std::sync::{Arc, OnceLock, PoisonError, Weak};
use std::time::Instant;

use super::host::MapStore;
use super::locks::lock;
use super::{Sketch, SketchError, SketchOptions};
use crate::account::Account;
use crate::ledger::Ledger;

/// The number of blocks that a filler completes in one sketch before it goes on to the next sketch.
const BLOCKS_PER_TURN: usize = 256;

/// Counters for the statistics.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) open: AtomicU64,
    pub(super) lower_bytes: AtomicU64,
    pub(super) present: AtomicU64,
    pub(super) fills: [AtomicU64; 4],
    pub(super) promotions: AtomicU64,
    pub(super) flushes: AtomicU64,
    pub(super) maps_compacted: AtomicU64,
}

/// The actor that completed a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Completer {
    Background,
    Reader,
    Flush,
    Writer,
}

pub(super) struct Shared {
    me: Weak<Shared>,
    /// The fillers. They start when the first block needs them.
    threads: Mutex<Vec<JoinHandle<()>>>,
    started: AtomicBool,
    pub(super) account: Arc<Account>,
    pub(super) store: Arc<dyn MapStore>,
    pub(super) options: SketchOptions,
    pub(super) counters: Counters,
    /// The number of blocks in transit, of all sketches.
    in_transit: AtomicU64,
    queue: Mutex<Queue>,
    queued: Condvar,
    /// Open sketches by number. Reads and writes do not take this lock.
    open: Mutex<HashMap<u64, Weak<Sketch>>>,
    numbers: RandomState,
    next_number: AtomicU64,
    /// Records changes for a process that takes over the mount.
    pub(super) ledger: OnceLock<Arc<Ledger>>,
}

#[derive(Default)]
struct Queue {
    /// Sketches with blocks in transit, and the time at which their first block is due.
    sketches: VecDeque<(Weak<Sketch>, Instant)>,
    ended: bool,
}

impl Shared {
    pub(super) fn new(
        store: Arc<dyn MapStore>,
        account: Arc<Account>,
        options: SketchOptions,
    ) -> Arc<Self> {
        Arc::new_cyclic(|me| Shared {
            me: Weak::clone(me),
            threads: Mutex::default(),
            started: AtomicBool::new(false),
            account,
            store,
            options,
            counters: Counters::default(),
            in_transit: AtomicU64::new(0),
            queue: Mutex::default(),
            queued: Condvar::new(),
            open: Mutex::default(),
            numbers: RandomState::new(),
            next_number: AtomicU64::new(0),
            ledger: OnceLock::new(),
        })
    }

    /// Calls `note`, which notes written bytes of a sketch where the next flush finds them.
    /// Records the bytes in the ledger before that, because from then on other writes to the same
    /// blocks need no record; and once more if a flush of all sketches has begun since, because
    /// that flush may have missed the bytes.
    pub(super) fn written<T>(&self, id: u64, bytes: Range<u64>, note: impl FnOnce() -> T) -> T {
        let Some(ledger) = self.ledger.get() else {
            return note();
        };
        let area = ledger.area();
        ledger.written(id, bytes.clone());
        let noted = note();
        if ledger.area() != area {
            ledger.written(id, bytes);
        }
        noted
    }

    /// Starts the fillers. If no thread can be started, reads and flushes complete the blocks.
    fn start(&self) {
        if self.started.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut threads = Vec::new();
        for _ in 0..self.options.fillers {
            if let Some(shared) = self.me.upgrade() {
                let builder = thread::Builder::new().name("bcow-fill".into());
                threads.extend(builder.spawn(move || shared.fill_forever()));
            }
        }
        lock(&self.threads).extend(threads);
    }

    /// A new number for a sketch. It is random, because other mounts may have created sketches in
    /// this upper.
    pub(super) fn new_id(&self) -> u64 {
        let next = self.next_number.fetch_add(1, Ordering::Relaxed);
        self.numbers
            .hash_one((next, std::time::SystemTime::now(), std::process::id()))
    }

    pub(super) fn in_transit(&self) -> u64 {
        self.in_transit.load(Ordering::Relaxed)
    }

    pub(super) fn transit_began(&self) {
        self.in_transit.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn transit_ended(&self, blocks: u64) {
        self.in_transit.fetch_sub(blocks, Ordering::Relaxed);
    }

    /// Whether more blocks are in transit than the limit. In this case a partial write completes
    /// its own block.
    pub(super) fn is_behind(&self) -> bool {
        self.in_transit() > self.options.most_in_transit
    }

    pub(super) fn filled(&self, by: Completer) {
        self.counters.fills[by as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Queues a sketch with blocks in transit for the fillers.
    pub(super) fn fill_later(&self, sketch: Weak<Sketch>) {
        if self.options.fillers == 0 {
            return;
        }
        self.start();
        let due = Instant::now() + self.options.fill_delay;
        lock(&self.queue).sketches.push_back((sketch, due));
        self.queued.notify_one();
    }

    /// The loop of a filler: completes blocks until the queue is ended.
    pub(super) fn fill_forever(&self) {
        let mut queue = lock(&self.queue);
        while !queue.ended {
            let Some((sketch, due)) = queue.sketches.pop_front() else {
                queue = self
                    .queued
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let wait = due.saturating_duration_since(Instant::now());
            if !wait.is_zero() && !self.is_behind() {
                queue.sketches.push_front((sketch, due));
                queue = self
                    .queued
                    .wait_timeout(queue, wait)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
                continue;
            }
            drop(queue);
            let again = sketch
                .upgrade()
                .and_then(|sketch| sketch.fill_due(BLOCKS_PER_TURN));
            queue = lock(&self.queue);
            if let Some(due) = again {
                queue.sketches.push_back((sketch, due));
            }
        }
    }

    /// Ends the fillers and waits for them.
    pub(super) fn end(&self) {
        let mut queue = lock(&self.queue);
        queue.ended = true;
        queue.sketches.clear();
        drop(queue);
        self.queued.notify_all();
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            // The panic hook has already reported a panic of the thread.
            let _ = thread.join();
        }
    }

    /// The open sketch with this number.
    pub(super) fn find(&self, id: u64) -> Option<Arc<Sketch>> {
        lock(&self.open).get(&id)?.upgrade()
    }

    /// Registers a sketch, and returns it. If a sketch with this number is open, returns that one.
    pub(super) fn register(&self, sketch: Arc<Sketch>) -> Arc<Sketch> {
        let mut open = lock(&self.open);
        if let Some(there) = open.get(&sketch.id()).and_then(Weak::upgrade) {
            return there;
        }
        open.insert(sketch.id(), Arc::downgrade(&sketch));
        sketch
    }

    /// Removes the entry of a closed sketch, unless the sketch was opened again.
    pub(super) fn unregister(&self, id: u64) {
        let mut open = lock(&self.open);
        if open.get(&id).is_some_and(|kept| kept.strong_count() == 0) {
            open.remove(&id);
        }
    }

    /// Logs an error of work that no request waits for.
    pub(super) fn log(&self, problem: &str, error: &SketchError) {
        tracing::warn!("{problem}: {error}");
    }
}

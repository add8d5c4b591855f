//! What the sketches of an instance share: the account, the maps' directory, the threads in the background, figures.

use bcow::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use bcow::sync::thread::{self, JoinHandle};
use bcow::sync::{Condvar, Mutex};
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Instant;

use bcow::BlockCache;

use super::locks::lock;
use super::{MapStore, Sketch, SketchError, SketchOptions};
use crate::account::Account;

/// Blocks that a filler completes of one sketch before it looks after another.
const BLOCKS_PER_TURN: usize = 256;

/// What the instance asks of a sketch beyond what [`Sketch`] offers to all.
pub(super) trait Kept: Sketch {
    /// Completes up to so many blocks in transit that are due. Says when to come again, if there is a reason to.
    fn fill_some(&self, most: usize) -> Option<Instant>;
}

/// Numbers, for people.
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

/// Who completed a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    Background,
    Reader,
    Flush,
    Writer,
}

pub(super) struct Shared {
    me: Weak<Shared>,
    /// The background, once there is something to do.
    threads: Mutex<Vec<JoinHandle<()>>>,
    started: AtomicBool,
    pub(super) account: Arc<Account>,
    pub(super) store: Arc<dyn MapStore>,
    pub(super) options: SketchOptions,
    /// Decoded blocks of packed sketches.
    pub(super) cache: BlockCache,
    pub(super) counters: Counters,
    /// Blocks in transit, of all sketches.
    in_transit: AtomicU64,
    queue: Mutex<Queue>,
    queued: Condvar,
    /// Sketches by number. Not used while they are read and written.
    open: Mutex<HashMap<u64, Weak<dyn Kept>>>,
    numbers: RandomState,
    next_number: AtomicU64,
}

#[derive(Default)]
struct Queue {
    /// Sketches with blocks in transit, and from when on something is due.
    sketches: VecDeque<(Weak<dyn Kept>, Instant)>,
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
            cache: BlockCache::new(options.cache_bytes),
            options,
            counters: Counters::default(),
            in_transit: AtomicU64::new(0),
            queue: Mutex::default(),
            queued: Condvar::new(),
            open: Mutex::default(),
            numbers: RandomState::new(),
            next_number: AtomicU64::new(0),
        })
    }

    /// Starts the threads in the background. Where there can be none, reads and flushes complete what they meet.
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

    /// A number that no sketch has: random, as others may have been made by other mounts.
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

    /// Whether so much is in transit that who writes a block in part completes it.
    pub(super) fn is_behind(&self) -> bool {
        self.in_transit() > self.options.most_in_transit
    }

    pub(super) fn filled(&self, by: By) {
        self.counters.fills[by as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Leaves a sketch with blocks in transit to the background.
    pub(super) fn fill_later(&self, sketch: Weak<dyn Kept>) {
        if self.options.fillers == 0 {
            return;
        }
        self.start();
        let due = Instant::now() + self.options.fill_delay;
        lock(&self.queue).sketches.push_back((sketch, due));
        self.queued.notify_one();
    }

    /// Completes blocks until the queue is ended.
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
                .and_then(|sketch| sketch.fill_some(BLOCKS_PER_TURN));
            queue = lock(&self.queue);
            if let Some(due) = again {
                queue.sketches.push_back((sketch, due));
            }
        }
    }

    /// Makes the threads in the background end, and waits for that.
    pub(super) fn end(&self) {
        let mut queue = lock(&self.queue);
        queue.ended = true;
        queue.sketches.clear();
        drop(queue);
        self.queued.notify_all();
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            // A panic in there is a bug that has been shown already.
            let _ = thread.join();
        }
    }

    /// The sketch of this number, if it is open.
    pub(super) fn find(&self, id: u64) -> Option<Arc<dyn Kept>> {
        lock(&self.open).get(&id)?.upgrade()
    }

    /// Makes a sketch known, unless one of its number is: then gives that one.
    pub(super) fn enter(&self, sketch: Arc<dyn Kept>) -> Arc<dyn Kept> {
        let mut open = lock(&self.open);
        if let Some(there) = open.get(&sketch.id()).and_then(Weak::upgrade) {
            return there;
        }
        open.insert(sketch.id(), Arc::downgrade(&sketch));
        sketch
    }

    /// The sketch of this number is gone, if nobody opened it again since.
    pub(super) fn leave(&self, id: u64) {
        let mut open = lock(&self.open);
        if open.get(&id).is_some_and(|kept| kept.strong_count() == 0) {
            open.remove(&id);
        }
    }

    /// Logs what nobody waits for.
    pub(super) fn log(&self, what: &str, error: &SketchError) {
        tracing::warn!("{what}: {error}");
    }
}

//! The state that the partial files of an instance share: the account, the directory of maps, the
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
use super::reserve::Reserve;
use super::{Partial, PartialError, PartialOptions};
use crate::account::Account;
use crate::ledger::Ledger;

/// The number of blocks that a filler completes in one partial file before it goes on to the next
/// partial file.
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
    pub(super) reserve: Reserve,
    pub(super) options: PartialOptions,
    pub(super) counters: Counters,
    /// The number of incomplete blocks, of all partial files.
    incomplete: AtomicU64,
    queue: Mutex<Queue>,
    queued: Condvar,
    /// Open partial files by number. Reads and writes do not take this lock.
    open: Mutex<HashMap<u64, Weak<Partial>>>,
    numbers: RandomState,
    next_number: AtomicU64,
    /// Records changes for a process that takes over the mount.
    pub(super) ledger: OnceLock<Arc<Ledger>>,
}

#[derive(Default)]
struct Queue {
    /// Partial files with incomplete blocks, and the time at which their first block is due.
    partials: VecDeque<(Weak<Partial>, Instant)>,
    ended: bool,
}

impl Shared {
    pub(super) fn new(
        store: Arc<dyn MapStore>,
        account: Arc<Account>,
        options: PartialOptions,
    ) -> Arc<Self> {
        Arc::new_cyclic(|me| Shared {
            me: Weak::clone(me),
            threads: Mutex::default(),
            started: AtomicBool::new(false),
            account,
            reserve: Reserve::new(Arc::clone(&store)),
            store,
            options,
            counters: Counters::default(),
            incomplete: AtomicU64::new(0),
            queue: Mutex::default(),
            queued: Condvar::new(),
            open: Mutex::default(),
            numbers: RandomState::new(),
            next_number: AtomicU64::new(0),
            ledger: OnceLock::new(),
        })
    }

    /// Calls `note`, which notes written bytes of a partial file where the next flush finds them.
    /// Records the bytes in the ledger before that, because from then on other writes to the same
    /// blocks need no record; and once more if a flush of all partial files has begun since,
    /// because that flush may have missed the bytes.
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

    /// A new number for a partial file. It is random, because other mounts may have created partial
    /// files in this upper.
    pub(super) fn new_id(&self) -> u64 {
        let next = self.next_number.fetch_add(1, Ordering::Relaxed);
        self.numbers
            .hash_one((next, std::time::SystemTime::now(), std::process::id()))
    }

    pub(super) fn incomplete(&self) -> u64 {
        self.incomplete.load(Ordering::Relaxed)
    }

    pub(super) fn incomplete_began(&self) {
        self.incomplete.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn completion_ended(&self, blocks: u64) {
        self.incomplete.fetch_sub(blocks, Ordering::Relaxed);
    }

    /// Whether more blocks are incomplete than the limit. In this case a partial write completes
    /// its own block.
    pub(super) fn is_behind(&self) -> bool {
        self.incomplete() > self.options.most_incomplete
    }

    pub(super) fn filled(&self, by: Completer) {
        self.counters.fills[by as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Queues a partial file with incomplete blocks for the fillers.
    pub(super) fn fill_later(&self, partial: Weak<Partial>) {
        if self.options.fillers == 0 {
            return;
        }
        self.start();
        let due = Instant::now() + self.options.fill_delay;
        lock(&self.queue).partials.push_back((partial, due));
        self.queued.notify_one();
    }

    /// The loop of a filler: completes blocks until the queue is ended.
    pub(super) fn fill_forever(&self) {
        let mut queue = lock(&self.queue);
        while !queue.ended {
            let Some((partial, due)) = queue.partials.pop_front() else {
                queue = self
                    .queued
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let wait = due.saturating_duration_since(Instant::now());
            if !wait.is_zero() && !self.is_behind() {
                queue.partials.push_front((partial, due));
                queue = self
                    .queued
                    .wait_timeout(queue, wait)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
                continue;
            }
            drop(queue);
            let again = partial
                .upgrade()
                .and_then(|partial| partial.fill_due(BLOCKS_PER_TURN));
            queue = lock(&self.queue);
            if let Some(due) = again {
                queue.partials.push_back((partial, due));
            }
        }
    }

    /// Ends the fillers and waits for them.
    pub(super) fn end(&self) {
        let mut queue = lock(&self.queue);
        queue.ended = true;
        queue.partials.clear();
        drop(queue);
        self.queued.notify_all();
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            // The panic hook has already reported a panic of the thread.
            let _ = thread.join();
        }
    }

    /// The open partial file with this number.
    pub(super) fn find(&self, id: u64) -> Option<Arc<Partial>> {
        lock(&self.open).get(&id)?.upgrade()
    }

    /// Registers a partial file, and returns it. If a partial file with this number is open,
    /// returns that one.
    pub(super) fn register(&self, partial: Arc<Partial>) -> Arc<Partial> {
        let mut open = lock(&self.open);
        if let Some(there) = open.get(&partial.id()).and_then(Weak::upgrade) {
            return there;
        }
        open.insert(partial.id(), Arc::downgrade(&partial));
        partial
    }

    /// Removes the entry of a closed partial file, unless the partial file was opened again.
    pub(super) fn unregister(&self, id: u64) {
        let mut open = lock(&self.open);
        if open.get(&id).is_some_and(|kept| kept.strong_count() == 0) {
            open.remove(&id);
        }
    }

    /// Logs an error of work that no request waits for.
    pub(super) fn log(&self, problem: &str, error: &PartialError) {
        tracing::warn!("{problem}: {error}");
    }
}

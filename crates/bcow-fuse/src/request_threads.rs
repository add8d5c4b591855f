//! The threads that wait for requests.
//!
//! The kernel gives a request to the thread that has waited longest. So if several threads wait,
//! the requests of one program go to all of them in turn, and most wake a thread on another CPU
//! than the program's. If only one thread waits, it stays on the CPU of the program, and each
//! request costs a fraction of that time (docs/benchmarks.md).
//!
//! So only the threads that are needed wait in the kernel; the others are *parked*: they wait here.
//! One parked thread is the *watcher*. At fixed intervals, it looks whether a thread waits in the
//! kernel.
//!
//! - If no thread waits, and no request has begun since the last look, all active threads are busy
//!   with long requests. Usually they wait for the disk, a lock or another program. The watcher
//!   then stops watching, and waits for requests in the kernel itself. Another parked thread
//!   becomes the watcher.
//! - If requests begin, but most looks find no waiting thread, the CPU time of the threads is the
//!   limit. One more thread takes part then. If few looks find none, one thread less takes part.
//! - While no requests begin, the watcher sleeps.
//!
//! A thread that is parked cannot see the end of the mount. But each thread that waits in the
//! kernel sees it, and ends; its end releases the parked threads. All counts are of *known*
//! threads: those that have received a request.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::buffers;

/// The time between two looks of the watcher. If all active threads are busy, a request waits at
/// most twice as long until a parked thread, if there is one, becomes active. If several requests
/// wait, the parked threads become active one after the other.
const INTERVAL: Duration = Duration::from_millis(2);
/// The number of looks after which the watcher decides about the number of threads.
const LOOKS: u32 = 16;
/// If no thread waited at this number of looks or more, one more thread takes part.
const MANY_BUSY: u32 = 14;
/// If no thread waited at fewer looks than this, one thread less takes part.
const FEW_BUSY: u32 = 8;
/// The number of looks without a request after which the watcher sleeps.
const QUIET_LOOKS: u32 = 10;

/// Counts the threads of one mount that wait for requests, and parks the others.
#[derive(Debug)]
pub(crate) struct RequestThreads {
    /// Known threads that wait for a request in the kernel, or are about to.
    waiting: AtomicUsize,
    /// Known threads that are not parked.
    active: AtomicUsize,
    /// The number of threads that should be active, at least 1.
    wanted: AtomicUsize,
    /// The greatest value of `wanted`.
    most: usize,
    /// The number of requests that have begun.
    begun: AtomicU64,
    /// Whether the watcher sleeps until a request begins.
    watcher_sleeps: AtomicBool,
    /// Whether the mount has ended, so that no thread may be parked.
    ended: AtomicBool,
    /// Held to park and to release threads, and by the watcher when it looks. No other lock is
    /// acquired inside.
    parked: Mutex<Parked>,
    /// Wakes the watcher.
    watcher: Condvar,
    /// Wakes another parked thread.
    others: Condvar,
}

#[derive(Debug, Default)]
struct Parked {
    /// The number of parked threads, the watcher included.
    count: usize,
    /// The number of parked threads that must become active.
    called: usize,
    has_watcher: bool,
    /// The looks since the last decision, and those among them at which no thread waited.
    looks: u32,
    busy: u32,
}

/// A request in progress. The drop, after the reply, may park the thread.
#[must_use]
pub(crate) struct Turn<'a> {
    request_threads: &'a RequestThreads,
    kind: Kind,
}

/// The kind of a request, as far as the number of threads depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The request usually takes less time than the wake-up of another thread.
    Brief,
    /// The request waits for the disk.
    Slow,
    /// A brief operation of a batch. The thread may have others of the batch to execute, so the end
    /// of this one does not park the thread.
    BriefInBatch,
}

/// A known thread. The drop, at the end of the thread, releases the parked threads.
struct Member {
    request_threads: Arc<RequestThreads>,
}

thread_local! {
    static MEMBER: RefCell<Option<Member>> = const { RefCell::new(None) };
}

impl RequestThreads {
    /// For a mount with `most` + 1 threads. Up to `most` of them are active; the other one is the
    /// watcher, which also takes requests if all others are busy with long ones.
    pub(crate) fn new(most: usize) -> Arc<RequestThreads> {
        Arc::new(RequestThreads {
            waiting: AtomicUsize::new(0),
            active: AtomicUsize::new(0),
            wanted: AtomicUsize::new(1),
            most: most.max(1),
            begun: AtomicU64::new(0),
            watcher_sleeps: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            parked: Mutex::default(),
            watcher: Condvar::new(),
            others: Condvar::new(),
        })
    }

    /// For a mount with `threads` threads, at least one, and fuser's settings for them.
    pub(crate) fn with_settings(threads: usize) -> (Arc<RequestThreads>, fuser::Config) {
        let mut config = fuser::Config::default();
        let threads = threads.max(1);
        // One thread more than answer requests: see [`RequestThreads::new`].
        config.n_threads = Some(threads + 1);
        (RequestThreads::new(threads), config)
    }

    /// Begins a request that this thread has received.
    pub(crate) fn begin(self: &Arc<Self>, kind: Kind) -> Turn<'_> {
        let is_known = MEMBER.with_borrow_mut(|member| match member {
            Some(member) if Arc::ptr_eq(&member.request_threads, self) => true,
            member => {
                *member = Some(Member {
                    request_threads: Arc::clone(self),
                });
                false
            }
        });
        let left = if is_known {
            self.waiting.fetch_sub(1, Ordering::SeqCst) - 1
        } else {
            self.active.fetch_add(1, Ordering::SeqCst);
            self.waiting.load(Ordering::SeqCst)
        };
        self.begun.fetch_add(1, Ordering::SeqCst);
        if kind == Kind::Slow && left == 0 {
            self.call_one();
        }
        // The watcher sets `watcher_sleeps` before it reads `begun`; this thread changes `begun`
        // before it reads `watcher_sleeps`. So at least one of them sees the other's change.
        if self.watcher_sleeps.load(Ordering::SeqCst) {
            let _parked = self.parked.lock();
            self.watcher.notify_one();
        }
        Turn {
            request_threads: self,
            kind,
        }
    }

    /// Makes a parked thread active, if there is one.
    fn call_one(&self) {
        let mut parked = self.parked.lock();
        if parked.called >= parked.count {
            return;
        }
        parked.called += 1;
        if parked.count - usize::from(parked.has_watcher) >= parked.called {
            self.others.notify_one();
        } else {
            self.watcher.notify_one();
        }
    }

    /// Ends a request: parks the thread if it is not needed.
    fn end_turn(&self, kind: Kind) {
        let is_surplus = |active: usize| {
            (kind != Kind::BriefInBatch
                && active > self.wanted.load(Ordering::SeqCst)
                && self.waiting.load(Ordering::SeqCst) > 0)
                .then(|| active - 1)
        };
        let left = self
            .active
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, is_surplus);
        if left.is_ok() {
            buffers::without_pages(|| self.park());
            self.active.fetch_add(1, Ordering::SeqCst);
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
    }

    /// Waits until the thread is needed or the mount has ended.
    fn park(&self) {
        let mut parked = self.parked.lock();
        parked.count += 1;
        while !self.ended.load(Ordering::SeqCst) {
            if parked.called > 0 {
                parked.called -= 1;
                break;
            }
            if parked.has_watcher {
                self.others.wait(&mut parked);
                continue;
            }
            parked.has_watcher = true;
            let is_needed = self.watch(&mut parked);
            parked.has_watcher = false;
            if is_needed {
                break;
            }
        }
        parked.count -= 1;
        if parked.count > 0 && !parked.has_watcher {
            // Another parked thread becomes the watcher.
            self.others.notify_one();
        }
    }

    /// Does the watcher's work. Returns `true` if this thread must become active, and `false` if
    /// [`RequestThreads::call_one`] has called a parked thread or the mount has ended.
    fn watch(&self, parked: &mut MutexGuard<'_, Parked>) -> bool {
        let mut seen = self.begun.load(Ordering::SeqCst);
        let mut quiet = 0;
        while parked.called == 0 && !self.ended.load(Ordering::SeqCst) {
            if quiet == QUIET_LOOKS {
                self.sleep(parked, seen);
                quiet = 0;
                seen = self.begun.load(Ordering::SeqCst);
                continue;
            }
            let timeout = self.watcher.wait_for(parked, INTERVAL);
            if !timeout.timed_out() {
                continue;
            }
            let begun = self.begun.load(Ordering::SeqCst);
            let is_busy = self.waiting.load(Ordering::SeqCst) == 0;
            if is_busy && begun == seen {
                // All active threads are busy with long requests. More such requests may follow, so
                // fewer threads are parked from now on.
                let wanted = self.wanted.load(Ordering::SeqCst);
                self.want(wanted * 2);
                return true;
            }
            if begun == seen {
                quiet += 1;
                continue;
            }
            (seen, quiet) = (begun, 0);
            if self.look(parked, is_busy) {
                return true;
            }
        }
        false
    }

    /// Sleeps until a request begins, a parked thread is called, or the mount ends.
    fn sleep(&self, parked: &mut MutexGuard<'_, Parked>, seen: u64) {
        self.watcher_sleeps.store(true, Ordering::SeqCst);
        if self.begun.load(Ordering::SeqCst) == seen {
            self.watcher.wait(parked);
        }
        self.watcher_sleeps.store(false, Ordering::SeqCst);
    }

    /// Counts a look. After [`LOOKS`] of them, changes the number of wanted threads if necessary.
    /// Returns whether the watcher must become active.
    fn look(&self, parked: &mut Parked, is_busy: bool) -> bool {
        parked.looks += 1;
        parked.busy += u32::from(is_busy);
        if parked.looks < LOOKS {
            return false;
        }
        let busy = std::mem::take(&mut parked.busy);
        parked.looks = 0;
        let wanted = self.wanted.load(Ordering::SeqCst);
        if busy < FEW_BUSY {
            self.want(wanted - 1);
        } else if busy >= MANY_BUSY {
            self.want(wanted + 1);
            return self.active.load(Ordering::SeqCst) < self.wanted.load(Ordering::SeqCst);
        }
        false
    }

    /// Sets the number of threads that should be active, within its limits. Only the watcher calls
    /// this, so no other thread changes the number between its load and its store.
    fn want(&self, threads: usize) {
        self.wanted
            .store(threads.clamp(1, self.most), Ordering::SeqCst);
    }

    /// Releases all parked threads, because the mount has ended.
    fn end(&self) {
        let _parked = self.parked.lock();
        self.ended.store(true, Ordering::SeqCst);
        self.watcher.notify_all();
        self.others.notify_all();
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.request_threads.end_turn(self.kind);
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.request_threads.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::thread;

    /// A request. The answering thread reports that it has begun, and then waits for its end.
    struct Request {
        kind: Kind,
        begun: Sender<()>,
        end: Receiver<()>,
    }

    /// The kernel's queue, at which each waiting thread receives requests.
    #[derive(Default)]
    struct Queue {
        requests: Mutex<(Vec<Request>, bool)>,
        changed: Condvar,
    }

    impl Queue {
        fn receive(&self) -> Option<Request> {
            let mut requests = self.requests.lock();
            loop {
                if let Some(request) = requests.0.pop() {
                    return Some(request);
                }
                if requests.1 {
                    return None;
                }
                self.changed.wait(&mut requests);
            }
        }

        /// Queues a request. Returns the channel that reports its begin, and the one that ends it.
        fn send(&self, kind: Kind) -> (Receiver<()>, Sender<()>) {
            let (begun, has_begun) = channel();
            let (ends, end) = channel();
            let request = Request { kind, begun, end };
            self.requests.lock().0.insert(0, request);
            self.changed.notify_one();
            (has_begun, ends)
        }

        fn end(&self) {
            self.requests.lock().1 = true;
            self.changed.notify_all();
        }
    }

    /// Runs a mount with `most` + 1 threads. Returns only when all have ended.
    fn mount(most: usize, test: impl FnOnce(&Queue, &RequestThreads)) {
        let (queue, request_threads) = (Queue::default(), RequestThreads::new(most));
        thread::scope(|scope| {
            for _ in 0..=most {
                scope.spawn(|| {
                    while let Some(request) = queue.receive() {
                        let _turn = request_threads.begin(request.kind);
                        request.begun.send(()).unwrap();
                        // The test ends the request by dropping the sender, which is an error here.
                        let _ = request.end.recv();
                    }
                });
            }
            test(&queue, &request_threads);
            queue.end();
        });
    }

    fn answered(queue: &Queue, kind: Kind) {
        let (begun, end) = queue.send(kind);
        begun.recv().unwrap();
        drop(end);
    }

    #[test]
    fn requests_one_at_a_time_leave_one_thread_waiting() {
        mount(3, |queue, request_threads| {
            // Each thread that is not parked yet may receive some of them.
            while request_threads.parked.lock().count < 3 {
                answered(queue, Kind::Brief);
            }
            assert!(request_threads.active.load(Ordering::SeqCst) <= 1);
        });
    }

    #[test]
    fn waiting_requests_do_not_delay_others() {
        for kind in [Kind::Brief, Kind::Slow] {
            mount(3, |queue, request_threads| {
                while request_threads.parked.lock().count < 3 {
                    answered(queue, Kind::Brief);
                }
                // A request for each thread; no request ends before all have begun.
                let all: Vec<_> = (0..4).map(|_| queue.send(kind)).collect();
                for (begun, _) in &all {
                    begun.recv().unwrap();
                }
                drop(all);
                answered(queue, kind);
            });
        }
    }

    #[test]
    fn request_after_a_pause_finds_a_watcher() {
        mount(1, |queue, request_threads| {
            while request_threads.parked.lock().count < 1 {
                answered(queue, Kind::Brief);
            }
            while !request_threads.watcher_sleeps.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            let first = queue.send(Kind::Brief);
            first.0.recv().unwrap();
            answered(queue, Kind::Brief);
        });
    }

    #[test]
    fn end_of_the_mount_releases_parked_threads() {
        mount(8, |queue, request_threads| {
            while request_threads.parked.lock().count < 8 {
                answered(queue, Kind::Brief);
            }
        });
    }
}

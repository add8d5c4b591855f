//! The process of a pool: its mounts, and the requests of clients.

mod figures;
mod requests;
mod restart;
mod takeover;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use bcow::BlockCache;
use bcow_fuse::kernel::DiskStopper;
use bcow_fuse::session::{Closer, Stopper, Unmounted, Unmounter};
use bcow_fuse::shared::{Keeper, SharedFiles, SharedHandover};
use bcow_fuse::signals::Signals;
use bcow_fuse::{AnySession, MountStats};
use bcow_images::error::CommandError;
use bcow_images::image::Messages;
use bcow_images::running::{self, Published, Service};
use bcow_mounts::mount::fuse::Mounted;
use bcow_mounts::mount::host::{Host, InPool, threads_by_default};
use bcow_mounts::mount::pooled;
use bcow_mounts::{PoolName, failure};
use bcow_union::log::{self, Severity};

use self::requests::Client;
use crate::asked::Asked;
use crate::given::{Given, send_shared};
use crate::link::{Link, Packet, Wait};
use crate::opener::Opener;
use crate::protocol::Message;
use crate::record::MountRecord;

/// Mounts that are stopped or taken over at a time.
const SIDE_BY_SIDE: usize = 8;
/// Limit of the mounts of a pool: each has threads and descriptors.
const MAX_MOUNTS: usize = 1000;
/// How long the threads of unmounted mounts may take to end before the end of the pool is refused.
const LEAVES_WITHIN: Duration = Duration::from_secs(2);
/// Pause after a failed accept, which mostly means too few descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// Timeout for the answers to other clients, when the process ends for a restart.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

pub struct Pool {
    name: PoolName,
    /// Threads that answer the requests of one mount.
    threads: Option<usize>,
    /// The parts of the sandbox that are in force.
    sandbox: Vec<String>,
    /// Start time of the pool in seconds since 1970.
    since: u64,
    /// The processes that the pool had before.
    restarts: u64,
    /// The process that starts this one again.
    supervisor: u32,
    cache: BlockCache,
    /// The files that mounts share; `None` if the next process would not get them.
    files: Option<Arc<SharedFiles>>,
    /// The socket to the supervisor.
    link: Link,
    has_supervisor: AtomicBool,
    clients: AtomicUsize,
    /// Mounts that this process could not take over.
    lost: AtomicU64,
    /// The lock is held to add, to remove and to list mounts; never during a request of a mount,
    /// nor while a mount is made or ends.
    state: Mutex<PoolState>,
    /// Signals that a mount has ended, or that the pool is to end.
    changed: Condvar,
}

#[derive(Default)]
struct PoolState {
    /// By the order in which they were made.
    mounts: BTreeMap<u64, PoolMount>,
    next: u64,
    /// Mounts that are being made.
    in_progress: usize,
    is_ending: bool,
    /// Whether another process takes over.
    is_restarting: bool,
    /// Whether the mounts are being stopped for that. From now on no thread may wait for a mount of
    /// this pool: the mounts do not answer, and the process could not end.
    is_leaving: bool,
    /// Clients that have ended the pool and have no answer yet.
    unanswered: usize,
    /// Clients whose request is being read or was read, and that are still connected.
    answering: usize,
    /// Whether no further request is read, because the process is about to exit.
    reads_no_more: bool,
    /// For `bcow ps`.
    published: Option<Published>,
}

struct PoolMount {
    service: Service,
    /// Its counters refer to the upper, which the end of the mount releases.
    stats: Weak<MountStats>,
    unmounter: Unmounter,
    closer: Option<Closer>,
    /// Stops the mount for another process; `None` without an upper and without a disk.
    stopper: Option<AnyStopper>,
    /// What another process needs to take the mount over; `None` if none can. The supervisor has
    /// it, with descriptors.
    kept: Option<MountRecord>,
}

#[derive(Clone)]
enum AnyStopper {
    Upper(Stopper),
    Disk(DiskStopper),
}

impl Pool {
    /// A pool whose supervisor is at the other end of `link`, with a cache of `memory_bytes`.
    pub fn new(
        name: PoolName,
        memory_bytes: u64,
        threads: Option<usize>,
        given: &Given,
        link: Link,
        sandbox: Vec<String>,
        published: Option<Published>,
    ) -> io::Result<Self> {
        let files = if given.keeps_shared {
            let keeper = FilesKeeper {
                link: link.try_clone()?,
                opener: Opener::default(),
            };
            let threads = threads.unwrap_or_else(|| threads_by_default(READ_THREADS));
            Some(SharedFiles::new(keeper, threads))
        } else {
            None
        };
        Ok(Pool {
            name,
            threads,
            sandbox,
            since: given.since,
            restarts: given.restarts,
            supervisor: given.supervisor,
            cache: BlockCache::common(memory_bytes),
            files,
            link,
            has_supervisor: AtomicBool::new(true),
            clients: AtomicUsize::new(0),
            lost: AtomicU64::new(0),
            state: Mutex::new(PoolState {
                published,
                ..PoolState::default()
            }),
            changed: Condvar::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Releases the cache whenever no mount has received a request for some time.
    pub fn watch_rest(self: &Arc<Self>) {
        let pool = Arc::downgrade(self);
        bcow_fuse::idle::watch_all(move || {
            let pool = pool.upgrade()?;
            let cache = pool.cache.clone();
            Some((pool.requests(), move || cache.release()))
        });
    }

    fn requests(&self) -> u64 {
        let state = self.state();
        let stats = state
            .mounts
            .values()
            .filter_map(|entry| entry.stats.upgrade());
        let requests: u64 = stats.map(|stats| stats.requests()).sum();
        requests + self.files.as_ref().map_or(0, |files| files.reads())
    }

    /// Ends the pool at SIGTERM and SIGINT, and at once at a second signal.
    pub fn unmount_at_signals(self: &Arc<Self>, signals: Signals) -> io::Result<()> {
        let pool = Arc::clone(self);
        let wait = move || {
            pool.end(signals.wait());
            signals.wait();
            pool.end_now();
        };
        start_thread("signals", wait)
    }

    /// Does the same on the signals that the supervisor forwards. They are counted separately: a
    /// service manager sends each signal to both processes.
    pub fn listen_to_supervisor(self: &Arc<Self>) -> io::Result<()> {
        let pool = Arc::clone(self);
        let listen = move || {
            let mut has_signal = false;
            while let Ok(Some((packet, _))) = pool.link.receive(Wait::Yes) {
                match packet {
                    Packet::End { .. } if has_signal => pool.end_now(),
                    Packet::End { signal } => {
                        has_signal = true;
                        pool.end(&signal);
                    }
                    _ => {}
                }
            }
            pool.has_supervisor.store(false, Ordering::Relaxed);
            let name = &pool.name;
            let message = format!(
                "pool {name}: its supervisor has ended; no process can take over its mounts"
            );
            log::log(Severity::Warning, &message);
        };
        start_thread("supervisor", listen)
    }

    /// Ends the process, when the uppers are durable.
    fn end_now(&self) -> ! {
        self.close_uppers(|_| true);
        // The kernel sees that the connections are closed, and fails the requests in flight.
        std::process::exit(1);
    }

    fn close_uppers(&self, is_meant: impl Fn(u64) -> bool) {
        let closers: Vec<Closer> = {
            let state = self.state();
            let mounts = state.mounts.iter();
            let meant = mounts.filter(|(number, _)| is_meant(**number));
            meant
                .filter_map(|(_, entry)| entry.closer.clone())
                .collect()
        };
        for closer in closers {
            if let Err(error) = closer.close() {
                log_failure(&failure(&error));
            }
        }
    }

    /// Reports to the supervisor that the pool takes requests.
    pub fn report_ready(&self) {
        self.notify_supervisor(&Packet::Ready, &[]);
    }

    /// Without a supervisor, this process serves its mounts to their end.
    fn notify_supervisor(&self, packet: &Packet, descriptors: &[BorrowedFd<'_>]) -> bool {
        self.link.send(packet, descriptors).is_ok()
    }

    fn host(&self) -> Host<'static> {
        let pool = InPool {
            name: self.name.to_string(),
            threads: self.threads,
            files: self.files.clone(),
        };
        Host {
            cache: self.cache.clone(),
            signals: None,
            pool: Some(pool),
        }
    }

    /// Unmounts everything because of `reason`; the pool ends with its last mount. Returns the
    /// number of mounts that are in use.
    fn end(&self, reason: &str) -> u64 {
        let mounts: Vec<(Unmounter, String)> = {
            let mut state = self.state();
            if state.is_leaving {
                // The next process ends the pool.
                let signal = reason.to_owned();
                self.notify_supervisor(&Packet::End { signal }, &[]);
                return 0;
            }
            state.is_ending = true;
            self.changed.notify_all();
            let mounts = state.mounts.values();
            let place = |entry: &PoolMount| entry.service.at.join(", ");
            mounts
                .map(|entry| (entry.unmounter.clone(), place(entry)))
                .collect()
        };
        let mut in_use = 0;
        for (unmounter, place) in mounts {
            let unmounted = unmounter.unmount();
            in_use += u64::from(unmounted != Unmounted::Gone);
            if let Some(warning) = unmounted.warning(reason, Path::new(&place)) {
                log::log(Severity::Warning, &warning);
            }
        }
        in_use
    }

    /// Waits until the pool is to end, and its last mount has ended.
    pub fn wait_for_end(&self) {
        let mut state = self.state();
        while !state.has_ended() {
            state = self.wait(state);
        }
    }

    /// Before the process exits for a restart: waits until all other clients whose request was read
    /// have their answer. They get it without a mount, so at once. The others see that their
    /// request was not read, and repeat it.
    fn wait_for_answers(&self) {
        let mut state = self.state();
        state.reads_no_more = true;
        let others = |state: &mut PoolState| state.answering > 1;
        drop(
            self.changed
                .wait_timeout_while(state, ANSWERS_WITHIN, others),
        );
    }

    fn wait<'a>(&self, state: MutexGuard<'a, PoolState>) -> MutexGuard<'a, PoolState> {
        self.changed
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes requests from now on.
    pub fn accept(self: &Arc<Self>, listener: UnixListener) -> io::Result<()> {
        let pool = Arc::clone(self);
        let accept = move || {
            loop {
                let Ok((connection, _)) = listener.accept() else {
                    thread::sleep(PAUSE);
                    continue;
                };
                let client = Client::new(&pool);
                // If no thread can be started, the connection closes.
                let _ = start_thread("request", move || client.serve(&connection));
            }
        };
        start_thread("accept", accept)
    }

    fn has_supervisor(&self) -> bool {
        self.has_supervisor.load(Ordering::Relaxed)
    }

    /// Mounts, and serves the mount in a thread of its own. Returns its number.
    fn mount(
        self: &Arc<Self>,
        mount: MountInProgress<'_>,
        asked: Asked,
        ui: &dyn Messages,
    ) -> Result<u64, CommandError> {
        let args = asked.args()?;
        let mounted = pooled::mount(&args, &self.host(), &self.devices(), ui)?;
        let number = {
            let mut state = self.state();
            state.next += 1;
            state.next - 1
        };
        let kept = self.keep(number, &mounted, asked);
        mount
            .arrive(number, mounted, kept)
            .inspect_err(|_| self.release(number))?;
        if self.state().is_ending {
            return Err(
                CommandError::new("cannot serve the mount").caused_by_text("the pool is ending")
            );
        }
        Ok(number)
    }

    /// The device numbers of the mounts.
    fn devices(&self) -> Vec<String> {
        let state = self.state();
        let services = state.mounts.values().map(|entry| &entry.service);
        services
            .filter_map(|service| service.device.clone())
            .collect()
    }

    /// Serves a mount to its end.
    fn serve(&self, number: u64, session: AnySession) {
        if let Err(error) = session.serve(|| self.release(number)) {
            log_failure(&failure(&error));
        }
        {
            let mut state = self.state();
            state.mounts.remove(&number);
            state.publish();
        }
        self.changed.notify_all();
    }

    /// Unmounts a mount that no user knows of.
    fn unmount(self: &Arc<Self>, number: u64) {
        // A restart waits for this: see `PoolState::is_leaving`.
        let Ok(Some(_unmounting)) = MountInProgress::new(self) else {
            return;
        };
        let unmounter = {
            let state = self.state();
            state
                .mounts
                .get(&number)
                .map(|entry| entry.unmounter.clone())
        };
        if let Some(unmounter) = unmounter {
            unmounter.unmount();
        }
    }

    /// The state, when the mounts that the kernel has ended are no longer listed: `bcow umount`
    /// returns before the thread of the mount has ended. Waits for a limited time only, because a
    /// mount can continue in another mount namespace.
    fn without_unmounted(&self) -> MutexGuard<'_, PoolState> {
        let mut state = self.state();
        let mounted = bcow_fuse::mounted_images().unwrap_or_default();
        let unmounted: Vec<u64> = (state.mounts.iter())
            .filter(|(_, mount)| {
                let device = mount.service.device.as_ref();
                !mounted.iter().any(|one| Some(&one.device) == device)
            })
            .map(|(number, _)| *number)
            .collect();
        let deadline = Instant::now() + LEAVES_WITHIN;
        while unmounted.iter().any(|one| state.mounts.contains_key(one)) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state
    }

    /// Ends the pool. Returns the number of mounts that are in use.
    fn stop(&self, force: bool) -> Result<u64, CommandError> {
        {
            let mut state = if force { self.state() } else { self.without_unmounted() };
            if state.is_restarting {
                let name = &self.name;
                return Err(CommandError::new(format!("cannot stop the pool {name}"))
                    .caused_by_text("it is restarting")
                    .passes_if(true));
            }
            let mounts = state.mounts.len() + state.in_progress;
            if mounts > 0 && !force {
                let name = &self.name;
                return Err(CommandError::new(format!(
                    "the pool {name} has {}",
                    bcow_images::size::plural(mounts as u64, "mount")
                ))
                .hint(format!(
                    "`bcow umount` unmounts them one by one, `bcow pool stop --force {name}` all \
                     at once"
                )));
            }
            // Before the lock is released: another client may be about to mount.
            state.is_ending = true;
            state.unanswered += 1;
        }
        Ok(self.end("bcow pool stop"))
    }
}

/// Keeps the files that mounts share for the next process.
struct FilesKeeper {
    link: Link,
    opener: Opener,
}

/// With the least, one slow read does not delay the others.
const READ_THREADS: usize = 4;

impl Keeper for FilesKeeper {
    fn keep(&self, handover: &SharedHandover) -> io::Result<()> {
        match send_shared(&self.link, handover) {
            // Without a supervisor there is no next process.
            Err(error) if is_gone(&error) => Ok(()),
            sent => sent,
        }
    }

    fn open(&self, hidden: BorrowedFd<'_>, name: &str) -> io::Result<OwnedFd> {
        self.opener.open(hidden, name)
    }
}

/// Whether the process at the other end of a link has ended.
fn is_gone(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected};
    matches!(error.kind(), BrokenPipe | ConnectionReset | NotConnected)
}

impl PoolState {
    fn has_ended(&self) -> bool {
        self.is_ending && self.mounts.is_empty() && self.in_progress == 0 && self.unanswered == 0
    }

    /// Publishes the list of mounts for `bcow ps`.
    fn publish(&mut self) {
        let services = self.mounts.values().map(|entry| entry.service.clone());
        let services = services.collect();
        match &mut self.published {
            // If that fails, the old list stays.
            Some(published) => drop(published.replace(services)),
            None => self.published = running::publish(services),
        }
    }
}

/// A mount that is being made. Counts until it is dropped.
struct MountInProgress<'a>(&'a Arc<Pool>);

impl<'a> MountInProgress<'a> {
    /// `None` while the pool is restarting.
    fn new(pool: &'a Arc<Pool>) -> Result<Option<Self>, CommandError> {
        let mut state = pool.state();
        let cannot = || CommandError::new(format!("cannot use the pool {}", pool.name));
        if state.is_ending {
            return Err(cannot().caused_by_text("it is ending"));
        }
        if state.is_restarting {
            return Ok(None);
        }
        if state.mounts.len() + state.in_progress >= MAX_MOUNTS {
            return Err(cannot().caused_by_text(format!("it has {MAX_MOUNTS} mounts")));
        }
        state.in_progress += 1;
        Ok(Some(MountInProgress(pool)))
    }

    /// For a mount that the process before has served. A pool that is ending takes it over too, to
    /// end it as the others.
    fn of_taken_over(pool: &'a Arc<Pool>) -> Self {
        pool.state().in_progress += 1;
        MountInProgress(pool)
    }

    /// Adds the mount to those of the pool, and serves it. If the pool is ending, the mount ends
    /// too.
    fn arrive(
        self,
        number: u64,
        mut mounted: Mounted,
        kept: Option<MountRecord>,
    ) -> Result<(), CommandError> {
        let pool = Arc::downgrade(self.0);
        mounted.take_requests(move |files| {
            if let Some(pool) = pool.upgrade() {
                pool.keep_disk(number, files);
            }
        });
        let Mounted {
            session,
            stats,
            mut service,
            fetching,
            ..
        } = mounted;
        stats.set_sandbox(self.0.sandbox.clone());
        service.sandbox.clone_from(&self.0.sandbox);
        let name = "cannot serve the mount";
        let unmounter = session.unmounter();
        // Before the lock: this can wait for a snapshot.
        let stopper = stopper(&session);
        let is_ending = {
            let mut state = self.0.state();
            state.mounts.insert(
                number,
                PoolMount {
                    service,
                    stats: Arc::downgrade(&stats),
                    unmounter: session.unmounter(),
                    closer: session.closer(),
                    stopper,
                    kept,
                },
            );
            state.publish();
            state.is_ending
        };
        // From now on only the session refers to the upper.
        drop(stats);
        let pool = Arc::clone(self.0);
        let serve = move || {
            let _fetching = fetching.and_then(|ready| ready.start());
            pool.serve(number, session);
        };
        start_thread("mount", serve).map_err(|error| {
            // The session was dropped, which has unmounted.
            let mut state = self.0.state();
            state.mounts.remove(&number);
            state.publish();
            CommandError::new(name).caused_by(&error)
        })?;
        if is_ending {
            unmounter.unmount();
        }
        Ok(())
    }
}

fn stopper(session: &AnySession) -> Option<AnyStopper> {
    match session {
        AnySession::Fuse(session) => session.stopper().map(AnyStopper::Upper),
        AnySession::Kernel(session) => session.stopper().map(AnyStopper::Disk),
    }
}

impl Drop for MountInProgress<'_> {
    fn drop(&mut self) {
        self.0.state().in_progress -= 1;
        self.0.changed.notify_all();
    }
}

/// Messages for the client, which shows them.
#[derive(Default)]
pub struct Collected(RefCell<Vec<Message>>);

impl Messages for Collected {
    fn status(&self, text: &dyn Display) {
        self.0.borrow_mut().push(Message::Status(text.to_string()));
    }

    fn warning(&self, text: &dyn Display) {
        self.0.borrow_mut().push(Message::Warning(text.to_string()));
    }

    fn hint(&self, text: &str) {
        self.0.borrow_mut().push(Message::Hint(text.to_owned()));
    }
}

pub(crate) fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = thread::Builder::new().name(name.to_owned());
    thread.spawn(work).map(drop)
}

/// Does `work` for each item, for [`SIDE_BY_SIDE`] at a time.
fn side_by_side<T: Send>(items: impl Iterator<Item = T> + Send, work: impl Fn(T) + Sync) {
    let items = Mutex::new(items);
    let work_on = || {
        let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
        while let Some(item) = next() {
            work(item);
        }
    };
    thread::scope(|scope| {
        for _ in 1..SIDE_BY_SIDE {
            // If no thread can be started, the others do the work.
            let _ = thread::Builder::new().spawn_scoped(scope, work_on);
        }
        work_on();
    });
}

/// No process reads standard error of a pool in the background.
pub fn log_failure(error: &CommandError) {
    log::log(Severity::Error, &error.in_one_line());
}

//! The supervisor of a pool: the parent of the process that serves the mounts.
//!
//! The supervisor has the socket of the pool and the connections of its mounts to the kernel open.
//! So programs and clients wait when the serving process ends, and the next process continues. The
//! supervisor opens no image and answers no request: it does little, so that little can fail.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use bcow_fuse::shared::SharedHandover;
use bcow_fuse::signals::Ground;
use bcow_images::error::{CommandError, Context};
use bcow_images::running;
use bcow_mounts::PoolName;
use bcow_mounts::metrics::Metrics;
use bcow_union::log::{self, Severity};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::given::{Kept, send_shared, take, take_shared};
use crate::link::{self, AGAIN, Link, Packet, Wait};

/// A process that has run for less time than this has ended at once.
const AT_ONCE: Duration = Duration::from_secs(10);
/// The processes in a row that may end at once. After one more the pool ends.
const MAX_IN_A_ROW: u32 = 5;
/// The pause after the first of them; each further pause is twice as long.
const PAUSE: Duration = Duration::from_millis(100);

/// The settings of a supervisor.
pub struct Settings<'a> {
    pub name: PoolName,
    /// The socket of the pool.
    pub listener: &'a UnixListener,
    /// The socket for metrics.
    pub metrics: Option<&'a Metrics>,
    /// The log file: an absolute path.
    pub log_file: Option<PathBuf>,
    /// Whether the supervisor has a terminal.
    pub ground: Ground,
}

/// The supervisor of a pool.
pub struct Supervisor<'a> {
    settings: Settings<'a>,
    signals: SignalFd,
    /// The program from which the pool was started. An upgrade replaces the file.
    installed: Option<PathBuf>,
    since: u64,
    restarts: u64,
    mounts: BTreeMap<u64, Kept>,
    /// The hidden mount of the files that they share.
    shared: Option<SharedHandover>,
    /// The signal that ends the pool. Each further process gets it too: the one before may have
    /// ended without having read it.
    ending: Option<String>,
}

/// A running process of the pool.
struct Process {
    child: Child,
    link: Link,
    /// Whether it takes requests.
    is_ready: bool,
}

/// The program of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Program {
    /// That of the supervisor, even if its file is gone.
    Own,
    /// The file from which the supervisor was started.
    Installed,
}

/// Why a process has ended.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// The pool has ended, with this exit status.
    Pool(u8),
    /// It asked for another process.
    Replaced,
    /// This signal has ended it before it handled signals. Another process has to end the mounts.
    Signalled(Signal),
    Failed(String),
}

impl<'a> Supervisor<'a> {
    /// A supervisor without a process. Blocks the signals that it handles: no other thread may run.
    pub fn new(settings: Settings<'a>) -> io::Result<Self> {
        let signals: SigSet = [
            Signal::SIGTERM,
            Signal::SIGINT,
            Signal::SIGHUP,
            Signal::SIGCHLD,
        ]
        .into_iter()
        .collect();
        signals.thread_block()?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        Ok(Supervisor {
            settings,
            signals: SignalFd::with_flags(&signals, flags)?,
            installed: std::env::current_exe().ok(),
            since: running::now(),
            restarts: 0,
            mounts: BTreeMap::new(),
            shared: None,
            ending: None,
        })
    }

    /// Starts the process of the pool, calls `announce` when it takes requests, and starts it again
    /// when it fails. Returns the exit status of the pool.
    pub fn run(
        mut self,
        announce: impl FnOnce() -> Result<(), CommandError>,
    ) -> Result<u8, CommandError> {
        let name = self.settings.name.to_string();
        let mut announce = Some(announce);
        let mut program = Program::Own;
        let mut in_a_row = 0;
        loop {
            let begun = Instant::now();
            let mut was_ready = false;
            let end = match self.start(program) {
                Err(error) => End::Failed(format!("cannot be started: {error}")),
                Ok(mut process) => {
                    let status = self.watch(&mut process, &mut announce)?;
                    was_ready = process.is_ready;
                    judge(status, was_ready, self.restarts == 0)
                }
            };
            let why = match end {
                End::Pool(0) => return Ok(0),
                End::Pool(code) => {
                    self.unmount_all();
                    return Ok(code);
                }
                End::Replaced => {
                    (program, in_a_row) = (Program::Installed, 0);
                    self.restarts += 1;
                    continue;
                }
                End::Signalled(signal) => {
                    self.ending = Some(signal.as_str().to_owned());
                    format!("was ended by {signal}")
                }
                End::Failed(why) => why,
            };
            let is_at_once = !was_ready || begun.elapsed() < AT_ONCE;
            in_a_row = if is_at_once { in_a_row + 1 } else { 0 };
            if announce.is_some() || in_a_row > MAX_IN_A_ROW {
                self.unmount_all();
                let cause = format!("its process {why}");
                if announce.is_none() {
                    let message = format!("pool {name}: ended: {cause}, as those before it");
                    log::log(Severity::Error, &message);
                }
                return Err(
                    CommandError::new(format!("the pool {name} has ended")).caused_by_text(cause)
                );
            }
            log::log(
                Severity::Error,
                &format!("pool {name}: its process {why}; another one takes over"),
            );
            // A program that was not ready may be the wrong one.
            program = match (was_ready, program) {
                (false, Program::Installed) => Program::Own,
                _ => Program::Installed,
            };
            self.restarts += 1;
            if in_a_row > 0 {
                self.pause(PAUSE * 2_u32.pow(in_a_row - 1))?;
            }
        }
    }

    fn start(&self, program: Program) -> io::Result<Process> {
        let (link, theirs) = Link::pair()?;
        let mut arguments = std::env::args_os();
        let mut command = Command::new(match (program, &self.installed) {
            (Program::Installed, Some(installed)) => installed.clone().into_os_string(),
            _ => OsString::from("/proc/self/exe"),
        });
        if let Some(name) = arguments.next() {
            command.arg0(name);
        }
        command
            .args(arguments)
            .env(link::MARK, "1")
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null());
        let child = command.spawn()?;
        // It has the other end of the link.
        drop(command);
        let mut process = Process {
            child,
            link,
            is_ready: false,
        };
        if let Err(error) = self.give(&process.link) {
            tracing::warn!("cannot send to the process of the pool: {error}");
            // It would wait for the rest for ever. If it has ended, the status says more.
            let _ = process.child.kill();
        }
        Ok(process)
    }

    /// Sends everything that a new process needs.
    fn give(&self, link: &Link) -> io::Result<()> {
        let log_file = self.settings.log_file.as_ref();
        let socket = Packet::Socket {
            since: self.since,
            restarts: self.restarts,
            supervisor: std::process::id(),
            log_file: log_file.map(|path| path.as_os_str().into()),
            keeps_shared: true,
        };
        let metrics = self.settings.metrics.map(Metrics::as_fd);
        let sockets: Vec<_> = [Some(self.settings.listener.as_fd()), metrics]
            .into_iter()
            .flatten()
            .collect();
        link.send(&socket, &sockets)?;
        for (&number, kept) in &self.mounts {
            kept.send(link, number)?;
        }
        if let Some(shared) = &self.shared {
            send_shared(link, shared)?;
        }
        link.send(&Packet::Begin, &[])?;
        if let Some(signal) = &self.ending {
            end(link, signal);
        }
        Ok(())
    }

    /// Takes what the process gives, and passes signals on to it, until it has ended.
    fn watch(
        &mut self,
        process: &mut Process,
        announce: &mut Option<impl FnOnce() -> Result<(), CommandError>>,
    ) -> Result<ExitStatus, CommandError> {
        let cannot = || format!("cannot watch the pool {}", self.settings.name);
        let mut is_open = true;
        loop {
            let ended = process.child.try_wait().context(cannot)?;
            while is_open {
                match process.link.receive(Wait::No) {
                    Ok(Some((Packet::Ready, _))) => {
                        process.is_ready = true;
                        if let Some(announce) = announce.take()
                            && let Err(error) = announce()
                        {
                            // No user knows of the pool.
                            end(&process.link, error.message());
                        }
                    }
                    Ok(Some((Packet::End { signal }, _))) => self.ending = Some(signal),
                    Ok(Some((Packet::Shared { agreed, next_slot }, descriptors))) => {
                        match take_shared(agreed, next_slot, descriptors) {
                            Ok(shared) => self.shared = Some(shared),
                            Err(error) => cannot_hold(&error),
                        }
                    }
                    Ok(Some((packet, descriptors))) => {
                        if let Err(error) = take(&mut self.mounts, packet, descriptors) {
                            cannot_hold(&error);
                        }
                    }
                    Ok(None) => is_open = false,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => {
                        log::log(Severity::Error, &format!("{}: {error}", cannot()));
                        break;
                    }
                }
            }
            if let Some(status) = ended {
                return Ok(status);
            }
            let mut wanted = vec![self.signals.as_fd()];
            if is_open {
                wanted.push(process.link.as_fd());
            }
            wait_for(&wanted, None).context(cannot)?;
            for signal in self.received() {
                end(&process.link, signal.as_str());
                self.ending = Some(signal.as_str().to_owned());
            }
        }
    }

    /// Waits, or until a signal ends the pool.
    fn pause(&mut self, pause: Duration) -> Result<(), CommandError> {
        let deadline = Instant::now() + pause;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            wait_for(&[self.signals.as_fd()], Some(left)).context(|| "cannot wait".to_owned())?;
            if let Some(signal) = self.received().pop_back() {
                self.ending = Some(signal.as_str().to_owned());
                return Ok(());
            }
        }
    }

    /// The signals for the pool that have arrived.
    fn received(&self) -> VecDeque<Signal> {
        let mut received = VecDeque::new();
        while let Ok(Some(info)) = self.signals.read_signal() {
            match Signal::try_from(info.ssi_signo as i32) {
                // The status of the process says more.
                Ok(Signal::SIGCHLD) | Err(_) => {}
                Ok(Signal::SIGHUP) if self.settings.ground == Ground::Background => {}
                Ok(signal) => received.push_back(signal),
            }
        }
        received
    }

    /// Unmounts what no process serves any more. The last mounts first: one may be inside another.
    fn unmount_all(&mut self) {
        while let Some((_, kept)) = self.mounts.pop_last() {
            kept.unmount();
        }
    }
}

fn cannot_hold(error: &io::Error) {
    let message = format!("the supervisor of a pool cannot hold a mount: {error}");
    log::log(Severity::Error, &message);
}

/// Tells the process that a signal for the pool has arrived. If it has ended, its status says more.
fn end(link: &Link, signal: &str) {
    let signal = signal.to_owned();
    let _ = link.send(&Packet::End { signal }, &[]);
}

/// Judges how a process has ended.
fn judge(status: ExitStatus, was_ready: bool, is_first: bool) -> End {
    const SIGNALS: [Signal; 3] = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP];
    let is_end = |signal: i32| SIGNALS.iter().any(|&one| one as i32 == signal);
    match (status.code(), status.signal()) {
        (Some(code), _) if code == i32::from(AGAIN) => End::Replaced,
        (Some(code), _) if code == 0 || was_ready || is_first => {
            End::Pool(u8::try_from(code).unwrap_or(1))
        }
        (Some(code), _) => End::Failed(format!("has failed with exit status {code}")),
        // It did not handle signals yet. The first process has no mounts yet.
        (None, Some(signal)) if is_first && is_end(signal) => {
            End::Pool(u8::try_from(128 + signal).unwrap_or(1))
        }
        (None, Some(signal)) if is_end(signal) => match Signal::try_from(signal) {
            Ok(signal) => End::Signalled(signal),
            Err(_) => End::Failed(format!("was ended by signal {signal}")),
        },
        (None, signal) => End::Failed(format!("was ended by signal {}", signal.unwrap_or(0))),
    }
}

fn wait_for(descriptors: &[BorrowedFd<'_>], limit: Option<Duration>) -> io::Result<()> {
    let mut wanted: Vec<PollFd<'_>> = descriptors
        .iter()
        .map(|descriptor| PollFd::from_borrowed_fd(*descriptor, PollFlags::IN))
        .collect();
    let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
    match poll(&mut wanted, limit.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_replaced_if_it_failed_or_asked_for_it() {
        const KILLED: i32 = 9;
        const TERMINATED: i32 = 15;
        let exited = |code: i32| ExitStatus::from_raw(code << 8);
        let killed = ExitStatus::from_raw(KILLED);
        for (status, was_ready, is_first, expected) in [
            (exited(0), true, true, Some(End::Pool(0))),
            (exited(1), true, false, Some(End::Pool(1))),
            // The command line is wrong.
            (exited(2), false, true, Some(End::Pool(2))),
            (exited(2), false, false, None),
            (exited(AGAIN.into()), true, true, Some(End::Replaced)),
            (killed, true, true, None),
            (
                ExitStatus::from_raw(TERMINATED),
                false,
                true,
                Some(End::Pool(143)),
            ),
            // A later process has mounts, which another one has to end.
            (
                ExitStatus::from_raw(TERMINATED),
                false,
                false,
                Some(End::Signalled(Signal::SIGTERM)),
            ),
        ] {
            let end = judge(status, was_ready, is_first);
            match expected {
                Some(expected) => assert_eq!(end, expected),
                None => assert!(matches!(end, End::Failed(_)), "{status}: {end:?}"),
            }
        }
    }
}

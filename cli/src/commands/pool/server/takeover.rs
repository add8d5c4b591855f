//! How the mounts of a pool pass from one process to the next.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bcow_fuse::session::Stopper;
use bcow_fuse::{Handover, Session, Unmounted, Unmounter};
use bcow_union::log::{self, Severity};
use serde_json::{Value, json};

use super::{MountInProgress, OwnDirectory, Pool, log_failure};
use crate::commands::mount::failure;
use crate::commands::mount::fuse::{Mounted, Opened};
use crate::commands::mount::host::UpperUse;
use crate::commands::mount::pooled::{self, Attempts};
use crate::error::{CommandError, Context};
use crate::image::hex;
use crate::pool::link::Packet;
use crate::pool::record::{Asked, Record};
use crate::running::Service;
use crate::ui::Ui;

/// Number of threads that take over mounts.
const THREADS: usize = 8;
/// Timeout for the end of busy mounts that are unmounted for a restart.
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of mounts that an error names.
const MAX_NAMED: usize = 5;

/// A mount that this process takes over from the one before.
pub struct Kept {
    /// The connection to the kernel.
    pub connection: OwnedFd,
    /// The stored [`Record`].
    pub record: OwnedFd,
    /// The device number of the mount.
    pub device: Option<String>,
    /// The ledger of a mount with an upper.
    pub ledger: Option<OwnedFd>,
}

/// A mount at a restart.
struct Staying {
    number: u64,
    unmounter: Unmounter,
    service: Service,
    record: Option<Record>,
    is_at_kernel_door: bool,
}

impl Pool {
    /// Gives to the keeper what another process needs to take over this mount. Returns the record,
    /// or `None` if no other process can.
    pub(super) fn keep(&self, number: u64, mounted: &Mounted, asked: Asked) -> Option<Record> {
        let session = mounted.session.fuse()?;
        let kept = session.hand_over().map_err(|error| failure(&error));
        let kept = kept.and_then(|handover| {
            let Some(handover) = handover else {
                return Ok(None);
            };
            let record = Record::new(
                asked,
                handover.target.into(),
                handover.agreed,
                hex(&mounted.identity),
                mounted.service.clone(),
            );
            let stored = record
                .store()
                .context(|| "cannot store the record of a mount")?;
            let device = handover.device;
            let descriptors = [handover.connection.as_fd(), stored.as_fd()];
            let mut is_kept = self.tell(&Packet::Keep { number, device }, &descriptors);
            if let Some(ledger) = &handover.ledger {
                is_kept &= self.tell(&Packet::Ledger { number }, &[ledger.as_fd()]);
            }
            Ok(is_kept.then_some(record))
        });
        kept.unwrap_or_else(|error| {
            log_failure(&error);
            None
        })
    }

    /// The mount has ended.
    pub(super) fn release(&self, number: u64) {
        self.tell(&Packet::Release { number }, &[]);
    }

    /// Takes over the mounts of the previous process. Mounts whose image cannot be opened again are
    /// unmounted.
    pub fn take_over(self: &Arc<Self>, mounts: BTreeMap<u64, Kept>) {
        self.state().next = mounts.last_key_value().map_or(0, |(number, _)| number + 1);
        let mounts = Mutex::new(mounts);
        let next = || {
            let mut mounts = mounts.lock().unwrap_or_else(PoisonError::into_inner);
            mounts.pop_first()
        };
        let take = || {
            while let Some((number, kept)) = next() {
                if let Err(error) = self.take_over_one(number, kept) {
                    log_failure(&error);
                    self.release(number);
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..THREADS {
                // If no thread can be started, the others do the work.
                let _ = thread::Builder::new().spawn_scoped(scope, take);
            }
            take();
        });
    }

    fn take_over_one(self: &Arc<Self>, number: u64, kept: Kept) -> Result<(), CommandError> {
        let name = &self.settings.name;
        let mut handover = Handover {
            connection: kept.connection,
            target: PathBuf::new(),
            device: kept.device,
            agreed: 0,
            ledger: None,
        };
        let opened = Record::load(kept.record)
            .context(|| "cannot read its record")
            .and_then(|record| {
                handover.target = OsString::from(record.target.clone()).into();
                handover.agreed = record.agreed;
                let mount = MountInProgress::new(self)?;
                let upper_use = match (&record.service.upper, &kept.ledger) {
                    (Some(_), Some(ledger)) => UpperUse::TakeOver(ledger.as_fd()),
                    (Some(upper), None) => {
                        return Err(CommandError::new(format!(
                            "the ledger of its upper {upper} is missing"
                        )));
                    }
                    (None, _) => UpperUse::None,
                };
                let opened = self.open_again(&record, Attempts::Several, upper_use)?;
                Ok((mount, opened, record))
            });
        match opened {
            Ok((mount, opened, record)) => {
                let mounted = opened.take_over(handover, record.service.clone())?;
                let session = mounted.session.fuse();
                let ledger = session.map_or(Ok(None), Session::ledger);
                if let Some(ledger) = ledger.map_err(|error| failure(&error))? {
                    // Before the first request, which the ledger of the process before would miss.
                    self.tell(&Packet::Ledger { number }, &[ledger.as_fd()]);
                }
                mount.arrive(number, mounted, Some(record))
            }
            Err(error) => {
                let place = handover.target.display().to_string();
                handover.unmount();
                let lost = format!("pool {name}: cannot take over {place}, which is unmounted");
                let lost = CommandError::new(lost).caused_by_text(error.message());
                let causes = error.causes().iter().cloned();
                Err(causes.fold(lost, CommandError::caused_by_text))
            }
        }
    }

    /// Opens the image of a mount again. It must be the same image: the kernel has its names and
    /// inodes in the cache.
    fn open_again(
        &self,
        record: &Record,
        attempts: Attempts,
        upper_use: UpperUse<'_>,
    ) -> Result<Opened, CommandError> {
        // If the directory is gone, a relative path leads to no image or to another one.
        let _place = OwnDirectory::enter(record.directory.clone(), None).ok();
        let args = self.parse(record.arguments.clone())?;
        let host = self.host(&[]);
        let opened = pooled::open_again(&args, host, attempts, upper_use, &Ui::collecting())?;
        match hex(&opened.identity) == record.identity {
            true => Ok(opened),
            false => Err(CommandError::new("another image has its place now")),
        }
    }

    /// Prepares the end of this process, so that another one takes over. Returns the answer for the
    /// client.
    pub(super) fn restart(&self, force: bool) -> Result<Value, CommandError> {
        let name = &self.settings.name;
        let cannot = || CommandError::new(format!("cannot restart the pool {name}"));
        if !self.has_keeper() {
            return Err(cannot()
                .caused_by_text("its keeper has died")
                .hint(format!("`bcow pool stop {name}` ends it")));
        }
        let mut state = self.state();
        if state.is_ending {
            return Err(cannot().caused_by_text("it is ending"));
        }
        if state.is_restarting {
            return Err(cannot().caused_by_text("it is already restarting"));
        }
        // From now on no mount is added.
        state.is_restarting = true;
        while state.in_progress > 0 {
            state = self.wait(state);
        }
        let mounts = state.mounts.iter().map(|(&number, entry)| Staying {
            number,
            unmounter: entry.unmounter.clone(),
            service: entry.service.clone(),
            record: entry.kept.clone(),
            is_at_kernel_door: entry.is_at_kernel_door,
        });
        let mounts: Vec<Staying> = mounts.collect();
        drop(state);
        let others = mounts.into_iter().filter_map(|mount| {
            let why = self.why_it_ends(&mount)?;
            Some((mount, why))
        });
        let others: Vec<(Staying, String)> = others.collect();
        if !others.is_empty() && !force {
            self.state().is_restarting = false;
            let reasons = others.into_iter().take(MAX_NAMED).map(|(_, why)| why);
            return Err(reasons
                .fold(cannot(), CommandError::caused_by_text)
                .hint(format!(
                    "`bcow umount` unmounts one, `bcow pool restart --force {name}` all such \
                     mounts; the others stay"
                )));
        }
        let mut unmounted = 0;
        for (mount, _) in &others {
            let done = mount.unmounter.unmount();
            unmounted += u64::from(done != Unmounted::Stays);
            let place = mount.service.at.join(", ");
            if let Some(warning) = done.warning("bcow pool restart", Path::new(&place)) {
                log::log(Severity::Warning, &warning);
            }
        }
        let mut state = self.state();
        let deadline = Instant::now() + UNMOUNT_TIMEOUT;
        while others
            .iter()
            .any(|(mount, _)| state.mounts.contains_key(&mount.number))
        {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = self.changed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        if state.is_ending {
            return Err(cannot().caused_by_text("it is ending"));
        }
        drop(state);
        // Mounts that are still in use are only detached, and have open uppers: make their data
        // durable before the process ends.
        let detached: Vec<u64> = others.iter().map(|(mount, _)| mount.number).collect();
        self.close_uppers(|number| detached.contains(&number));
        self.stop_uppers();
        Ok(json!({ "unmounted": unmounted }))
    }

    /// Stops the requests to all mounts with an upper, and makes their data durable. The process
    /// ends afterwards, and another one takes them over.
    fn stop_uppers(&self) {
        let stoppers: Vec<Stopper> = {
            let state = self.state();
            let mounts = state.mounts.values();
            mounts.filter_map(|entry| entry.stopper.clone()).collect()
        };
        let stoppers = Mutex::new(stoppers);
        let stop = || {
            let next = || {
                let mut stoppers = stoppers.lock().unwrap_or_else(PoisonError::into_inner);
                stoppers.pop()
            };
            while let Some(stopper) = next() {
                if let Err(error) = stopper.stop() {
                    log_failure(&failure(&error));
                }
            }
        };
        thread::scope(|scope| {
            for _ in 1..THREADS {
                // If no thread can be started, the others do the work.
                let _ = thread::Builder::new().spawn_scoped(scope, stop);
            }
            stop();
        });
    }

    /// Why another process could not take over a mount; `None` if it could.
    fn why_it_ends(&self, mount: &Staying) -> Option<String> {
        let at = mount.service.at.join(", ");
        let Some(record) = &mount.record else {
            return Some(match mount.is_at_kernel_door {
                true => format!(
                    "{at} is at the kernel door: taking over such a mount is not supported yet"
                ),
                false => format!("{at} cannot be taken over: that needs Linux 6.9"),
            });
        };
        let error = self
            .open_again(record, Attempts::One, UpperUse::None)
            .err()?;
        let causes = std::iter::once(error.message());
        let causes: Vec<&str> = causes
            .chain(error.causes().iter().map(String::as_str))
            .collect();
        Some(format!("{at}: {}", causes.join(": ")))
    }
}

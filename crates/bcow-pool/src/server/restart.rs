//! The end of a process of a pool whose mounts another process continues.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use bcow::format::hex;
use bcow_fuse::{MountError, Unmounted, Unmounter};
use bcow_images::error::CommandError;
use bcow_images::running::Service;
use bcow_mounts::failure;
use bcow_mounts::mount::host::UpperUse;
use bcow_mounts::mount::kernel;
use bcow_union::log::{self, Severity};

use super::takeover::another_image;
use super::{AnyStopper, Pool, log_failure, side_by_side};
use crate::asked::OwnDirectory;
use crate::record::MountRecord;

/// Timeout for the end of busy mounts that are unmounted for a restart.
const UNMOUNT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of mounts that an error names.
const MAX_NAMED: usize = 5;

/// A mount at a restart.
struct Staying {
    number: u64,
    unmounter: Unmounter,
    service: Service,
    record: Option<MountRecord>,
    stopper: Option<AnyStopper>,
}

impl Pool {
    /// Prepares the end of this process, so that another one takes over. Returns the number of
    /// mounts that it has unmounted.
    pub(super) fn restart(&self, force: bool) -> Result<u64, CommandError> {
        let name = &self.name;
        let cannot = || CommandError::new(format!("cannot restart the pool {name}"));
        if !self.has_supervisor() {
            return Err(cannot()
                .caused_by_text("its supervisor has died")
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
            stopper: entry.stopper.clone(),
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
        if let Err(error) = self.prepare_disks() {
            self.state().is_restarting = false;
            return Err(cannot().caused_by(&error));
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
        if !self.has_supervisor() {
            state.is_restarting = false;
            return Err(cannot().caused_by_text("its supervisor has died"));
        }
        state.is_leaving = true;
        drop(state);
        // Mounts that are still in use are only detached, and have open uppers: make their data
        // durable before the process ends.
        let detached: Vec<u64> = others.iter().map(|(mount, _)| mount.number).collect();
        self.close_uppers(|number| detached.contains(&number));
        let ending = self.stop_mounts();
        let is_ending = |number: &u64| ending.contains(number) && !detached.contains(number);
        let mut state = self.state();
        while state.mounts.keys().any(is_ending) {
            state = self.wait(state);
        }
        Ok(unmounted)
    }

    fn stoppers(&self) -> Vec<(u64, AnyStopper)> {
        let state = self.state();
        let mounts = state.mounts.iter();
        mounts
            .filter_map(|(&number, entry)| Some((number, entry.stopper.clone()?)))
            .collect()
    }

    /// Makes the disks of all mounts durable, while programs use them. If that fails, the pool must
    /// not restart: a mount whose disk cannot be closed ends.
    fn prepare_disks(&self) -> Result<(), MountError> {
        self.stoppers()
            .iter()
            .try_for_each(|(_, stopper)| match stopper {
                AnyStopper::Upper(_) => Ok(()),
                AnyStopper::Disk(stopper) => stopper.prepare(),
            })
    }

    /// Stops the requests to all mounts with an upper or a disk, and makes their data durable. The
    /// process ends afterwards, and another one takes them over. Returns the mounts that have
    /// ended, and that other threads close.
    fn stop_mounts(&self) -> Vec<u64> {
        let ending = Mutex::new(Vec::new());
        // The last mounts first: one may be inside another.
        side_by_side(self.stoppers().into_iter().rev(), |(number, stopper)| {
            let stopped = match stopper {
                AnyStopper::Upper(stopper) => stopper.stop(),
                AnyStopper::Disk(stopper) => stopper.stop(),
            };
            match stopped {
                Ok(true) => {}
                Ok(false) => {
                    let mut ending = ending.lock().unwrap_or_else(PoisonError::into_inner);
                    ending.push(number);
                }
                // The next process takes the mount over all the same: it has the ledger.
                Err(error) => log_failure(&failure(&error)),
            }
        });
        ending.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why another process could not take over a mount; `None` if it could.
    fn why_it_ends(&self, mount: &Staying) -> Option<String> {
        let at = mount.service.at.join(", ");
        let Some(record) = &mount.record else {
            return Some(format!("{at} cannot be taken over: that needs Linux 6.9"));
        };
        let error = self.check_again(mount, record).err()?;
        Some(format!("{at}: {}", error.in_one_line()))
    }

    /// Fails if the content of a mount cannot be opened again.
    fn check_again(&self, mount: &Staying, record: &MountRecord) -> Result<(), CommandError> {
        if mount.service.descriptor.is_none() {
            return self.open_again(record, &[], UpperUse::None).map(drop);
        }
        let _place = OwnDirectory::enter(record.asked.directory.clone(), None).ok();
        let upper = match &mount.stopper {
            Some(AnyStopper::Disk(stopper)) => stopper.upper(),
            Some(AnyStopper::Upper(_)) | None => None,
        };
        let args = record.args(upper.as_deref())?;
        match kernel::again::check(&args, &self.host())? {
            Some(identity) if hex(&identity) != record.identity => Err(another_image()),
            _ => Ok(()),
        }
    }
}

//! The process in which a mount is made: one of its own, or that of a pool.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use bcow::BlockCache;
use bcow_fuse::shared::SharedFiles;
use bcow_fuse::signals::Signals;
use bcow_images::error::CommandError;
use bcow_union::{HeldUpper, UpperError};

use crate::args::MountArgs;
use crate::error::failure;
use bcow_images::image::Messages;
use bcow_images::upper;

/// The threads of a mount, unless the user asks for more.
const MOST_THREADS: usize = 16;

/// The process in which a mount is made.
pub struct Host<'a> {
    /// The cache of decoded blocks.
    pub cache: BlockCache,
    /// The signals that may interrupt the mount while it is being made.
    pub signals: Option<&'a Signals>,
    /// The pool, if the process has several mounts.
    pub pool: Option<InPool>,
}

/// What a mount gets from its pool.
#[derive(Debug, Clone)]
pub struct InPool {
    /// The name of the pool.
    pub name: String,
    /// Threads that answer the requests of one mount.
    pub threads: Option<usize>,
    /// The files that the mounts of the pool share; `None` if its supervisor cannot keep them.
    pub files: Option<Arc<SharedFiles>>,
}

impl Host<'_> {
    /// Lets signals interrupt the mount from now on.
    pub fn let_signals_through(&self) -> Result<(), CommandError> {
        let through = self.signals.map_or(Ok(()), Signals::let_through);
        through.map_err(|error| failure(&error))
    }

    /// As [`upper::when_free`]. Signals may interrupt a wait for the end of another mount.
    pub fn when_free<T>(
        &self,
        ui: &dyn Messages,
        mut open: impl FnMut() -> Result<T, UpperError>,
    ) -> Result<T, UpperError> {
        upper::when_free(ui, || {
            // Only the call that blocked the signals can fail.
            let _ = self.let_signals_through();
            open()
        })
    }

    /// Threads that answer the requests of a mount.
    pub fn threads(&self, args: &MountArgs, is_writable: bool) -> usize {
        let of_pool = self.pool.as_ref().and_then(|pool| pool.threads);
        // With the least, one slow read does not delay the others, nor do two requests to an upper
        // that wait for the disk. More threads than CPUs only compete for them.
        let least = if is_writable { 4 } else { 2 };
        match args.threads.map(usize::from).or(of_pool) {
            Some(threads) => threads,
            // Reads that wait for a server do not delay reads of what is here.
            None if args.image.is_remote() => MOST_THREADS,
            None => threads_by_default(least),
        }
    }
}

/// A thread for each CPU, and at least `least`.
pub fn threads_by_default(least: usize) -> usize {
    std::thread::available_parallelism().map_or(least, |cpus| cpus.get().clamp(least, MOST_THREADS))
}

/// The slots of an image and its layers among the files that the mounts of a pool share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TakenSlots<'a> {
    /// The mount is new, and can get some.
    New,
    /// The mount is taken over, and had these.
    Of(&'a [u32]),
    /// The mount is taken over, and had none: the kernel opens its files in the ordinary way.
    None,
}

impl<'a> UpperUse<'a> {
    /// The slots of the image and its layers.
    pub(super) fn slots(self) -> TakenSlots<'a> {
        match self {
            UpperUse::TakeOver { slots: [], .. } => TakenSlots::None,
            UpperUse::TakeOver { slots, .. } => TakenSlots::Of(slots),
            UpperUse::New | UpperUse::None => TakenSlots::New,
        }
    }
}

/// What to do with the upper of a mount.
#[derive(Debug, Clone, Copy)]
pub enum UpperUse<'a> {
    /// Open it for a new mount.
    New,
    /// Take it over from a process that has ended, with the ledger of that process.
    TakeOver {
        ledger: BorrowedFd<'a>,
        /// The upper; `None` if it was not kept, and is at its path.
        upper: Option<&'a HeldUpper>,
        /// The slots of the image and its layers, if the mount shares files.
        slots: &'a [u32],
    },
    /// Leave it alone: this process, or another one, uses it.
    None,
}

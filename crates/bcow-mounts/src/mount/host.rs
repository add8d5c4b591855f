//! The process in which a mount is made: one of its own, or that of a pool.

use std::os::fd::BorrowedFd;

use bcow::BlockCache;
use bcow_fuse::MountError;
use bcow_fuse::signals::Signals;

use super::threads;
use crate::args::MountArgs;

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
}

impl Host<'_> {
    /// The process of a pool.
    pub fn of_pool(cache: BlockCache, pool: InPool) -> Self {
        Host {
            cache,
            signals: None,
            pool: Some(pool),
        }
    }

    /// Lets signals interrupt the mount from now on.
    pub fn let_signals_through(&self) -> Result<(), MountError> {
        self.signals.map_or(Ok(()), Signals::let_through)
    }

    /// Threads that answer the requests of a mount.
    pub fn threads(&self, args: &MountArgs, is_writable: bool) -> usize {
        match (&self.pool, args.threads) {
            (Some(pool), None) if pool.threads.is_some() => pool.threads.unwrap_or(1),
            _ => threads(args, is_writable),
        }
    }
}

/// What to do with the upper of a mount.
#[derive(Debug, Clone, Copy)]
pub enum UpperUse<'a> {
    /// Open it for a new mount.
    New,
    /// Take it over from a process that has ended, with the ledger of that process.
    TakeOver(BorrowedFd<'a>),
    /// Leave it alone: this process, or another one, uses it.
    None,
}

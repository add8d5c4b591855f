//! The ledger of a disk in a pool, with which the next process of the pool continues.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bcow::Ledger;
use bcow_fuse::kernel::DiskFiles;
use bcow_images::error::{CommandError, Context};
use bcow_union::HeldUpper;
use rustix::fs::MemfdFlags;

/// Where a disk has its ledger.
#[derive(Debug, Clone, Copy)]
pub enum LedgerUse<'a> {
    /// Nowhere: no other process continues.
    None,
    /// In a new memory file.
    New,
    /// In that of a process that has ended. This process continues with its files, and with its
    /// upper if the mount has one and it was kept.
    Continue(&'a DiskFiles, Option<&'a HeldUpper>),
}

pub struct OpenLedger {
    /// Its memory file, for the next process.
    memory: OwnedFd,
    ledger: Arc<Ledger>,
}

/// An empty ledger, and its memory file.
pub fn new_ledger() -> io::Result<(OwnedFd, Arc<Ledger>)> {
    let memory = rustix::fs::memfd_create("bcow-ledger", MemfdFlags::CLOEXEC)?;
    let storage = Arc::new(File::from(memory.try_clone()?));
    Ok((memory, Arc::new(Ledger::create(storage)?)))
}

impl LedgerUse<'_> {
    /// The same, for the disk of the process that has ended. A new disk over that one has a new
    /// ledger.
    pub fn of_disk(self, continues: bool) -> Self {
        if continues { self } else { LedgerUse::New }
    }

    pub fn open(self) -> Result<Option<OpenLedger>, CommandError> {
        let cannot = || "cannot make the ledger of the disk";
        let memory: OwnedFd = match self {
            LedgerUse::None => return Ok(None),
            LedgerUse::New => {
                let (memory, ledger) = new_ledger().context(cannot)?;
                return Ok(Some(OpenLedger { memory, ledger }));
            }
            LedgerUse::Continue(files, _) => files.ledger.try_clone().context(cannot)?,
        };
        let storage = Arc::new(File::from(memory.try_clone().context(cannot)?));
        let ledger = Arc::new(Ledger::open(storage).context(cannot)?);
        Ok(Some(OpenLedger { memory, ledger }))
    }

    /// The file of the disk, if another process has kept it.
    pub fn kept_file(self) -> Result<Option<File>, CommandError> {
        match self {
            LedgerUse::Continue(files, _) => files
                .file
                .try_clone()
                .map(|file| Some(file.into()))
                .context(|| "cannot continue with the disk"),
            LedgerUse::None | LedgerUse::New => Ok(None),
        }
    }
}

impl<'a> LedgerUse<'a> {
    /// The upper, if another process has kept it.
    pub fn kept_upper(self) -> Option<&'a HeldUpper> {
        match self {
            LedgerUse::Continue(_, upper) => upper,
            LedgerUse::None | LedgerUse::New => None,
        }
    }
}

impl OpenLedger {
    /// The ledger, for the disk.
    pub fn ledger(&self) -> Arc<Ledger> {
        Arc::clone(&self.ledger)
    }

    /// What the next process needs to continue with the disk in `file`.
    pub fn files(self, file: &File) -> Result<DiskFiles, CommandError> {
        let file = file.try_clone().context(|| "cannot keep the disk open")?;
        Ok(DiskFiles {
            file: file.into(),
            ledger: self.memory,
        })
    }
}

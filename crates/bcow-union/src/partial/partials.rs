//! The partial files of an instance: creation, open, statistics.

use bcow::sync::atomic::Ordering;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::host::{MapDirectory, MapStore, MarkedFile, UpperFile};
use super::shared::{Completer, Shared};
use super::{Lower, Partial, PartialError, PartialMark, PartialOptions};
use crate::account::Account;
use crate::blocks::BLOCK_BYTES;
use crate::ledger::Ledger;
use crate::options::{SyncPolicy, UnionOptions};
use crate::upper::{Instance, META, Namespace};

/// Figures of the partial files of an instance: files of the image that were written in part, and
/// whose other blocks are still in the image. A part of the schema `bcow.stats/1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PartialFigures {
    /// Number of open partial files.
    pub open: u64,
    /// Number of blocks of the open partial files.
    pub blocks: u64,
    /// Number of these blocks for which the image is no longer needed.
    pub present_blocks: u64,
    /// Number of these blocks that were written in part, and whose rest is not copied from the
    /// image yet.
    #[serde(rename = "in_transit_blocks")]
    pub incomplete_blocks: u64,
    /// Bytes stored for the open partial files.
    pub stored_bytes: u64,
    /// Bytes of the lower files that are still visible and were not copied.
    pub saved_bytes: u64,
    /// Partial files that became plain files, since the mount.
    pub promoted: u64,
    /// Blocks completed from the image, since the mount.
    pub fills: Fills,
    /// Flushes of partial files, since the mount.
    pub flushes: u64,
    /// Maps that were rewritten, since the mount, their first write included.
    pub maps_written: u64,
}

/// Number of blocks that were completed from the image, by actor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Fills {
    /// By the background threads.
    pub background: u64,
    /// By requests that read the block.
    pub readers: u64,
    pub flushes: u64,
    /// By requests that write, while the background threads are behind.
    pub writers: u64,
}

impl Fills {
    /// The sum of all fills.
    pub fn total(&self) -> u64 {
        self.background + self.readers + self.flushes + self.writers
    }
}

/// The partial files of an instance.
///
/// The last user of a partial file flushes it before the drop if it was written to. Otherwise the
/// partial file's state is the same as after a crash.
pub struct Partials {
    shared: Arc<Shared>,
    namespace: Namespace,
}

impl Partials {
    /// The partial files of this instance.
    pub fn new(
        instance: &Instance,
        account: Arc<Account>,
        options: &UnionOptions,
    ) -> Result<Partials, Errno> {
        let options = PartialOptions {
            fillers: options.fillers,
            durable: options.sync != SyncPolicy::Volatile,
            ..PartialOptions::default()
        };
        Self::with_options(instance, account, options)
    }

    /// As [`Partials::new`], with internal options.
    pub fn with_options(
        instance: &Instance,
        account: Arc<Account>,
        options: PartialOptions,
    ) -> Result<Partials, Errno> {
        let own = |fd: BorrowedFd<'_>| rustix::io::fcntl_dupfd_cloexec(fd, 3);
        let path = instance.path().join(META).join("maps");
        let (maps, work) = (own(instance.maps())?, own(instance.work())?);
        let store = Arc::new(MapDirectory::new(maps, work, path, Arc::clone(&account)));
        Ok(Self::on(store, instance.namespace(), account, options))
    }

    /// Whether the host stores holes in files and reports them. Partial files need this.
    pub fn host_has_holes(&self) -> bool {
        self.shared.store.has_holes().unwrap_or(false)
    }

    /// The partial files with maps in `store` and marks in `namespace`.
    pub fn on(
        store: Arc<dyn MapStore>,
        namespace: Namespace,
        account: Arc<Account>,
        options: PartialOptions,
    ) -> Partials {
        Partials {
            shared: Shared::new(store, account, options),
            namespace,
        }
    }

    /// Records changes that no flush has recorded in this ledger, from now on.
    pub(crate) fn record_in(&self, ledger: &Arc<Ledger>) {
        let _ = self.shared.ledger.set(Arc::clone(ledger));
    }

    /// Makes a partial file of `host`, a file that is marked as a metadata copy of `lower`. The
    /// size and the content of `host` do not matter. If this fails, `host` is still a metadata
    /// copy.
    pub fn create(&self, host: File, lower: Arc<dyn Lower>) -> Result<Arc<Partial>, PartialError> {
        self.create_on(Arc::new(UpperFile::new(host, self.namespace)), lower)
    }

    /// Opens the partial file in `host` with this mark, or returns the open partial file with the
    /// mark's number.
    pub fn open(
        &self,
        mark: PartialMark,
        host: File,
        lower: Arc<dyn Lower>,
    ) -> Result<Arc<Partial>, PartialError> {
        self.open_on(&mark, Arc::new(UpperFile::new(host, self.namespace)), lower)
    }

    /// As [`Partials::create`], on any [`MarkedFile`].
    pub fn create_on(
        &self,
        host: Arc<dyn MarkedFile>,
        lower: Arc<dyn Lower>,
    ) -> Result<Arc<Partial>, PartialError> {
        let partial = Partial::create(&self.shared, host, lower)?;
        Ok(self.shared.register(partial))
    }

    /// As [`Partials::open`], on any [`MarkedFile`].
    pub fn open_on(
        &self,
        mark: &PartialMark,
        host: Arc<dyn MarkedFile>,
        lower: Arc<dyn Lower>,
    ) -> Result<Arc<Partial>, PartialError> {
        if let Some(partial) = self.shared.find(mark.id) {
            return Ok(partial);
        }
        let partial = Partial::open(&self.shared, mark, host, lower)?;
        Ok(self.shared.register(partial))
    }

    /// Removes the data beside the host's file of a partial file that lost its last name. Open
    /// users of the partial file continue to work. When the partial file is closed, its space is
    /// released in the account.
    pub fn remove(&self, mark: &PartialMark) -> Result<(), PartialError> {
        if let Some(partial) = self.shared.find(mark.id) {
            return partial.discard();
        }
        let removed = self.shared.store.remove(mark.id);
        removed.map_err(PartialError::host("remove the map of a partial file"))
    }

    /// The number of open partial files.
    pub fn open_count(&self) -> u64 {
        self.shared.counters.open.load(Ordering::Relaxed)
    }

    /// Figures of the partial files, without their blocks and stored bytes ([`Partial::status`]).
    pub fn statistics(&self) -> PartialFigures {
        let counters = &self.shared.counters;
        let fills = |by: Completer| counters.fills[by as usize].load(Ordering::Relaxed);
        let present = counters.present.load(Ordering::Relaxed);
        let lower_bytes = counters.lower_bytes.load(Ordering::Relaxed);
        PartialFigures {
            open: self.open_count(),
            present_blocks: present,
            incomplete_blocks: self.shared.incomplete(),
            saved_bytes: lower_bytes.saturating_sub(present * BLOCK_BYTES),
            promoted: counters.promotions.load(Ordering::Relaxed),
            fills: Fills {
                background: fills(Completer::Background),
                readers: fills(Completer::Reader),
                flushes: fills(Completer::Flush),
                writers: fills(Completer::Writer),
            },
            flushes: counters.flushes.load(Ordering::Relaxed),
            maps_written: counters.maps_compacted.load(Ordering::Relaxed),
            ..PartialFigures::default()
        }
    }
}

impl std::fmt::Debug for Partials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Partial files")
            .field("statistics", &self.statistics())
            .finish_non_exhaustive()
    }
}

impl Drop for Partials {
    fn drop(&mut self) {
        self.shared.end();
    }
}

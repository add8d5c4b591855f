//! The sketches of an instance: where they are made, opened, kept, and counted.

use bcow::sync::atomic::Ordering;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use bcow::Layout;
use rustix::io::Errno;

use super::host::{MapDirectory, MapStore, MarkedFile, UpperFile};
use super::packed::Packed;
use super::shared::{By, Kept, Shared};
use super::sparse::Sparse;
use super::{BLOCK_BYTES, Lower, Sketch, SketchError, SketchKind, SketchMark};
use crate::account::{Account, CountedMaps};
use crate::options::{SyncPolicy, UnionOptions};
use crate::upper::{Instance, META, Namespace};

/// How the sketches of an instance behave.
#[derive(Debug, Clone)]
pub struct SketchOptions {
    /// Threads that complete blocks in the background.
    pub fillers: usize,
    /// Blocks in transit of all sketches together, beyond which who writes a block in part completes it.
    pub most_in_transit: u64,
    /// How long a block is left alone, as its rest may be written too.
    pub fill_delay: Duration,
    /// Blocks that are completed ahead of who writes in order and synchronises each step.
    pub ahead_blocks: u64,
    /// Whether anything ever waits for the disk.
    pub durable: bool,
    /// How packed sketches are cut into blocks.
    pub layout: Layout,
    /// Bytes of decoded blocks of packed sketches that are kept.
    pub cache_bytes: u64,
}

impl Default for SketchOptions {
    fn default() -> Self {
        SketchOptions {
            fillers: 1,
            most_in_transit: 16 << 10,
            fill_delay: Duration::from_millis(10),
            ahead_blocks: 256,
            durable: true,
            // A block that is written in part takes all its space then, so that completing it never fails for want of it.
            layout: Layout::Space,
            cache_bytes: 8 << 20,
        }
    }
}

/// What the sketches of an instance hold, and what they did since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Sketches that are open.
    pub open: u64,
    /// Blocks of them that are present, over their lower files.
    pub blocks_present: u64,
    /// Blocks of them in transit.
    pub blocks_in_transit: u64,
    /// Bytes of their lower files that still show and were not copied.
    pub bytes_not_copied: u64,
    /// Blocks completed in the background.
    pub fills_by_background: u64,
    /// Blocks completed by who wanted to read them.
    pub fills_by_readers: u64,
    /// Blocks completed by flushes.
    pub fills_by_flushes: u64,
    /// Blocks completed by who wrote them, because the background was behind.
    pub fills_by_writers: u64,
    /// Sketches that became plain files.
    pub promotions: u64,
    /// Flushes of sketches.
    pub flushes: u64,
    /// Maps that were written anew, the first time included.
    pub maps_written: u64,
}

/// The sketches of an instance.
///
/// A sketch that was written to must be flushed before it is let go; otherwise it is as after a crash.
pub struct Sketches {
    shared: Arc<Shared>,
    namespace: Namespace,
}

impl Sketches {
    /// Of this instance.
    pub fn new(
        instance: &Instance,
        account: Arc<Account>,
        options: &UnionOptions,
    ) -> Result<Sketches, Errno> {
        let options = SketchOptions {
            fillers: options.fillers,
            durable: options.sync != SyncPolicy::Volatile,
            ..SketchOptions::default()
        };
        Self::with_options(instance, account, options)
    }

    /// As [`Sketches::new`], with options that users need not know.
    pub fn with_options(
        instance: &Instance,
        account: Arc<Account>,
        options: SketchOptions,
    ) -> Result<Sketches, Errno> {
        let own = |fd: BorrowedFd<'_>| rustix::io::fcntl_dupfd_cloexec(fd, 3);
        let path = instance.path().join(META).join("maps");
        let store = MapDirectory::new(own(instance.maps())?, own(instance.work())?, &path);
        let store: Arc<dyn MapStore> = match account.is_limited() {
            true => Arc::new(CountedMaps::new(
                store,
                own(instance.maps())?,
                Arc::clone(&account),
            )),
            false => Arc::new(store),
        };
        let namespace = instance.namespace();
        Ok(Self::on(store, namespace, account, options))
    }

    /// Whether files of the host can have holes that it tells from data, which sparse sketches live on.
    pub fn host_has_holes(&self) -> bool {
        self.shared.store.has_holes().unwrap_or(false)
    }

    /// With maps that are kept there, and marks that are named so.
    pub fn on(
        store: Arc<dyn MapStore>,
        namespace: Namespace,
        account: Arc<Account>,
        options: SketchOptions,
    ) -> Sketches {
        Sketches {
            shared: Shared::new(store, account, options),
            namespace,
        }
    }

    /// Makes a sketch of `host`: a file that is marked as a metadata copy of `lower`, whatever size and content it has. If that fails,
    /// it is one still.
    pub fn create(
        &self,
        kind: SketchKind,
        host: File,
        lower: Arc<dyn Lower>,
    ) -> Result<Arc<dyn Sketch>, SketchError> {
        self.create_on(kind, Arc::new(UpperFile::new(host, self.namespace)), lower)
    }

    /// Opens the sketch that `host` is by its mark, or gives the one that is open.
    pub fn open(
        &self,
        mark: SketchMark,
        host: File,
        lower: Arc<dyn Lower>,
    ) -> Result<Arc<dyn Sketch>, SketchError> {
        self.open_on(&mark, Arc::new(UpperFile::new(host, self.namespace)), lower)
    }

    /// As [`Sketches::create`], on any host.
    pub fn create_on(
        &self,
        kind: SketchKind,
        host: Arc<dyn MarkedFile>,
        lower: Arc<dyn Lower>,
    ) -> Result<Arc<dyn Sketch>, SketchError> {
        let sketch: Arc<dyn Kept> = match kind {
            SketchKind::Sparse => Sparse::create(&self.shared, host, lower)?,
            SketchKind::Packed => Packed::create(&self.shared, host, lower)?,
        };
        Ok(self.shared.enter(sketch))
    }

    /// As [`Sketches::open`], on any host.
    pub fn open_on(
        &self,
        mark: &SketchMark,
        host: Arc<dyn MarkedFile>,
        lower: Arc<dyn Lower>,
    ) -> Result<Arc<dyn Sketch>, SketchError> {
        if let Some(sketch) = self.shared.find(mark.id) {
            return Ok(sketch);
        }
        let sketch: Arc<dyn Kept> = match mark.kind {
            SketchKind::Sparse => Sparse::open(&self.shared, mark, host, lower)?,
            SketchKind::Packed => Packed::open(&self.shared, mark, host, lower)?,
        };
        Ok(self.shared.enter(sketch))
    }

    /// Removes what is kept beside the host's file of a sketch that lost its last name. Who has it open may use it as before; its
    /// space is given back to the account when it is closed.
    pub fn remove(&self, mark: &SketchMark) -> Result<(), SketchError> {
        if let Some(sketch) = self.shared.find(mark.id) {
            return sketch.discard();
        }
        let removed = self.shared.store.remove(mark.id);
        removed.map_err(|error| SketchError::host("remove the map of a sketch", &error))
    }

    /// A plain file of `stored` bytes took the place of a sketch's host file.
    pub fn replaced(&self, mark: &SketchMark, stored: u64) -> Result<(), SketchError> {
        if self.account().limit().is_some() {
            self.account().add(stored.next_multiple_of(BLOCK_BYTES));
        }
        self.remove(mark)
    }

    /// Makes a plain file of a sparse sketch that is complete; see [`Sketch::promote`].
    pub fn promote(&self, sketch: &dyn Sketch) -> Result<(), SketchError> {
        sketch.promote().map(drop)
    }

    /// How many are open.
    pub fn open_count(&self) -> u64 {
        self.shared.counters.open.load(Ordering::Relaxed)
    }

    /// What they hold and did.
    pub fn statistics(&self) -> Statistics {
        let counters = &self.shared.counters;
        let fills = |by: By| counters.fills[by as usize].load(Ordering::Relaxed);
        let present = counters.present.load(Ordering::Relaxed);
        let lower_bytes = counters.lower_bytes.load(Ordering::Relaxed);
        Statistics {
            open: counters.open.load(Ordering::Relaxed),
            blocks_present: present,
            blocks_in_transit: self.shared.in_transit(),
            bytes_not_copied: lower_bytes.saturating_sub(present * BLOCK_BYTES),
            fills_by_background: fills(By::Background),
            fills_by_readers: fills(By::Reader),
            fills_by_flushes: fills(By::Flush),
            fills_by_writers: fills(By::Writer),
            promotions: counters.promotions.load(Ordering::Relaxed),
            flushes: counters.flushes.load(Ordering::Relaxed),
            maps_written: counters.maps_compacted.load(Ordering::Relaxed),
        }
    }

    /// The account that is charged.
    pub fn account(&self) -> &Arc<Account> {
        &self.shared.account
    }
}

impl std::fmt::Debug for Sketches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sketches")
            .field("statistics", &self.statistics())
            .finish_non_exhaustive()
    }
}

impl Drop for Sketches {
    fn drop(&mut self) {
        self.shared.end();
    }
}

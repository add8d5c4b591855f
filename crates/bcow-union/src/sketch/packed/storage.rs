//! The host's file of a packed sketch, as the storage of a BCoW file.

use bcow::sync::atomic::{AtomicBool, Ordering};
use std::cell::Cell;
use std::io;
use std::sync::Arc;

use bcow::Storage;

use super::super::SketchError;
use super::super::host::MarkedFile;
use super::super::times::Times;
use crate::account::{Account, ChargeError, StoredBlocks};
use crate::host::HostFile;

thread_local! {
    /// Whether this thread flushes. Its writes may exceed the size limit, because they make data
    /// durable that was acknowledged. A write has charged for them (see `promise.rs`).
    static IS_FLUSHING: Cell<bool> = const { Cell::new(false) };
}

/// The host's file of a packed sketch. Its space is charged to the account.
pub(super) struct HostStorage {
    host: Arc<dyn MarkedFile>,
    stored: StoredBlocks,
    times: Arc<Times>,
    /// Whether `sync` issues a barrier.
    barriers: AtomicBool,
    /// Whether the BCoW file is being opened. Writes of an open may exceed the size limit, because
    /// they make the file readable.
    opening: AtomicBool,
}

impl HostStorage {
    /// A storage without barriers, until [`HostStorage::use_barriers`].
    pub(super) fn new(host: Arc<dyn MarkedFile>, account: Arc<Account>) -> Self {
        HostStorage {
            host,
            stored: StoredBlocks::new(account),
            times: Arc::default(),
            barriers: AtomicBool::new(false),
            opening: AtomicBool::new(false),
        }
    }

    /// Calls `open`, whose writes may exceed the size limit.
    pub(super) fn while_opening<T>(&self, open: impl FnOnce() -> T) -> T {
        self.opening.store(true, Ordering::Release);
        let opened = open();
        self.opening.store(false, Ordering::Release);
        opened
    }

    /// Calls `flush`, whose writes may exceed the size limit.
    pub(super) fn while_flushing<T>(&self, flush: impl FnOnce() -> T) -> T {
        let before = IS_FLUSHING.replace(true);
        let flushed = flush();
        IS_FLUSHING.set(before);
        flushed
    }

    pub(super) fn use_barriers(&self, barriers: bool) {
        self.barriers.store(barriers, Ordering::Release);
    }

    /// Discards the file's content and sets its size.
    pub(super) fn empty(&self, size: u64) -> Result<(), SketchError> {
        let set_len = |bytes| {
            Storage::set_len(self, bytes).map_err(SketchError::host("empty the file of a sketch"))
        };
        set_len(0)?;
        match size {
            0 => Ok(()),
            _ => set_len(size),
        }
    }

    /// The times of the host's file.
    pub(super) fn times(&self) -> &Arc<Times> {
        &self.times
    }

    /// Releases the file's space in the account.
    pub(super) fn release(&self) -> Result<(), SketchError> {
        Ok(self.stored.release_all(self.content())?)
    }

    fn content(&self) -> &dyn HostFile {
        self.host.content()
    }
}

impl Storage for HostStorage {
    fn len(&self) -> io::Result<u64> {
        self.content().size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            match self.content().read_at(at, &mut buf[done..])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => done += read,
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let range = offset..offset.saturating_add(bytes.len() as u64);
        let failed = |error: ChargeError| io::Error::from(error.errno());
        if self.opening.load(Ordering::Acquire) {
            self.stored
                .add(self.content(), range.clone())
                .map_err(failed)?;
        }
        let reserved = match self.stored.reserve_all(self.content(), range.clone()) {
            Err(ChargeError::NoSpace(_)) if IS_FLUSHING.get() => self
                .stored
                .add(self.content(), range.clone())
                .and_then(|()| self.stored.reserve_all(self.content(), range))
                .map_err(failed)?,
            // The BCoW library overwrites a record that found no room with zeros. That write must
            // not fail for the same reason.
            Err(ChargeError::NoSpace(_)) if bytes.iter().all(|&byte| byte == 0) => {
                if range.end <= self.content().size()?
                    && !self.stored.has_charged_block(range.clone())
                {
                    return Ok(());
                }
                self.stored
                    .add(self.content(), range.clone())
                    .and_then(|()| self.stored.reserve_all(self.content(), range))
                    .map_err(failed)?
            }
            reserved => reserved.map_err(failed)?,
        };
        let mut done = 0;
        while done < bytes.len() {
            let at = offset + done as u64;
            match self.content().write_at(at, &bytes[done..]) {
                Ok(written) => done += written,
                Err(error) => {
                    self.stored.release_unwritten(reserved, at);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.examine()?;
        self.content().set_size(bytes)?;
        self.stored.truncated(bytes);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        match self.barriers.load(Ordering::Acquire) {
            true => self.content().sync_data(),
            false => Ok(()),
        }
    }

    fn punch(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.examine()?;
        match self.content().punch(offset, bytes) {
            Ok(()) => {
                self.stored.punched(offset..offset + bytes);
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            Err(error) => Err(error),
        }
    }
    fn unasked(&self, work: &mut dyn FnMut()) {
        self.times.hold().preserve_time(self.content(), work);
    }
}

impl HostStorage {
    fn examine(&self) -> io::Result<()> {
        self.stored
            .examine(self.content())
            .map_err(|error| io::Error::from(error.errno()))
    }
}

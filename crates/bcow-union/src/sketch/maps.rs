//! Charges the maps of sketches to the account.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use rustix::fs::Timespec;

use super::host::MapStore;
use crate::Seek;
use crate::account::Account;
use crate::host::{FileTimes, HostFile};

/// A [`MapStore`] whose maps are charged to the account.
///
/// One inode and one block are charged for each map when its sketch is created. The growth of a map
/// is added even above the limit: the blocks that the new records list are already written, and
/// take at least sixteen times as much space.
pub(super) struct CountedMaps<S> {
    maps: S,
    /// The directory of the maps.
    directory: OwnedFd,
    account: Arc<Account>,
}

impl<S: MapStore> CountedMaps<S> {
    /// Counts the maps of `maps`, in the directory `directory`.
    pub(super) fn new(maps: S, directory: OwnedFd, account: Arc<Account>) -> Self {
        CountedMaps {
            maps,
            directory,
            account,
        }
    }

    fn counted(&self, id: u64, file: Arc<dyn HostFile>) -> Arc<dyn HostFile> {
        Arc::new(CountedMap {
            id,
            file,
            account: Arc::clone(&self.account),
        })
    }

    fn settle_directory(&self) -> io::Result<()> {
        let mut room = self.account.unreserved();
        Ok(self.account.overhead.recount(&self.directory, &mut room)?)
    }
}

impl<S: MapStore> MapStore for CountedMaps<S> {
    fn open(&self, id: u64) -> io::Result<Option<Arc<dyn HostFile>>> {
        let map = self.maps.open(id)?;
        Ok(map.map(|file| self.counted(id, file)))
    }
    fn create(&self, id: u64) -> io::Result<Arc<dyn HostFile>> {
        let map = self.maps.create(id)?;
        self.account.add_map(id, 0, &mut self.account.unreserved());
        Ok(self.counted(id, map))
    }
    fn publish(&self, id: u64) -> io::Result<()> {
        self.maps.publish(id)?;
        // The new map may be smaller than the one that it replaced.
        if let Some(map) = self.maps.open(id)? {
            self.account.set_map(id, map.size()?);
        }
        self.settle_directory()
    }
    fn sync(&self) -> io::Result<()> {
        self.maps.sync()
    }
    fn has_holes(&self) -> io::Result<bool> {
        self.maps.has_holes()
    }
    fn remove(&self, id: u64) -> io::Result<()> {
        self.maps.remove(id)?;
        self.account.release_map(id);
        self.settle_directory()
    }
    fn path(&self, id: u64) -> PathBuf {
        self.maps.path(id)
    }
}

/// A map, or a temporary file that will become one.
struct CountedMap {
    id: u64,
    file: Arc<dyn HostFile>,
    account: Arc<Account>,
}

impl HostFile for CountedMap {
    fn size(&self) -> io::Result<u64> {
        self.file.size()
    }
    fn stored_bytes(&self) -> io::Result<u64> {
        self.file.stored_bytes()
    }
    fn inode(&self) -> io::Result<u64> {
        self.file.inode()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.file.read_at(offset, buf)
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<usize> {
        let written = self.file.write_at(offset, data)?;
        let end = offset.saturating_add(written as u64);
        self.account.grow_map(self.id, end);
        Ok(written)
    }
    fn set_size(&self, size: u64) -> io::Result<()> {
        self.file.set_size(size)
    }
    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        self.file.punch(offset, length)
    }
    fn allocate(&self, offset: u64, length: u64) -> io::Result<()> {
        self.file.allocate(offset, length)
    }
    fn seek(&self, offset: u64, what: Seek) -> io::Result<Option<u64>> {
        self.file.seek(offset, what)
    }
    fn times(&self) -> io::Result<FileTimes> {
        self.file.times()
    }
    fn set_modified(&self, at: Timespec) -> io::Result<()> {
        self.file.set_modified(at)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }
    fn sync_all(&self) -> io::Result<()> {
        self.file.sync_all()
    }
}

//! A disk of which a snapshot can be taken while programs read and write it.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use super::snapshot::{SnapshotError, Snapshotted, copy_snapshot, snapshot};
use crate::disk::Gate;
use crate::{BlockDevice, Disk, Error, Ledger, LockedFile, Space, Status, WritableDevice};

/// An open disk. Its operations wait while a snapshot is taken.
pub struct LiveDisk(Gate<Top>);

/// The disk that takes the writes now.
struct Top {
    disk: Arc<Disk>,
    /// Dropped after the disk, which may write to the file until it is dropped.
    file: LockedFile,
    /// The number of files on the longest path down from the disk, without the disk.
    height: u32,
}

impl LiveDisk {
    /// The disk in a locked file, with `height` files below it.
    pub fn new(disk: Disk, file: LockedFile, height: u32) -> Self {
        LiveDisk(Gate::new(Top {
            disk: Arc::new(disk),
            file,
            height,
        }))
    }

    /// Whether this is the disk in the file with this device number and inode number.
    pub fn is_at(&self, device: u64, inode: u64) -> bool {
        let top = self.0.enter();
        top.file.has_numbers(device, inode)
    }

    /// Runs `work` with the disk that takes the writes now. No snapshot is taken meanwhile.
    pub fn with<T>(&self, work: impl FnOnce(&Disk) -> T) -> T {
        work(&self.0.enter().disk)
    }

    /// Whether the file of the disk has no name any more.
    pub fn is_removed(&self) -> bool {
        let top = self.0.enter();
        let metadata = top.file.file().metadata();
        metadata.is_ok_and(|metadata| metadata.nlink() == 0)
    }

    /// Makes the present content the snapshot `name`, as [`snapshot`]. Returns the path of the
    /// snapshot. After a failure, the disk continues with its file.
    ///
    /// From now on, the disk has `ledger`. `is_replaced` is called with its new file, before any
    /// operation continues.
    pub fn snapshot(
        &self,
        name: &str,
        note: &str,
        ledger: Option<Arc<Ledger>>,
        is_replaced: impl FnOnce(&File),
    ) -> Result<PathBuf, SnapshotError> {
        // Most data is durable before the operations have to wait.
        self.flush().map_err(SnapshotError::Disk)?;
        let mut closed = self.0.close();
        let top = closed.get();
        let Snapshotted { disk, file, path } =
            snapshot(&top.disk, &top.file, name, top.height, note, ledger)?;
        is_replaced(file.file());
        let height = top.height + 1;
        closed.replace(Top {
            disk: Arc::new(disk),
            file,
            height,
        });
        Ok(path)
    }

    /// Makes a copy of the disk the snapshot `name`, as [`copy_snapshot`].
    pub fn copy(&self, name: &str) -> Result<PathBuf, SnapshotError> {
        self.flush().map_err(SnapshotError::Disk)?;
        let closed = self.0.close();
        let top = closed.get();
        copy_snapshot(&top.disk, &top.file, name)
    }

    /// Closes the disk, as [`Disk::close`].
    pub fn close(self) -> Result<(), Error> {
        self.0.enter().disk.finish()
    }
}

impl BlockDevice for LiveDisk {
    fn size(&self) -> u64 {
        self.0.enter().disk.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        self.0.enter().disk.read_at(offset, buf)
    }

    fn status(&self, offset: u64, length: u64) -> Result<Status, Error> {
        self.0.enter().disk.status(offset, length)
    }
}

impl WritableDevice for LiveDisk {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.0.enter().disk.write_at(offset, bytes)
    }

    fn write_zeroes(&self, offset: u64, length: u64, space: Space) -> Result<(), Error> {
        self.0.enter().disk.write_zeroes(offset, length, space)
    }

    fn discard(&self, offset: u64, length: u64) -> Result<(), Error> {
        self.0.enter().disk.discard(offset, length)
    }

    fn flush(&self) -> Result<(), Error> {
        self.0.enter().disk.flush()
    }
}

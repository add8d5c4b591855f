//! A disk of which a snapshot can be taken and removed while programs read and write it.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::snapshot::{Earlier, SnapshotError, Snapshotted, copy_snapshot, snapshot};
use crate::disk::{Closed, Gate, Pass};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::{BlockDevice, Disk, Error, Ledger, LockedFile, Space, Status, WritableDevice};

/// An open disk. Its operations wait while a snapshot is taken.
pub struct LiveDisk {
    gate: Gate<Top>,
    /// Held while a snapshot is removed, so that one is removed at a time. Taken before the gate is
    /// entered or closed.
    removing: Mutex<()>,
}

/// The disk that takes the writes now.
pub(super) struct Top {
    pub(super) disk: Arc<Disk>,
    /// Dropped after the disk, which may write to the file until it is dropped.
    pub(super) file: LockedFile,
    /// The number of files on the longest path down from the disk, without the disk. It changes
    /// only while the gate is closed.
    pub(super) height: AtomicU32,
}

/// A snapshot that was taken. Dropping this releases its unused space and the tables of the earlier
/// disk, which takes the longer the more was written: no operation should wait for it.
pub struct Taken {
    /// The path of the snapshot.
    pub path: PathBuf,
    _earlier: Earlier,
    _top: Arc<Top>,
}

impl LiveDisk {
    /// The disk in a locked file, with `height` files below it.
    pub fn new(disk: Disk, file: LockedFile, height: u32) -> Self {
        LiveDisk {
            gate: Gate::new(Top {
                disk: Arc::new(disk),
                file,
                height: height.into(),
            }),
            removing: Mutex::new(()),
        }
    }

    /// Waits until no other snapshot is being removed.
    pub(super) fn begin_removal(&self) -> MutexGuard<'_, ()> {
        lock(&self.removing)
    }

    pub(super) fn top(&self) -> Pass<'_, Top> {
        self.gate.enter()
    }

    /// The disk that takes the writes now.
    pub(super) fn disk(&self) -> Arc<Disk> {
        Arc::clone(&self.top().disk)
    }

    /// The path of the disk.
    pub(super) fn path(&self) -> PathBuf {
        self.top().file.path().to_owned()
    }

    /// Waits until no operation is in progress. The operations wait until the gate opens.
    pub(super) fn close_gate(&self) -> Closed<'_, Top> {
        self.gate.close()
    }

    /// Whether this is the disk in the file with this device number and inode number.
    pub fn is_at(&self, device: u64, inode: u64) -> bool {
        let top = self.gate.enter();
        top.file.has_numbers(device, inode)
    }

    /// Runs `work` with the disk that takes the writes now. No snapshot is taken meanwhile.
    pub fn with<T>(&self, work: impl FnOnce(&Disk) -> T) -> T {
        work(&self.gate.enter().disk)
    }

    /// Whether the file of the disk has no name any more.
    pub fn is_removed(&self) -> bool {
        let top = self.gate.enter();
        let metadata = top.file.file().metadata();
        metadata.is_ok_and(|metadata| metadata.nlink() == 0)
    }

    /// Makes all that was written durable, and writes the tables, while operations continue. So
    /// there is little left to do in a snapshot that follows, for which they have to wait.
    pub fn prepare(&self) -> Result<(), Error> {
        self.with(Disk::checkpoint)
    }

    /// Makes the present content the snapshot `name`, as [`snapshot`]. After a failure, the disk
    /// continues with its file.
    ///
    /// From now on, the disk has `ledger`. `is_replaced` is called with its new file, before any
    /// operation continues.
    pub fn snapshot(
        &self,
        name: &str,
        note: &str,
        ledger: Option<Arc<Ledger>>,
        is_replaced: impl FnOnce(&File),
    ) -> Result<Taken, SnapshotError> {
        let mut closed = self.gate.close();
        let top = closed.get();
        let height = top.height.load(Ordering::Relaxed);
        let Snapshotted {
            earlier,
            disk,
            file,
            path,
        } = snapshot(&top.disk, &top.file, name, height, note, ledger)?;
        is_replaced(file.file());
        let top = closed.replace(Top {
            disk: Arc::new(disk),
            file,
            height: (height + 1).into(),
        });
        Ok(Taken {
            path,
            _earlier: earlier,
            _top: top,
        })
    }

    /// Makes a copy of the disk the snapshot `name`, as [`copy_snapshot`].
    pub fn copy(&self, name: &str) -> Result<PathBuf, SnapshotError> {
        let closed = self.gate.close();
        let top = closed.get();
        copy_snapshot(&top.disk, &top.file, name)
    }

    /// Closes the disk, as [`Disk::close`].
    pub fn close(self) -> Result<(), Error> {
        self.gate.enter().disk.finish()
    }
}

impl BlockDevice for LiveDisk {
    fn size(&self) -> u64 {
        self.gate.enter().disk.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        self.gate.enter().disk.read_at(offset, buf)
    }

    fn status(&self, offset: u64, length: u64) -> Result<Status, Error> {
        self.gate.enter().disk.status(offset, length)
    }
}

impl WritableDevice for LiveDisk {
    fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.gate.enter().disk.write_at(offset, bytes)
    }

    fn write_zeroes(&self, offset: u64, length: u64, space: Space) -> Result<(), Error> {
        self.gate.enter().disk.write_zeroes(offset, length, space)
    }

    fn discard(&self, offset: u64, length: u64) -> Result<(), Error> {
        self.gate.enter().disk.discard(offset, length)
    }

    fn flush(&self) -> Result<(), Error> {
        self.gate.enter().disk.flush()
    }
}

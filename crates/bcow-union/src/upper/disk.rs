//! An upper of the kernel driver: a disk in [`META`], and no tree of files.
//!
//! The kernel mounts the file system on the disk, and so it trusts its metadata. That is why a
//! writer refuses a disk that a user other than this one and root could have written.
//!
//! A new upper begins in this order: the lock, the disk, the record. Each gets its name when it is
//! complete and durable. So a crash leaves a directory without a record. The next writer then makes
//! the disk, or takes the disk that is there.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bcow::format::hex;
use bcow::lock::FileLock;
use bcow::{LockFileError, LockedFile, NewFile, Storage};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::beneath::open_regular;
use super::directory::{
    lock, meta_failed, open_inside, open_or_create, open_or_create_root, open_root, remove_acls,
    same_device,
};
use super::lock::lock_shared;
use super::overlap::refuse_overlap;
use super::record::{self, DISK, DISK_SCHEMA, DiskRecord, Recorded};
use super::{Driver, FileSystem, HeldUpper, ImageName, META, UpperError, volatile, work};
use crate::options::SyncPolicy;

/// Permission bits with which other users can write.
const OTHERS_WRITE: u32 = 0o022;
/// How many times the disk is opened again because another file took its name.
const MAX_REPLACEMENTS: u32 = 100;

/// The driver that the upper at `path` belongs to; `None` if no mount has begun an upper there, or
/// nothing is there. A directory that overlayfs filled belongs to no driver yet.
pub fn driver_of(path: &Path) -> Result<Option<Driver>, UpperError> {
    let root = match open_root(path) {
        Err(UpperError::Missing(_)) => return Ok(None),
        other => other?,
    };
    match open_inside(root.as_fd(), path, META)? {
        Some(meta) => Ok(Recorded::read(meta.as_fd(), path)?.driver()),
        None => Ok(None),
    }
}

/// An upper of the kernel driver, open for writing. Only this process may change it.
#[derive(Debug)]
pub struct DiskInstance {
    path: PathBuf,
    root: OwnedFd,
    meta: OwnedFd,
    record: Option<DiskRecord>,
    disk: Option<LockedFile>,
    /// See [`DiskInstance::continues`].
    continues: bool,
    /// Dropped after the disk.
    lock: FileLock,
}

impl DiskInstance {
    /// Opens the upper at `path` for writing, with the image `image`, or begins one. A missing
    /// directory is created with mode 0700 if its parent exists. `note` is stored with the locks;
    /// other processes that find the upper locked show it.
    ///
    /// The caller completes an upper that has no disk or no record.
    pub fn open(path: &Path, image: ImageName<'_>, note: &str) -> Result<Self, UpperError> {
        refuse_overlap(path)?;
        let (root, _) = open_or_create_root(path)?;
        // Before anything is created in a directory that is no upper of this driver.
        let names = names_beside_meta(root.as_fd(), path)?;
        let meta = match open_inside(root.as_fd(), path, META)? {
            Some(meta) => meta,
            None if names > 0 => return Err(UpperError::NotEmpty(path.to_owned())),
            None => open_or_create(root.as_fd(), path, META)?,
        };
        refuse_other_driver(&Recorded::read(meta.as_fd(), path)?, path)?;
        let instance = DiskInstance::lock(path, root, meta, note, None)?;
        instance.require_image(image)?;
        match (&instance.record, &instance.disk) {
            (Some(_), None) => Err(missing_disk(path)),
            (None, None) if names > 0 => Err(UpperError::NotEmpty(path.to_owned())),
            _ => Ok(instance),
        }
    }

    /// As [`DiskInstance::open`], for an upper that another process has used until it ended.
    /// `disk` is the disk of that process, which has kept its lock; the upper must have no other
    /// disk. `held` is the upper itself; `None` if it was not kept, and is at `path`.
    pub fn open_again(
        path: &Path,
        image: ImageName<'_>,
        note: &str,
        disk: &File,
        held: Option<&HeldUpper>,
    ) -> Result<Self, UpperError> {
        refuse_overlap(path)?;
        let root = match held {
            Some(held) => held.open_root(path)?,
            None => open_root(path)?,
        };
        let meta = existing_meta(&root, path)?;
        let instance = DiskInstance::lock(path, root, meta, note, Some((disk, held)))?;
        instance.require_image(image)?;
        Ok(instance)
    }

    /// Opens an existing upper of any image, for repair.
    pub fn open_existing(path: &Path, note: &str) -> Result<Self, UpperError> {
        let root = open_root(path)?;
        let meta = existing_meta(&root, path)?;
        DiskInstance::lock(path, root, meta, note, None)
    }

    fn require_image(&self, image: ImageName<'_>) -> Result<(), UpperError> {
        self.record.as_ref().map_or(Ok(()), |record| {
            record::require_image(&self.path, record.identity(), &record.image_name, image)
        })
    }

    /// Locks the upper, and reads what it has.
    fn lock(
        path: &Path,
        root: OwnedFd,
        meta: OwnedFd,
        note: &str,
        before: Option<(&File, Option<&HeldUpper>)>,
    ) -> Result<Self, UpperError> {
        same_device(root.as_fd(), meta.as_fd(), path, "")?;
        require_own(meta.as_fd(), path.join(META))?;
        let held = before.and_then(|(_, held)| held);
        let lock = lock(meta.as_fd(), path, note, held)?;
        remove_acls(meta.as_fd(), path)?;
        // Read with the lock: another process may have begun the upper.
        let recorded = Recorded::read(meta.as_fd(), path)?;
        refuse_other_driver(&recorded, path)?;
        let mut instance = DiskInstance {
            path: path.to_owned(),
            root,
            meta,
            record: match recorded {
                Recorded::Disk(record) => Some(record),
                _ => None,
            },
            disk: None,
            continues: true,
            lock,
        };
        instance.remove_temporaries();
        instance.disk = match before {
            Some((file, _)) => {
                let file = rustix::io::fcntl_dupfd_cloexec(file, 0)
                    .map_err(|errno| UpperError::io(&instance.disk_path(), "open it", errno))?;
                let disk = instance.lock_disk(file.into(), note)?;
                let (disk, continues) = disk.ok_or_else(|| replaced(path))?;
                instance.continues = continues;
                Some(disk)
            }
            None => instance.open_disk(note)?,
        };
        Ok(instance)
    }

    /// What another process needs to continue with the upper, beside its disk.
    pub fn hold(&self) -> io::Result<HeldUpper> {
        HeldUpper::new(self.root.as_fd(), self.lock.file())
    }

    /// The path of the upper.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn disk_path(&self) -> PathBuf {
        disk_path(&self.path)
    }

    /// The content of its `instance.json`; `None` until the upper is complete.
    pub fn record(&self) -> Option<&DiskRecord> {
        self.record.as_ref()
    }

    /// The bytes of the disk; `None` if it is still to be made.
    pub fn disk(&self) -> Option<Arc<dyn Storage>> {
        self.disk.as_ref().map(LockedFile::storage)
    }

    /// The open file of the disk.
    pub fn disk_file(&self) -> Option<&File> {
        self.disk.as_ref().map(LockedFile::file)
    }

    /// Whether the disk is that of the process that has ended, and not a new one over it: see
    /// [`LockedFile::continue_with`].
    pub fn continues(&self) -> bool {
        self.continues
    }

    /// Hands the file of the disk over, with its lock. The lock of the upper stays.
    pub fn take_disk(&mut self) -> Option<LockedFile> {
        self.disk.take()
    }

    /// Begins the file of the disk. It gets its name by [`DiskInstance::complete_disk`].
    pub fn new_disk(&self) -> Result<NewFile, UpperError> {
        // By the open directory: the path could lead to another one by now.
        let within = format!("/proc/self/fd/{}/{DISK}", self.meta.as_raw_fd());
        let failed = |source| UpperError::MakeDisk {
            path: self.disk_path(),
            source,
        };
        let new = NewFile::create_new(Path::new(&within)).map_err(failed)?;
        // The umask may allow more.
        rustix::fs::fchmod(new.file(), Mode::from_raw_mode(0o600))
            .map_err(|errno| UpperError::io(&self.disk_path(), "set its mode", errno))?;
        Ok(new)
    }

    /// Gives the filled file of the disk its name, and opens the disk.
    pub fn complete_disk(&mut self, new: NewFile, note: &str) -> Result<(), UpperError> {
        new.complete().map_err(|source| UpperError::MakeDisk {
            path: self.disk_path(),
            source,
        })?;
        self.disk = self.open_disk(note)?;
        match self.disk {
            Some(_) => Ok(()),
            None => Err(missing_disk(&self.path)),
        }
    }

    /// Writes the record of an upper that has its disk: a file system of `size` bytes, over
    /// `image`. The upper is complete then.
    pub fn complete(
        &mut self,
        fs: FileSystem,
        size: u64,
        image: ImageName<'_>,
    ) -> Result<(), UpperError> {
        let record = DiskRecord {
            schema: DISK_SCHEMA.into(),
            driver: Driver::Kernel,
            fs,
            size,
            image: hex(&image.identity),
            image_name: image.name.into(),
            created_by: concat!("bcow ", env!("CARGO_PKG_VERSION")).into(),
        };
        record::write(&record, self.meta.as_fd(), &self.path)?;
        rustix::fs::fsync(&self.root)
            .map_err(|errno| UpperError::io(&self.path, "synchronize it", errno))?;
        self.record = Some(record);
        Ok(())
    }

    /// Records that the file system has `size` bytes, if it was larger.
    pub fn shrink_to(&mut self, size: u64) -> Result<(), UpperError> {
        let Some(record) = self.record.as_mut().filter(|record| record.size > size) else {
            return Ok(());
        };
        record.size = size;
        record::write(record, self.meta.as_fd(), &self.path)
    }

    /// Refuses an upper whose last use was volatile and did not end before a reboot. Leaves a note
    /// if this use is volatile.
    pub fn refuse_after_volatile(&self, policy: SyncPolicy) -> Result<(), UpperError> {
        volatile::refuse_after_volatile(&self.path, self.root.as_fd(), self.meta.as_fd(), policy)
    }

    /// Removes the note of a volatile use, which has ended.
    pub fn forget_volatile(&self) -> Result<(), UpperError> {
        volatile::forget(self.meta.as_fd())
            .map_err(|errno| UpperError::io(&self.path, "remove a note from it", errno))
    }

    /// Removes files that an interrupted writer left without their final name. A file that stays
    /// does no harm.
    fn remove_temporaries(&self) {
        for name in work::list(self.meta.as_fd()).unwrap_or_default() {
            if name.starts_with(b".bcow-") && name.ends_with(b".part") {
                let _ = work::unlink(self.meta.as_fd(), &name);
            }
        }
    }

    fn open_disk(&self, note: &str) -> Result<Option<LockedFile>, UpperError> {
        for _ in 0..MAX_REPLACEMENTS {
            let meta = self.meta.as_fd();
            let file = open_disk_file(meta, &self.path, DISK, OFlags::RDWR)?;
            let Some(file) = file else { return Ok(None) };
            require_own(file.as_fd(), self.disk_path())?;
            // The previous holder of the lock may have replaced the file.
            if let Some((disk, _)) = self.lock_disk(file, note)? {
                return Ok(Some(disk));
            }
        }
        Err(replaced(&self.path))
    }

    /// As [`LockedFile::continue_with`]; `None` if another file has its name.
    fn lock_disk(&self, file: File, note: &str) -> Result<Option<(LockedFile, bool)>, UpperError> {
        match LockedFile::continue_with(file, &self.disk_path(), note) {
            Ok(disk) => Ok(Some(disk)),
            Err(LockFileError::Replaced) => Ok(None),
            Err(LockFileError::Lock(holder)) => Err(UpperError::InUse(self.path.clone(), holder)),
            Err(error) => {
                let errno = match &error {
                    LockFileError::Open(error) => Errno::from_io_error(error),
                    _ => None,
                };
                let errno = errno.unwrap_or(Errno::IO);
                Err(UpperError::io(&self.disk_path(), "open it", errno))
            }
        }
    }
}

/// Opens [`META`] of an upper that must have been begun.
fn existing_meta(root: &OwnedFd, path: &Path) -> Result<OwnedFd, UpperError> {
    work::open_directory(root.as_fd(), META.as_bytes())
        .map_err(|errno| meta_failed(path, META, errno))
}

/// An upper of the kernel driver that no process writes to while this lives.
#[derive(Debug)]
pub struct DiskReader {
    path: PathBuf,
    meta: OwnedFd,
    record: DiskRecord,
    /// The name of the disk in [`META`].
    name: String,
    disk: Arc<File>,
    _lock: Option<File>,
}

impl DiskReader {
    /// Opens the upper at `path` for reading. Fails if a writer holds its lock, and with
    /// [`UpperError::Incomplete`] if no mount has completed it.
    pub fn open(path: &Path) -> Result<Self, UpperError> {
        DiskReader::open_file(path, DISK)
    }

    /// As [`DiskReader::open`], for the snapshot in the file `snapshot` beside the disk. The upper
    /// may be in use.
    pub fn open_snapshot(path: &Path, snapshot: &str) -> Result<Self, UpperError> {
        DiskReader::open_file(path, snapshot)
    }

    fn open_file(path: &Path, name: &str) -> Result<Self, UpperError> {
        let root = open_root(path)?;
        let meta = work::open_directory(root.as_fd(), META.as_bytes())
            .map_err(|errno| meta_failed(path, META, errno))?;
        let lock = if name == DISK { lock_shared(meta.as_fd(), path)? } else { None };
        let recorded = Recorded::read(meta.as_fd(), path)?;
        refuse_other_driver(&recorded, path)?;
        let Recorded::Disk(record) = recorded else {
            return Err(UpperError::Incomplete(path.to_owned()));
        };
        let disk = open_disk_file(meta.as_fd(), path, name, OFlags::RDONLY)?;
        let disk = disk.ok_or_else(|| missing_disk(path))?;
        // Another program than a mount can have the disk open.
        FileLock::shared(&disk).map_err(|holder| UpperError::InUse(path.to_owned(), holder))?;
        Ok(DiskReader {
            path: path.to_owned(),
            meta,
            record,
            name: name.to_owned(),
            disk: Arc::new(disk),
            _lock: lock,
        })
    }

    /// The path of the upper.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn disk_path(&self) -> PathBuf {
        self.path.join(META).join(&self.name)
    }

    /// The content of its `instance.json`.
    pub fn record(&self) -> &DiskRecord {
        &self.record
    }

    /// The bytes of the disk.
    pub fn disk(&self) -> Arc<dyn Storage> {
        Arc::clone(&self.disk) as Arc<dyn Storage>
    }

    /// Whether the machine stopped while the upper was mounted with `--sync volatile`. The file
    /// system on the disk may then be damaged in any way. A snapshot is never lost.
    pub fn is_lost(&self) -> Result<bool, UpperError> {
        if self.name != DISK {
            return Ok(false);
        }
        volatile::is_lost(self.meta.as_fd(), &self.path)
    }
}

/// The path of the disk of an upper of the kernel driver.
pub fn disk_path(upper: &Path) -> PathBuf {
    upper.join(META).join(DISK)
}

/// The number of names in the root of an upper, without [`META`].
fn names_beside_meta(root: BorrowedFd<'_>, path: &Path) -> Result<usize, UpperError> {
    let names = work::list(root).map_err(|errno| UpperError::io(path, "list it", errno))?;
    Ok(names.iter().filter(|name| *name != META.as_bytes()).count())
}

fn replaced(upper: &Path) -> UpperError {
    UpperError::io(&disk_path(upper), "open it", Errno::BUSY)
}

fn missing_disk(upper: &Path) -> UpperError {
    UpperError::Record {
        path: disk_path(upper),
        problem: "it is missing".into(),
    }
}

/// Opens the file of the disk; `None` if it is missing.
fn open_disk_file(
    meta: BorrowedFd<'_>,
    upper: &Path,
    name: &str,
    flags: OFlags,
) -> Result<Option<File>, UpperError> {
    match open_regular(meta, name, flags) {
        Ok(file) => Ok(Some(file.into())),
        Err(Errno::NOENT) => Ok(None),
        Err(Errno::INVAL) => Err(UpperError::Record {
            path: disk_path(upper),
            problem: "it is not a regular file".into(),
        }),
        Err(errno) => Err(UpperError::io(&disk_path(upper), "open it", errno)),
    }
}

fn refuse_other_driver(recorded: &Recorded, path: &Path) -> Result<(), UpperError> {
    match recorded.driver() {
        Some(Driver::Fuse) => Err(UpperError::OtherDriver {
            path: path.to_owned(),
            driver: Driver::Fuse,
        }),
        _ => Ok(()),
    }
}

/// Fails unless only this user and root can have written a file, or the names in a directory.
fn require_own(file: BorrowedFd<'_>, path: PathBuf) -> Result<(), UpperError> {
    let stat = rustix::fs::fstat(file).map_err(|errno| UpperError::io(&path, "open it", errno))?;
    let own = rustix::process::geteuid().as_raw();
    if [own, 0].contains(&stat.st_uid) && stat.st_mode & OTHERS_WRITE == 0 {
        Ok(())
    } else {
        Err(UpperError::Foreign(path))
    }
}

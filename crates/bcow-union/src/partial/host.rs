//! The upper's files and maps, as partial files use them. Tests replace these traits to inject
//! failures and power cuts.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use bcow::sync::Mutex;
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

use super::locks::lock;
use crate::Seek;
use crate::account::Account;
use crate::host::{HostFile, stored_bytes};
use crate::upper::beneath::{is_not_regular_error, open_regular};
use crate::upper::{
    Attribute, Mark, Metacopy, Namespace, PartialMark, REDIRECT_NOWHERE, entry_name,
};

/// The file of the upper that holds a partial file, and the marks on it. The host applies changes
/// of size, marks and names in order, also across a power cut.
pub trait MarkedFile: Send + Sync {
    /// The file's content.
    fn content(&self) -> &dyn HostFile;
    /// Sets the partial file mark: makes the file a partial file, or changes the fields of the
    /// mark.
    fn set_mark(&self, mark: &PartialMark) -> io::Result<()>;
    /// Sets a redirect and a metacopy mark with which overlayfs rejects the file instead of showing
    /// wrong content.
    fn set_reject_marks(&self) -> io::Result<()>;
    /// Restores the metadata copy that the file was before [`MarkedFile::set_mark`] and
    /// [`MarkedFile::set_reject_marks`], whether these succeeded or not.
    fn restore_marks(&self) -> io::Result<()>;
    /// Removes all marks of a partial file: makes the file a plain file.
    fn remove_marks(&self) -> io::Result<()>;
}

/// The storage of the maps of partial files.
pub trait MapStore: Send + Sync {
    /// Opens the map of partial file `id`, if there is one. Fails with
    /// [`io::ErrorKind::InvalidData`] if an object that is not a regular file has its name.
    fn open(&self, id: u64) -> io::Result<Option<Arc<dyn HostFile>>>;
    /// Creates an empty temporary file for a new map.
    fn create(&self, id: u64) -> io::Result<Arc<dyn HostFile>>;
    /// Makes the file that was created last the map, atomically (rename).
    fn publish(&self, id: u64) -> io::Result<()>;
    /// Returns when the names in the directory of maps are durable.
    fn sync(&self) -> io::Result<()>;
    /// Whether the host stores holes in files and reports them (lseek(2) with SEEK_DATA).
    fn has_holes(&self) -> io::Result<bool>;
    /// Removes the map and its temporary file, if they exist.
    fn remove(&self, id: u64) -> io::Result<()>;
    /// The path of the map, for messages.
    fn path(&self, id: u64) -> PathBuf;
    /// Keeps this many bytes of the host for later changes of maps; 0 frees them.
    fn reserve(&self, bytes: u64) -> io::Result<()> {
        let _ = bytes;
        Ok(())
    }
    /// Updates the counted space of the map, whose file is `file`, after a change.
    fn measure(&self, id: u64, file: &dyn HostFile) -> io::Result<()> {
        let _ = (id, file);
        Ok(())
    }
}

/// A file of an upper on the host's file system.
pub(super) struct UpperFile {
    file: File,
    namespace: Namespace,
    /// The redirect that the file had before it became a partial file, if this object set the
    /// marks.
    redirect: OnceLock<Option<Vec<u8>>>,
}

impl UpperFile {
    pub(super) fn new(file: File, namespace: Namespace) -> Self {
        UpperFile {
            file,
            namespace,
            redirect: OnceLock::new(),
        }
    }

    fn at(&self) -> Attribute<'_> {
        Attribute::Open(self.file.as_fd())
    }

    fn set(&self, mark: Mark, value: &[u8]) -> io::Result<()> {
        Ok(mark.set(self.at(), self.namespace, value)?)
    }

    fn clear(&self, mark: Mark) -> io::Result<()> {
        mark.clear(self.at(), self.namespace)?;
        Ok(())
    }
}

impl MarkedFile for UpperFile {
    fn content(&self) -> &dyn HostFile {
        &self.file
    }
    fn set_mark(&self, mark: &PartialMark) -> io::Result<()> {
        self.set(Mark::Partial, &mark.encode())
    }
    fn set_reject_marks(&self) -> io::Result<()> {
        if self.redirect.get().is_none() {
            let before = self.at().get(Mark::Redirect.name(self.namespace))?;
            let _ = self.redirect.set(before);
        }
        self.set(Mark::Redirect, REDIRECT_NOWHERE)?;
        match Metacopy::Partial.encode() {
            Some(value) => self.set(Mark::Metacopy, value),
            None => Ok(()),
        }
    }
    fn restore_marks(&self) -> io::Result<()> {
        // The partial file mark is removed last. As long as it exists, the file is a partial file
        // without stored blocks, and shows the same content as the metadata copy.
        if let Some(value) = Metacopy::Whole.encode() {
            self.set(Mark::Metacopy, value)?;
        }
        match self.redirect.get() {
            Some(Some(redirect)) => self.set(Mark::Redirect, redirect)?,
            Some(None) => self.clear(Mark::Redirect)?,
            // The redirect was not changed.
            None => {}
        }
        self.clear(Mark::Partial)
    }
    fn remove_marks(&self) -> io::Result<()> {
        // The order matters. A complete partial file reads the same with and without the metacopy
        // mark. But a file with a metacopy mark and without the partial file mark would be a
        // metadata copy of the lower file.
        for mark in [Mark::Metacopy, Mark::Partial, Mark::Redirect] {
            self.clear(mark)?;
        }
        Ok(())
    }
}

/// The directories of an upper that hold the maps and temporary files.
///
/// A map is measured after each change, even if it grows beyond the limit: the blocks that the new
/// records list are already written, and take at least sixteen times as much space.
pub(super) struct MapDirectory {
    maps: OwnedFd,
    work: OwnedFd,
    path: PathBuf,
    account: Arc<Account>,
    /// A file without a name, which takes the reserved space.
    reserved: Mutex<Option<File>>,
}

impl MapDirectory {
    /// `path` is the path of the directory `maps`, for messages.
    pub(super) fn new(maps: OwnedFd, work: OwnedFd, path: PathBuf, account: Arc<Account>) -> Self {
        MapDirectory {
            maps,
            work,
            path,
            account,
            reserved: Mutex::default(),
        }
    }

    fn measure_directory(&self) -> io::Result<()> {
        if !self.account.is_limited() {
            return Ok(());
        }
        let stat = || rustix::fs::fstat(&self.maps);
        let stored = || Ok(stored_bytes(&stat()?));
        self.account.measure(stat()?.st_ino, stored)
    }
}

fn temporary_name(id: u64) -> String {
    format!("map-{id:016x}")
}

impl MapStore for MapDirectory {
    fn open(&self, id: u64) -> io::Result<Option<Arc<dyn HostFile>>> {
        match open_regular(self.maps.as_fd(), &entry_name(id), OFlags::RDWR) {
            Ok(file) => Ok(Some(Arc::new(File::from(file)))),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) if is_not_regular_error(errno) => Err(io::ErrorKind::InvalidData.into()),
            Err(errno) => Err(errno.into()),
        }
    }
    fn create(&self, id: u64) -> io::Result<Arc<dyn HostFile>> {
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(0o600);
        let file = rustix::fs::openat(&self.work, temporary_name(id), flags, mode)?;
        Ok(Arc::new(File::from(file)))
    }
    fn publish(&self, id: u64) -> io::Result<()> {
        rustix::fs::renameat(&self.work, temporary_name(id), &self.maps, entry_name(id))?;
        self.measure_directory()
    }
    fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.maps)?)
    }
    fn has_holes(&self) -> io::Result<bool> {
        const SIZE: u64 = 1 << 20;
        let name = "holes";
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC | OFlags::NOFOLLOW;
        let mode = Mode::from_raw_mode(0o600);
        let file = rustix::fs::openat(&self.work, name, flags | OFlags::CLOEXEC, mode)?;
        let file = File::from(file);
        rustix::fs::unlinkat(&self.work, name, AtFlags::empty())?;
        // A host without support for holes reports the whole file as data.
        file.set_size(SIZE)?;
        HostFile::write_at(&file, SIZE - 1, &[1])?;
        let data = HostFile::seek(&file, 0, Seek::Data)?;
        Ok(data.is_some_and(|at| at >= SIZE / 2) && file.stored_bytes()? < SIZE / 2)
    }
    fn remove(&self, id: u64) -> io::Result<()> {
        for (dir, name) in [
            (&self.work, temporary_name(id)),
            (&self.maps, entry_name(id)),
        ] {
            match rustix::fs::unlinkat(dir, &name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => {}
                // A directory that does not belong to bcow has the name. It is removed only if it
                // is empty.
                Err(Errno::ISDIR) => match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
                    Ok(()) | Err(Errno::NOENT | Errno::NOTEMPTY) => {}
                    Err(errno) => return Err(errno.into()),
                },
                Err(errno) => return Err(errno.into()),
            }
        }
        self.account.forget_map(id);
        self.measure_directory()
    }
    fn path(&self, id: u64) -> PathBuf {
        self.path.join(entry_name(id))
    }
    fn reserve(&self, bytes: u64) -> io::Result<()> {
        let mut reserved = lock(&self.reserved);
        let file = match reserved.take() {
            Some(file) => file,
            None if bytes == 0 => return Ok(()),
            None => {
                let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
                let mode = Mode::from_raw_mode(0o600);
                File::from(rustix::fs::openat(&self.work, ".", flags, mode)?)
            }
        };
        let file = reserved.insert(file);
        let before = file.size()?;
        file.set_size(bytes)?;
        if bytes > before {
            // A host that becomes full allocates a part.
            file.allocate(0, bytes)
                .inspect_err(|_| drop(file.set_size(before)))?;
        }
        Ok(())
    }
    fn measure(&self, id: u64, file: &dyn HostFile) -> io::Result<()> {
        self.account.measure_map(id, || file.stored_bytes())
    }
}

//! The host's file system as sketches use it. Tests replace these traits to inject failures and
//! power cuts.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use rustix::fs::{
    AtFlags, FallocateFlags, Mode, OFlags, SeekFrom, Timespec, Timestamps, UTIME_OMIT,
};
use rustix::io::Errno;

use crate::Seek;
use crate::upper::beneath::{is_no_regular_file, open_regular};
use crate::upper::{Attribute, Mark, Metacopy, Namespace, REDIRECT_NOWHERE, SketchMark};

/// A regular file of the host.
pub trait HostFile: Send + Sync {
    /// Size in bytes.
    fn size(&self) -> io::Result<u64>;
    /// Bytes of the host's disk that the file takes.
    fn stored_bytes(&self) -> io::Result<u64>;
    /// The inode number. It is unique among the files of the host that exist.
    fn inode(&self) -> io::Result<u64>;
    /// Reads at `offset` and returns the number of bytes read. A short read is possible at the end
    /// of the file and anywhere else.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize>;
    /// Writes at `offset` and returns the number of bytes written: at least one. A short write is
    /// possible.
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<usize>;
    /// Truncates the file, or extends it with zeros.
    fn set_size(&self, size: u64) -> io::Result<()>;
    /// Makes a range read as zeros and frees its space. The size does not change. Fails with
    /// [`io::ErrorKind::Unsupported`] if the host cannot punch holes.
    fn punch(&self, offset: u64, length: u64) -> io::Result<()>;
    /// Allocates space for a range. Size and content do not change.
    fn allocate(&self, offset: u64, length: u64) -> io::Result<()>;
    /// The offset of the first byte of data, or of the first byte in a hole, at or behind `offset`;
    /// `None` if there is none before the end of the file.
    fn seek(&self, offset: u64, what: Seek) -> io::Result<Option<u64>>;
    /// The time of last modification.
    fn modified(&self) -> io::Result<Timespec>;
    /// Sets the time of last modification. The time of last access does not change.
    fn set_modified(&self, at: Timespec) -> io::Result<()>;
    /// Returns when the content is durable, together with the metadata that is needed to read it
    /// (fdatasync).
    fn sync_data(&self) -> io::Result<()>;
    /// Returns when content and attributes are durable (fsync).
    fn sync_all(&self) -> io::Result<()>;
}

/// The file of the upper that holds a sketch, and the marks on it. The host applies changes of
/// size, marks and names in order, also across a power cut.
pub trait MarkedFile: Send + Sync {
    /// The file's content.
    fn content(&self) -> &dyn HostFile;
    /// Sets the sketch mark: makes the file a sketch, or changes the fields of the mark.
    fn set_mark(&self, mark: &SketchMark) -> io::Result<()>;
    /// Sets a redirect and a metacopy mark with which overlayfs rejects the file instead of showing
    /// wrong content.
    fn set_foreign(&self) -> io::Result<()>;
    /// Restores the metadata copy that the file was before [`MarkedFile::set_mark`] and
    /// [`MarkedFile::set_foreign`], whether these succeeded or not.
    fn take_marks_back(&self) -> io::Result<()>;
    /// Removes all marks of a sketch: makes the file a plain file.
    fn remove_marks(&self) -> io::Result<()>;
}

/// The storage of the maps of sketches.
pub trait MapStore: Send + Sync {
    /// Opens the map of sketch `id`, if there is one. Fails with [`io::ErrorKind::InvalidData`] if
    /// an object that is not a regular file has its name.
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
}

impl HostFile for File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }
    fn stored_bytes(&self) -> io::Result<u64> {
        Ok(self.metadata()?.blocks().saturating_mul(512))
    }
    fn inode(&self) -> io::Result<u64> {
        Ok(self.metadata()?.ino())
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        retry(|| FileExt::read_at(self, buf, offset))
    }
    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<usize> {
        match retry(|| FileExt::write_at(self, data, offset))? {
            0 if !data.is_empty() => Err(io::ErrorKind::WriteZero.into()),
            written => Ok(written),
        }
    }
    fn set_size(&self, size: u64) -> io::Result<()> {
        self.set_len(size)
    }
    fn punch(&self, offset: u64, length: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(self, flags, offset, length) {
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Err(io::ErrorKind::Unsupported.into()),
            other => Ok(other?),
        }
    }
    fn allocate(&self, offset: u64, length: u64) -> io::Result<()> {
        Ok(rustix::fs::fallocate(
            self,
            FallocateFlags::KEEP_SIZE,
            offset,
            length,
        )?)
    }
    fn seek(&self, offset: u64, what: Seek) -> io::Result<Option<u64>> {
        let from = match what {
            Seek::Data => SeekFrom::Data(offset),
            Seek::Hole => SeekFrom::Hole(offset),
        };
        match rustix::fs::seek(self, from) {
            Ok(at) => Ok(Some(at)),
            Err(Errno::NXIO) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }
    fn modified(&self) -> io::Result<Timespec> {
        let metadata = self.metadata()?;
        Ok(Timespec {
            tv_sec: metadata.mtime(),
            tv_nsec: metadata.mtime_nsec(),
        })
    }
    fn set_modified(&self, at: Timespec) -> io::Result<()> {
        let times = Timestamps {
            last_access: Timespec {
                tv_sec: 0,
                tv_nsec: UTIME_OMIT,
            },
            last_modification: at,
        };
        Ok(rustix::fs::futimens(self, &times)?)
    }
    fn sync_data(&self) -> io::Result<()> {
        File::sync_data(self)
    }
    fn sync_all(&self) -> io::Result<()> {
        File::sync_all(self)
    }
}

fn retry<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// A file of an upper on the host's file system.
pub(super) struct UpperFile {
    file: File,
    namespace: Namespace,
    /// The redirect that the file had before it became a sketch, if this object set the marks.
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
    fn set_mark(&self, mark: &SketchMark) -> io::Result<()> {
        self.set(Mark::Sketch, &mark.encode())
    }
    fn set_foreign(&self) -> io::Result<()> {
        if self.redirect.get().is_none() {
            let before = self.at().get(Mark::Redirect.name(self.namespace))?;
            let _ = self.redirect.set(before);
        }
        self.set(Mark::Redirect, REDIRECT_NOWHERE)?;
        match Metacopy::Sketch.encode() {
            Some(value) => self.set(Mark::Metacopy, value),
            None => Ok(()),
        }
    }
    fn take_marks_back(&self) -> io::Result<()> {
        // The sketch mark is removed last. As long as it exists, the file is a sketch without
        // stored blocks, and shows the same content as the metadata copy.
        if let Some(value) = Metacopy::Whole.encode() {
            self.set(Mark::Metacopy, value)?;
        }
        match self.redirect.get() {
            Some(Some(redirect)) => self.set(Mark::Redirect, redirect)?,
            Some(None) => self.clear(Mark::Redirect)?,
            // The redirect was not changed.
            None => {}
        }
        self.clear(Mark::Sketch)
    }
    fn remove_marks(&self) -> io::Result<()> {
        // The order matters. A complete sketch reads the same with and without the metacopy mark.
        // But a file with a metacopy mark and without the sketch mark would be a metadata copy of
        // the lower file.
        for mark in [Mark::Metacopy, Mark::Sketch, Mark::Redirect] {
            self.clear(mark)?;
        }
        Ok(())
    }
}

/// The directories of an upper that hold the maps and temporary files.
pub(super) struct MapDirectory {
    maps: OwnedFd,
    work: OwnedFd,
    path: PathBuf,
}

impl MapDirectory {
    /// `path` is the path of the directory `maps`, for messages.
    pub(super) fn new(maps: OwnedFd, work: OwnedFd, path: &Path) -> Self {
        MapDirectory {
            maps,
            work,
            path: path.to_owned(),
        }
    }
}

/// The file name of a sketch's map: its number in 16 hexadecimal digits.
pub fn map_name(id: u64) -> String {
    format!("{id:016x}")
}

fn temporary_name(id: u64) -> String {
    format!("map-{id:016x}")
}

impl MapStore for MapDirectory {
    fn open(&self, id: u64) -> io::Result<Option<Arc<dyn HostFile>>> {
        match open_regular(self.maps.as_fd(), &map_name(id), OFlags::RDWR) {
            Ok(file) => Ok(Some(Arc::new(File::from(file)))),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) if is_no_regular_file(errno) => Err(io::ErrorKind::InvalidData.into()),
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
        Ok(rustix::fs::renameat(
            &self.work,
            temporary_name(id),
            &self.maps,
            map_name(id),
        )?)
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
        for (dir, name) in [(&self.work, temporary_name(id)), (&self.maps, map_name(id))] {
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
        Ok(())
    }
    fn path(&self, id: u64) -> PathBuf {
        self.path.join(map_name(id))
    }
}

/// Writes all of `data`.
pub(super) fn write_all(file: &dyn HostFile, offset: u64, data: &[u8]) -> io::Result<()> {
    let mut done = 0;
    while done < data.len() {
        done += file.write_at(offset + done as u64, &data[done..])?;
    }
    Ok(())
}

/// Fills `buf`. Bytes beyond the end of the file are zeros.
pub(super) fn read_all(file: &dyn HostFile, offset: u64, buf: &mut [u8]) -> io::Result<()> {
    let mut done = 0;
    while done < buf.len() {
        match file.read_at(offset + done as u64, &mut buf[done..])? {
            0 => {
                buf[done..].fill(0);
                return Ok(());
            }
            read => done += read,
        }
    }
    Ok(())
}

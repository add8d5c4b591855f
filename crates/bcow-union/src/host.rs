//! Regular files of the host, as the account and the partial files use them. Tests replace the
//! trait to inject failures and power cuts.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use bcow_erofs::reader::FileType;
use rustix::fs::{FallocateFlags, SeekFrom, Stat, Timespec, Timestamps, UTIME_OMIT};
use rustix::io::Errno;

use crate::Seek;

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
    /// `None` if the file ends before one.
    fn seek(&self, offset: u64, what: Seek) -> io::Result<Option<u64>>;
    /// The times of last modification and of last change.
    fn times(&self) -> io::Result<FileTimes>;
    /// Sets the time of last modification. The time of last access does not change.
    fn set_modified(&self, at: Timespec) -> io::Result<()>;
    /// Returns when the content is durable, together with the metadata that is needed to read it
    /// (fdatasync).
    fn sync_data(&self) -> io::Result<()>;
    /// Returns when content and attributes are durable (fsync).
    fn sync_all(&self) -> io::Result<()>;
}

/// Times of a host's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileTimes {
    /// Time of last modification.
    pub modified: Timespec,
    /// Time of last change. The kernel sets it at each change, and a program cannot.
    pub changed: Timespec,
}

/// A change of a host's file that is no change of the file in the mount, for example of its marks.
/// The change time in the mount stays until the next change of the host's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HiddenChange {
    /// Change time of the host's file after the hidden change.
    pub host: Timespec,
    /// Change time in the mount.
    pub shown: Timespec,
}

impl HiddenChange {
    /// The change time in the mount of a file with these times on the host.
    pub fn shown(hidden: Option<Self>, host: FileTimes) -> Timespec {
        match hidden {
            // If both times are equal, a program wrote in the same tick of the host's clock.
            Some(hidden) if hidden.host == host.changed && host.modified != host.changed => {
                hidden.shown
            }
            _ => host.changed,
        }
    }
}

impl HostFile for File {
    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }
    fn stored_bytes(&self) -> io::Result<u64> {
        Ok(stored_bytes(&rustix::fs::fstat(self)?))
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
    fn times(&self) -> io::Result<FileTimes> {
        Ok(file_times(&rustix::fs::fstat(self)?))
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

pub(crate) fn write_all(file: &dyn HostFile, offset: u64, data: &[u8]) -> io::Result<()> {
    let mut done = 0;
    while done < data.len() {
        done += file.write_at(offset + done as u64, &data[done..])?;
    }
    Ok(())
}

/// Fills `buf`. Bytes beyond the end of the file are zeros.
pub(crate) fn read_all(file: &dyn HostFile, offset: u64, buf: &mut [u8]) -> io::Result<()> {
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

/// Bytes of the host's disk that an inode takes.
pub(crate) fn stored_bytes(stat: &Stat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0) * 512
}

/// The times of a host's file.
pub(crate) fn file_times(stat: &Stat) -> FileTimes {
    FileTimes {
        modified: Timespec {
            tv_sec: stat.st_mtime,
            tv_nsec: stat.st_mtime_nsec as i64,
        },
        changed: Timespec {
            tv_sec: stat.st_ctime,
            tv_nsec: stat.st_ctime_nsec as i64,
        },
    }
}

/// The file type in `st_mode`.
pub(crate) fn kind_of(mode: u32) -> FileType {
    // Linux has no other types.
    FileType::from_mode(mode as u16).unwrap_or(FileType::Regular)
}

/// The errno of an error. Errors without an errno come from bcow itself.
pub(crate) fn errno_of(error: &std::io::Error) -> Errno {
    match Errno::from_io_error(error) {
        Some(errno) => errno,
        None if error.kind() == std::io::ErrorKind::StorageFull => Errno::NOSPC,
        None => Errno::IO,
    }
}

//! The interface to the bytes of a file.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustix::fs::{FallocateFlags, SeekFrom};
use rustix::io::Errno;

use crate::Error;

/// Bytes with random access for reads and writes, from several threads at once.
pub trait Storage: Send + Sync {
    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;
    /// Whether the length is 0.
    fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }
    /// Fills `buf` with the bytes at `offset`; [`io::ErrorKind::UnexpectedEof`] beyond the end.
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()>;
    /// Writes all of `bytes` at `offset`; extends the storage if necessary.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Truncates or extends (with zeros) to `bytes` bytes.
    fn set_len(&self, bytes: u64) -> io::Result<()>;
    /// Makes all earlier writes durable, with the length that is needed to read them (fdatasync).
    fn sync(&self) -> io::Result<()>;
    /// Releases the space of a range whose content is no longer needed. The range then reads as
    /// zeros or as before. The length does not change. A storage that cannot release space does
    /// nothing.
    fn punch(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let _ = (offset, bytes);
        Ok(())
    }
    /// Whether new space is much more expensive to make durable than space that was written before:
    /// the host then has to make metadata durable as well. A disk that is often flushed writes
    /// zeros ahead in such a storage.
    fn prefers_written_space(&self) -> bool {
        false
    }
    /// The first byte from `offset` on that is not in a hole, as far as the storage can tell: all
    /// bytes before it are zeros, or beyond the end.
    fn data_from(&self, offset: u64) -> u64 {
        offset
    }
    /// The host file behind the storage, if there is one. Storages with the same identity have the
    /// same bytes.
    fn identity(&self) -> Option<FileIdentity> {
        None
    }
    /// The open file of the host that has exactly the bytes of the storage, for its locks and
    /// attributes.
    fn host_file(&self) -> Option<&File> {
        None
    }
    /// Replaces the content after a read of damaged bytes, if the storage can make it again.
    /// Returns whether another read of the same bytes may succeed.
    fn restore(&self) -> bool {
        false
    }
    /// Identifies the bytes as they are now. Storages with the same version have the same bytes, as
    /// long as none of them is written to. `None` if the storage cannot tell.
    fn version(&self) -> Option<Version> {
        None
    }
}

/// Identifies the content of a storage at one moment; see [`Storage::version`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Version {
    /// A file of the host.
    File {
        /// The file.
        file: FileIdentity,
        /// Its length in bytes.
        bytes: u64,
        /// When its bytes changed last: seconds and nanoseconds.
        modified: (i64, i64),
        /// When its bytes or its attributes changed last (st_ctim). No program can set this time.
        changed: (i64, i64),
    },
    /// Bytes that are checked on every read against a Merkle tree with this root.
    Checked([u8; 32]),
}

/// Identifies a file of the host by device and inode, independent of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
}

/// The operations of [`Storage`] with errors that name the operation and the place.
impl dyn Storage + '_ {
    pub(crate) fn read(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        self.read_at(offset, buf)
            .map_err(|source| Error::io("read", offset, source))
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.write_at(offset, bytes)
            .map_err(|source| Error::io("write", offset, source))
    }

    pub(crate) fn length(&self) -> Result<u64, Error> {
        self.len()
            .map_err(|source| Error::io("get the length", 0, source))
    }

    /// Sets the length. `action` says for the error whether that extends or truncates the file.
    pub(crate) fn set_length(&self, action: &'static str, bytes: u64) -> Result<(), Error> {
        self.set_len(bytes)
            .map_err(|source| Error::io(action, bytes, source))
    }

    pub(crate) fn make_durable(&self) -> Result<(), Error> {
        self.sync().map_err(|source| Error::io("sync", 0, source))
    }
}

impl Storage for File {
    fn len(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.read_exact_at(buf, offset)
    }
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }
    fn set_len(&self, bytes: u64) -> io::Result<()> {
        File::set_len(self, bytes)
    }
    fn sync(&self) -> io::Result<()> {
        // fdatasync: modification times are not needed, and would cost a write of the inode.
        self.sync_data()
    }
    fn punch(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match rustix::fs::fallocate(self, flags, offset, bytes) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
    fn prefers_written_space(&self) -> bool {
        // ext2, ext3 and ext4 share a number. File systems that never overwrite data in place, and
        // those in memory, gain nothing.
        const EXT4: u64 = 0xef53;
        const XFS: u64 = 0x5846_5342;
        let kind = rustix::fs::fstatfs(self).map(|found| found.f_type as u64);
        kind.is_ok_and(|kind| [EXT4, XFS].contains(&kind))
    }
    fn data_from(&self, offset: u64) -> u64 {
        // This moves the offset of the open file, which only a copy of the file uses (copy.rs). It
        // is copied while no operation is in progress, and is not opened as a disk meanwhile.
        match rustix::fs::seek(self, SeekFrom::Data(offset)) {
            Ok(found) => found,
            Err(Errno::NXIO) => u64::MAX,
            Err(_) => offset,
        }
    }
    fn identity(&self) -> Option<FileIdentity> {
        let metadata = self.metadata().ok()?;
        Some(FileIdentity::of(&metadata))
    }
    fn host_file(&self) -> Option<&File> {
        Some(self)
    }
    fn version(&self) -> Option<Version> {
        let metadata = self.metadata().ok()?;
        Some(Version::File {
            file: FileIdentity::of(&metadata),
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }
}

impl FileIdentity {
    fn of(metadata: &std::fs::Metadata) -> Self {
        FileIdentity {
            device: metadata.dev(),
            inode: metadata.ino(),
        }
    }
}

/// Bytes in memory.
#[derive(Debug, Default)]
pub struct MemoryStorage(RwLock<Vec<u8>>);

impl MemoryStorage {
    /// Storage with this content.
    pub fn new(bytes: Vec<u8>) -> Self {
        MemoryStorage(RwLock::new(bytes))
    }

    /// A copy of the content.
    pub fn to_vec(&self) -> Vec<u8> {
        self.bytes().clone()
    }

    // A panic of a lock holder leaves valid bytes, so poisoning is ignored.

    fn bytes(&self) -> RwLockReadGuard<'_, Vec<u8>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn bytes_mut(&self) -> RwLockWriteGuard<'_, Vec<u8>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Storage for MemoryStorage {
    fn len(&self) -> io::Result<u64> {
        Ok(self.bytes().len() as u64)
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let bytes = self.bytes();
        let range = usize::try_from(offset)
            .ok()
            .and_then(|start| bytes.get(start..start.checked_add(buf.len())?))
            .ok_or(io::ErrorKind::UnexpectedEof)?;
        buf.copy_from_slice(range);
        Ok(())
    }
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut all = self.bytes_mut();
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::FileTooLarge)?;
        let end = start
            .checked_add(bytes.len())
            .ok_or(io::ErrorKind::FileTooLarge)?;
        if all.len() < end {
            all.resize(end, 0);
        }
        all[start..end].copy_from_slice(bytes);
        Ok(())
    }
    fn set_len(&self, bytes: u64) -> io::Result<()> {
        let length = usize::try_from(bytes).map_err(|_| io::ErrorKind::FileTooLarge)?;
        self.bytes_mut().resize(length, 0);
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn punch(&self, offset: u64, bytes: u64) -> io::Result<()> {
        let mut all = self.bytes_mut();
        let end = offset.saturating_add(bytes).min(all.len() as u64);
        if offset < end {
            all[offset as usize..end as usize].fill(0);
        }
        Ok(())
    }
    fn data_from(&self, offset: u64) -> u64 {
        let all = self.bytes();
        let rest = all.get(offset as usize..).unwrap_or_default();
        match rest.iter().position(|&byte| byte != 0) {
            Some(zeros) => offset + zeros as u64,
            None => u64::MAX,
        }
    }
}

//! A raw disk: the bytes of a file.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bcow::format::{MAX_ADDRESS, SECTOR_BYTES};
use bcow::{BlockDevice, Error, Status};
use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::{ForeignError, host};

/// A file or block device of the host as a disk.
///
/// The size of the address space is rounded up to sectors of 4096 bytes. Bytes beyond the end of
/// the file read as zeros.
#[derive(Debug)]
pub struct RawDisk {
    file: File,
    bytes: u64,
}

impl RawDisk {
    /// Opens the file or block device at `path` for reading.
    pub fn open(path: &Path) -> Result<RawDisk, ForeignError> {
        let file = host::open(path)?;
        // Only a seek returns the length of a block device.
        let bytes = rustix::fs::seek(&file, SeekFrom::End(0))
            .map_err(ForeignError::io("find the length of", path))?;
        check_size(path, bytes)?;
        Ok(RawDisk { file, bytes })
    }

    /// Length of the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    /// Seeks to the next data or hole. No other method uses the file's position.
    fn seek(&self, to: SeekFrom) -> Result<Option<u64>, Errno> {
        match rustix::fs::seek(&self.file, to) {
            Ok(at) => Ok(Some(at)),
            // No data follows.
            Err(Errno::NXIO) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl BlockDevice for RawDisk {
    fn size(&self) -> u64 {
        self.bytes.next_multiple_of(SECTOR_BYTES)
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        let data = without_padding(offset, buf, self.bytes)?;
        self.file
            .read_exact_at(data, offset)
            .map_err(|source| io_error(offset, source))
    }

    fn status(&self, offset: u64, length: u64) -> Result<Status, Error> {
        let length = length.max(1);
        check(offset, length, self.size())?;
        if offset >= self.bytes {
            return Ok(Status::hole(length));
        }
        match self.seek(SeekFrom::Data(offset)) {
            Ok(None) => Ok(Status::hole(length)),
            Ok(Some(start)) if start > offset => Ok(Status::hole(length.min(start - offset))),
            Ok(Some(_)) => match self.seek(SeekFrom::Hole(offset)) {
                // The rest of the last sector belongs to this piece; it is too short for a piece of
                // its own.
                Ok(Some(end)) if end > offset && end < self.bytes => {
                    Ok(Status::data(length.min(end - offset)))
                }
                _ => Ok(Status::data(length)),
            },
            // The file system or device does not support this.
            Err(_) => Ok(Status::data(length)),
        }
    }
}

/// Fails if a disk of this size does not fit into an address space.
pub(crate) fn check_size(path: &Path, bytes: u64) -> Result<(), ForeignError> {
    if bytes > MAX_ADDRESS {
        let problem = format!("its size in bytes is {bytes}, the limit is {MAX_ADDRESS}");
        return Err(ForeignError::unsuitable(path, problem));
    }
    Ok(())
}

/// The part of `buf` that a file of `bytes` bytes fills. Sets the rest, up to the end of the last
/// sector, to zero.
pub(crate) fn without_padding(offset: u64, buf: &mut [u8], bytes: u64) -> Result<&mut [u8], Error> {
    let length = buf.len() as u64;
    check(offset, length, bytes.next_multiple_of(SECTOR_BYTES))?;
    let there = bytes.saturating_sub(offset).min(length);
    let (data, padding) = buf.split_at_mut(there as usize);
    padding.fill(0);
    Ok(data)
}

pub(crate) fn check(offset: u64, length: u64, size: u64) -> Result<(), Error> {
    match offset.checked_add(length) {
        Some(end) if end <= size => Ok(()),
        _ => Err(Error::OutOfRange {
            offset,
            length,
            size,
        }),
    }
}

pub(crate) fn io_error(offset: u64, source: io::Error) -> Error {
    Error::Io {
        action: "read",
        offset,
        source,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use bcow::Content;

    use super::*;

    #[test]
    fn holes_are_reported_and_the_last_sector_is_complete() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len((8 << 20) + 5).unwrap();
        file.seek(io::SeekFrom::Start(4 << 20)).unwrap();
        file.write_all(&[1; 4096]).unwrap();
        let disk = RawDisk::open(file.path()).unwrap();
        assert_eq!(
            (disk.bytes(), disk.size()),
            ((8 << 20) + 5, (8 << 20) + 4096)
        );
        let mut buf = [9; 4096];
        disk.read_at(8 << 20, &mut buf).unwrap();
        assert_eq!(buf, [0; 4096]);
        let mut seen = Vec::new();
        let mut at = 0;
        while at < disk.size() {
            let status = disk.status(at, disk.size() - at).unwrap();
            seen.push((at, status.content));
            at += status.length;
        }
        // With any block size of the file system, the written range is data.
        assert!(seen.contains(&(4 << 20, Content::Data)), "{seen:?}");
        assert_eq!(seen[0], (0, Content::Hole));
    }

    #[test]
    fn files_that_are_not_disks_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let error = RawDisk::open(directory.path()).unwrap_err().to_string();
        assert!(error.ends_with("it is a directory"), "{error}");
        let error = RawDisk::open(Path::new("/dev/null"))
            .unwrap_err()
            .to_string();
        assert!(error.ends_with("it is not a regular file"), "{error}");
    }
}

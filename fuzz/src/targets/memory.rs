//! Files in memory: one with a path, and one on a host with little space.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use bcow::{MemoryStorage, Storage};
use rustix::fs::MemfdFlags;

/// A file in memory, for code that opens a path.
pub struct MemoryFile(File);

impl MemoryFile {
    pub fn new(bytes: &[u8]) -> Self {
        let descriptor = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC);
        let mut file = File::from(descriptor.expect("a file in memory"));
        file.write_all(bytes).expect("written");
        MemoryFile(file)
    }

    pub fn path(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.0.as_raw_fd()).into()
    }
}

/// A file of a host with little space.
pub struct Small {
    storage: MemoryStorage,
    most_bytes: u64,
}

impl Small {
    /// A file with this content, which can grow to `most_bytes`.
    pub fn new(content: Vec<u8>, most_bytes: u64) -> Self {
        Small {
            storage: MemoryStorage::new(content),
            most_bytes,
        }
    }

    fn fits(&self, end: Option<u64>) -> io::Result<()> {
        match end {
            Some(end) if end <= self.most_bytes => Ok(()),
            _ => Err(io::ErrorKind::StorageFull.into()),
        }
    }
}

impl Storage for Small {
    fn len(&self) -> io::Result<u64> {
        self.storage.len()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.storage.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.fits(offset.checked_add(bytes.len() as u64))?;
        self.storage.write_at(offset, bytes)
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.fits(Some(bytes))?;
        self.storage.set_len(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

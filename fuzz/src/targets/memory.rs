//! Files in memory, with a path.

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

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

//! Any bytes as a disk that is opened for writing: written to, flushed, checked and opened again.

use std::io;
use std::sync::Arc;

use bcow::check::{CheckOptions, check};
use bcow::{
    BlockCache, BlockDevice, Disk, MemoryStorage, OpenOptions, Space, Storage, UnreadBackings,
    Verify, WritableDevice,
};

/// A host's file can grow to this size.
const MOST_BYTES: u64 = 8 << 20;

/// A file of a host with little space.
struct Small(MemoryStorage);

fn fits(end: Option<u64>) -> io::Result<()> {
    match end {
        Some(..=MOST_BYTES) => Ok(()),
        _ => Err(io::ErrorKind::StorageFull.into()),
    }
}

impl Storage for Small {
    fn len(&self) -> io::Result<u64> {
        self.0.len()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, buf)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        fits(offset.checked_add(bytes.len() as u64))?;
        self.0.write_at(offset, bytes)
    }

    fn set_len(&self, bytes: u64) -> io::Result<()> {
        fits(Some(bytes))?;
        self.0.set_len(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

pub fn fuzz(bytes: &[u8]) {
    let storage = Arc::new(Small(MemoryStorage::new(bytes.to_vec())));
    let options = OpenOptions {
        cache: BlockCache::new(1 << 20),
        verify: Verify::Checksums,
    };
    for value in [1, 2] {
        let Ok(disk) = Disk::open(storage.clone(), &options, &UnreadBackings) else {
            break;
        };
        let size = disk.size();
        for at in [0, 4096, 70_000, size / 2, size.saturating_sub(4096)] {
            let _ = disk.write_at(at, &[value; 4096]);
            let _ = disk.write_zeroes(at + 4096, 8192, Space::Free);
            let _ = disk.discard(at / 2, 1 << 20);
            let _ = disk.read_at(at, &mut [0; 4096]);
            let _ = disk.map(at);
            let _ = disk.flush();
        }
        let _ = disk.checkpoint();
        let _ = disk.close();
    }
    let options = CheckOptions {
        data: true,
        threads: 1,
    };
    let _ = check(storage, &options);
}

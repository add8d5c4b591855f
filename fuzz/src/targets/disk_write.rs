//! Any bytes as a disk that is opened for writing: written to, flushed, checked and opened again.

use std::sync::Arc;

use bcow::check::{CheckOptions, check};
use bcow::{
    BlockCache, BlockDevice, Disk, OpenOptions, Space, UnreadBackings, Verify, WritableDevice,
};

use super::memory::Small;

pub fn fuzz(bytes: &[u8]) {
    let storage = Arc::new(Small::new(bytes.to_vec(), 8 << 20));
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

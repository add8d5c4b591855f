//! Any bytes as a BCoW file: checked in full, opened, mapped, read.

use std::sync::Arc;

use bcow::check::{CheckOptions, check};
use bcow::{BlockCache, BlockDevice, Image, MemoryStorage, OpenOptions, Verify};

pub fn fuzz(bytes: &[u8]) {
    let storage = Arc::new(MemoryStorage::new(bytes.to_vec()));
    let options = CheckOptions {
        data: true,
        threads: 1,
    };
    let _ = check(storage.clone(), &options);
    for verify in [Verify::Checksums, Verify::Merkle] {
        let options = OpenOptions {
            cache: BlockCache::new(1 << 20),
            verify,
        };
        let Ok(image) = Image::open_storage(storage.clone(), &options) else {
            continue;
        };
        let _ = image.metadata();
        // An address space may be of any size; its first extents are as good as any.
        for extent in image.extents().take(256) {
            let Ok(extent) = extent else { break };
            let length = extent.length.min(1 << 16);
            let _ = image.read_with(extent.offset, length, &mut |_| ());
            let last = extent.offset + extent.length - 1;
            let _ = image.read_at(last, &mut [0]);
        }
        assert!(image.read_at(image.size(), &mut [0]).is_err());
    }
}

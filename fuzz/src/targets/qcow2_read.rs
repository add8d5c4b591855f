//! Any bytes as a qcow2 disk, mapped and read.

use bcow::BlockDevice;
use bcow_foreign::Qcow2Disk;

use super::memory::MemoryFile;

pub fn fuzz(bytes: &[u8]) {
    let file = MemoryFile::new(bytes);
    let Ok(disk) = Qcow2Disk::open(&file.path(), &[]) else {
        return;
    };
    let mut at = 0;
    let mut buf = [0; 4096];
    // A disk may be of any size; its first extents are as good as any.
    for _ in 0..64 {
        if at >= disk.size() {
            break;
        }
        let Ok(found) = disk.status(at, disk.size() - at) else {
            break;
        };
        assert!(found.length > 0);
        let _ = disk.read_at(at, &mut buf);
        at += found.length;
        let _ = disk.read_at(at.saturating_sub(4096), &mut buf);
    }
    assert!(disk.read_at(disk.size(), &mut buf).is_err());
}

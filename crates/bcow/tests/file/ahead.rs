//! Space that is initialised ahead: a disk that is often flushed writes only where its file was
//! written before, so that the host has no metadata to make durable.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bcow::check::{CheckOptions, check};
use bcow::{CreateOptions, Disk, Image, MemoryStorage, OpenOptions, Storage, WritableDevice};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 4096;

/// Bytes in memory that prefer written space, with the pages that were never written before data
/// other than zeros was written to them.
#[derive(Default)]
struct Pages {
    content: MemoryStorage,
    written: Mutex<HashSet<u64>>,
    grown: Mutex<Vec<u64>>,
    /// Whether writes of at least 64 KiB fail for lack of space.
    is_full: AtomicBool,
}

impl Pages {
    fn take_grown(&self) -> Vec<u64> {
        std::mem::take(&mut self.grown.lock().unwrap())
    }
}

impl Storage for Pages {
    bcow_testkit::forward!(content: len, read_at, set_len);

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if self.is_full.load(Ordering::Relaxed) && bytes.len() >= 64 << 10 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let is_data = bytes.iter().any(|byte| *byte != 0);
        let mut written = self.written.lock().unwrap();
        for page in offset / BLOCK..(offset + bytes.len() as u64).div_ceil(BLOCK) {
            if written.insert(page) && is_data {
                self.grown.lock().unwrap().push(page);
            }
        }
        self.content.write_at(offset, bytes)
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn prefers_written_space(&self) -> bool {
        true
    }
}

fn create(storage: Arc<dyn Storage>) -> Disk {
    Disk::create_alone(storage, &CreateOptions::disk(64 * MIB)).unwrap()
}

/// Writes block after block of the disk, each with a flush.
fn write_and_flush(disk: &Disk, blocks: std::ops::Range<u64>) {
    for block in blocks {
        disk.write_at(block * BLOCK, &[block as u8 | 1; BLOCK as usize])
            .unwrap();
        disk.flush().unwrap();
    }
}

fn wait_for_ready(disk: &Disk) {
    let begun = Instant::now();
    while disk.statistics().zeroed_bytes == 0 {
        assert!(begun.elapsed() < Duration::from_secs(120), "none is ready");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn disk_that_is_often_flushed_writes_to_initialised_space() {
    let storage = Arc::new(Pages::default());
    let disk = create(storage.clone());
    write_and_flush(&disk, 0..4);
    // The background begins after the fourth flush, and can overtake the next ones.
    assert!(storage.take_grown().len() >= 4);
    write_and_flush(&disk, 4..8);
    wait_for_ready(&disk);
    storage.take_grown();
    write_and_flush(&disk, 8..40);
    assert_eq!(storage.take_grown(), Vec::<u64>::new());
    disk.close().unwrap();
    let image = Image::open_storage(storage.clone(), &OpenOptions::default()).unwrap();
    assert_eq!(storage.len().unwrap(), image.header().file_bytes);
    assert_eq!(check(storage, &CheckOptions::FULL).unwrap().findings, []);
}

#[test]
fn few_flushes_or_flushes_of_much_data_initialise_no_space() {
    let storage = Arc::new(Pages::default());
    let disk = create(storage.clone());
    for part in 0..32 {
        disk.write_at(part * MIB, &vec![1; MIB as usize]).unwrap();
        disk.flush().unwrap();
    }
    write_and_flush(&disk, 0..3);
    assert_eq!(disk.statistics().queued_jobs, 0);
    assert_eq!(disk.statistics().zeroed_bytes, 0);
}

#[test]
fn storage_that_gains_nothing_is_not_written_ahead() {
    let disk = create(Arc::new(MemoryStorage::default()));
    write_and_flush(&disk, 0..64);
    assert_eq!(disk.statistics().queued_jobs, 0);
    assert_eq!(disk.statistics().zeroed_bytes, 0);
}

#[test]
fn full_host_stops_the_initialisation_and_nothing_else() {
    let storage = Arc::new(Pages::default());
    let disk = create(storage.clone());
    storage.is_full.store(true, Ordering::Relaxed);
    write_and_flush(&disk, 0..64);
    assert_eq!(disk.statistics().zeroed_bytes, 0);
    let grown = storage.take_grown();
    assert!(grown.len() >= 64, "{}", grown.len());
    disk.close().unwrap();
}

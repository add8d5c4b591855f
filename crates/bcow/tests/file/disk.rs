//! Writable files: reads return written data at once, after a flush, and after the file is opened
//! again.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bcow::{
    BlockDevice, Content, CreateOptions, Disk, DiskForm, Error, Image, ImageWriter, Layout,
    Mapping, MemoryStorage, OneBacking, OpenOptions, Space, Storage, WritableDevice, WriterOptions,
};
use bcow_testkit::{assert_sound, below, content, noise, read};

const MIB: u64 = 1 << 20;

fn create(storage: &Arc<MemoryStorage>, options: CreateOptions) -> Disk {
    Disk::create_alone(storage.clone(), &options).unwrap()
}

fn layouts(size: u64) -> Vec<CreateOptions> {
    let with = |layout, block_bytes| CreateOptions {
        layout,
        block_bytes,
        ..CreateOptions::disk(size)
    };
    vec![
        with(Layout::Auto, None),
        with(Layout::Space, None),
        with(Layout::Performance, None),
        with(Layout::Space, Some(65536)),
        with(Layout::Performance, Some(1 << 20)),
    ]
}

fn layout(layout: Layout, size: u64) -> CreateOptions {
    CreateOptions {
        layout,
        ..CreateOptions::disk(size)
    }
}

/// Creates a disk over these bytes; also returns the backing.
fn over(
    storage: &Arc<MemoryStorage>,
    options: &CreateOptions,
    bytes: Vec<u8>,
) -> (Disk, Arc<dyn BlockDevice>) {
    let device: Arc<dyn BlockDevice> = Arc::new(bytes);
    let given = Some(below(device.clone()));
    let disk = Disk::create(storage.clone(), options, given, &OpenOptions::default());
    (disk.unwrap(), device)
}

fn reopen(storage: &Arc<MemoryStorage>, backing: Option<&Arc<dyn BlockDevice>>) -> Disk {
    let backing = OneBacking(backing.cloned());
    Disk::open(storage.clone(), &OpenOptions::default(), &backing).unwrap()
}

/// A copy of the storage after a power cut that lost nothing.
fn crashed(storage: &Arc<MemoryStorage>) -> Arc<MemoryStorage> {
    Arc::new(MemoryStorage::new(storage.to_vec()))
}

/// The threads that still refer to the disk wait, as in a process that ends.
#[test]
fn a_disk_that_is_closed_for_an_exit_changes_no_more() {
    for options in layouts(9 * MIB) {
        let storage = Arc::new(MemoryStorage::default());
        let (disk, device) = over(&storage, &options, noise(3, 9 << 20));
        let disk = Arc::new(disk);
        let (sender, receiver) = std::sync::mpsc::channel();
        let writing = Arc::clone(&disk);
        std::thread::spawn(move || {
            for number in 0_u64.. {
                let at = number * 4093 % (9 * MIB - 100);
                writing.write_at(at, &number.to_le_bytes()).unwrap();
                let _ = sender.send((at, number));
            }
        });
        let begun: Vec<(u64, u64)> = receiver.iter().take(500).collect();
        disk.close_for_exit().unwrap();
        let identity = disk.identity_hash();
        let file = storage.to_vec();
        let written: Vec<(u64, u64)> = begun.into_iter().chain(receiver.try_iter()).collect();
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(storage.to_vec(), file);
        assert_sound(storage.clone());
        let again = reopen(&crashed(&storage), Some(&device));
        assert_eq!(again.identity_hash(), identity);
        let mut newest = noise(3, 9 << 20);
        for (at, number) in written {
            newest[at as usize..at as usize + 8].copy_from_slice(&number.to_le_bytes());
        }
        let shown = read(&again, 0, 9 << 20);
        // The last write can have ended without its message.
        let differs = newest
            .iter()
            .zip(&shown)
            .filter(|(one, other)| one != other);
        assert!(differs.count() <= 8);
    }
}

#[test]
fn what_is_written_is_read_at_once_and_after_every_way_of_opening_again() {
    for options in layouts(9 * MIB + 4096) {
        for with_backing in [false, true] {
            let storage = Arc::new(MemoryStorage::default());
            let below = noise(1, 7 * MIB as usize);
            let (disk, device) = if with_backing {
                let (disk, device) = over(&storage, &options, below.clone());
                (disk, Some(device))
            } else {
                (create(&storage, options.clone()), None)
            };
            let mut model = vec![0; options.size as usize];
            if with_backing {
                model[..below.len()].copy_from_slice(&below);
            }
            let writes: [(u64, usize); 12] = [
                (0, 4096),
                (4096 * 3, 8192),
                (100, 50),
                (4096 * 5 - 10, 20),
                (MIB, 300_000),
                (4 * MIB - 5000, 10_000),
                (9 * MIB, 4096),
                (9 * MIB + 10, 3),
                (7 * MIB - 2048, 4096),
                (5 * MIB, 2 * MIB as usize),
                (6 * MIB + 1, 511),
                (100, 50),
            ];
            for (index, (offset, length)) in writes.into_iter().enumerate() {
                let bytes = noise(index as u64 + 10, length);
                disk.write_at(offset, &bytes).unwrap();
                model[offset as usize..offset as usize + length].copy_from_slice(&bytes);
                assert_eq!(read(&disk, offset, length), bytes);
                if index % 3 == 2 {
                    disk.flush().unwrap();
                }
            }
            assert!(read(&disk, 0, model.len()) == model, "{options:?}");
            disk.flush().unwrap();
            let after_crash = crashed(&storage);
            let again = reopen(&after_crash, device.as_ref());
            assert!(read(&again, 0, model.len()) == model, "{options:?}");
            again.close().unwrap();
            assert_sound(after_crash);
            disk.close().unwrap();
            assert_sound(storage.clone());
            let (open, backing) = (OpenOptions::default(), OneBacking(device));
            let image = Image::open_with_backings(storage, &open, &backing).unwrap();
            assert!(content(&*image) == model);
        }
    }
}

#[test]
fn discarded_and_zeroed_ranges_read_as_zeros_and_take_no_space() {
    for options in layouts(8 * MIB) {
        let storage = Arc::new(MemoryStorage::default());
        let (disk, device) = over(&storage, &options, noise(1, 8 * MIB as usize));
        disk.write_at(0, &noise(2, 5 * MIB as usize)).unwrap();
        disk.flush().unwrap();
        disk.write_zeroes(1000, 6 * MIB, Space::Free).unwrap();
        assert!(read(&disk, 1000, 6 * MIB as usize).iter().all(|b| *b == 0));
        assert_eq!(read(&disk, 0, 1000), noise(2, 5 * MIB as usize)[..1000]);
        disk.discard(0, 8 * MIB).unwrap();
        disk.flush().unwrap();
        let again = reopen(&crashed(&storage), Some(&device));
        assert!(read(&again, 0, 8 * MIB as usize).iter().all(|b| *b == 0));
        let status = again.status(0, 8 * MIB).unwrap();
        assert_eq!((status.content, status.depth), (Content::Zero, 1));
        let used = storage.len().unwrap() - disk.statistics().free_bytes;
        assert!(used < 5 * MIB, "{options:?} {used}");
        disk.close().unwrap();
        assert_sound(storage);
    }
}

#[test]
fn zeros_that_keep_their_space_are_stored() {
    let storage = Arc::new(MemoryStorage::default());
    let disk = create(&storage, CreateOptions::disk(4 * MIB));
    disk.write_zeroes(0, MIB, Space::Keep).unwrap();
    assert_eq!(disk.status(0, MIB).unwrap().content, Content::Data);
    assert!(read(&disk, 0, MIB as usize).iter().all(|b| *b == 0));
}

#[test]
fn freed_space_is_used_again() {
    let storage = Arc::new(MemoryStorage::default());
    let disk = create(&storage, layout(Layout::Space, 32 * MIB));
    for round in 0..20 {
        disk.write_at(0, &noise(round, 8 * MIB as usize)).unwrap();
        disk.flush().unwrap();
    }
    let length = storage.len().unwrap();
    assert!(length < 64 * MIB, "{length}");
    disk.close().unwrap();
    assert_sound(storage);
}

#[test]
fn a_full_log_becomes_tables() {
    let storage = Arc::new(MemoryStorage::default());
    let options = CreateOptions {
        log_bytes: 256 << 10,
        ..CreateOptions::disk(64 * MIB)
    };
    let disk = create(&storage, options);
    let mut model = vec![0; 64 * MIB as usize];
    for round in 0..4000u64 {
        let at = (round * 7919 % 16384) * 4096;
        let bytes = noise(round, 4096);
        disk.write_at(at, &bytes).unwrap();
        model[at as usize..at as usize + 4096].copy_from_slice(&bytes);
        disk.flush().unwrap();
    }
    assert!(disk.statistics().checkpoints > 0);
    assert!(read(&disk, 0, model.len()) == model);
    let again = reopen(&crashed(&storage), None);
    assert!(read(&again, 0, model.len()) == model);
    again.close().unwrap();
    disk.close().unwrap();
    assert_sound(storage);
}

#[test]
fn a_disk_that_grew_shows_zeros_and_one_that_shrank_forgot() {
    for options in layouts(5 * MIB + 8192) {
        let storage = Arc::new(MemoryStorage::default());
        let below = noise(1, 9 * MIB as usize);
        let (disk, device) = over(&storage, &options, below.clone());
        let mut model = below[..options.size as usize].to_vec();
        disk.write_at(5 * MIB, &noise(3, 100)).unwrap();
        model[5 * MIB as usize..5 * MIB as usize + 100].copy_from_slice(&noise(3, 100));
        for size in [8 * MIB, 6 * MIB - 4096, 2 * MIB + 4096, 10 * MIB, 4096, MIB] {
            disk.resize(size).unwrap();
            model.resize(size as usize, 0);
            assert_eq!(disk.size(), size);
            assert!(read(&disk, 0, model.len()) == model, "{options:?} {size}");
            disk.write_at(size - 100, &noise(size, 100)).unwrap();
            model[size as usize - 100..].copy_from_slice(&noise(size, 100));
            disk.flush().unwrap();
            let again = reopen(&crashed(&storage), Some(&device));
            assert!(read(&again, 0, model.len()) == model, "{options:?} {size}");
        }
        disk.close().unwrap();
        assert_sound(storage);
    }
}

#[test]
fn a_cleared_disk_shows_its_backing_again() {
    let storage = Arc::new(MemoryStorage::default());
    let below = noise(1, 4 * MIB as usize);
    let (disk, _) = over(&storage, &CreateOptions::disk(4 * MIB), below.clone());
    disk.write_at(0, &noise(2, 3 * MIB as usize)).unwrap();
    disk.clear().unwrap();
    assert!(read(&disk, 0, below.len()) == below);
    disk.write_at(10, b"again").unwrap();
    disk.set_backing(None).unwrap();
    assert_eq!(read(&disk, 10, 5), b"again");
    assert!(read(&disk, 4096, 8192).iter().all(|byte| *byte == 0));
    assert_eq!(disk.rebuild_free_list().unwrap(), 0);
    disk.close().unwrap();
    assert_sound(storage);
}

#[test]
fn a_sealed_file_is_not_opened_for_writing() {
    let storage = Arc::new(MemoryStorage::default());
    let writer = ImageWriter::on_storage(storage.clone(), WriterOptions::default()).unwrap();
    writer.finish(&[], &serde_json::json!({})).unwrap();
    let refused = Disk::open(storage, &OpenOptions::default(), &bcow::NoBackings);
    assert!(matches!(refused.err(), Some(Error::Unsupported(_))));
}

#[test]
fn blocks_of_a_long_first_write_are_larger() {
    let storage = Arc::new(MemoryStorage::default());
    let disk = create(&storage, CreateOptions::disk(8 * MIB));
    disk.write_at(0, &noise(1, MIB as usize)).unwrap();
    disk.write_at(4 * MIB, &noise(2, 4096)).unwrap();
    assert_eq!(disk.map(0).unwrap().length, 65536);
    assert_eq!(disk.map(4 * MIB).unwrap().length, 4096);
    disk.flush().unwrap();
    assert!(matches!(disk.map(0).unwrap().mapping, Mapping::Open { .. }));
    assert!(matches!(
        disk.map(4 * MIB).unwrap().mapping,
        Mapping::Raw { .. }
    ));
}

#[test]
fn writers_and_flushers_side_by_side_lose_nothing() {
    let storage = Arc::new(MemoryStorage::default());
    let below = noise(1, 16 * MIB as usize);
    let (disk, _) = over(&storage, &CreateOptions::disk(16 * MIB), below.clone());
    let share = 2 * MIB as usize;
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let (disk, below) = (&disk, &below);
            scope.spawn(move || {
                let start = thread * share;
                let mut model = below[start..start + share].to_vec();
                for round in 0..300u64 {
                    let seed = round * 8 + thread as u64;
                    let random = noise(seed, 8);
                    let at = (u32::from_le_bytes([random[0], random[1], random[2], 0]) as usize)
                        % (share - 20_000);
                    let length =
                        1 + (usize::from(random[3]) << 8 | usize::from(random[4])) % 20_000;
                    let bytes = noise(seed, length);
                    disk.write_at((start + at) as u64, &bytes).unwrap();
                    model[at..at + length].copy_from_slice(&bytes);
                    if round % 16 == thread as u64 {
                        disk.flush().unwrap();
                    }
                    assert!(read(disk, (start + at) as u64, length) == bytes);
                }
                assert!(read(disk, start as u64, share) == model);
            });
        }
    });
    disk.close().unwrap();
    assert_sound(storage);
}

#[test]
fn a_disk_is_closed_while_blocks_are_being_filled() {
    let below = noise(1, MIB as usize);
    for round in 0..100 {
        let storage = Arc::new(MemoryStorage::default());
        let options = layout(Layout::Space, MIB);
        let (disk, device) = over(&storage, &options, below.clone());
        for block in 0..64 {
            disk.write_at(block * 4096 + round, b"part").unwrap();
        }
        disk.close().unwrap();
        let again = reopen(&storage, Some(&device));
        assert_eq!(
            read(&again, 4096 + round, 5),
            [b"part", &below[4100 + round as usize..][..1]].concat()
        );
    }
}

#[test]
fn space_that_one_region_gave_up_and_another_took_is_in_use_after_a_crash() {
    let storage = Arc::new(MemoryStorage::default());
    let disk = create(&storage, layout(Layout::Space, 8 << 20));
    let region = 4 << 20;
    disk.write_at(0, &noise(0, region)).unwrap();
    disk.checkpoint().unwrap();
    // These writes free the place that the tables name, and reuse it for the other region.
    for seed in 1..6 {
        disk.write_at(0, &noise(seed, region)).unwrap();
        disk.flush().unwrap();
    }
    disk.write_at(region as u64, &noise(6, region)).unwrap();
    disk.flush().unwrap();
    assert_eq!(disk.statistics().checkpoints, 1);
    let storage = crashed(&storage);
    let disk = reopen(&storage, None);
    disk.write_at(0, &noise(10, region)).unwrap();
    disk.flush().unwrap();
    assert!(read(&disk, region as u64, region) == noise(6, region));
    disk.close().unwrap();
    assert_sound(storage);
}

#[test]
fn a_large_block_written_in_part_at_the_end_of_the_file_is_there_as_a_whole() {
    let storage = Arc::new(MemoryStorage::default());
    let options = CreateOptions {
        block_bytes: Some(1 << 20),
        ..layout(Layout::Performance, 8 * MIB)
    };
    let disk = create(&storage, options);
    disk.write_at(2 * MIB + 4096, &[7; 4096]).unwrap();
    let whole = read(&disk, 2 * MIB, MIB as usize);
    let mut around = whole[..4096].iter().chain(&whole[8192..]);
    assert!(around.all(|byte| *byte == 0));
    disk.flush().unwrap();

    // Nothing was written after it, and the file was not closed.
    let disk = reopen(&crashed(&storage), None);
    assert_eq!(read(&disk, 2 * MIB, MIB as usize), whole);
}

#[test]
fn a_record_that_lacked_its_blocks_never_comes_to_count() {
    let storage = Arc::new(MemoryStorage::default());
    let disk = create(&storage, CreateOptions::disk(8 * MIB));
    disk.write_at(0, &noise(1, 4096)).unwrap();
    disk.write_at(4096, &noise(2, 4096)).unwrap();
    disk.flush().unwrap();
    let Mapping::Raw { stored } = disk.map(4096).unwrap().mapping else {
        panic!("a block of 4 KiB has a checksum");
    };
    // The record reached the disk, but one of its blocks did not.
    let cut = crashed(&storage);
    cut.write_at(stored.at.0, &[0; 4096]).unwrap();
    let again = reopen(&cut, None);
    assert!(read(&again, 0, 8192).iter().all(|byte| *byte == 0));
    drop(again);
    // The record must stay dropped when a later write puts the same bytes at the same place.
    let later = crashed(&cut);
    let end = later.len().unwrap().max(stored.end());
    later.set_len(end).unwrap();
    later.write_at(stored.at.0, &noise(2, 4096)).unwrap();
    let Mapping::Raw { stored } = disk.map(0).unwrap().mapping else {
        panic!("a block of 4 KiB has a checksum");
    };
    later.write_at(stored.at.0, &noise(1, 4096)).unwrap();
    let image = Image::open_storage(later, &OpenOptions::default()).unwrap();
    assert!(read(&*image, 0, 8192).iter().all(|byte| *byte == 0));
}

#[test]
fn released_memory_changes_no_content() {
    const REGION: u64 = 4 * MIB;
    let storage = Arc::new(MemoryStorage::default());
    let disk = create(&storage, CreateOptions::disk(8 * REGION));
    let mut model = vec![0; 8 * REGION as usize];
    for round in 0..4u64 {
        for region in 0..8 {
            let at = region * REGION + (round * 5 + region) * 4096;
            let bytes = noise(100 * round + region, 4096);
            disk.write_at(at, &bytes).unwrap();
            model[at as usize..][..4096].copy_from_slice(&bytes);
            // Pending in the first round; in the log, or in tables, in the others.
            match (round, region) {
                (1, 7) | (2, 3) => disk.flush().unwrap(),
                (3, 5) => disk.checkpoint().unwrap(),
                _ => {}
            }
        }
        disk.release_memory().unwrap();
        assert!(read(&disk, 0, model.len()) == model, "round {round}");
    }
    disk.close().unwrap();
    assert!(read(&reopen(&storage, None), 0, model.len()) == model);
    assert_sound(storage);
}

/// Bytes in memory, with counters of barriers and of bytes written.
#[derive(Default)]
struct Counted {
    content: MemoryStorage,
    barriers: AtomicUsize,
    written: AtomicUsize,
}

impl Storage for Counted {
    bcow_testkit::forward!(content: len, read_at, set_len);

    fn write_at(&self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        self.written.fetch_add(bytes.len(), Ordering::SeqCst);
        self.content.write_at(offset, bytes)
    }
    fn sync(&self) -> std::io::Result<()> {
        self.barriers.fetch_add(1, Ordering::SeqCst);
        self.content.sync()
    }
    fn data_from(&self, offset: u64) -> u64 {
        self.content.data_from(offset)
    }
}

#[test]
fn a_large_disk_with_little_data_writes_and_stores_little() {
    const SIZE: u64 = 256 << 30;
    const ROOT_BYTES: u64 = SIZE / (4 * MIB) * 16;
    let storage = Arc::new(Counted::default());
    let disk = Disk::create_alone(storage.clone(), &layout(Layout::Space, SIZE)).unwrap();
    let mut model = Vec::new();
    for round in 0..8 {
        for at in [round << 12, (round * 13 % 7) << 35] {
            let bytes = noise(at, 4096);
            disk.write_at(at, &bytes).unwrap();
            model.push((at, bytes));
        }
        disk.checkpoint().unwrap();
        let again = reopen(
            &Arc::new(MemoryStorage::new(storage.content.to_vec())),
            None,
        );
        for (at, bytes) in &model {
            assert!(read(&again, *at, 4096) == *bytes, "round {round}, at {at}");
        }
    }
    let written = storage.written.load(Ordering::SeqCst) as u64;
    assert!(written < 2 * ROOT_BYTES, "{written} bytes");

    // In space that has had data, zeros have to be written.
    for round in 0..2 {
        disk.write_at(4 * MIB, &noise(round, 8 << 20)).unwrap();
        disk.checkpoint().unwrap();
    }
    let before = storage.written.load(Ordering::SeqCst) as u64;
    let end = storage.content.len().unwrap();
    for round in 2..6 {
        disk.write_at(4 * MIB, &noise(round, 4096)).unwrap();
        disk.checkpoint().unwrap();
    }
    let written = storage.written.load(Ordering::SeqCst) as u64 - before;
    assert!(written > ROOT_BYTES, "{written} bytes");
    assert_eq!(storage.content.len().unwrap(), end);
    disk.close().unwrap();
    assert_sound(Arc::new(MemoryStorage::new(storage.content.to_vec())));
}

#[test]
fn what_is_found_at_opening_is_made_durable_before_anything_else() {
    let storage = Arc::new(MemoryStorage::default());
    let disk = create(&storage, CreateOptions::disk(8 * MIB));
    disk.close().unwrap();
    // The log is empty and both slots are equal, but the last writer may have been killed before
    // its last barrier.
    let counted = Arc::new(Counted {
        content: MemoryStorage::new(storage.to_vec()),
        ..Counted::default()
    });
    let again = Disk::open(counted.clone(), &OpenOptions::default(), &bcow::NoBackings).unwrap();
    assert_eq!(counted.barriers.load(Ordering::SeqCst), 1);
    drop(again);
}

/// A disk as `bcow convert --writable` makes it of a small raw disk: each region is one block.
#[test]
fn a_region_that_is_zeroed_as_a_whole_and_written_before_a_flush_gives_its_space_back() {
    const BLOCK: u64 = 64 << 10;
    let storage = Arc::new(MemoryStorage::default());
    let options = WriterOptions {
        block_bytes: Some(BLOCK as u32),
        disk: Some(DiskForm {
            size: 4 * BLOCK,
            log_bytes: 64 << 10,
            ..DiskForm::default()
        }),
        ..WriterOptions::default()
    };
    let mut writer = ImageWriter::on_storage(storage.clone(), options).unwrap();
    writer.append(&noise(1, 4 * BLOCK as usize)).unwrap();
    writer.finish(&[], &serde_json::json!({})).unwrap();
    let disk = reopen(&storage, None);
    assert_eq!(disk.header().region_shift, 16);
    for region in [0, 1] {
        let at = region * BLOCK;
        disk.write_zeroes(at, BLOCK, Space::Free).unwrap();
        disk.write_at(at + 8192, &[1; 512]).unwrap();
        match region {
            0 => disk.flush().unwrap(),
            _ => disk.checkpoint().unwrap(),
        }
        assert_eq!(disk.statistics().unflushed_blocks, 0);
    }
    disk.close().unwrap();
    assert_sound(storage);
}

#[test]
fn a_block_that_is_alone_in_the_last_region_is_a_checked_one_also_after_a_crash() {
    let storage = Arc::new(MemoryStorage::default());
    let disk = create(&storage, layout(Layout::Space, 4 * MIB + 4096));
    disk.write_at(4 * MIB, &[1; 4096]).unwrap();
    disk.flush().unwrap();
    drop(disk);
    let disk = reopen(&crashed(&storage), None);
    let mut places = Vec::new();
    for value in [2, 3] {
        disk.write_at(4 * MIB, &[value; 4096]).unwrap();
        disk.flush().unwrap();
        let Mapping::Raw { stored } = disk.map(4 * MIB).unwrap().mapping else {
            panic!("a flushed block of 4 KiB has a checksum");
        };
        places.push(stored.at);
    }
    assert_ne!(places[0], places[1], "written over in place");
    disk.close().unwrap();
}

//! Partly written blocks that are completed later, while other requests change them. The tests park
//! the unlocked reads of a completion at the worst moment.

use std::sync::Arc;

use bcow::check::{CheckOptions, check};
use bcow::{
    BlockDevice, Compression, CreateOptions, Disk, Image, ImageWriter, Layout, Mapping,
    MemoryStorage, OneBacking, OpenOptions, Space, WritableDevice, WriterOptions,
};
use bcow_testkit::{Fault, Faulty, Moment, On, Parkable, below};

const MIB: u64 = 1 << 20;
const REGION: u64 = 4 * MIB;

fn read(device: &dyn BlockDevice, offset: u64, length: u64) -> Vec<u8> {
    bcow_testkit::read(device, offset, length as usize)
}

/// Bytes that depend on their address.
fn pattern(length: u64) -> Vec<u8> {
    let byte = |at: u64| (at / 509) as u8 ^ (at / 65_521) as u8 | 1;
    (0..length).map(byte).collect()
}

/// Compares two contents; on a failure shows the first difference instead of all bytes.
fn assert_same(found: &[u8], expected: &[u8], context: &str) {
    assert_eq!(found.len(), expected.len(), "{context}");
    if let Some(at) = (0..found.len()).find(|&at| found[at] != expected[at]) {
        panic!(
            "{context}: byte {at} is {}, not {}",
            found[at], expected[at]
        );
    }
}

/// An image of 64 MiB that is slow to decompress.
fn compressed_base() -> Arc<Image> {
    let storage = Arc::new(MemoryStorage::default());
    let options = WriterOptions {
        compression: Compression::Zstd { level: 1 },
        ..WriterOptions::default()
    };
    let mut writer = ImageWriter::on_storage(storage.clone(), options).unwrap();
    writer.append(&pattern(16 * REGION - 4096)).unwrap();
    writer.begin_metadata().unwrap();
    writer
        .finish(b"superblock", &serde_json::json!({}))
        .unwrap();
    Image::open_storage(storage, &OpenOptions::default()).unwrap()
}

#[test]
fn a_place_that_is_given_to_the_next_write_does_not_get_the_bytes_of_the_one_before() {
    // Reads of it by the background thread are parked until the other requests have finished.
    let base = Arc::new(Parkable::new(compressed_base()));
    let performance = CreateOptions {
        layout: Layout::Performance,
        ..CreateOptions::disk(4 << 30)
    };
    let large_blocks = CreateOptions {
        block_bytes: Some(REGION as u32),
        ..CreateOptions::disk(4 << 30)
    };
    for options in [performance, large_blocks] {
        let storage = Arc::new(MemoryStorage::default());
        let backing = Some(below(base.clone()));
        let disk = Disk::create(storage.clone(), &options, backing, &OpenOptions::default());
        let disk = disk.unwrap();
        for region in 0..15 {
            let at = region * REGION;
            let parked = base.parking.hold(at..at + REGION, Moment::After);
            disk.write_at(at, &[1; 4096]).unwrap();
            parked.wait();
            disk.write_zeroes(at, REGION, Space::Free).unwrap();
            disk.write_at(at + MIB, &[2; 4096]).unwrap();
            parked.release();
        }
        // The background thread has ended when this returns.
        disk.close().unwrap();
        let below = OneBacking(Some(base.clone()));
        let disk = Disk::open(storage, &OpenOptions::default(), &below).unwrap();
        let mut expected = vec![0; REGION as usize];
        expected[MIB as usize..MIB as usize + 4096].fill(2);
        for region in 0..15 {
            let context = format!("{:?}, region {region}", options.layout);
            assert_same(&read(&disk, region * REGION, REGION), &expected, &context);
        }
    }
}

#[test]
fn a_block_that_a_full_host_does_not_complete_is_read_from_below() {
    const BLOCK: u64 = 64 << 10;
    let base = Arc::new(Parkable::new(Arc::new(pattern(4 * BLOCK))));
    let options = CreateOptions {
        block_bytes: Some(BLOCK as u32),
        ..CreateOptions::disk(4 * BLOCK)
    };
    let storage = Arc::new(Faulty::new(Vec::new()));
    let backing = Some(below(base.clone()));
    let disk = Disk::create(storage.clone(), &options, backing, &OpenOptions::default()).unwrap();
    // The background thread completes no block before the host is full.
    let parked = base.parking.hold(0..4 * BLOCK, Moment::After);
    let mut expected = pattern(4 * BLOCK);
    for (at, length) in [
        (4096, 8192),
        (BLOCK + 512, 100),
        (BLOCK + 4000, 5),
        (3 * BLOCK, 9),
    ] {
        disk.write_at(at, &vec![0xAB; length]).unwrap();
        expected[at as usize..at as usize + length].fill(0xAB);
    }
    storage.plan(Some(Fault {
        on: On::Change,
        after: 0,
        stays: true,
        errno: 28,
    }));
    parked.release();
    assert_same(&read(&disk, 0, 4 * BLOCK), &expected, "all");
    for (at, length) in [(0, 1), (4095, 2), (5000, 10), (12_287, 2), (BLOCK - 1, 600)] {
        let found = read(&disk, at, length);
        assert_same(
            &found,
            &expected[at as usize..(at + length) as usize],
            "a part",
        );
    }
    storage.plan(None);
    disk.flush().unwrap();
    assert_same(&read(&disk, 0, 4 * BLOCK), &expected, "completed");
}

/// Block size and layout of a test.
#[derive(Debug, Clone, Copy)]
struct Shape {
    layout: Layout,
    block: u64,
    size: u64,
}

const SHAPES: [Shape; 4] = [
    Shape {
        layout: Layout::Performance,
        block: 4 * MIB,
        size: 16 * MIB,
    },
    Shape {
        layout: Layout::Performance,
        block: 256 << 10,
        size: 8 * MIB,
    },
    Shape {
        layout: Layout::Space,
        block: 128 << 10,
        size: 8 * MIB,
    },
    Shape {
        layout: Layout::Space,
        block: 4096,
        size: 4 * MIB,
    },
];

/// A disk over a backing whose chosen reads are parked, and the expected content of the disk.
struct Subject {
    shape: Shape,
    storage: Arc<MemoryStorage>,
    below: Arc<Parkable<Arc<Vec<u8>>>>,
    disk: Arc<Disk>,
    shows: Vec<u8>,
}

impl Subject {
    fn new(shape: Shape) -> Self {
        let storage = Arc::new(MemoryStorage::default());
        let below = Arc::new(Parkable::new(Arc::new(pattern(shape.size))));
        let options = CreateOptions {
            layout: shape.layout,
            block_bytes: Some(shape.block as u32),
            log_bytes: 256 << 10,
            ..CreateOptions::disk(shape.size)
        };
        let backing = Some(bcow_testkit::below(below.clone()));
        let disk = Disk::create(storage.clone(), &options, backing, &OpenOptions::default());
        let subject = Subject {
            shape,
            storage,
            below,
            disk: Arc::new(disk.unwrap()),
            shows: pattern(shape.size),
        };
        // Makes enough free space for it to be reused, in the last quarter of the disk, which the
        // tests do not use.
        let quarter = shape.size / 4;
        for _ in 0..(6 * MIB).div_ceil(quarter) {
            let bytes = vec![9; quarter as usize];
            subject.disk.write_at(3 * quarter, &bytes).unwrap();
        }
        subject
            .disk
            .write_zeroes(3 * quarter, quarter, Space::Free)
            .unwrap();
        let mut subject = subject;
        subject.shows[3 * quarter as usize..].fill(0);
        subject
    }

    fn write(&mut self, at: u64, bytes: &[u8]) {
        self.disk.write_at(at, bytes).unwrap();
        self.shows[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    fn zero(&mut self, at: u64, length: u64) {
        self.disk.write_zeroes(at, length, Space::Free).unwrap();
        self.shows[at as usize..(at + length) as usize].fill(0);
    }

    fn discard(&mut self, at: u64, length: u64) {
        self.disk.discard(at, length).unwrap();
        self.shows[at as usize..(at + length) as usize].fill(0);
    }

    /// Where a block is stored.
    fn place(&self, at: u64) -> Option<u64> {
        match self.disk.map(at).unwrap().mapping {
            Mapping::Open { stored } | Mapping::Raw { stored } => Some(stored.at.0),
            _ => None,
        }
    }

    /// Writes parts of further blocks until one of them has the place `wanted`, or the second
    /// quarter of the disk is full.
    fn take_place(&mut self, wanted: u64) -> bool {
        let blocks = self.shape.size / 4 / self.shape.block;
        for block in blocks..2 * blocks {
            let at = block * self.shape.block;
            self.write(at + 1024, &[block as u8; 512]);
            if self.place(at) == Some(wanted) {
                return true;
            }
        }
        false
    }

    /// Checks the content of the disk, now and after it is opened again.
    fn verify(self, context: &str) {
        let context = format!("{context}, {:?}", self.shape);
        let size = self.shape.size;
        assert_same(&read(&*self.disk, 0, size), &self.shows, &context);
        // The references of all threads are gone.
        let disk = Arc::into_inner(self.disk).expect("no thread has it");
        disk.close().unwrap();
        let below = OneBacking(Some(self.below));
        let again = Disk::open(self.storage.clone(), &OpenOptions::default(), &below).unwrap();
        assert_same(&read(&again, 0, size), &self.shows, &context);
        again.close().unwrap();
        let report = check(self.storage, &CheckOptions::FULL).unwrap();
        assert_eq!(report.findings, [], "{context}");
    }
}

/// A change of the first block of a disk, which was written in part, while the background thread
/// reads the rest of it.
type Meanwhile = fn(&mut Subject);

const MEANWHILE: [(&str, Meanwhile); 13] = [
    ("a second part", |subject| {
        subject.write(subject.shape.block / 2, &[2; 512]);
    }),
    ("all of it", |subject| {
        subject.write(0, &vec![2; subject.shape.block as usize]);
    }),
    ("zeros", |subject| subject.zero(0, subject.shape.block)),
    ("a discard", |subject| {
        subject.discard(0, subject.shape.block)
    }),
    ("zeros, a part", |subject| {
        subject.zero(0, subject.shape.block);
        subject.write(subject.shape.block / 2, &[2; 512]);
    }),
    ("a discard, a part", |subject| {
        subject.discard(0, subject.shape.block);
        subject.write(subject.shape.block / 2, &[2; 512]);
    }),
    ("zeros, a flush, a part", |subject| {
        subject.zero(0, subject.shape.block);
        subject.disk.flush().unwrap();
        subject.write(subject.shape.block / 2, &[2; 512]);
    }),
    ("a flush, a part in a gap", |subject| {
        subject.disk.flush().unwrap();
        subject.write(subject.shape.block / 2, &[2; 512]);
    }),
    ("a read, a part in a gap", |subject| {
        read(&*subject.disk, 0, subject.shape.block);
        subject.write(subject.shape.block / 2, &[2; 512]);
    }),
    ("a checkpoint, zeros, a part", |subject| {
        subject.disk.checkpoint().unwrap();
        subject.zero(0, subject.shape.block);
        subject.write(subject.shape.block / 2, &[2; 512]);
    }),
    ("zeros, the place to another block", |subject| {
        let place = subject.place(0).unwrap();
        subject.zero(0, subject.shape.block);
        subject.take_place(place);
    }),
    (
        "a discard, the place to another block, all of it",
        |subject| {
            let place = subject.place(0).unwrap();
            subject.discard(0, subject.shape.block);
            subject.take_place(place);
            subject.write(0, &vec![3; subject.shape.block as usize]);
        },
    ),
    ("zeros, a part, a flush, zeros, a part", |subject| {
        for value in [2, 3] {
            subject.zero(0, subject.shape.block);
            subject.write(subject.shape.block / 4 * u64::from(value), &[value; 512]);
            subject.disk.flush().unwrap();
        }
    }),
];

#[test]
fn whatever_happens_to_a_block_while_its_rest_is_read_it_holds_what_was_written() {
    for shape in SHAPES {
        for moment in [Moment::Before, Moment::After] {
            for (name, meanwhile) in MEANWHILE {
                let mut subject = Subject::new(shape);
                let parked = subject.below.parking.hold(0..shape.block, moment);
                subject.write(512, &[1; 512]);
                parked.wait();
                meanwhile(&mut subject);
                parked.release();
                subject.verify(name);
            }
        }
    }
}

#[test]
fn the_same_holds_when_a_reader_completes_the_block() {
    for shape in SHAPES {
        for (name, meanwhile) in MEANWHILE {
            let mut subject = Subject::new(shape);
            let parking = subject.below.parking.clone();
            let filler = parking.hold(0..shape.block, Moment::Before);
            subject.write(512, &[1; 512]);
            filler.wait();
            let parked = parking.hold(0..shape.block, Moment::After);
            let disk = subject.disk.clone();
            let reader = std::thread::spawn(move || read(&*disk, 0, shape.block));
            parked.wait();
            meanwhile(&mut subject);
            parked.release();
            let seen = reader.join().unwrap();
            let shown = &subject.shows[..shape.block as usize];
            assert_same(&seen, shown, name);
            filler.release();
            subject.verify(name);
        }
    }
}

/// The storage parks reads of the disk: when a late read continues, its place belongs to another
/// block.
#[test]
fn a_source_that_is_given_away_while_it_is_read_is_not_reported_as_damage() {
    let size = 8 * MIB;
    let content = Arc::new(MemoryStorage::default());
    let storage = Arc::new(Parkable::new(content.clone()));
    let options = CreateOptions {
        layout: Layout::Space,
        ..CreateOptions::disk(size)
    };
    let disk = Disk::create_alone(storage.clone(), &options).unwrap();
    disk.write_at(0, &vec![1; size as usize]).unwrap();
    disk.flush().unwrap();
    let Mapping::Raw { stored } = disk.map(0).unwrap().mapping else {
        panic!("a flushed block has a checksum");
    };
    let place = stored.at.0..stored.at.0 + 4096;
    let filler = storage.parking.hold(place.clone(), Moment::Before);
    disk.write_at(512, &[2; 512]).unwrap();
    filler.wait();
    let parked = storage.parking.hold(place.clone(), Moment::Before);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(&disk, 0, 4096));
        parked.wait();
        for value in [3, 4] {
            disk.write_at(0, &vec![value; size as usize]).unwrap();
            disk.flush().unwrap();
        }
        let held = content.to_vec();
        assert_eq!(held[place.start as usize..place.end as usize], [4; 4096]);
        parked.release();
        assert_same(&reader.join().unwrap(), &[4; 4096], "the reader");
    });
    filler.release();
    disk.close().unwrap();
}

//! The disk engine and the block cache under thousands of thread schedules (shuttle).
//!
//! Needs the feature `shuttle`. With it, space is reused at once and regions are evicted at once,
//! so that few operations conflict soon. `BCOW_SCHEDULES=100` runs a hundred times as many
//! schedules; `BCOW_SCHEDULE=...` repeats the one that a failure printed.

use std::io;
use std::sync::Arc;

use bcow::check::{CheckOptions, check};
use bcow::sync::atomic::{AtomicUsize, Ordering};
use bcow::sync::thread;
use bcow::{
    BlockCache, BlockDevice, Compression, Content, CreateOptions, Disk, DiskForm, Error, Image,
    ImageWriter, Layout, MemoryStorage, OneBacking, OpenOptions, Space, Storage, WritableDevice,
    WriterOptions,
};
use bcow_testkit::shuttle::rand::{Rng, thread_rng};
use bcow_testkit::{below, explore};

const SECTOR: usize = 512;
const BLOCK: u64 = 8192;
const BLOCKS: u64 = 3;
const SIZE: u64 = BLOCK * BLOCKS;

/// A point at which the scheduler may switch threads.
#[derive(Default)]
struct Point(AtomicUsize);

impl Point {
    fn pass(&self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A storage or a backing, with a possible switch of threads before and after each operation.
struct Slow<T> {
    content: T,
    point: Point,
}

impl<T> Slow<T> {
    fn new(content: T) -> Self {
        Slow {
            content,
            point: Point::default(),
        }
    }

    fn around<R>(&self, work: impl FnOnce(&T) -> R) -> R {
        self.point.pass();
        let result = work(&self.content);
        self.point.pass();
        result
    }

    /// Sometimes delays the operation by the time of several requests.
    fn late<R>(&self, work: impl FnOnce(&T) -> R) -> R {
        let late = thread_rng().gen_bool(0.2);
        let wait = || (0..40).for_each(|_| self.point.pass());
        if late && thread_rng().gen_bool(0.5) {
            wait();
            return self.around(work);
        }
        let result = self.around(work);
        if late {
            wait();
        }
        result
    }
}

impl Storage for Slow<Arc<MemoryStorage>> {
    fn len(&self) -> io::Result<u64> {
        self.content.len()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.late(|content| content.read_at(offset, buf))
    }
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.late(|content| content.write_at(offset, bytes))
    }
    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.around(|content| content.set_len(bytes))
    }
    fn sync(&self) -> io::Result<()> {
        self.around(|content| content.sync())
    }
    fn prefers_written_space(&self) -> bool {
        true
    }
}

impl BlockDevice for Slow<Vec<u8>> {
    fn size(&self) -> u64 {
        self.content.size()
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        self.late(|content| content.read_at(offset, buf))
    }
}

fn base() -> Vec<u8> {
    (0..SIZE).map(|at| 0xA0 | (at / 4096) as u8).collect()
}

/// The storage of the disk of a model, and whether the disk has a backing.
#[derive(Clone)]
struct Subject {
    content: Arc<MemoryStorage>,
    backed: bool,
}

impl Subject {
    fn below(&self) -> Option<Arc<dyn BlockDevice>> {
        let device = || Arc::new(Slow::new(base())) as Arc<dyn BlockDevice>;
        self.backed.then(device)
    }

    fn created(options: &CreateOptions, backed: bool) -> (Subject, Disk) {
        let content = Arc::new(MemoryStorage::default());
        let subject = Subject { content, backed };
        let storage = Arc::new(Slow::new(subject.content.clone()));
        let backing = subject.below().map(below);
        let disk = Disk::create(storage, options, backing, &OpenOptions::default()).unwrap();
        (subject, disk)
    }

    /// Opens the disk in `file`, with a small cache.
    fn opened(file: Vec<u8>, backed: bool) -> (Subject, Disk) {
        let content = Arc::new(MemoryStorage::new(file));
        let subject = Subject { content, backed };
        let options = OpenOptions {
            cache: BlockCache::new(2 * BLOCK),
            ..OpenOptions::default()
        };
        let storage = Arc::new(Slow::new(subject.content.clone()));
        let disk = Disk::open(storage, &options, &OneBacking(subject.below())).unwrap();
        (subject, disk)
    }

    /// Opens, for reading, what a process that is killed now leaves.
    fn killed(&self) -> Arc<Image> {
        let left = Arc::new(MemoryStorage::new(self.content.to_vec()));
        let below = self
            .backed
            .then(|| Arc::new(base()) as Arc<dyn BlockDevice>);
        Image::open_with_backings(left, &OpenOptions::default(), &OneBacking(below)).unwrap()
    }

    /// Checks the content of the disk, now and after it is opened again, and that the file is
    /// sound.
    fn verify(&self, disk: Disk, shows: &[u8]) {
        assert_shows(&disk, 0, shows);
        if thread_rng().gen_bool(0.5) {
            disk.close().unwrap()
        } else {
            disk.flush().unwrap();
            drop(disk);
        }
        assert_shows(&*self.killed(), 0, shows);
        let (again, disk) = Subject::opened(self.content.to_vec(), self.backed);
        assert_shows(&disk, 0, shows);
        disk.close().unwrap();
        assert_eq!(
            check(again.content, &CheckOptions::FULL).unwrap().findings,
            []
        );
    }
}

/// The value of each sector; all bytes of a sector are equal.
fn values(bytes: &[u8]) -> Vec<u8> {
    let sectors = bytes.chunks(SECTOR);
    sectors
        .map(|sector| {
            let one = sector.iter().all(|byte| *byte == sector[0]);
            assert!(one, "a sector is torn: {sector:x?}");
            sector[0]
        })
        .collect()
}

fn assert_shows(device: &dyn BlockDevice, at: u64, shows: &[u8]) {
    let mut found = vec![0xEE; shows.len()];
    device.read_at(at, &mut found).unwrap();
    assert!(
        found == shows,
        "from {at}: {:x?}, not {:x?}",
        values(&found),
        values(shows)
    );
}

/// A thread that alone writes to a part of the disk. The other threads must not affect the results
/// of its requests.
struct Owner {
    disk: Arc<Disk>,
    subject: Subject,
    /// First byte of its part.
    at: u64,
    shows: Vec<u8>,
    /// Value of the next write; the values of two owners differ.
    next: u8,
}

impl Owner {
    fn write(&mut self, from: usize, sectors: usize) {
        let range = from * SECTOR..(from + sectors) * SECTOR;
        self.next += 1;
        let bytes = vec![self.next; range.len()];
        let at = self.at + range.start as u64;
        self.disk.write_at(at, &bytes).unwrap();
        self.shows[range].fill(self.next);
    }

    /// Every second request writes a part of a block, which the background then completes. All
    /// other requests meet the block in that state.
    fn step(&mut self, number: usize) {
        let length = self.shows.len();
        let mut random = thread_rng();
        let kind = if number.is_multiple_of(2) { 0 } else { random.gen_range(1..10) };
        match kind {
            0 => {
                let sectors = length / SECTOR;
                let from = random.gen_range(0..sectors);
                match random.gen_range(0..4) {
                    0 => self.write(0, sectors),
                    1 => self.write(from, sectors - from),
                    _ => self.write(from, 1),
                }
            }
            1 => self.write(0, length / SECTOR),
            2 | 3 => {
                let space = Space::Free;
                let disk = &self.disk;
                disk.write_zeroes(self.at, length as u64, space).unwrap();
                self.shows.fill(0);
            }
            4 | 5 => {
                self.disk.discard(self.at, length as u64).unwrap();
                // A part that is too small to be released keeps its content.
                let mut found = vec![0; length];
                self.disk.read_at(self.at, &mut found).unwrap();
                let allowed = found.iter().all(|byte| *byte == 0) || found == self.shows;
                assert!(allowed, "{:x?}", values(&found));
                self.shows = found;
            }
            6 => self.check(),
            7 | 8 => {
                self.disk.flush().unwrap();
                assert_shows(&*self.subject.killed(), self.at, &self.shows);
            }
            _ => {
                self.disk.checkpoint().unwrap();
                assert_shows(&*self.subject.killed(), self.at, &self.shows);
            }
        }
    }

    fn check(&self) {
        assert_shows(&*self.disk, self.at, &self.shows);
    }
}

/// Two owners, of a block or half a block each, and a third thread that reads the whole disk or
/// changes the file as a whole. The final content is checked.
fn owners(subject: Subject, disk: Disk, steps: usize) {
    let mut shows = vec![0; SIZE as usize];
    disk.read_at(0, &mut shows).unwrap();
    let disk = Arc::new(disk);
    let part = if thread_rng().gen_bool(0.5) { BLOCK } else { BLOCK / 2 };
    let mut threads = Vec::new();
    for owner in 0..2u64 {
        let range = (owner * part) as usize..((owner + 1) * part) as usize;
        let mut owner = Owner {
            disk: disk.clone(),
            subject: subject.clone(),
            at: range.start as u64,
            shows: shows[range].to_vec(),
            next: 1 + owner as u8 * 0x40,
        };
        threads.push(thread::spawn(move || {
            for step in 0..steps {
                owner.step(step);
            }
            owner.check();
            (owner.at as usize, owner.shows)
        }));
    }
    let other = {
        let disk = disk.clone();
        thread::spawn(move || {
            match thread_rng().gen_range(0..4) {
                0 => disk.checkpoint().unwrap(),
                // A change of the whole file waits for all operations in flight, and blocks new
                // ones.
                1 => disk.resize(SIZE + BLOCK).unwrap(),
                _ => look(&disk, part as usize),
            }
        })
    };
    other.join().unwrap();
    for thread in threads {
        let (at, part) = thread.join().unwrap();
        shows[at..at + part.len()].copy_from_slice(&part);
    }
    let disk = Arc::into_inner(disk).expect("the threads have ended");
    shows.resize(disk.size() as usize, 0);
    subject.verify(disk, &shows);
}

/// Each sector has a value of its owner, or zero, or the original value. An owner has `part` bytes.
fn look(disk: &Disk, part: usize) {
    let mut bytes = vec![0; SIZE as usize];
    disk.read_at(0, &mut bytes).unwrap();
    for (sector, value) in values(&bytes).into_iter().enumerate() {
        let owner = sector / (part / SECTOR);
        let foreign = match value {
            0 => false,
            1..0x40 => owner != 0,
            0x40..0x80 => owner != 1,
            base => base != 0xA0 | (sector / 8) as u8,
        };
        assert!(!foreign, "sector {sector} is {value:x}");
    }
}

fn options(layout: Layout, block_bytes: Option<u64>) -> CreateOptions {
    CreateOptions {
        layout,
        block_bytes: block_bytes.map(|bytes| bytes as u32),
        log_bytes: 256 << 10,
        ..CreateOptions::disk(SIZE)
    }
}

#[test]
fn regions_of_one_block_keep_what_their_owners_wrote() {
    explore(2000, || {
        let options = options(Layout::Performance, Some(BLOCK));
        let (subject, disk) = Subject::created(&options, true);
        owners(subject, disk, 5);
    });
}

#[test]
fn open_blocks_of_one_region_keep_what_their_owners_wrote() {
    explore(1000, || {
        let options = options(Layout::Space, Some(BLOCK));
        let (subject, disk) = Subject::created(&options, true);
        owners(subject, disk, 5);
    });
}

#[test]
fn checked_blocks_keep_what_their_owners_wrote() {
    explore(1000, || {
        let options = options(Layout::Space, None);
        let (subject, disk) = Subject::created(&options, thread_rng().gen_bool(0.5));
        // The rest of the block is then copied from a place that is soon freed.
        disk.write_at(0, &base()).unwrap();
        disk.flush().unwrap();
        owners(subject, disk, 5);
    });
}

#[test]
fn a_block_that_is_given_up_while_it_is_read_and_written_mixes_with_no_other() {
    explore(1000, || {
        let options = options(Layout::Performance, Some(BLOCK));
        let (subject, disk) = Subject::created(&options, true);
        disk.write_at(0, &[0x41; BLOCK as usize]).unwrap();
        let disk = Arc::new(disk);
        let see = |disk: &Disk| {
            let mut bytes = vec![0; BLOCK as usize];
            disk.read_at(0, &mut bytes).unwrap();
            let seen = values(&bytes);
            let own = seen.iter().all(|value| [0, 0x41, 0x42].contains(value));
            assert!(own, "{seen:x?}");
            bytes
        };
        let (writer, giver) = (disk.clone(), disk.clone());
        let writer = thread::spawn(move || {
            writer.write_at(512, &[0x42; 512]).unwrap();
            see(&writer);
        });
        let giver = thread::spawn(move || {
            giver.write_zeroes(0, BLOCK, Space::Free).unwrap();
        });
        // This owner reuses the place.
        let mut owner = Owner {
            disk: disk.clone(),
            subject: subject.clone(),
            at: BLOCK,
            shows: base()[BLOCK as usize..2 * BLOCK as usize].to_vec(),
            next: 1,
        };
        let owner = thread::spawn(move || {
            owner.write(0, BLOCK as usize / SECTOR);
            (1..4).for_each(|step| owner.step(step));
            owner.check();
            owner.shows
        });
        writer.join().unwrap();
        giver.join().unwrap();
        let mut shows = base();
        shows[BLOCK as usize..2 * BLOCK as usize].copy_from_slice(&owner.join().unwrap());
        shows[..BLOCK as usize].copy_from_slice(&see(&disk));
        let disk = Arc::into_inner(disk).expect("the threads have ended");
        subject.verify(disk, &shows);
    });
}

/// A writable disk whose blocks are compressed, except `zeros` bytes at the start.
fn compressed(zeros: u64) -> Vec<u8> {
    let storage = Arc::new(MemoryStorage::default());
    let options = WriterOptions {
        compression: Compression::Zstd { level: 1 },
        block_bytes: Some(BLOCK as u32),
        disk: Some(DiskForm {
            size: SIZE,
            log_bytes: 64 << 10,
            ..DiskForm::default()
        }),
        ..WriterOptions::default()
    };
    let mut writer = ImageWriter::on_storage(storage.clone(), options).unwrap();
    writer.append_zeros(zeros).unwrap();
    writer.append(&base()[zeros as usize..]).unwrap();
    writer.finish(&[], &serde_json::json!({})).unwrap();
    storage.to_vec()
}

#[test]
fn compressed_blocks_are_decoded_from_their_place_or_not_at_all() {
    let files = [compressed(0), compressed(BLOCK)];
    explore(1000, move || {
        let file = files[thread_rng().gen_range(0..2)].clone();
        let (subject, disk) = Subject::opened(file, false);
        owners(subject, disk, 5);
    });
}

#[test]
fn readers_that_share_a_small_cache_get_each_block_as_it_is() {
    let file = compressed(0);
    explore(500, move || {
        let (_, disk) = Subject::opened(file.clone(), false);
        let disk = Arc::new(disk);
        let readers = (0..3u64).map(|reader| {
            let disk = disk.clone();
            thread::spawn(move || {
                for round in 0..3 {
                    let at = (reader + round) % BLOCKS * BLOCK;
                    let range = at as usize..(at + BLOCK) as usize;
                    assert_shows(&*disk, at, &base()[range]);
                }
            })
        });
        let readers: Vec<_> = readers.collect();
        for reader in readers {
            reader.join().unwrap();
        }
    });
}

/// The files of a chain, the lowest first. File N has block N of the address space, and all blocks
/// behind it.
fn chain() -> Vec<Vec<u8>> {
    let mut files: Vec<Vec<u8>> = Vec::new();
    for block in 0..BLOCKS {
        let storage = Arc::new(MemoryStorage::default());
        let options = CreateOptions {
            log_bytes: 64 << 10,
            ..options(Layout::Space, Some(4096))
        };
        let open = OpenOptions::default();
        let backing = open_chain(&files, &open).map(|image| below(image));
        let disk = Disk::create(storage.clone(), &options, backing, &open).unwrap();
        let at = (block * BLOCK) as usize;
        disk.write_at(block * BLOCK, &base()[at..]).unwrap();
        disk.close().unwrap();
        files.push(storage.to_vec());
    }
    files
}

fn open_chain(files: &[Vec<u8>], options: &OpenOptions) -> Option<Arc<Image>> {
    files.iter().fold(None, |below, file| {
        let storage = Arc::new(Slow::new(Arc::new(MemoryStorage::new(file.clone()))));
        let below = OneBacking(below.map(|image: Arc<Image>| image as Arc<dyn BlockDevice>));
        Some(Image::open_with_backings(storage, options, &below).unwrap())
    })
}

/// Readers search the map of a chain, while a snapshot begins a new one that takes it over.
#[test]
fn readers_that_search_a_chain_find_each_block() {
    let files: Arc<std::sync::OnceLock<Vec<Vec<u8>>>> = Arc::default();
    explore(500, move || {
        let files = files.get_or_init(chain);
        let options = OpenOptions {
            cache: BlockCache::new(if thread_rng().gen_bool(0.5) { 0 } else { 64 << 10 }),
            ..OpenOptions::default()
        };
        let backing = open_chain(files, &options).map(|image| below(image));
        let storage = || Arc::new(Slow::new(Arc::new(MemoryStorage::default())));
        let create = CreateOptions {
            log_bytes: 64 << 10,
            ..crate::options(Layout::Space, None)
        };
        let disk = Disk::create(storage(), &create, backing, &options).unwrap();
        let disk = Arc::new(disk);
        let readers: Vec<_> = (0..2)
            .map(|_| {
                let disk = disk.clone();
                thread::spawn(move || find_blocks(&disk))
            })
            .collect();
        let over = disk.create_over("below".into(), storage(), None).unwrap();
        find_blocks(&over);
        for reader in readers {
            reader.join().unwrap();
        }
    });
}

fn find_blocks(disk: &Disk) {
    for _ in 0..3 {
        let at = thread_rng().gen_range(0..BLOCKS) * BLOCK;
        let end = thread_rng().gen_range(at + 1..=SIZE);
        assert_shows(disk, at, &base()[at as usize..end as usize]);
        let status = disk.status(at, BLOCK).unwrap();
        assert_eq!(status.content, Content::Data);
    }
}

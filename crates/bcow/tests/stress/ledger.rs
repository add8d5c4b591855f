//! A process that serves a disk with a ledger ends at any operation of its storages; another one
//! continues. All answered writes are present, also those without a flush.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use bcow::check::{CheckOptions, check};
use bcow::{
    BlockDevice, CreateOptions, Disk, Error, Layout, Ledger, MemoryStorage, OneBacking,
    OpenOptions, Space, Storage, WritableDevice,
};
use bcow_testkit::{Random, SmallDisk, below, noise};

const SIZE: u64 = 5 << 20;
/// Processes in a row for each layout.
const PROCESSES: u64 = 400;

/// The storages of a process, which ends when it has changed them this many times.
struct Mortal {
    content: Arc<MemoryStorage>,
    life: Arc<AtomicI64>,
    /// Called before the next record is written.
    before_record: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl Mortal {
    fn new(content: &Arc<MemoryStorage>, life: &Arc<AtomicI64>) -> Arc<Self> {
        Arc::new(Mortal {
            content: Arc::clone(content),
            life: Arc::clone(life),
            before_record: Mutex::new(None),
        })
    }

    /// Fails if the process has ended. The last change may be made in part.
    fn lives(&self) -> io::Result<Life> {
        match self.life.fetch_sub(1, Ordering::SeqCst) {
            1.. => Ok(Life::Goes),
            0 => Ok(Life::Ends),
            _ => Err(io::Error::other("the process has ended")),
        }
    }
}

#[derive(PartialEq)]
enum Life {
    Goes,
    Ends,
}

impl Storage for Mortal {
    bcow_testkit::forward!(content: len, read_at);

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        // The log is behind the header (spec section 3).
        let is_record = (4096..8192).contains(&offset);
        let before_record = self.before_record.lock().unwrap().take_if(|_| is_record);
        if let Some(before_record) = before_record {
            before_record();
        }
        match self.lives()? {
            Life::Goes => self.content.write_at(offset, bytes),
            Life::Ends => {
                let part = bytes.len() / 2 / 8 * 8;
                self.content.write_at(offset, &bytes[..part])?;
                Err(io::Error::other("the process ends"))
            }
        }
    }
    fn set_len(&self, bytes: u64) -> io::Result<()> {
        self.lives()?;
        self.content.set_len(bytes)
    }
    fn sync(&self) -> io::Result<()> {
        self.lives().map(drop)
    }
    fn punch(&self, offset: u64, bytes: u64) -> io::Result<()> {
        self.lives()?;
        // As a host that releases the space.
        let zeros = vec![0; bytes as usize];
        let end = self.content.len()?.min(offset + bytes);
        if end > offset {
            self.content
                .write_at(offset, &zeros[..(end - offset) as usize])
        } else {
            Ok(())
        }
    }
}

/// A change that may have been made, or not.
struct Unanswered {
    range: Range<usize>,
    /// The bytes that the range has if the change was made.
    new: Vec<u8>,
}

/// The files of a disk, and its expected content.
struct Subject {
    file: Arc<MemoryStorage>,
    ledger: Arc<MemoryStorage>,
    backing: Arc<dyn BlockDevice>,
    content: Vec<u8>,
}

impl Subject {
    fn new(layout: Layout, block_bytes: Option<u32>) -> Self {
        let below_bytes = noise(9, 3 << 20);
        let backing: Arc<dyn BlockDevice> = Arc::new(below_bytes.clone());
        let options = CreateOptions {
            layout,
            block_bytes,
            log_bytes: 256 << 10,
            ..CreateOptions::disk(SIZE)
        };
        let file = Arc::new(MemoryStorage::default());
        let open = OpenOptions::default();
        let disk = Disk::create(file.clone(), &options, Some(below(backing.clone())), &open);
        disk.unwrap().close().unwrap();
        let ledger = Arc::new(MemoryStorage::default());
        Ledger::create(ledger.clone()).unwrap();
        let mut content = below_bytes;
        content.resize(SIZE as usize, 0);
        Subject {
            file,
            ledger,
            backing,
            content,
        }
    }

    /// Opens the disk in a process that can make this many changes.
    fn open(&self, life: i64) -> Result<Disk, Error> {
        let life = Arc::new(AtomicI64::new(life));
        let ledger = Arc::new(Ledger::open(Mortal::new(&self.ledger, &life))?);
        let backing = OneBacking(Some(self.backing.clone()));
        let options = OpenOptions::default();
        let file = Mortal::new(&self.file, &life);
        Disk::open_with_ledger(file, &options, &backing, Some(ledger))
    }

    /// Changes the disk at random until its process ends. Returns the number of answered changes,
    /// and the change without an answer.
    fn work(&mut self, disk: &Disk, random: &mut Random) -> (u64, Unanswered) {
        for changes in 0.. {
            let most = [600, 5000, 70_000, 400_000][random.below(4) as usize];
            let length = 1 + random.below(most);
            let mut at = random.below(SIZE - length);
            let mut range = at as usize..(at + length) as usize;
            if random.one_in(2) {
                at = at / 4096 * 4096;
                let end = (at + length).next_multiple_of(4096).min(SIZE);
                range = at as usize..end as usize;
            }
            let length = range.len();
            let (outcome, bytes) = match random.below(20) {
                0..12 => {
                    let bytes = noise(random.next_u64(), length);
                    (disk.write_at(at, &bytes), bytes)
                }
                12..14 => {
                    if random.one_in(3) {
                        // The last region as a whole.
                        (at, range) = (4 << 20, 4 << 20..SIZE as usize);
                    }
                    let length = range.len();
                    let zeroed = disk.write_zeroes(at, length as u64, Space::Free);
                    (zeroed, vec![0; length])
                }
                14 => {
                    // Only whole blocks are discarded.
                    let discarded = disk.discard(at, length as u64);
                    let mut bytes = vec![0; length];
                    if discarded.is_ok() {
                        disk.read_at(at, &mut bytes).unwrap();
                    }
                    (discarded, bytes)
                }
                16 if random.one_in(4) => (disk.checkpoint(), self.content[range.clone()].to_vec()),
                _ => (disk.flush(), self.content[range.clone()].to_vec()),
            };
            match outcome {
                Ok(()) => self.content[range].copy_from_slice(&bytes),
                Err(_) => return (changes, Unanswered { range, new: bytes }),
            }
        }
        unreachable!("the process ends")
    }

    /// The content for a process that continues, which is the expected one.
    fn verify(&mut self, unanswered: Option<Unanswered>, name: &str) {
        let disk = self.open(i64::MAX).unwrap();
        let mut found = vec![0xEE; SIZE as usize];
        disk.read_at(0, &mut found).unwrap();
        if let Some(Unanswered { range, new }) = unanswered {
            for (at, new) in range.clone().zip(new) {
                let (old, is) = (self.content[at], found[at]);
                assert!([old, new].contains(&is), "{name}: byte {at}");
            }
            let bytes = found[range.clone()].to_vec();
            self.content[range].copy_from_slice(&bytes);
        }
        if found != self.content {
            let same = found
                .iter()
                .zip(&self.content)
                .position(|(is, was)| is != was);
            panic!("{name}: byte {same:?} is lost");
        }
        // The process ends again before anything is flushed.
        drop(disk);
    }
}

fn processes(name: &str, layout: Layout, block_bytes: Option<u32>) {
    let mut random = Random::new(3);
    let mut subject = Subject::new(layout, block_bytes);
    let (mut begun, mut answered) = (0, 0);
    for process in 0..PROCESSES {
        let name = format!("{name}, process {process}");
        // Some end while they open the disk.
        let life = if random.one_in(4) { random.below(12) } else { random.below(120) };
        let unanswered = match subject.open(life as i64) {
            Err(_) => None,
            Ok(disk) => {
                begun += 1;
                let (changes, unanswered) = subject.work(&disk, &mut random);
                answered += changes;
                Some(unanswered)
            }
        };
        subject.verify(unanswered, &name);
        if process % 20 == 0 {
            subject.open(i64::MAX).unwrap().close().unwrap();
            let report = check(subject.file.clone(), &CheckOptions::FULL).unwrap();
            assert_eq!(report.findings, [], "{name}");
            subject.verify(None, &name);
        }
    }
    println!("{name}: {begun} processes answered {answered} changes");
    assert!(
        begun > PROCESSES / 2 && answered > 3 * PROCESSES,
        "{begun} {answered}"
    );
}

#[test]
fn small_blocks() {
    processes("space", Layout::Space, None);
}

#[test]
fn blocks_of_both_kinds() {
    processes("auto", Layout::Auto, None);
}

#[test]
fn regions_as_one_block() {
    processes("performance", Layout::Performance, None);
}

/// A storage for the ledger that is full: no process continues, until a flush.
#[test]
fn a_full_ledger_stops_no_write_and_is_refused() {
    let file = Arc::new(MemoryStorage::default());
    let disk = Disk::create_alone(file.clone(), &CreateOptions::disk(SIZE)).unwrap();
    disk.close().unwrap();
    let noted = Arc::new(SmallDisk::new(64 + 40));
    let ledger = Arc::new(Ledger::create(noted.clone()).unwrap());
    let open = |ledger| {
        let options = OpenOptions::default();
        Disk::open_with_ledger(file.clone(), &options, &OneBacking(None), Some(ledger))
    };
    let disk = open(ledger).unwrap();
    disk.write_at(0, &[1; 4096]).unwrap();
    disk.write_at(1 << 20, &[2; 4096]).unwrap();
    drop(disk);
    let again = || open(Arc::new(Ledger::open(noted.clone()).unwrap()));
    let error = again().err().unwrap().to_string();
    assert!(error.contains("lacks changes"), "{error}");
}

/// Records that no process writes: places where no block can be, parts of several blocks, space of
/// two blocks.
#[test]
fn a_ledger_with_an_impossible_record_is_refused() {
    let record = |kind: u8, at: u64, length: u64, place: u64, part: [u32; 2]| {
        let mut bytes = vec![0, 0, 0, 0, kind, 12, 0, 0];
        for field in [at, length, place] {
            bytes.extend(field.to_le_bytes());
        }
        for field in part {
            bytes.extend(field.to_le_bytes());
        }
        let crc = bcow::format::crc32c(&bytes[4..]);
        bytes[..4].copy_from_slice(&crc.to_le_bytes());
        bytes
    };
    let file = Arc::new(MemoryStorage::default());
    let disk = Disk::create_alone(file.clone(), &CreateOptions::disk(SIZE)).unwrap();
    disk.close().unwrap();
    let free = 1 << 20;
    let set = |at, length, place| record(3, at, length, place, [0, 0]);
    for (records, expected) in [
        (vec![set(0, 4096, free + 5)], "no block can be"),
        (vec![set(0, 4096, u64::MAX - 4095)], "no block can be"),
        (vec![set(SIZE, 0, free)], "does not exist"),
        (
            vec![record(4, 0, 8192, free, [0, 5])],
            "part of several blocks",
        ),
        (
            vec![record(4, 0, 4096, free, [9, 5])],
            "part of several blocks",
        ),
        (
            vec![record(5, 0, 0, 0, [0, 4097])],
            "part of several blocks",
        ),
        (
            vec![set(0, 8192, free), set(8192, 4096, free + 4096)],
            "space that is in use",
        ),
    ] {
        let noted = Arc::new(MemoryStorage::default());
        Ledger::create(noted.clone()).unwrap();
        noted.write_at(64, &records.concat()).unwrap();
        let ledger = Arc::new(Ledger::open(noted).unwrap());
        let options = OpenOptions::default();
        let opened =
            Disk::open_with_ledger(file.clone(), &options, &OneBacking(None), Some(ledger));
        let error = opened.err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

/// The ledger of another disk, or of an older state of the file, names space that is in use.
#[test]
fn a_ledger_of_another_file_is_refused() {
    let files = [1, 2].map(|seed| {
        let file = Arc::new(MemoryStorage::default());
        let disk = Disk::create_alone(file.clone(), &CreateOptions::disk(SIZE)).unwrap();
        disk.close().unwrap();
        let noted = Arc::new(MemoryStorage::default());
        let ledger = Arc::new(Ledger::create(noted.clone()).unwrap());
        let options = OpenOptions::default();
        let alone = OneBacking(None);
        let disk = Disk::open_with_ledger(file.clone(), &options, &alone, Some(ledger)).unwrap();
        disk.write_at(seed << 16, &noise(seed, 8192)).unwrap();
        (file, noted, disk)
    });
    // The second file uses the space that the ledger of the first one names.
    files[1].2.flush().unwrap();
    let noted = files[0].1.clone();
    let file = files[1].0.clone();
    drop(files);
    let ledger = Arc::new(Ledger::open(noted).unwrap());
    let options = OpenOptions::default();
    let opened = Disk::open_with_ledger(file, &options, &OneBacking(None), Some(ledger));
    let error = opened.err().unwrap().to_string();
    assert!(error.contains("names space that is in use"), "{error}");
}

/// Writes during a flush, whose record is written or not.
#[test]
fn changes_during_a_flush_are_not_lost() {
    for is_recorded in [false, true] {
        let file = Arc::new(MemoryStorage::default());
        let disk = Disk::create_alone(file.clone(), &CreateOptions::disk(SIZE)).unwrap();
        disk.close().unwrap();
        let noted = Arc::new(MemoryStorage::default());
        let ledger = Arc::new(Ledger::create(noted.clone()).unwrap());
        let life = Arc::new(AtomicI64::new(i64::MAX));
        let watched = Mortal::new(&file, &life);
        let (options, alone) = (OpenOptions::default(), OneBacking(None));
        let disk = Disk::open_with_ledger(watched.clone(), &options, &alone, Some(ledger)).unwrap();
        let disk = Arc::new(disk);
        let mut content = vec![0; 64 << 10];
        let old = noise(1, 4096);
        disk.write_at(0, &old).unwrap();
        content[..4096].copy_from_slice(&old);
        content[50..150].fill(7);
        content[32 << 10..36 << 10].fill(8);
        let writer = Arc::clone(&disk);
        *watched.before_record.lock().unwrap() = Some(Box::new(move || {
            // The record in flight has the block: the rest of it is copied from there.
            let written = std::thread::spawn(move || {
                writer.write_at(50, &[7; 100]).unwrap();
                writer.write_at(32 << 10, &[8; 4096]).unwrap();
            });
            written.join().unwrap();
            if !is_recorded {
                life.store(-1, Ordering::SeqCst);
            }
        }));
        assert_eq!(disk.flush().is_ok(), is_recorded);
        watched.life.store(-1, Ordering::SeqCst);
        drop(disk);
        // As a process that was killed: it did not note the failure.
        let incomplete = 24;
        noted.write_at(incomplete, &[0; 8]).unwrap();
        let ledger = Arc::new(Ledger::open(noted).unwrap());
        let again = Disk::open_with_ledger(file.clone(), &options, &alone, Some(ledger)).unwrap();
        let mut found = vec![0; content.len()];
        again.read_at(0, &mut found).unwrap();
        assert!(found == content, "the record was written: {is_recorded}");
        again.close().unwrap();
        assert_eq!(check(file, &CheckOptions::FULL).unwrap().findings, []);
    }
}

/// A region is zeroed as a whole, cut, and written to. The process ends when the record of all that
/// is in the file, before the ledger drops it.
#[test]
fn a_record_can_have_newer_blocks_than_the_whole_region_of_the_ledger() {
    let mut subject = Subject::new(Layout::Space, None);
    let life = Arc::new(AtomicI64::new(i64::MAX));
    let (file, options) = (Mortal::new(&subject.file, &life), OpenOptions::default());
    let ledger = Ledger::open(Mortal::new(&subject.ledger, &life)).unwrap();
    let backing = OneBacking(Some(subject.backing.clone()));
    let disk =
        Disk::open_with_ledger(file.clone(), &options, &backing, Some(Arc::new(ledger))).unwrap();
    let region = 4 << 20;
    disk.write_at(region, &noise(1, 4096)).unwrap();
    disk.flush().unwrap();
    disk.write_zeroes(0, region, Space::Free).unwrap();
    subject.content[..region as usize].fill(0);
    for (at, bytes) in [(region, noise(1, 4096)), (8192, noise(2, 8192))] {
        disk.write_at(at, &bytes).unwrap();
        subject.content[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
    }
    *file.before_record.lock().unwrap() = Some(Box::new(move || life.store(1, Ordering::SeqCst)));
    let _ = disk.flush();
    drop(disk);
    subject.verify(None, "zeroed as a whole");
    subject.open(i64::MAX).unwrap().close().unwrap();
    let report = check(subject.file.clone(), &CheckOptions::FULL).unwrap();
    assert_eq!(report.findings, []);
}

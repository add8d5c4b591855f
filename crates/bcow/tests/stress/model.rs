//! Random sequences of all operations on a chain of disks, against a model in memory: what a guest
//! does with the disk on top, and all that the commands do with whole disks. After each operation,
//! the top is compared byte by byte; after each operation on a whole disk, every file of the chain
//! is, and checked.

use std::sync::Arc;

use bcow::check::{CheckOptions, check};
use bcow::format::{BackingEntry, BackingName};
use bcow::operation::{
    CommitError, RewriteOptions, WRITABLE_LOG_BYTES, absorb_backing, commit, open_over, rebase,
    rebase_reference, rewrite,
};
use bcow::{
    BlockDevice, Compression, Content, CreateOptions, Disk, Error, Image, Keep, Layout, Ledger,
    MemoryStorage, OneBacking, OpenOptions, Space, Status, WritableDevice,
};
use bcow_testkit::{Random, assert_sound, below as with_entry, content};
use proptest::prelude::*;

const MAX_BYTES: u64 = 6 << 20;
/// Most files of a chain.
const MAX_LEVELS: usize = 4;

/// An operation on the disk on top.
#[derive(Debug, Clone)]
enum Step {
    Write {
        at: u64,
        length: u64,
        seed: u8,
    },
    Zero {
        at: u64,
        length: u64,
        keep: bool,
    },
    Discard {
        at: u64,
        length: u64,
    },
    Read {
        at: u64,
        length: u64,
    },
    Flush,
    Checkpoint,
    /// Opens the disk again: after a close, or after a crash that follows a flush.
    Reopen {
        orderly: bool,
    },
    /// Continues the disk with its ledger, as after the end of the process. Nothing is lost.
    Continue,
    Resize {
        size: u64,
    },
    /// Creates a new disk on top.
    Overlay {
        layout: u8,
        size: u64,
    },
    /// Commits a disk of the chain into the disk below it.
    Commit {
        level: u8,
    },
    /// Makes the top read-only, and creates a new disk over it.
    Snapshot,
    /// A disk of the chain takes the data of the file below it, which is dropped.
    Absorb {
        level: u8,
    },
    /// Writes the own data of the top into a new file, which is looked at and dropped.
    CommitNew,
    /// Gives the top another backing: with the content that it has, or by reference only.
    Rebase {
        onto: Onto,
        by_reference: bool,
    },
    /// Copies the content into a new file without unused space.
    Compact {
        compress: bool,
    },
    /// Seals the top, and creates a new disk on it.
    Seal {
        flatten: bool,
    },
    /// Copies all content to the bytes of a raw disk with holes, and from there to a new file.
    Convert {
        writable: bool,
    },
}

/// A backing of a rebase.
#[derive(Debug, Clone)]
enum Onto {
    None,
    /// A file of the chain.
    Level(u8),
    /// A new file with one kind of data, without a backing.
    New {
        layout: u8,
        size: u64,
        writes: Vec<(u64, u64, u8)>,
        sealed: bool,
    },
}

fn onto() -> impl Strategy<Value = Onto> {
    let write = (place(), 1..=255u8).prop_map(|((at, length), seed)| (at, length, seed));
    let writes = proptest::collection::vec(write, 1..4);
    let new = (0..5u8, sectors(), writes, any::<bool>());
    prop_oneof![
        1 => Just(Onto::None),
        2 => any::<u8>().prop_map(Onto::Level),
        2 => new.prop_map(|(layout, size, writes, sealed)| Onto::New {
            layout,
            size,
            writes,
            sealed,
        }),
    ]
}

fn place() -> impl Strategy<Value = (u64, u64)> {
    let length = prop_oneof![
        4 => 1..5000u64,
        2 => (1..16u64).prop_map(|sectors| sectors * 4096),
        1 => 1..(300u64 << 10),
    ];
    let at = prop_oneof![
        4 => 0..(64u64 << 10),
        2 => (0..MAX_BYTES / 4096).prop_map(|sector| sector * 4096),
        1 => (4u64 << 20) - 8192..(4 << 20) + 8192,
        1 => 0..MAX_BYTES,
    ];
    (at, length)
}

/// A size: often one of few blocks, so that operations meet.
fn sectors() -> impl Strategy<Value = u64> {
    let sectors = prop_oneof![2 => 1..64u64, 1 => 1..=MAX_BYTES / 4096];
    sectors.prop_map(|sectors| sectors * 4096)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (place(), 1..=255u8).prop_map(|((at, length), seed)| Step::Write { at, length, seed }),
        2 => (place(), any::<bool>())
            .prop_map(|((at, length), keep)| Step::Zero { at, length, keep }),
        2 => place().prop_map(|(at, length)| Step::Discard { at, length }),
        3 => place().prop_map(|(at, length)| Step::Read { at, length }),
        3 => Just(Step::Flush),
        1 => Just(Step::Checkpoint),
        2 => any::<bool>().prop_map(|orderly| Step::Reopen { orderly }),
        3 => Just(Step::Continue),
        1 => sectors().prop_map(|size| Step::Resize { size }),
        1 => (0..5u8, sectors()).prop_map(|(layout, size)| Step::Overlay { layout, size }),
        1 => any::<u8>().prop_map(|level| Step::Commit { level }),
        2 => Just(Step::Snapshot),
        2 => any::<u8>().prop_map(|level| Step::Absorb { level }),
        1 => Just(Step::CommitNew),
        2 => (onto(), any::<bool>())
            .prop_map(|(onto, by_reference)| Step::Rebase { onto, by_reference }),
        1 => any::<bool>().prop_map(|compress| Step::Compact { compress }),
        1 => any::<bool>().prop_map(|flatten| Step::Seal { flatten }),
        1 => any::<bool>().prop_map(|writable| Step::Convert { writable }),
    ]
}

fn options(layout: u8, size: u64) -> CreateOptions {
    let (layout, block_bytes) = [
        (Layout::Auto, None),
        (Layout::Space, None),
        (Layout::Performance, None),
        (Layout::Space, Some(64 << 10)),
        (Layout::Performance, Some(1 << 20)),
    ][usize::from(layout)];
    CreateOptions {
        layout,
        block_bytes,
        log_bytes: 256 << 10,
        ..CreateOptions::disk(size)
    }
}

/// A file of the chain, and its expected content.
struct Level {
    storage: Arc<MemoryStorage>,
    /// The ledger of the disk, if it is on top.
    ledger: Arc<MemoryStorage>,
    content: Vec<u8>,
    is_sealed: bool,
}

impl Level {
    /// The entry of a disk over this file. Only a sealed file can be named by digest.
    fn entry(&self, device: &dyn BlockDevice) -> BackingEntry {
        let name = if self.is_sealed {
            BackingName::Digest([7; 32])
        } else {
            BackingName::FileName {
                name: "below".into(),
                identity: None,
            }
        };
        let size = device.size();
        BackingEntry { name, size }
    }
}

/// The bytes of a raw disk, with holes.
struct Sparse(Vec<u8>);

impl BlockDevice for Sparse {
    fn size(&self) -> u64 {
        self.0.size()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        self.0.read_at(offset, buf)
    }

    fn status(&self, offset: u64, length: u64) -> Result<Status, Error> {
        let length = length.min(4096 - offset % 4096);
        let sector = &self.0[offset as usize..][..length as usize];
        let is_hole = sector.iter().all(|byte| *byte == 0);
        Ok(if is_hole { Status::hole(length) } else { Status::data(length) })
    }
}

/// The bytes of a write.
fn bytes_of(range: std::ops::Range<usize>, seed: u8) -> Vec<u8> {
    range.map(|at| seed ^ (at / 97) as u8).collect()
}

/// The files, lowest first; the last one is open for writing.
struct Chain {
    levels: Vec<Level>,
    disk: Option<Disk>,
}

impl Chain {
    fn new(layout: u8, size: u64) -> Self {
        let mut chain = Chain {
            levels: Vec::new(),
            disk: None,
        };
        chain.push(&options(layout, size));
        chain
    }

    fn disk(&self) -> &Disk {
        self.disk.as_ref().expect("the top is open")
    }

    fn top(&mut self) -> &mut Level {
        self.levels.last_mut().expect("there is a file")
    }

    /// The top of the first `count` files, opened for reading.
    fn open_below(&self, count: usize) -> Option<Arc<dyn BlockDevice>> {
        let mut below: Option<Arc<dyn BlockDevice>> = None;
        for level in &self.levels[..count] {
            let image = Image::open_with_backings(
                level.storage.clone(),
                &OpenOptions::default(),
                &OneBacking(below.take()),
            );
            below = Some(image.unwrap());
        }
        below
    }

    fn push(&mut self, options: &CreateOptions) {
        if let Some(disk) = self.disk.take() {
            disk.close().unwrap();
        }
        let storage = Arc::new(MemoryStorage::default());
        let open = OpenOptions::default();
        let backing = self.backing(self.levels.len());
        let disk = Disk::create(storage.clone(), options, backing, &open).unwrap();
        disk.close().unwrap();
        let mut content = self
            .levels
            .last()
            .map_or(Vec::new(), |level| level.content.clone());
        content.resize(options.size as usize, 0);
        let ledger = Arc::default();
        self.levels.push(Level {
            storage,
            ledger,
            content,
            is_sealed: false,
        });
        self.open();
    }

    /// The top of the first `count` files, as the backing of a disk.
    fn backing(&self, count: usize) -> Option<(BackingEntry, Arc<dyn BlockDevice>)> {
        let device = self.open_below(count)?;
        let entry = self.levels[count - 1].entry(&*device);
        Some((entry, device))
    }

    /// Opens the top with a new ledger.
    fn open(&mut self) {
        let storage = Arc::new(MemoryStorage::default());
        self.top().ledger = storage.clone();
        self.open_with(Ledger::create(storage).unwrap());
    }

    fn open_with(&mut self, ledger: Ledger) {
        let below = OneBacking(self.open_below(self.levels.len() - 1));
        let storage = self.top().storage.clone();
        let options = OpenOptions::default();
        let disk = Disk::open_with_ledger(storage, &options, &below, Some(Arc::new(ledger)));
        self.disk = Some(disk.unwrap());
    }

    /// The part of a range that lies inside the top.
    fn clip(&mut self, at: u64, length: u64) -> std::ops::Range<usize> {
        let size = self.top().content.len() as u64;
        let start = at.min(size - 1);
        start as usize..(start + length).min(size) as usize
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Write { at, length, seed } => {
                let range = self.clip(at, length);
                let bytes = bytes_of(range.clone(), seed);
                self.disk().write_at(range.start as u64, &bytes).unwrap();
                self.top().content[range].copy_from_slice(&bytes);
            }
            Step::Zero { at, length, keep } => {
                let range = self.clip(at, length);
                let space = if keep { Space::Keep } else { Space::Free };
                let disk = self.disk();
                disk.write_zeroes(range.start as u64, range.len() as u64, space)
                    .unwrap();
                self.top().content[range].fill(0);
            }
            Step::Discard { at, length } => {
                let range = self.clip(at, length);
                let disk = self.disk();
                disk.discard(range.start as u64, range.len() as u64)
                    .unwrap();
                let mut found = vec![0; range.len()];
                self.disk().read_at(range.start as u64, &mut found).unwrap();
                let content = &mut self.top().content[range];
                assert!(
                    content
                        .iter()
                        .zip(&found)
                        .all(|(was, is)| *is == 0 || is == was)
                );
                content.copy_from_slice(&found);
            }
            Step::Read { at, length } => {
                let range = self.clip(at, length);
                let mut found = vec![0xEE; range.len()];
                self.disk().read_at(range.start as u64, &mut found).unwrap();
                assert!(found == self.top().content[range]);
            }
            Step::Flush => self.disk().flush().unwrap(),
            Step::Checkpoint => self.disk().checkpoint().unwrap(),
            Step::Reopen { orderly } => {
                let disk = self.disk.take().expect("the top is open");
                if orderly {
                    disk.close().unwrap()
                } else {
                    disk.flush().unwrap();
                    drop(disk);
                }
                self.open();
            }
            Step::Continue => {
                drop(self.disk.take().expect("the top is open"));
                let ledger = self.top().ledger.clone();
                self.open_with(Ledger::open(ledger).unwrap());
            }
            Step::Resize { size } => {
                self.disk().resize(size).unwrap();
                self.top().content.resize(size as usize, 0);
            }
            Step::Overlay { layout, size } if self.levels.len() < MAX_LEVELS => {
                self.push(&options(layout, size));
            }
            Step::Overlay { .. } => {}
            Step::Commit { level } => self.commit(level),
            Step::Snapshot => self.snapshot(),
            Step::Absorb { level } => self.absorb(level),
            Step::CommitNew => self.commit_new(),
            Step::Rebase {
                ref onto,
                by_reference,
            } => self.rebase(onto, by_reference),
            Step::Compact { compress: true } => self.compact(Compression::Zstd { level: 1 }),
            Step::Compact { compress: false } => self.compact(Compression::None),
            Step::Seal { flatten } => self.seal(flatten),
            Step::Convert { writable } => self.convert(writable),
        }
        match step {
            Step::Write { .. }
            | Step::Zero { .. }
            | Step::Discard { .. }
            | Step::Read { .. }
            | Step::Flush
            | Step::Checkpoint
            | Step::Reopen { .. }
            | Step::Continue => self.verify_top(),
            _ => self.verify(),
        }
    }

    fn close(&mut self) {
        let disk = self.disk.take().expect("the top is open");
        disk.close().unwrap();
    }

    /// The top, closed, as an image over the file below it.
    fn open_top(&self) -> Arc<Image> {
        let below = OneBacking(self.open_below(self.levels.len() - 1));
        let storage = self.levels[self.levels.len() - 1].storage.clone();
        Image::open_with_backings(storage, &OpenOptions::default(), &below).unwrap()
    }

    fn commit(&mut self, level: u8) {
        let count = self.levels.len();
        if count < 2 {
            return;
        }
        let level = 1 + usize::from(level) % (count - 1);
        let below = level - 1;
        if self.levels[below].is_sealed || self.levels[level].is_sealed {
            return;
        }
        self.close();
        let deeper = OneBacking(self.open_below(below));
        let options = OpenOptions::default();
        let storage = self.levels[below].storage.clone();
        let open = || Disk::open(storage, &options, &deeper).map_err(CommitError::Disk);
        let top = self.levels[level].storage.clone();
        let (disk, backing) = open_over(top, &options, open).unwrap();
        commit(disk, &backing, &()).unwrap();
        Arc::into_inner(backing).expect("the last").close().unwrap();
        let shown = self.levels[level].content.clone();
        let content = &mut self.levels[below].content;
        content.resize(content.len().max(shown.len()), 0);
        content[..shown.len()].copy_from_slice(&shown);
        self.open();
    }

    fn snapshot(&mut self) {
        if self.levels.len() == MAX_LEVELS {
            return;
        }
        let below = Arc::new(self.disk.take().expect("the top is open"));
        below.checkpoint().unwrap();
        let storage = Arc::new(MemoryStorage::default());
        let over = below.create_over("below".into(), storage.clone(), None);
        let shown = self.top().content.clone();
        assert!(content(&over.unwrap()) == shown);
        Arc::into_inner(below).expect("the last").close().unwrap();
        self.levels.push(Level {
            storage,
            ledger: Arc::default(),
            content: shown,
            is_sealed: false,
        });
        self.open();
    }

    fn absorb(&mut self, level: u8) {
        let count = self.levels.len();
        if count < 2 {
            return;
        }
        let level = 1 + usize::from(level) % (count - 1);
        if self.levels[level].is_sealed {
            return;
        }
        self.close();
        let below = self.open_below(level).expect("there is a file below");
        let backing_bytes = below.size();
        let storage = self.levels[level].storage.clone();
        let disk = Disk::open(storage, &OpenOptions::default(), &OneBacking(Some(below))).unwrap();
        let deeper = self.backing(level - 1);
        let deeper_bytes = deeper.as_ref().map_or(0, |(entry, _)| entry.size);
        absorb_backing(&disk, backing_bytes, deeper_bytes, &()).unwrap();
        disk.set_backing(deeper).unwrap();
        disk.close().unwrap();
        self.levels.remove(level - 1);
        self.open();
    }

    fn commit_new(&mut self) {
        self.close();
        let image = self.open_top();
        let storage = Arc::new(MemoryStorage::default());
        let form = RewriteOptions::sealed(&image, Keep::Own);
        rewrite(&*image, storage.clone(), form, &()).unwrap();
        let below = OneBacking(self.open_below(self.levels.len() - 1));
        let new = Image::open_with_backings(storage.clone(), &OpenOptions::default(), &below);
        assert!(content(&*new.unwrap()) == self.top().content);
        assert_sound(storage);
        drop(image);
        self.open();
    }

    fn rebase(&mut self, onto: &Onto, by_reference: bool) {
        let top = self.levels.len() - 1;
        let kept = match onto {
            Onto::None => 0,
            Onto::Level(_) if top == 0 => return,
            Onto::Level(level) => 1 + usize::from(*level) % top,
            Onto::New { .. } => 1,
        };
        let new_base = match onto {
            Onto::New {
                layout,
                size,
                writes,
                sealed,
            } => Some(new_base(&options(*layout, *size), writes, *sealed)),
            _ => None,
        };
        // The old files below stay open through the disk.
        let mut new = Chain {
            levels: Vec::new(),
            disk: None,
        };
        let disk = self.disk.take().expect("the top is open");
        let mut levels = std::mem::take(&mut self.levels);
        let mut level = levels.pop().expect("there is a file");
        new.levels = match new_base {
            Some(base) => vec![base],
            None => levels.into_iter().take(kept).collect(),
        };
        let backing = new.backing(new.levels.len());
        if !by_reference {
            rebase(disk, backing, &()).unwrap();
        } else {
            let shown = new.levels.last().map_or(&[][..], |level| &level.content);
            show_by_reference(&disk, &mut level.content, shown);
            disk.close().unwrap();
            rebase_reference(level.storage.clone(), backing, &OpenOptions::default()).unwrap();
        }
        new.levels.push(level);
        *self = new;
        self.open();
    }

    /// Replaces the file of the top by `storage`.
    fn replace_top(&mut self, storage: Arc<MemoryStorage>, is_sealed: bool) {
        let top = self.top();
        top.storage = storage;
        top.is_sealed = is_sealed;
        if is_sealed {
            let size = self.top().content.len() as u64;
            self.push(&options(0, size));
        } else {
            self.open()
        }
    }

    fn compact(&mut self, compression: Compression) {
        self.close();
        let image = self.open_top();
        let storage = Arc::new(MemoryStorage::default());
        let form = RewriteOptions::compacted(&image, compression).unwrap();
        rewrite(&*image, storage.clone(), form, &()).unwrap();
        self.replace_top(storage, false);
    }

    fn seal(&mut self, flatten: bool) {
        if !flatten && self.levels.len() == MAX_LEVELS {
            return;
        }
        self.close();
        let image = self.open_top();
        let storage = Arc::new(MemoryStorage::default());
        let keep = if flatten { Keep::All } else { Keep::Own };
        let form = RewriteOptions::sealed(&image, keep);
        rewrite(&*image, storage.clone(), form, &()).unwrap();
        if flatten {
            self.drop_below();
        }
        self.replace_top(storage, true);
    }

    fn convert(&mut self, writable: bool) {
        self.close();
        let raw = Sparse(content(&*self.open_top()));
        let storage = Arc::new(MemoryStorage::default());
        let mut form = RewriteOptions::new(raw.size());
        if writable {
            form.compression = Compression::None;
            form.form.log_bytes = WRITABLE_LOG_BYTES;
        }
        rewrite(&raw, storage.clone(), form, &()).unwrap();
        self.drop_below();
        self.replace_top(storage, !writable);
    }

    fn drop_below(&mut self) {
        let top = self.levels.len() - 1;
        self.levels.drain(..top);
    }

    fn verify_top(&mut self) {
        assert_eq!(self.disk().size(), self.top().content.len() as u64);
        let found = content(self.disk());
        assert!(found == self.top().content, "the open disk");
    }

    /// Compares and checks every file.
    fn verify(&mut self) {
        self.verify_top();
        let size = self.disk().size();
        let mut at = 0;
        while at < size {
            let status = self.disk().status(at, size - at).unwrap();
            let range = at as usize..(at + status.length) as usize;
            if status.content != Content::Data {
                let shown = &self.top().content[range];
                assert!(shown.iter().all(|byte| *byte == 0), "status at {at}");
            }
            at += status.length;
        }
        self.close();
        for count in 1..=self.levels.len() {
            let shown = self.open_below(count).expect("it is there");
            let level = &self.levels[count - 1];
            assert!(
                content(&*shown) == level.content,
                "file {count} of {}",
                self.levels.len()
            );
            let report = check(level.storage.clone(), &CheckOptions::FULL).unwrap();
            assert_eq!(report.findings, [], "file {count} of {}", self.levels.len());
        }
        self.open();
    }
}

/// A file without a backing, which `writes` fill.
fn new_base(options: &CreateOptions, writes: &[(u64, u64, u8)], sealed: bool) -> Level {
    let mut chain = Chain {
        levels: Vec::new(),
        disk: None,
    };
    chain.push(options);
    for &(at, length, seed) in writes {
        chain.step(&Step::Write { at, length, seed });
    }
    if sealed {
        // With another disk on it.
        chain.seal(true);
    }
    chain.close();
    chain.levels.remove(0)
}

/// Changes the content of a disk to that over a file with the content `below`: only what the disk
/// itself stores stays.
fn show_by_reference(disk: &Disk, content: &mut [u8], below: &[u8]) {
    let mut at = 0;
    while at < content.len() {
        let left = content.len() - at;
        let status = disk.status(at as u64, left as u64).unwrap();
        let length = status.length as usize;
        if status.depth != 1 {
            let shown = below.get(at..).unwrap_or_default();
            let shown = &shown[..length.min(shown.len())];
            content[at..at + length].fill(0);
            content[at..at + shown.len()].copy_from_slice(shown);
        }
        at += length;
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: Some(Box::new(
            proptest::test_runner::FileFailurePersistence::WithSource("regressions"),
        )),
        cases: std::env::var("PROPTEST_CASES").map_or(256, |cases| cases.parse().unwrap()),
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_chain_of_disks_shows_what_the_model_shows(
        layout in 0..5u8,
        size in sectors(),
        steps in proptest::collection::vec(step(), 1..30),
    ) {
        let mut chain = Chain::new(layout, size);
        for step in &steps {
            chain.step(step);
        }
        chain.verify();
    }
}

/// Several threads write, zero, discard, flush and read the same blocks. Each block has the data of
/// the last write of one of them, also for the next process, after a flush or with the ledger.
#[test]
fn threads_on_the_same_blocks_leave_one_value_in_each() {
    threads_on_the_same_blocks(false);
    threads_on_the_same_blocks(true);
}

fn threads_on_the_same_blocks(with_ledger: bool) {
    const BLOCKS: u64 = 64;
    for (layout, backed) in [(0, false), (1, true), (2, true), (3, true)] {
        let storage = Arc::new(MemoryStorage::default());
        let size = BLOCKS * 4096;
        let below: Arc<dyn BlockDevice> = Arc::new(vec![0xFF; size as usize]);
        let backing = backed.then(|| with_entry(below.clone()));
        let open = OpenOptions::default();
        let disk = Disk::create(storage.clone(), &options(layout, size), backing, &open).unwrap();
        disk.close().unwrap();
        let resolver = OneBacking(backed.then_some(below));
        let noted = Arc::new(MemoryStorage::default());
        let ledger = Arc::new(Ledger::create(noted.clone()).unwrap());
        let file = storage.clone();
        let disk = Disk::open_with_ledger(file, &open, &resolver, Some(ledger)).unwrap();
        let one_value = |block: &[u8]| block.iter().all(|byte| *byte == block[0]);
        std::thread::scope(|scope| {
            for thread in 1..=4u8 {
                let disk = &disk;
                scope.spawn(move || {
                    let mut random = Random::new(u64::from(thread));
                    for round in 0..300u64 {
                        let at = random.below(BLOCKS) * 4096;
                        let count = (1 + random.below(4)).min(BLOCKS - at / 4096) * 4096;
                        match random.below(10) {
                            0..6 => {
                                let value = thread << 5 | (round % 31) as u8;
                                disk.write_at(at, &vec![value; count as usize]).unwrap();
                            }
                            6 => disk.write_zeroes(at, count, Space::Free).unwrap(),
                            7 => disk.discard(at, count).unwrap(),
                            8 => disk.flush().unwrap(),
                            _ => {
                                let mut block = [0; 4096];
                                disk.read_at(at, &mut block).unwrap();
                            }
                        }
                    }
                });
            }
        });
        let mut seen = vec![0; size as usize];
        disk.read_at(0, &mut seen).unwrap();
        assert!(seen.chunks(4096).all(one_value), "layout {layout}");
        let file = storage.clone();
        let disk = if !with_ledger {
            disk.flush().unwrap();
            drop(disk);
            Disk::open(file, &open, &resolver).unwrap()
        } else {
            drop(disk);
            let ledger = Arc::new(Ledger::open(noted).unwrap());
            Disk::open_with_ledger(file, &open, &resolver, Some(ledger)).unwrap()
        };
        let mut again = vec![0; size as usize];
        disk.read_at(0, &mut again).unwrap();
        assert!(again == seen, "layout {layout}");
        disk.close().unwrap();
        assert_sound(storage);
    }
}

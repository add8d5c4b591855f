//! Random sequences of all operations on a chain of disks, against a model in memory.

use std::sync::Arc;

use bcow::check::{CheckOptions, check};
use bcow::format::Use;
use bcow::operation::{CommitError, RewriteOptions, commit, open_over, rebase, rewrite};
use bcow::{
    BlockDevice, Compression, CreateOptions, Disk, Image, Layout, Ledger, MemoryStorage,
    OneBacking, OpenOptions, Space, WritableDevice,
};
use bcow_testkit::below as backing;
use proptest::prelude::*;

const MAX_BYTES: u64 = 6 << 20;

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
    /// Commits the top into the disk below.
    Commit,
    /// Keeps the content, but uses the backing of the backing.
    Rebase,
    /// Copies the content into a new file without unused space.
    Compact {
        compress: bool,
    },
}

fn place() -> impl Strategy<Value = (u64, u64)> {
    let length = prop_oneof![
        4 => 1..5000u64,
        2 => (1..16u64).prop_map(|sectors| sectors * 4096),
        1 => 1..(300u64 << 10),
    ];
    let at = prop_oneof![
        2 => 0..(64u64 << 10),
        2 => (0..MAX_BYTES / 4096).prop_map(|sector| sector * 4096),
        1 => (4u64 << 20) - 8192..(4 << 20) + 8192,
        1 => 0..MAX_BYTES,
    ];
    (at, length)
}

fn sectors() -> impl Strategy<Value = u64> {
    (1..=MAX_BYTES / 4096).prop_map(|sectors| sectors * 4096)
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
        1 => Just(Step::Commit),
        1 => Just(Step::Rebase),
        1 => any::<bool>().prop_map(|compress| Step::Compact { compress }),
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
        purpose: Use::Sketch,
        ..CreateOptions::disk(size)
    }
}

/// A file of the chain, and its expected content.
struct Level {
    storage: Arc<MemoryStorage>,
    /// The ledger of the disk, if it is on top.
    ledger: Arc<MemoryStorage>,
    content: Vec<u8>,
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
        let below = self.open_below(self.levels.len());
        let storage = Arc::new(MemoryStorage::default());
        let open = OpenOptions::default();
        let backing = below.map(backing);
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
        });
        self.open();
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
        let disk = Disk::open_with_ledger(storage, &options, &below, Arc::new(ledger));
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
                let bytes: Vec<u8> = range.clone().map(|at| seed ^ (at / 97) as u8).collect();
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
                match orderly {
                    true => disk.close().unwrap(),
                    false => {
                        disk.flush().unwrap();
                        drop(disk);
                    }
                }
                self.open();
            }
            Step::Continue => {
                drop(self.disk.take().expect("the top is open"));
                let ledger = self.top().ledger.clone();
                self.open_with(Ledger::open(ledger).unwrap());
                let mut found = vec![0xEE; self.top().content.len()];
                self.disk().read_at(0, &mut found).unwrap();
                assert!(found == self.top().content, "after the end of the process");
            }
            Step::Resize { size } => {
                self.disk().resize(size).unwrap();
                self.top().content.resize(size as usize, 0);
            }
            Step::Overlay { layout, size } if self.levels.len() < 4 => {
                self.push(&options(layout, size));
            }
            Step::Overlay { .. } => {}
            Step::Commit => self.commit(),
            Step::Rebase => self.rebase(),
            Step::Compact { compress: true } => self.compact(Compression::Zstd { level: 1 }),
            Step::Compact { compress: false } => self.compact(Compression::None),
        }
    }

    fn close(&mut self) {
        let disk = self.disk.take().expect("the top is open");
        disk.close().unwrap();
    }

    fn commit(&mut self) {
        if self.levels.len() < 2 {
            return;
        }
        self.close();
        let below = self.levels.len() - 2;
        let deeper = OneBacking(self.open_below(below));
        let options = OpenOptions::default();
        let storage = self.levels[below].storage.clone();
        let open = || Disk::open(storage, &options, &deeper).map_err(CommitError::Disk);
        let (disk, backing) = open_over(self.top().storage.clone(), &options, open).unwrap();
        commit(disk, &backing, &()).unwrap();
        Arc::into_inner(backing).expect("the last").close().unwrap();
        let shown = self.top().content.clone();
        let content = &mut self.levels[below].content;
        content.resize(content.len().max(shown.len()), 0);
        content[..shown.len()].copy_from_slice(&shown);
        self.open();
    }

    fn rebase(&mut self) {
        if self.levels.len() < 3 {
            return;
        }
        let new = self.levels.len() - 2;
        let below = self.open_below(new).expect("there is one below");
        let disk = self.disk.take().expect("the top is open");
        rebase(disk, Some(backing(below.clone())), &()).unwrap();
        self.levels.remove(new);
        self.open();
    }

    fn compact(&mut self, compression: Compression) {
        self.close();
        let below = OneBacking(self.open_below(self.levels.len() - 1));
        let old = self.top().storage.clone();
        let image = Image::open_with_backings(old, &OpenOptions::default(), &below).unwrap();
        let storage = Arc::new(MemoryStorage::default());
        let form = RewriteOptions::compacted(&image, compression).unwrap();
        rewrite(&*image, storage.clone(), form, &()).unwrap();
        self.top().storage = storage;
        self.open();
    }

    fn verify(&mut self) {
        let size = self.top().content.len();
        assert_eq!(self.disk().size(), size as u64);
        let mut found = vec![0xEE; size];
        self.disk().read_at(0, &mut found).unwrap();
        assert!(found == self.top().content, "the open disk");
        let mut at = 0;
        while at < size as u64 {
            let status = self.disk().status(at, size as u64 - at).unwrap();
            let range = at as usize..(at + status.length) as usize;
            if status.content != bcow::Content::Data {
                assert!(found[range].iter().all(|byte| *byte == 0), "status at {at}");
            }
            at += status.length;
        }
        self.disk.take().expect("the top is open").close().unwrap();
        for count in 1..=self.levels.len() {
            let shown = self.open_below(count).expect("it is there");
            let level = &self.levels[count - 1];
            let mut found = vec![0xEE; level.content.len()];
            shown.read_at(0, &mut found).unwrap();
            assert!(
                found == level.content,
                "file {count} of {}",
                self.levels.len()
            );
            let report = check(level.storage.clone(), &CheckOptions::FULL).unwrap();
            assert_eq!(report.findings, [], "file {count} of {}", self.levels.len());
        }
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
    use bcow_testkit::Random;
    const BLOCKS: u64 = 64;
    for (layout, backed) in [(0, false), (1, true), (2, true), (3, true)] {
        let storage = Arc::new(MemoryStorage::default());
        let size = BLOCKS * 4096;
        let below: Arc<dyn BlockDevice> = Arc::new(vec![0xFF; size as usize]);
        let backing = backed.then(|| backing(below.clone()));
        let open = OpenOptions::default();
        let disk = Disk::create(storage.clone(), &options(layout, size), backing, &open).unwrap();
        disk.close().unwrap();
        let resolver = OneBacking(backed.then_some(below));
        let noted = Arc::new(MemoryStorage::default());
        let ledger = Arc::new(Ledger::create(noted.clone()).unwrap());
        let file = storage.clone();
        let disk = Disk::open_with_ledger(file, &open, &resolver, ledger).unwrap();
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
        let disk = match with_ledger {
            false => {
                disk.flush().unwrap();
                drop(disk);
                Disk::open(file, &open, &resolver).unwrap()
            }
            true => {
                drop(disk);
                let ledger = Arc::new(Ledger::open(noted).unwrap());
                Disk::open_with_ledger(file, &open, &resolver, ledger).unwrap()
            }
        };
        let mut again = vec![0; size as usize];
        disk.read_at(0, &mut again).unwrap();
        assert!(again == seen, "layout {layout}");
        disk.close().unwrap();
        assert_eq!(check(storage, &CheckOptions::FULL).unwrap().findings, []);
    }
}

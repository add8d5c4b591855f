//! Random sequences of all operations on a chain of disks, against a model in memory.

use std::sync::Arc;

use bcow::check::{CheckOptions, check};
use bcow::format::{BackingEntry, BackingName, Use};
use bcow::{
    BackingResolver, BlockDevice, CreateOptions, Disk, Error, Layout, MemoryStorage, OpenOptions,
    Space, WritableDevice,
};
use proptest::prelude::*;

const MOST: u64 = 6 << 20;

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
    Resize {
        size: u64,
    },
    /// Creates a new disk on top.
    Overlay {
        layout: u8,
        size: u64,
    },
    /// Writes the content of the top into the disk below, and clears the top.
    Commit,
    /// Keeps the content, but uses the backing of the backing.
    Rebase,
    /// Copies the content into a new file without unused space.
    Compact,
}

fn place() -> impl Strategy<Value = (u64, u64)> {
    let length = prop_oneof![
        4 => 1..5000u64,
        2 => (1..16u64).prop_map(|sectors| sectors * 4096),
        1 => 1..(300u64 << 10),
    ];
    let at = prop_oneof![
        2 => 0..(64u64 << 10),
        2 => (0..MOST / 4096).prop_map(|sector| sector * 4096),
        1 => (4u64 << 20) - 8192..(4 << 20) + 8192,
        1 => 0..MOST,
    ];
    (at, length)
}

fn sectors() -> impl Strategy<Value = u64> {
    (1..=MOST / 4096).prop_map(|sectors| sectors * 4096)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (place(), 1..=255u8).prop_map(|((at, length), seed)| Step::Write { at, length, seed }),
        2 => (place(), any::<bool>()).prop_map(|((at, length), keep)| Step::Zero { at, length, keep }),
        2 => place().prop_map(|(at, length)| Step::Discard { at, length }),
        3 => place().prop_map(|(at, length)| Step::Read { at, length }),
        3 => Just(Step::Flush),
        1 => Just(Step::Checkpoint),
        2 => any::<bool>().prop_map(|orderly| Step::Reopen { orderly }),
        1 => sectors().prop_map(|size| Step::Resize { size }),
        1 => (0..5u8, sectors()).prop_map(|(layout, size)| Step::Overlay { layout, size }),
        1 => Just(Step::Commit),
        1 => Just(Step::Rebase),
        1 => Just(Step::Compact),
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
    shows: Vec<u8>,
}

/// The files, lowest first; the last one is open for writing.
struct Chain {
    levels: Vec<Level>,
    disk: Option<Disk>,
}

struct Below(Option<Arc<dyn BlockDevice>>);

impl BackingResolver for Below {
    fn resolve(&self, _: &BackingEntry) -> Result<Option<Arc<dyn BlockDevice>>, Error> {
        Ok(self.0.clone())
    }
}

fn named(device: &Arc<dyn BlockDevice>) -> (BackingEntry, Arc<dyn BlockDevice>) {
    let name = BackingName::FileName {
        name: "below".into(),
        identity: None,
    };
    let size = device.size();
    (BackingEntry { name, size }, device.clone())
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
            let image = bcow::Image::open_with_backings(
                level.storage.clone(),
                &OpenOptions::default(),
                &Below(below.take()),
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
        let backing = below.as_ref().map(named);
        let disk = Disk::create(storage.clone(), options, backing, &open).unwrap();
        let mut shows = self
            .levels
            .last()
            .map_or(Vec::new(), |level| level.shows.clone());
        shows.resize(options.size as usize, 0);
        self.levels.push(Level { storage, shows });
        self.disk = Some(disk);
    }

    fn open(&mut self) {
        let below = self.open_below(self.levels.len() - 1);
        let storage = self.top().storage.clone();
        self.disk = Some(Disk::open(storage, &OpenOptions::default(), &Below(below)).unwrap());
    }

    /// The part of a range that lies inside the top.
    fn clip(&mut self, at: u64, length: u64) -> std::ops::Range<usize> {
        let size = self.top().shows.len() as u64;
        let start = at.min(size - 1);
        start as usize..(start + length).min(size) as usize
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Write { at, length, seed } => {
                let range = self.clip(at, length);
                let bytes: Vec<u8> = range.clone().map(|at| seed ^ (at / 97) as u8).collect();
                self.disk().write_at(range.start as u64, &bytes).unwrap();
                self.top().shows[range].copy_from_slice(&bytes);
            }
            Step::Zero { at, length, keep } => {
                let range = self.clip(at, length);
                let space = if keep { Space::Keep } else { Space::Free };
                let disk = self.disk();
                disk.write_zeroes(range.start as u64, range.len() as u64, space)
                    .unwrap();
                self.top().shows[range].fill(0);
            }
            Step::Discard { at, length } => {
                let range = self.clip(at, length);
                let disk = self.disk();
                disk.discard(range.start as u64, range.len() as u64)
                    .unwrap();
                let mut found = vec![0; range.len()];
                self.disk().read_at(range.start as u64, &mut found).unwrap();
                let shows = &mut self.top().shows[range];
                assert!(
                    shows
                        .iter()
                        .zip(&found)
                        .all(|(was, is)| *is == 0 || is == was)
                );
                shows.copy_from_slice(&found);
            }
            Step::Read { at, length } => {
                let range = self.clip(at, length);
                let mut found = vec![0xEE; range.len()];
                self.disk().read_at(range.start as u64, &mut found).unwrap();
                assert!(found == self.top().shows[range]);
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
            Step::Resize { size } => {
                self.disk().resize(size).unwrap();
                self.top().shows.resize(size as usize, 0);
            }
            Step::Overlay { layout, size } if self.levels.len() < 4 => {
                self.push(&options(layout, size));
            }
            Step::Overlay { .. } => {}
            Step::Commit => self.commit(),
            Step::Rebase => self.rebase(),
            Step::Compact => self.compact(),
        }
    }

    fn commit(&mut self) {
        if self.levels.len() < 2 {
            return;
        }
        let shows = self.top().shows.clone();
        let top = self.disk.take().expect("the top is open");
        // The backing changes, perhaps in size too, so it no longer has the recorded identity.
        top.clear().unwrap();
        top.set_backing(None).unwrap();
        top.close().unwrap();
        let below = self.levels.len() - 2;
        let deeper = self.open_below(below);
        let storage = self.levels[below].storage.clone();
        let target = Disk::open(storage, &OpenOptions::default(), &Below(deeper)).unwrap();
        target.resize(shows.len() as u64).unwrap();
        target.write_at(0, &shows).unwrap();
        target.close().unwrap();
        self.levels[below].shows = shows;
        self.open();
        let device = self.open_below(below + 1).expect("there is one below");
        self.disk().set_backing(Some(named(&device))).unwrap();
    }

    /// Works like `bcow rebase`: stores all content that differs from the new backing.
    fn rebase(&mut self) {
        if self.levels.len() < 3 {
            return;
        }
        let new = self.levels.len() - 2;
        let below = self.open_below(new).expect("there is one below");
        let shows = self.top().shows.clone();
        self.disk().set_backing(Some(named(&below))).unwrap();
        self.disk().write_at(0, &shows).unwrap();
        self.disk().flush().unwrap();
        self.levels.remove(new);
    }

    fn compact(&mut self) {
        let below = self.open_below(self.levels.len() - 1);
        let old = self.disk.take().expect("the top is open");
        let shows = self.top().shows.clone();
        let storage = Arc::new(MemoryStorage::default());
        let open = OpenOptions::default();
        let made = options(1, shows.len() as u64);
        let disk = Disk::create(storage.clone(), &made, below.as_ref().map(named), &open).unwrap();
        for (sector, bytes) in (0..).zip(shows.chunks(4096)) {
            let mut held = vec![0; bytes.len()];
            old.read_at(sector * 4096, &mut held).unwrap();
            if held.iter().any(|byte| *byte != 0) || below.is_some() {
                disk.write_at(sector * 4096, &held).unwrap();
            }
        }
        old.close().unwrap();
        disk.flush().unwrap();
        self.top().storage = storage;
        self.disk = Some(disk);
    }

    fn verify(&mut self) {
        let size = self.top().shows.len();
        assert_eq!(self.disk().size(), size as u64);
        let mut found = vec![0xEE; size];
        self.disk().read_at(0, &mut found).unwrap();
        assert!(found == self.top().shows, "the open disk");
        let mut told = 0;
        while told < size as u64 {
            let status = self.disk().status(told, size as u64 - told).unwrap();
            let range = told as usize..(told + status.length) as usize;
            if status.content != bcow::Content::Data {
                assert!(
                    found[range].iter().all(|byte| *byte == 0),
                    "status at {told}"
                );
            }
            told += status.length;
        }
        self.disk.take().expect("the top is open").close().unwrap();
        for count in 1..=self.levels.len() {
            let shown = self.open_below(count).expect("it is there");
            let level = &self.levels[count - 1];
            let mut found = vec![0xEE; level.shows.len()];
            shown.read_at(0, &mut found).unwrap();
            assert!(
                found == level.shows,
                "file {count} of {}",
                self.levels.len()
            );
            let full = CheckOptions {
                data: true,
                threads: 1,
            };
            let report = check(level.storage.clone(), &full).unwrap();
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
/// the last write of one of them.
#[test]
fn threads_on_the_same_blocks_leave_one_value_in_each() {
    use bcow_testkit::Random;
    const BLOCKS: u64 = 64;
    for (layout, backed) in [(0, false), (1, true), (2, true), (3, true)] {
        let storage = Arc::new(MemoryStorage::default());
        let size = BLOCKS * 4096;
        let below: Arc<dyn BlockDevice> = Arc::new(vec![0xFF; size as usize]);
        let backing = backed.then(|| named(&below));
        let open = OpenOptions::default();
        let disk = Disk::create(storage.clone(), &options(layout, size), backing, &open).unwrap();
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
        disk.flush().unwrap();
        drop(disk);
        let resolver = Below(backed.then_some(below));
        let disk = Disk::open(storage.clone(), &open, &resolver).unwrap();
        let mut again = vec![0; size as usize];
        disk.read_at(0, &mut again).unwrap();
        assert!(again == seen, "layout {layout}");
        disk.close().unwrap();
        let full = CheckOptions {
            data: true,
            threads: 1,
        };
        assert_eq!(check(storage, &full).unwrap().findings, []);
    }
}

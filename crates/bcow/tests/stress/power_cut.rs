//! Power cuts. The disk may keep any part of the unflushed writes, torn between sectors. In all
//! cases the file opens without a manual step, has the flushed content or later content, and a
//! check has no findings.
//!
//! `BCOW_POWER_CUTS=N` runs N times as many rounds, from other seeds.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bcow::check::{CheckOptions, Report, Severity, check};
use bcow::format::BackingEntry;
use bcow::{
    BlockDevice, CreateOptions, Disk, Image, Layout, MemoryStorage, OneBacking, OpenOptions, Space,
    Storage, WritableDevice,
};
use bcow_testkit::{History, PowerCut, Random, SECTOR_BYTES, below, fill, tag_of, tagged, tags};

const MIB: u64 = 1 << 20;

fn rounds() -> u64 {
    let rounds = std::env::var("BCOW_POWER_CUTS");
    rounds.map_or(1, |rounds| rounds.parse().expect("a number"))
}

/// Parameters of a run.
#[derive(Clone)]
struct Plan {
    name: &'static str,
    options: CreateOptions,
    backing: Option<Vec<u8>>,
    /// Number of sectors that change atomically.
    unit: usize,
    /// Longest write in bytes.
    longest: u64,
    steps: u64,
    /// How many times the whole disk is written first, to get free space that later writes reuse.
    churn: u64,
    /// Number of flushes of one block first, after which space is initialised ahead.
    small_flushes: u32,
}

fn options(size: u64, layout: Layout, block_bytes: Option<u32>) -> CreateOptions {
    CreateOptions {
        layout,
        block_bytes,
        // A small log, which fills up soon.
        log_bytes: 256 << 10,
        ..CreateOptions::disk(size)
    }
}

fn plans() -> Vec<Plan> {
    let plan = |name, layout, block_bytes, unit| Plan {
        name,
        options: options(MIB, layout, block_bytes),
        backing: None,
        unit,
        longest: 32 << 10,
        steps: 40,
        churn: 0,
        small_flushes: 0,
    };
    // The backing ends inside the disk, and inside a block.
    let backing = Some(tagged(&vec![7; (MIB as usize - 40960) / SECTOR_BYTES]));
    let over = |plan: Plan, name| Plan {
        name,
        backing: backing.clone(),
        ..plan
    };
    let space = plan("space", Layout::Space, None, 8);
    let performance = plan("performance", Layout::Performance, Some(64 << 10), 1);
    let blocks = plan("blocks of 16 KiB", Layout::Auto, Some(16 << 10), 1);
    let auto = Plan {
        options: options(9 * MIB, Layout::Auto, None),
        longest: 256 << 10,
        ..plan("auto", Layout::Auto, None, 1)
    };
    let reuse = Plan {
        name: "space used again",
        churn: 20,
        ..over(space.clone(), "")
    };
    let ahead = Plan {
        name: "space initialised ahead",
        small_flushes: 8,
        ..over(space.clone(), "")
    };
    vec![
        reuse,
        ahead,
        over(space.clone(), "space over a backing"),
        over(performance.clone(), "performance over a backing"),
        over(blocks.clone(), "blocks of 16 KiB over a backing"),
        space,
        performance,
        blocks,
        auto,
    ]
}

impl Plan {
    fn below(&self) -> Option<(BackingEntry, Arc<dyn BlockDevice>)> {
        Some(below(Arc::new(self.backing.clone()?)))
    }

    fn resolver(&self) -> OneBacking {
        OneBacking(self.below().map(|(_, device)| device))
    }

    fn open(&self, storage: Arc<dyn Storage>) -> Disk {
        Disk::open(storage, &OpenOptions::default(), &self.resolver())
            .unwrap_or_else(|error| panic!("{}: does not open: {error}", self.name))
    }

    fn set_up(&self, storage: &PowerCut) {
        if self.small_flushes > 0 {
            storage.prefer_written_space();
        }
    }

    /// The content of a new disk.
    fn base(&self) -> Vec<u32> {
        let mut tags = vec![0; self.options.size as usize / SECTOR_BYTES];
        if let Some(bytes) = &self.backing {
            tags[..bytes.len() / SECTOR_BYTES].fill(7);
        }
        tags
    }
}

/// A disk on a storage that records all operations, and its possible content.
struct Run<'a> {
    plan: &'a Plan,
    storage: Arc<PowerCut>,
    /// The first operation after the creation; power cuts before it are not examined.
    first_operation: usize,
    disk: Option<Disk>,
    history: History,
    random: Random,
    next_tag: u32,
}

impl<'a> Run<'a> {
    fn new(plan: &'a Plan, seed: u64) -> Self {
        let storage = Arc::new(PowerCut::default());
        plan.set_up(&storage);
        let options = OpenOptions::default();
        let disk = Disk::create(storage.clone(), &plan.options, plan.below(), &options).unwrap();
        let mut base = plan.base();
        for tag in 0..plan.churn as u32 {
            base.fill(10 + tag);
            disk.write_at(0, &tagged(&base)).unwrap();
            disk.flush().unwrap();
        }
        for tag in 0..plan.small_flushes {
            base[..8].fill(50 + tag);
            disk.write_at(0, &tagged(&base[..8])).unwrap();
            disk.flush().unwrap();
        }
        let mut history = History::new(plan.unit, base.clone());
        let now = storage.operations();
        // The caller gives the file its name only after its creation has finished.
        history.step(now, now, true, base);
        Run {
            plan,
            storage,
            first_operation: now,
            disk: Some(disk),
            history,
            random: Random::new(seed),
            next_tag: 100,
        }
    }

    /// Opens the file that a power cut left.
    fn again(plan: &'a Plan, image: Vec<u8>, seed: u64) -> Self {
        let storage = Arc::new(PowerCut::new(image));
        plan.set_up(&storage);
        let disk = plan.open(storage.clone());
        let held = tags(&disk).into_iter().map(|tag| tag.unwrap_or(u32::MAX));
        let mut history = History::new(plan.unit, held.clone().collect());
        let now = storage.operations();
        history.step(0, now, true, held.collect());
        Run {
            plan,
            storage,
            first_operation: now,
            disk: Some(disk),
            history,
            random: Random::new(seed),
            next_tag: 10_000,
        }
    }

    fn steps(&mut self, steps: u64) {
        for _ in 0..steps {
            self.step();
        }
    }

    fn step(&mut self) {
        let begun = self.storage.operations();
        let mut tags = self.history.now().to_vec();
        let mut durable = false;
        match self.random.below(20) {
            0..9 => self.write(&mut tags),
            9 => {
                let (at, count) = self.range(8, self.plan.longest * 4);
                let space = *self.random.pick(&[Space::Free, Space::Keep]);
                let (offset, length) = bytes_of(at, count);
                self.disk().write_zeroes(offset, length, space).unwrap();
                tags[at..at + count].fill(0);
            }
            10 | 11 => {
                let (at, count) = self.range(1, self.plan.longest * 4);
                let (offset, length) = bytes_of(at, count);
                self.disk().discard(offset, length).unwrap();
                let found = self.read(at, count);
                for (tag, found) in tags[at..at + count].iter_mut().zip(found) {
                    assert!(found == 0 || found == *tag);
                    *tag = found;
                }
            }
            12..17 => {
                self.disk().flush().unwrap();
                durable = true;
            }
            17 => {
                self.disk().checkpoint().unwrap();
                durable = true;
            }
            18 => {
                let limit = self.plan.options.size as usize / SECTOR_BYTES;
                let new = (limit / 2 + self.random.below(limit as u64) as usize) / 8 * 8;
                self.disk().resize((new * SECTOR_BYTES) as u64).unwrap();
                tags.resize(new, 0);
                durable = true;
            }
            _ if self.random.one_in(2) => return self.reopen(),
            _ => return self.kill(),
        }
        let ended = self.storage.operations();
        self.history.step(begun, ended, durable, tags);
    }

    /// Writes and flushes in a process that is killed in the middle.
    fn kill(&mut self) {
        self.storage.stop_after(Some(self.random.below(12)));
        let mut written = true;
        for _ in 0..1 + self.random.below(3) {
            let begun = self.storage.operations();
            let mut tags = self.history.now().to_vec();
            let (at, bytes) = self.fresh(&mut tags);
            // After success or failure, each block of the write may be in the file.
            written &= self.disk().write_at(at, &bytes).is_ok();
            let ended = self.storage.operations();
            self.history.step(begun, ended, false, tags);
        }
        let flushed = match self.random.below(3) {
            0 => self.disk().checkpoint(),
            _ => self.disk().flush(),
        };
        let now = self.storage.operations();
        let tags = self.history.now().to_vec();
        self.history
            .step(now, now, written && flushed.is_ok(), tags);
        let disk = self.disk.take();
        drop(disk);
        self.storage.stop_after(None);
        self.open_again(false);
    }

    /// Ends the process between two calls, with or without a close, and opens the file again.
    fn reopen(&mut self) {
        let orderly = self.random.one_in(2);
        let disk = self.disk.take().unwrap();
        if orderly {
            disk.close().unwrap()
        } else {
            drop(disk)
        }
        self.open_again(orderly);
    }

    fn open_again(&mut self, orderly: bool) {
        let begun = self.storage.operations();
        let disk = self.plan.open(self.storage.clone());
        let found = tags(&disk);
        let killed = self.storage.operations();
        self.history
            .allows(killed, &found)
            .unwrap_or_else(|problem| {
                panic!("{}: after a kill: {problem}", self.plan.name);
            });
        let held: Vec<u32> = found.into_iter().flatten().collect();
        if orderly {
            assert_eq!(
                held,
                self.history.now(),
                "{}: after closing",
                self.plan.name
            );
        }
        // Content that was read now must stay.
        self.history.step(begun, killed, true, held);
        self.disk = Some(disk);
    }

    fn write(&mut self, tags: &mut [u32]) {
        let (offset, bytes) = self.fresh(tags);
        self.disk().write_at(offset, &bytes).unwrap();
    }

    /// A range and new data for it, with a tag that no other write has.
    fn fresh(&mut self, tags: &mut [u32]) -> (u64, Vec<u8>) {
        let whole = *self.random.pick(&[1, 8]);
        let (at, count) = self.range(whole, self.plan.longest);
        let tag = self.next_tag;
        self.next_tag += 1;
        let mut bytes = vec![0; count * SECTOR_BYTES];
        for (sector, piece) in (at as u64..).zip(bytes.chunks_mut(SECTOR_BYTES)) {
            fill(tag, sector, piece);
        }
        tags[at..at + count].fill(tag);
        (bytes_of(at, count).0, bytes)
    }

    /// First sector and count of a range, both multiples of `whole`. Each order of magnitude of the
    /// length is equally likely.
    fn range(&mut self, whole: usize, longest: u64) -> (usize, usize) {
        let sectors = self.disk().size() as usize / SECTOR_BYTES / whole;
        let longest = (longest as usize / SECTOR_BYTES / whole).max(1);
        let most = 1 << self.random.below(u64::from(longest.ilog2()) + 1);
        let count = 1 + self.random.below(most) as usize;
        // Half of the ranges lie in one corner, so that they overlap.
        let places = if self.random.one_in(2) { sectors } else { (sectors / 16).max(1) };
        let at = self.random.below(places as u64) as usize;
        let count = count.min(sectors - at);
        (at * whole, count * whole)
    }

    fn disk(&self) -> &Disk {
        self.disk.as_ref().expect("it is open")
    }

    fn read(&self, at: usize, count: usize) -> Vec<u32> {
        let (offset, length) = bytes_of(at, count);
        let mut bytes = vec![0; length as usize];
        self.disk().read_at(offset, &mut bytes).unwrap();
        let sectors = (at as u64..).zip(bytes.chunks(SECTOR_BYTES));
        sectors
            .map(|(sector, bytes)| tag_of(sector, bytes).expect("a sector is as it was written"))
            .collect()
    }

    /// Examines what power cuts at all moments may leave. Returns the number of cases.
    fn cut(&mut self, exhaustive: usize, samples: usize, nested: u64) -> u64 {
        let mut looked = 0;
        let first = self.first_operation;
        let storage = self.storage.clone();
        let mut random = self.random.clone();
        storage.walk(|window, durable| {
            if window.operations.end < first {
                return;
            }
            for fates in storage.fates(window, exhaustive, samples, &mut random) {
                let image = storage.after(durable, window, &fates);
                let moment = window.operations.end;
                let outcome = look(self.plan, &self.history, moment, image.clone());
                if let Err(problem) = outcome {
                    let shown = format!("{:?}", fates.iter().enumerate().collect::<Vec<_>>());
                    panic!(
                        "{}: cut in operations {:?}: {problem}\n{shown}\n{}",
                        self.plan.name,
                        window.operations,
                        storage.describe(window),
                    );
                }
                looked += 1;
                if nested > 0 && random.one_in(nested) {
                    let mut again = Run::again(self.plan, image, random.next_u64());
                    again.steps(4);
                    looked += again.cut(3, 4, 0);
                }
            }
        });
        self.random = random;
        looked
    }
}

/// Checks that a file is a possible result of a power cut at this moment.
fn look(plan: &Plan, history: &History, moment: usize, image: Vec<u8>) -> Result<(), String> {
    let storage = Arc::new(MemoryStorage::new(image));
    let sound = |report: Report, severity: Severity| {
        let mut found = report.findings.into_iter();
        match found
            .find(|finding| finding.severity == Severity::Error || severity == Severity::Warning)
        {
            Some(finding) => Err(finding.to_string()),
            None => Ok(()),
        }
    };
    let checked = check(storage.clone(), &CheckOptions::FULL).map_err(|error| error.to_string())?;
    sound(checked, Severity::Error).map_err(|problem| format!("before opening: {problem}"))?;
    let image =
        Image::open_with_backings(storage.clone(), &OpenOptions::default(), &plan.resolver())
            .map_err(|error| format!("a reader: {error}"))?;
    let read = tags(&*image);
    history.allows(moment, &read)?;
    let disk = Disk::open(storage.clone(), &OpenOptions::default(), &plan.resolver())
        .map_err(|error| format!("a writer: {error}"))?;
    if tags(&disk) != read {
        return Err("a writer sees something else than a reader".into());
    }
    disk.close().map_err(|error| format!("closing: {error}"))?;
    let checked = check(storage, &CheckOptions::FULL).map_err(|error| error.to_string())?;
    sound(checked, Severity::Warning).map_err(|problem| format!("after closing: {problem}"))
}

fn bytes_of(at: usize, count: usize) -> (u64, u64) {
    ((at * SECTOR_BYTES) as u64, (count * SECTOR_BYTES) as u64)
}

fn run(name: &str) {
    let plans = plans();
    let plan = plans.iter().find(|plan| plan.name == name).expect("a plan");
    let mut looked = 0;
    for seed in 0..rounds() {
        let mut run = Run::new(plan, seed);
        run.steps(plan.steps);
        looked += run.cut(5, 10, 60);
    }
    println!("{name}: {looked} power cuts");
}

/// A host that reports a failure of one write although it carried the write out, as a network file
/// system may.
struct Mistaken {
    content: Arc<PowerCut>,
    /// Offset of that write.
    at: AtomicU64,
}

impl Storage for Mistaken {
    bcow_testkit::forward!(content: len, read_at, set_len, sync);

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.content.write_at(offset, bytes)?;
        let chosen = self
            .at
            .compare_exchange(offset, 0, Ordering::SeqCst, Ordering::SeqCst);
        match chosen {
            Ok(_) => Err(io::Error::from_raw_os_error(5)),
            Err(_) => Ok(()),
        }
    }
}

#[test]
fn a_record_whose_write_is_said_to_have_failed_names_no_block_of_another() {
    const BLOCK: u64 = MIB;
    let plan = Plan {
        options: options(8 * MIB, Layout::Performance, Some(BLOCK as u32)),
        ..plans().pop().expect("there are plans")
    };
    // A file with free space, which is reused before the file grows.
    let content = Arc::new(MemoryStorage::default());
    let disk = Disk::create_alone(content.clone(), &plan.options).unwrap();
    disk.write_at(0, &vec![1; 6 * MIB as usize]).unwrap();
    disk.write_at(7 * MIB, &vec![1; BLOCK as usize]).unwrap();
    disk.write_zeroes(0, 6 * MIB, Space::Free).unwrap();
    disk.write_zeroes(7 * MIB, BLOCK, Space::Keep).unwrap();
    disk.close().unwrap();

    let storage = Arc::new(PowerCut::new(content.to_vec()));
    let mistaken = Arc::new(Mistaken {
        content: storage.clone(),
        at: AtomicU64::new(0),
    });
    let disk = plan.open(mistaken.clone());
    let first = storage.operations();
    let write = |block: u64, tag: u32| {
        let mut bytes = vec![0; BLOCK as usize];
        let sectors = block * BLOCK / SECTOR_BYTES as u64;
        for (sector, piece) in (sectors..).zip(bytes.chunks_mut(SECTOR_BYTES)) {
            fill(tag, sector, piece);
        }
        disk.write_at(block * BLOCK, &bytes).unwrap();
        disk.map(block * BLOCK).unwrap().mapping
    };
    let place = write(0, 2);
    mistaken.at.store(disk.header().log.0, Ordering::SeqCst);
    disk.flush().unwrap_err();
    disk.write_zeroes(0, BLOCK, Space::Free).unwrap();
    assert_eq!(write(1, 3), place, "it is used again");
    storage.walk(|window, durable| {
        if window.operations.end < first {
            return;
        }
        for fates in storage.fates(window, 5, 10, &mut Random::new(1)) {
            let image = Arc::new(MemoryStorage::new(storage.after(durable, window, &fates)));
            let held = tags(&plan.open(image));
            let foreign = held.iter().position(|tag| tag.is_none());
            assert_eq!(foreign, None, "{}", storage.describe(window));
        }
    });
}

#[test]
fn space() {
    run("space");
}

#[test]
fn space_initialised_ahead() {
    run("space initialised ahead");
}

#[test]
fn space_used_again() {
    run("space used again");
}

#[test]
fn space_over_a_backing() {
    run("space over a backing");
}

#[test]
fn performance() {
    run("performance");
}

#[test]
fn performance_over_a_backing() {
    run("performance over a backing");
}

#[test]
fn blocks_of_16_kib() {
    run("blocks of 16 KiB");
}

#[test]
fn blocks_of_16_kib_over_a_backing() {
    run("blocks of 16 KiB over a backing");
}

#[test]
fn auto() {
    run("auto");
}

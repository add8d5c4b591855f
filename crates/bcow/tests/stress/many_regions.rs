//! Disks of tens of regions over a slow backing, in every layout and with blocks from 4 KiB to 4
//! MiB. Random requests, of one thread or of several with regions of their own, are compared with a
//! model of one number per sector.
//!
//! Reads by the background thread are delayed by some requests, so that blocks change while they
//! are completed. `BCOW_MANY_REGIONS=N` runs N times as many disks, from other seeds.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use bcow::check::{CheckOptions, check};
use bcow::{
    BlockDevice, CreateOptions, Disk, Error, Layout, OneBacking, OpenOptions, Space, Storage,
    WritableDevice,
};
use bcow_testkit::{Random, SECTOR_BYTES, fill, tag_of};

const SECTOR: u64 = SECTOR_BYTES as u64;
/// Size in bytes of an area of one thread: a region of the two-level layouts, the largest block of
/// the others.
const AREA: u64 = 4 << 20;
const AREA_SECTORS: usize = (AREA / SECTOR) as usize;
/// The tag of each sector of the backing.
const BASE: u32 = 7;
/// Longest delay of a read if no requests come.
const PATIENCE: Duration = Duration::from_millis(20);

fn rounds() -> u64 {
    let rounds = std::env::var("BCOW_MANY_REGIONS");
    rounds.map_or(1, |rounds| rounds.parse().expect("a number"))
}

/// Counts requests, and delays reads by the background thread by some of them.
#[derive(Clone)]
struct Clock(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    passed: Condvar,
}

struct State {
    requests: u64,
    /// Whether reads are not delayed.
    hurry: bool,
    random: Random,
    /// Longest delay of a read, in requests.
    latest: u64,
}

impl Clock {
    fn new(seed: u64, latest: u64) -> Self {
        let state = State {
            requests: 0,
            hurry: false,
            random: Random::new(seed),
            latest,
        };
        Clock(Arc::new(Shared {
            state: Mutex::new(state),
            passed: Condvar::new(),
        }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0
            .state
            .lock()
            .unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn tick(&self) {
        self.state().requests += 1;
        self.0.passed.notify_all();
    }

    fn hurry(&self, hurry: bool) {
        self.state().hurry = hurry;
        self.0.passed.notify_all();
    }

    /// Delays a read by the background thread.
    fn late(&self) {
        if std::thread::current().name() != Some("bcow-fill") {
            return;
        }
        let mut state = self.state();
        let latest = state.latest;
        let until = state.requests + state.random.below(latest + 1);
        let early = |state: &mut State| !state.hurry && state.requests < until;
        drop(
            self.0
                .passed
                .wait_timeout_while(state, PATIENCE, early)
                .unwrap_or_else(|poisoned| poisoned.into_inner()),
        );
    }
}

/// A backing whose content is computed on each read.
struct Below {
    size: u64,
    clock: Clock,
}

impl BlockDevice for Below {
    fn size(&self) -> u64 {
        self.size
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        assert!(offset + buf.len() as u64 <= self.size);
        self.clock.late();
        for (sector, piece) in (offset / SECTOR..).zip(buf.chunks_mut(SECTOR_BYTES)) {
            fill(BASE, sector, piece);
        }
        self.clock.late();
        Ok(())
    }
}

/// A file whose reads by the background thread are delayed.
struct SlowFile {
    file: File,
    clock: Clock,
}

impl Storage for SlowFile {
    bcow_testkit::forward!(file: len, write_at, set_len, punch);

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.clock.late();
        self.file.read_at(offset, buf)
    }
    fn sync(&self) -> io::Result<()> {
        // The test examines what a killed process leaves, which does not depend on syncs.
        Ok(())
    }
}

/// A 4 MiB part of the disk, and the tag of each of its sectors.
struct Area {
    start: u64,
    tags: Vec<u32>,
}

impl Area {
    fn bytes(&self, sectors: Range<usize>) -> Vec<u8> {
        let mut bytes = vec![0; sectors.len() * SECTOR_BYTES];
        let tags = &self.tags[sectors.clone()];
        let first = self.start / SECTOR + sectors.start as u64;
        for (sector, (piece, tag)) in (first..).zip(bytes.chunks_mut(SECTOR_BYTES).zip(tags)) {
            fill(*tag, sector, piece);
        }
        bytes
    }

    fn at(&self, sector: usize) -> u64 {
        self.start + sector as u64 * SECTOR
    }

    fn found(&self, disk: &Disk, sectors: Range<usize>) -> Vec<Option<u32>> {
        let mut bytes = vec![0xEE; sectors.len() * SECTOR_BYTES];
        disk.read_at(self.at(sectors.start), &mut bytes).unwrap();
        let first = self.start / SECTOR + sectors.start as u64;
        let pieces = (first..).zip(bytes.chunks(SECTOR_BYTES));
        pieces
            .map(|(sector, bytes)| tag_of(sector, bytes))
            .collect()
    }

    fn check(&self, disk: &Disk, sectors: Range<usize>, context: &str) {
        let found = self.found(disk, sectors.clone());
        for (sector, found) in sectors.zip(found) {
            let tag = self.tags[sector];
            let at = self.at(sector);
            assert_eq!(found, Some(tag), "{context}: the sector at byte {at}");
        }
    }
}

/// One thread, and the areas that only it writes.
struct Worker<'a> {
    disk: &'a Disk,
    clock: Clock,
    areas: Vec<Area>,
    random: Random,
    next: u32,
    context: String,
}

impl Worker<'_> {
    /// A range of sectors in an area, often a whole block or the start of one.
    fn range(&mut self, area: usize) -> Range<usize> {
        let all = self.areas[area].tags.len();
        let random = &mut self.random;
        let unit = 8 << random.below(11);
        let unit = unit.min(all);
        let at = random.below((all / unit) as u64) as usize * unit;
        match random.below(3) {
            0 => at..at + unit,
            1 => {
                let from = at + random.below(unit as u64) as usize;
                from..(from + 1 + random.below(16) as usize).min(all)
            }
            _ => at..(at + 1 + random.below(64) as usize).min(all),
        }
    }

    fn step(&mut self) {
        self.clock.tick();
        let index = self.random.below(self.areas.len() as u64) as usize;
        let kind = self.random.below(20);
        let sectors = match kind {
            // Whole areas.
            0..4 => 0..self.areas[index].tags.len(),
            _ => self.range(index),
        };
        let (disk, area) = (self.disk, &mut self.areas[index]);
        let (at, length) = (area.at(sectors.start), sectors.len() as u64 * SECTOR);
        match kind {
            0 | 1 | 4 => {
                disk.write_zeroes(at, length, Space::Free).unwrap();
                area.tags[sectors].fill(0);
            }
            2 | 5 => {
                disk.discard(at, length).unwrap();
                let found = area.found(disk, sectors.clone());
                for (sector, found) in sectors.zip(found) {
                    let tag = &mut area.tags[sector];
                    let allowed = found == Some(0) || found == Some(*tag);
                    assert!(allowed, "{}: a discarded sector is {found:?}", self.context);
                    *tag = found.unwrap_or(0);
                }
            }
            3 if self.random.one_in(2) => area.check(disk, sectors, &self.context),
            6 => {
                disk.write_zeroes(at, length, Space::Keep).unwrap();
                area.tags[sectors].fill(0);
            }
            7 | 8 => area.check(disk, sectors, &self.context),
            9 => disk.flush().unwrap(),
            10 if self.random.one_in(4) => disk.checkpoint().unwrap(),
            _ => {
                self.next += 1;
                area.tags[sectors.clone()].fill(self.next);
                disk.write_at(at, &area.bytes(sectors)).unwrap();
            }
        }
    }
}

/// One disk with properties from a seed.
struct Run {
    path: tempfile::NamedTempFile,
    clock: Clock,
    /// Size of the backing, if there is one.
    below: Option<u64>,
    areas: Vec<Area>,
    random: Random,
    context: String,
}

const LAYOUTS: [(Layout, Option<u32>); 12] = [
    (Layout::Auto, None),
    (Layout::Space, None),
    (Layout::Performance, None),
    (Layout::Space, Some(16 << 10)),
    (Layout::Space, Some(128 << 10)),
    (Layout::Space, Some(1 << 20)),
    (Layout::Auto, Some(4 << 20)),
    (Layout::Performance, Some(16 << 10)),
    (Layout::Performance, Some(128 << 10)),
    (Layout::Performance, Some(1 << 20)),
    (Layout::Performance, Some(4 << 20)),
    (Layout::Auto, Some(64 << 10)),
];

impl Run {
    fn new(seed: u64) -> (Run, Disk) {
        let mut random = Random::new(seed);
        let (layout, block_bytes) = LAYOUTS[(seed % LAYOUTS.len() as u64) as usize];
        let regions = 10 + random.below(21);
        // The last region may be short, and the backing may end anywhere.
        let cut = random.below(AREA / 4096) * 4096;
        let size = regions * AREA - if random.one_in(2) { cut } else { 0 };
        let below = (!random.one_in(6)).then(|| random.below(size / 4096 + 1) * 4096);
        let below = below.map(|bytes| if random.one_in(2) { size } else { bytes });
        let clock = Clock::new(seed, 1 + random.below(6));
        let path = tempfile::NamedTempFile::new().unwrap();
        let options = CreateOptions {
            layout,
            block_bytes,
            log_bytes: *random.pick(&[256 << 10, 4 << 20]),
            ..CreateOptions::disk(size)
        };
        let context = format!("seed {seed}: {layout:?}, {block_bytes:?}, {size}, over {below:?}");
        let areas = (0..size.div_ceil(AREA)).map(|area| {
            let start = area * AREA;
            let sectors = ((size - start) / SECTOR).min(AREA_SECTORS as u64);
            let covered = below.unwrap_or(0).saturating_sub(start) / SECTOR;
            let tag = |sector| if sector < covered { BASE } else { 0 };
            let tags = (0..sectors).map(tag).collect();
            Area { start, tags }
        });
        let run = Run {
            path,
            clock,
            below,
            areas: areas.collect(),
            random,
            context,
        };
        let open = OpenOptions::default();
        let backing = run.backing().map(bcow_testkit::below);
        let disk = Disk::create(run.storage(), &options, backing, &open).unwrap();
        (run, disk)
    }

    fn backing(&self) -> Option<Arc<dyn BlockDevice>> {
        let size = self.below?;
        let clock = self.clock.clone();
        Some(Arc::new(Below { size, clock }))
    }

    fn storage(&self) -> Arc<SlowFile> {
        Arc::new(SlowFile {
            file: self.path.reopen().unwrap(),
            clock: self.clock.clone(),
        })
    }

    fn open(&self) -> Disk {
        let below = OneBacking(self.backing());
        Disk::open(self.storage(), &OpenOptions::default(), &below)
            .unwrap_or_else(|error| panic!("{}: {error}", self.context))
    }

    /// Runs requests from several threads, each in areas of its own.
    fn phase(&mut self, disk: &Disk, number: u32) {
        let threads = *self.random.pick(&[1, 1, 2, 3]);
        let steps = 40 + self.random.below(80);
        let mut shares: Vec<Vec<Area>> = (0..threads).map(|_| Vec::new()).collect();
        for (index, area) in std::mem::take(&mut self.areas).into_iter().enumerate() {
            shares[index % threads].push(area);
        }
        self.clock.hurry(false);
        let workers = (1..).zip(shares).map(|(thread, areas)| Worker {
            disk,
            clock: self.clock.clone(),
            areas,
            random: Random::new(self.random.next_u64()),
            next: number << 20 | thread << 16,
            context: format!("{}, phase {number}, thread {thread}", self.context),
        });
        let workers: Vec<Worker<'_>> = workers.collect();
        std::thread::scope(|scope| {
            let running = workers.into_iter().map(|mut worker| {
                scope.spawn(move || {
                    (0..steps).for_each(|_| worker.step());
                    worker.areas
                })
            });
            let running: Vec<_> = running.collect();
            for thread in running {
                self.areas.extend(thread.join().unwrap());
            }
        });
        self.clock.hurry(true);
        self.areas.sort_by_key(|area| area.start);
    }

    fn check(&self, disk: &Disk, when: &str) {
        let context = format!("{}, {when}", self.context);
        for area in &self.areas {
            area.check(disk, 0..area.tags.len(), &context);
        }
    }

    fn run(mut self, disk: Disk) {
        let mut disk = disk;
        for number in 1..=3 {
            self.phase(&disk, number);
            match self.random.below(3) {
                0 => {
                    self.check(&disk, "after a phase");
                    continue;
                }
                1 => disk.close().unwrap(),
                _ => {
                    disk.flush().unwrap();
                    drop(disk);
                }
            }
            disk = self.open();
            self.check(&disk, "opened again");
        }
        disk.close().unwrap();
        let report = check(self.storage(), &CheckOptions::FULL).unwrap();
        assert_eq!(report.findings, [], "{}", self.context);
    }
}

#[test]
fn a_disk_of_many_regions_over_a_slow_backing_shows_what_was_written() {
    let runs = LAYOUTS.len() as u64;
    let first = if rounds() > 1 { runs } else { 0 };
    for seed in first..first + runs * rounds() {
        let (run, disk) = Run::new(seed);
        run.run(disk);
        println!("{} disks", seed - first + 1);
    }
}

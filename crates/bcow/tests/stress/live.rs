//! Random sequences of snapshots and their removals on a disk that a thread writes to, in files of
//! the host. The disk and all snapshots show what they must, while the disk is open, and after it
//! was opened again.
//!
//! `BCOW_LIVE=N` runs that many sequences, and `BCOW_SEED=N` begins with another one.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bcow::chain::Opener;
use bcow::check::{CheckOptions, check};
use bcow::operation::{LiveDisk, Monitor, OperationError, RemoveError, snapshot_path};
use bcow::{
    BlockDevice, CreateOptions, Disk, Image, Layout, LockedFile, NewFile, Space, WritableDevice,
};
use bcow_testkit::Random;

use super::operations::policy;

const NOTE: &str = "a test";
const BLOCK: u64 = 4096;
const BLOCKS: u64 = 1024;
/// The blocks from here on are those of the thread.
const OWN: u64 = 768;

fn from_environment(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
}

fn open_live(path: &Path) -> LiveDisk {
    let file = LockedFile::open(path, NOTE).unwrap();
    let policy = policy();
    let opener = Opener::new(path, policy.clone());
    let disk = Disk::open(file.storage(), &policy.options, &opener);
    let disk = disk.unwrap_or_else(|error| panic!("{error}: {:?}", opener.problems()));
    LiveDisk::new(disk, file, opener.height())
}

/// The numbers in the blocks of the main thread.
fn numbers(device: &dyn BlockDevice) -> Vec<u64> {
    let mut bytes = vec![0; (OWN * BLOCK) as usize];
    device.read_at(0, &mut bytes).unwrap();
    let number = |block: &[u8]| {
        let number = u64::from_le_bytes(*block.first_chunk().unwrap());
        assert!(block.chunks(8).all(|chunk| chunk == number.to_le_bytes()));
        number
    };
    bytes.chunks(BLOCK as usize).map(number).collect()
}

fn block(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(BLOCK as usize / 8)
}

/// Writes and reads its own blocks until `end`.
fn keep_busy(disk: &LiveDisk, seed: u64, end: &AtomicBool) {
    let mut random = Random::new(seed);
    let mut expected = vec![0; (BLOCKS - OWN) as usize];
    let mut found = block(0);
    while !end.load(Ordering::Relaxed) {
        let at = random.below(BLOCKS - OWN);
        let place = (OWN + at) * BLOCK;
        disk.read_at(place, &mut found).unwrap();
        assert!(found == block(expected[at as usize]), "{at}");
        match random.below(8) {
            0 => {
                disk.write_zeroes(place, BLOCK, Space::Free).unwrap();
                expected[at as usize] = 0;
            }
            1 => disk.flush().unwrap(),
            _ => {
                let number = random.below(u64::MAX);
                disk.write_at(place, &block(number)).unwrap();
                expected[at as usize] = number;
            }
        }
    }
    for (at, number) in expected.into_iter().enumerate() {
        disk.read_at((OWN + at as u64) * BLOCK, &mut found).unwrap();
        assert!(found == block(number), "{at}");
    }
}

/// Cancels a removal after some steps.
struct After(std::cell::Cell<u64>);

impl Monitor for After {
    fn is_cancelled(&self) -> bool {
        let left = self.0.get();
        self.0.set(left.saturating_sub(1));
        left == 0
    }
}

struct Sequence {
    directory: tempfile::TempDir,
    random: Random,
    now: Vec<u64>,
    taken: BTreeMap<String, Vec<u64>>,
    next: u64,
}

impl Sequence {
    fn path(&self) -> PathBuf {
        self.directory.path().canonicalize().unwrap().join("disk")
    }

    fn new(seed: u64) -> Self {
        let mut sequence = Sequence {
            directory: tempfile::tempdir().unwrap(),
            random: Random::new(seed),
            now: vec![0; OWN as usize],
            taken: BTreeMap::new(),
            next: 0,
        };
        let (layout, block_bytes) = *sequence.random.pick(&[
            (Layout::Space, None),
            (Layout::Performance, Some(32 << 10)),
            (Layout::Auto, None),
        ]);
        let options = CreateOptions {
            layout,
            block_bytes,
            log_bytes: 256 << 10,
            ..CreateOptions::disk(BLOCKS * BLOCK)
        };
        let new = NewFile::create_new(&sequence.path()).unwrap();
        let storage = Arc::new(new.file().try_clone().unwrap());
        let disk = Disk::create_alone(storage, &options).unwrap();
        disk.close().unwrap();
        new.complete().unwrap();
        sequence
    }

    fn run(&mut self) {
        for _ in 0..3 {
            let disk = open_live(&self.path());
            let end = AtomicBool::new(false);
            let seed = self.random.below(u64::MAX);
            // The thread begins with zeros.
            disk.write_zeroes(OWN * BLOCK, (BLOCKS - OWN) * BLOCK, Space::Free)
                .unwrap();
            std::thread::scope(|scope| {
                let busy = scope.spawn(|| keep_busy(&disk, seed, &end));
                for _ in 0..12 {
                    self.step(&disk);
                    assert!(numbers(&disk) == self.now);
                }
                end.store(true, Ordering::Relaxed);
                busy.join().unwrap();
            });
            self.check_snapshots();
            disk.close().unwrap();
            let disk = open_live(&self.path());
            assert!(numbers(&disk) == self.now);
            self.check_snapshots();
        }
        for entry in self.directory.path().read_dir().unwrap() {
            let file = File::open(entry.unwrap().path()).unwrap();
            let report = check(Arc::new(file), &CheckOptions::FULL).unwrap();
            assert!(report.is_sound(), "{:?}", report.findings);
        }
    }

    fn step(&mut self, disk: &LiveDisk) {
        let names: Vec<String> = self.taken.keys().cloned().collect();
        match self.random.below(8) {
            0..3 => self.write(disk),
            3 | 4 => {
                self.next += 1;
                let name = self.next.to_string();
                disk.snapshot(&name, NOTE, None, |_| ()).unwrap();
                self.taken.insert(name, self.now.clone());
            }
            _ if names.is_empty() => self.write(disk),
            5 => {
                let name = self.random.pick(&names).clone();
                let monitor = After(self.random.below(4).into());
                match disk.remove(&name, NOTE, &monitor) {
                    Ok(_) => drop(self.taken.remove(&name)),
                    Err(RemoveError::Operation(OperationError::Cancelled)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            _ => {
                let name = self.random.pick(&names).clone();
                disk.remove(&name, NOTE, &()).unwrap();
                self.taken.remove(&name);
            }
        }
    }

    fn write(&mut self, disk: &LiveDisk) {
        for _ in 0..1 + self.random.below(20) {
            let at = self.random.below(OWN);
            let count = (1 + self.random.below(16)).min(OWN - at);
            self.next += 1;
            let number = if self.random.one_in(4) { 0 } else { self.next };
            if number == 0 {
                let space = *self.random.pick(&[Space::Free, Space::Keep]);
                disk.write_zeroes(at * BLOCK, count * BLOCK, space).unwrap();
            } else {
                let bytes = block(number).repeat(count as usize);
                disk.write_at(at * BLOCK, &bytes).unwrap();
            }
            self.now[at as usize..(at + count) as usize].fill(number);
        }
    }

    fn check_snapshots(&self) {
        let files = self.directory.path().read_dir().unwrap().count();
        assert_eq!(files, 1 + self.taken.len());
        for (name, expected) in &self.taken {
            let path = snapshot_path(&self.path(), name).unwrap();
            let policy = policy();
            let opener = Opener::new(&path, policy.clone());
            let file = Arc::new(File::open(&path).unwrap());
            let image = Image::open_with_backings(file, &policy.options, &opener).unwrap();
            assert!(opener.problems().is_empty(), "{:?}", opener.problems());
            assert!(numbers(&*image) == *expected, "{name}");
        }
    }
}

#[test]
fn snapshots_are_taken_and_removed_while_the_disk_is_written_to() {
    let first = from_environment("BCOW_SEED", 1);
    for seed in first..first + from_environment("BCOW_LIVE", 20) {
        println!("BCOW_SEED={seed}");
        Sequence::new(seed).run();
    }
}

#[test]
fn a_snapshot_in_use_is_not_removed() {
    let mut sequence = Sequence::new(1);
    let disk = open_live(&sequence.path());
    for name in ["one", "two", "three"] {
        sequence.write(&disk);
        disk.snapshot(name, NOTE, None, |_| ()).unwrap();
        sequence.taken.insert(name.to_owned(), sequence.now.clone());
    }
    let path = |name| snapshot_path(&sequence.path(), name).unwrap();
    let refused = |name: &str| disk.remove(name, NOTE, &()).unwrap_err().to_string();
    assert!(refused("four").contains("is not below the disk"));
    assert!(refused("..").contains("the name of a snapshot begins with"));
    // A reader of the snapshot, and of the one over it, which would be another file.
    for name in ["one", "two"] {
        let reader = File::open(path(name)).unwrap();
        bcow::lock::FileLock::shared(&reader).unwrap();
        assert!(refused("one").contains("it is in use"), "{name}");
        sequence.check_snapshots();
    }
    // A link elsewhere is that of a fork, and its disks record the identity of the file.
    let link = sequence.directory.path().join("elsewhere");
    std::fs::create_dir(&link).unwrap();
    std::fs::hard_link(path("three"), link.join("disk@three")).unwrap();
    assert!(refused("one").contains("which forks have too"));
    std::fs::hard_link(path("two"), link.join("disk@two")).unwrap();
    std::fs::remove_file(link.join("disk@three")).unwrap();
    // What is replaced, and what is removed, stays in the fork.
    disk.remove("one", NOTE, &()).unwrap();
    std::fs::remove_dir_all(&link).unwrap();
    sequence.taken.remove("one");
    sequence.check_snapshots();
    disk.close().unwrap();
    assert!(numbers(&open_live(&sequence.path())) == sequence.now);
}

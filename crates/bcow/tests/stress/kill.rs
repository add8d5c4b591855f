//! Kills a program that writes and flushes at random, many times. Flushed data must be present.
//!
//! `BCOW_KILLS=N` sets the number of rounds.

use std::fs::{File, OpenOptions as FileOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bcow::check::{CheckOptions, check};
use bcow::{CreateOptions, Disk, Layout, NoBackings, OpenOptions, Space, WritableDevice};
use bcow_testkit::{History, Random, SECTOR_BYTES, fill, tags};

const SIZE: u64 = 8 << 20;
const ROUNDS: u64 = 100;
/// Environment variable with the path of the file. It makes a copy of this program the victim.
const VICTIM: &str = "BCOW_KILL_VICTIM";
const VICTIM_SEED: &str = "BCOW_KILL_SEED";

fn open(path: &Path) -> Disk {
    let file = FileOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap();
    Disk::open(Arc::new(file), &OpenOptions::default(), &NoBackings).unwrap()
}

fn journal(path: &Path) -> PathBuf {
    path.with_extension("journal")
}

/// The process that is killed, not a test of its own. It writes to the journal before each write
/// and after each flush.
#[test]
fn victim() {
    let Some(path) = std::env::var_os(VICTIM).map(PathBuf::from) else {
        return;
    };
    let seed = std::env::var(VICTIM_SEED).unwrap().parse().unwrap();
    let mut random = Random::new(seed);
    let mut journal = FileOptions::new()
        .append(true)
        .open(journal(&path))
        .unwrap();
    let disk = open(&path);
    let sectors = SIZE / SECTOR_BYTES as u64;
    for tag in 1.. {
        let tag = (seed as u32) << 16 | tag;
        let most = 1 << random.below(9);
        let count = 1 + random.below(most);
        let at = if random.one_in(2) {
            random.below(sectors - count)
        } else {
            random.below(1024)
        };
        let offset = at * SECTOR_BYTES as u64;
        let mut say = |line: String| journal.write_all(line.as_bytes()).unwrap();
        match random.below(12) {
            0..7 => {
                let mut bytes = vec![0; count as usize * SECTOR_BYTES];
                for (sector, piece) in (at..).zip(bytes.chunks_mut(SECTOR_BYTES)) {
                    fill(tag, sector, piece);
                }
                say(format!("write {at} {count} {tag}\n"));
                disk.write_at(offset, &bytes).unwrap();
            }
            7 => {
                say(format!("write {at} {count} 0\n"));
                let length = count * SECTOR_BYTES as u64;
                disk.write_zeroes(offset, length, Space::Free).unwrap();
            }
            8 if random.one_in(10) => {
                disk.checkpoint().unwrap();
                say("flushed\n".into());
            }
            _ => {
                disk.flush().unwrap();
                say("flushed\n".into());
            }
        }
    }
}

/// Runs the victim for a while and kills it.
fn kill_one(path: &Path, seed: u64, random: &mut Random) {
    let journal = journal(path);
    File::create(&journal).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kill::victim", "--nocapture"])
        .env(VICTIM, path)
        .env(VICTIM_SEED, seed.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    // The kill comes when the journal has this many bytes, independent of the speed of the machine.
    // Some kills come before the first byte, while the victim opens the file.
    let said = if random.one_in(10) { 0 } else { 1 + random.below(1500) };
    let patience = Instant::now();
    while journal.metadata().unwrap().len() < said {
        assert!(patience.elapsed() < Duration::from_secs(60), "it hangs");
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_micros(random.below(3000)));
    child.kill().unwrap();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), None, "it ended by itself");
}

/// The history that the journal records, from the content `held` on.
fn history_of(path: &Path, held: Vec<u32>) -> (History, u64) {
    let mut history = History::new(1, held);
    let mut flushes = 0;
    let said = std::fs::read_to_string(journal(path)).unwrap();
    // If a line is incomplete, the operation that it announces had not begun.
    for (now, line) in (1..).zip(said.split_inclusive('\n').filter(|l| l.ends_with('\n'))) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let mut tags = history.now().to_vec();
        match words[..] {
            ["write", at, count, tag] => {
                let at: usize = at.parse().unwrap();
                let count: usize = count.parse().unwrap();
                tags[at..at + count].fill(tag.parse().unwrap());
                history.step(now, now, false, tags);
            }
            _ => {
                flushes += 1;
                history.step(now, now, true, tags);
            }
        }
    }
    (history, flushes)
}

fn rounds(name: &str, layout: Layout, block_bytes: Option<u32>) {
    let rounds = std::env::var("BCOW_KILLS").map_or(ROUNDS, |rounds| rounds.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk.bcow");
    let file = FileOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .unwrap();
    let options = CreateOptions {
        layout,
        block_bytes,
        log_bytes: 256 << 10,
        ..CreateOptions::disk(SIZE)
    };
    let disk = Disk::create_alone(Arc::new(file), &options).unwrap();
    disk.close().unwrap();
    let mut random = Random::new(7);
    let mut held = vec![0; SIZE as usize / SECTOR_BYTES];
    let (mut flushed, mut surviving) = (0, 0);
    for round in 1..=rounds {
        kill_one(&path, round, &mut random);
        let (history, flushes) = history_of(&path, held);
        flushed += flushes;
        let file = Arc::new(File::open(&path).unwrap());
        let report = check(file.clone(), &CheckOptions::FULL).unwrap();
        assert!(
            report.is_sound(),
            "{name}, round {round}: {:?}",
            report.findings
        );
        let disk = open(&path);
        let found = tags(&disk);
        let allowed = history.allows(usize::MAX, &found);
        allowed.unwrap_or_else(|problem| panic!("{name}, round {round}: {problem}"));
        held = found.into_iter().flatten().collect();
        surviving += u64::from(held == history.now());
        match random.below(3) {
            0 => drop(disk),
            _ => {
                disk.close().unwrap();
                let report = check(file, &CheckOptions::FULL).unwrap();
                assert_eq!(report.findings, [], "{name}, round {round}");
            }
        }
    }
    println!("{name}: {rounds} kills, {flushed} flushes; nothing at all was lost in {surviving}");
    assert!(flushed > rounds, "{name}: the victim hardly ran");
}

#[test]
fn space() {
    rounds("space", Layout::Space, None);
}

#[test]
fn performance() {
    rounds("performance", Layout::Performance, Some(32 << 10));
}

#[test]
fn auto() {
    rounds("auto", Layout::Auto, None);
}

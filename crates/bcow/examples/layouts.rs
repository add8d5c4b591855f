//! Measures the layouts of writable files against each other, as Table 3 of the BAOverlay paper
//! does.
//!
//! `cargo run --release -p bcow --example layouts -- DIR [MIB [PATTERN]]`: a disk of MIB MiB
//! (default 512) over a backing as large, all in the page cache. *Case 1*: nothing of it is written
//! yet, so each write finds a place and fills tables. *Case 2*: the same writes to the same disk
//! once more, closed and opened between. Each with writes of 410 bytes, one into each 4 KiB (the
//! paper's), of 4 KiB in a random order, and of 1 MiB in order. `plain` is a plain file, written by
//! the same program.

use std::error::Error;
use std::fs::{File, OpenOptions as FileOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bcow::format::{BackingEntry, BackingName};
use bcow::{
    BlockDevice, CreateOptions, Disk, Layout, OneBacking, OpenOptions, Status, WritableDevice,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

const MIB: u64 = 1 << 20;
/// Rounds in turn, so that other load of the machine meets all layouts; the table has the median of
/// each number.
const ROUNDS: usize = 5;
const LAYOUTS: [Option<Layout>; 4] = [
    None,
    Some(Layout::Auto),
    Some(Layout::Performance),
    Some(Layout::Space),
];

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let dir = PathBuf::from(
        arguments
            .next()
            .ok_or("usage: layouts DIR [MIB [PATTERN]]")?,
    );
    let size = arguments.next().map_or(Ok(512), |text| text.parse())? * MIB;
    let only = arguments.next().unwrap_or_default();
    let base = Arc::new(Base::make(&dir.join("base"), size)?);
    println!(
        "| layout | writes | case 1: mean us | p50 | p99 | p99.9 | flush ms | file MiB \
         | case 2: mean us | p50 | p99 | p99.9 | flush ms | file MiB |"
    );
    println!("|{}", "---|".repeat(14));
    for pattern in [Pattern::Paper, Pattern::Random, Pattern::Sequential] {
        if !pattern.name().contains(&only) {
            continue;
        }
        let mut rounds: [Vec<Vec<Case>>; 4] = Default::default();
        for _ in 0..ROUNDS {
            for (layout, cases) in LAYOUTS.iter().zip(&mut rounds) {
                cases.push(match layout {
                    None => vec![plain(&dir, size, pattern)?],
                    Some(layout) => disk(&dir, *layout, &base, size, pattern)?,
                });
            }
        }
        for (layout, cases) in LAYOUTS.iter().zip(rounds) {
            row(layout.map_or("plain", Layout::name), pattern, cases);
        }
    }
    std::fs::remove_file(dir.join("base"))?;
    Ok(())
}

#[derive(Clone, Copy)]
enum Pattern {
    Paper,
    Random,
    Sequential,
}

impl Pattern {
    fn name(self) -> &'static str {
        match self {
            Pattern::Paper => "410 B into each 4 KiB",
            Pattern::Random => "4 KiB, random",
            Pattern::Sequential => "1 MiB, in order",
        }
    }

    fn bytes(self) -> usize {
        match self {
            Pattern::Paper => 410,
            Pattern::Random => 4096,
            Pattern::Sequential => MIB as usize,
        }
    }

    fn offset(self, number: u64, size: u64) -> u64 {
        match self {
            Pattern::Paper => number * 4096,
            // An odd factor modulo a power of two meets every block once.
            Pattern::Random => (number.wrapping_mul(0x9E37_79B1) % (size / 4096)) * 4096,
            Pattern::Sequential => number * MIB,
        }
    }

    fn count(self, size: u64) -> u64 {
        match self {
            Pattern::Paper | Pattern::Random => size / 4096,
            Pattern::Sequential => size / MIB,
        }
    }
}

/// What one run of writes took.
struct Case {
    nanoseconds: Vec<u64>,
    flush: Duration,
    file_bytes: u64,
}

impl Case {
    fn new(mut nanoseconds: Vec<u64>, flush: Duration, path: &Path) -> Outcome<Self> {
        nanoseconds.sort_unstable();
        Ok(Case {
            nanoseconds,
            flush,
            file_bytes: std::fs::metadata(path)?.blocks() * 512,
        })
    }

    fn percentile(&self, percent: f64) -> f64 {
        let index = (self.nanoseconds.len() as f64 * percent / 100.0) as usize;
        self.nanoseconds[index.min(self.nanoseconds.len() - 1)] as f64 / 1e3
    }

    fn mean(&self) -> f64 {
        self.nanoseconds.iter().sum::<u64>() as f64 / self.nanoseconds.len() as f64 / 1e3
    }
}

/// Prints the median over the rounds of each number, of each case.
fn row(layout: &str, pattern: Pattern, rounds: Vec<Vec<Case>>) {
    print!("| {layout} | {}", pattern.name());
    for case in 0..rounds[0].len() {
        let median = |number: &dyn Fn(&Case) -> f64| {
            let mut values: Vec<f64> = rounds.iter().map(|cases| number(&cases[case])).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        print!(
            " | {:.2} | {:.2} | {:.2} | {:.1} | {:.0} | {:.1}",
            median(&Case::mean),
            median(&|case| case.percentile(50.0)),
            median(&|case| case.percentile(99.0)),
            median(&|case| case.percentile(99.9)),
            median(&|case| case.flush.as_secs_f64() * 1e3),
            median(&|case| case.file_bytes as f64 / MIB as f64),
        );
    }
    println!(" |");
}

/// A plain file without holes: the cost of the host alone.
fn plain(dir: &Path, size: u64, pattern: Pattern) -> Outcome<Case> {
    let path = dir.join("plain");
    std::fs::copy(dir.join("base"), &path)?;
    let file = FileOptions::new().read(true).write(true).open(&path)?;
    file.sync_all()?;
    let writes = measure(size, pattern, |at, bytes| Ok(file.write_all_at(bytes, at)?))?;
    let flush = timed(|| Ok(file.sync_data()?))?;
    let case = Case::new(writes, flush, &path)?;
    std::fs::remove_file(&path)?;
    Ok(case)
}

/// Case 1 and case 2.
fn disk(
    dir: &Path,
    layout: Layout,
    base: &Arc<Base>,
    size: u64,
    pattern: Pattern,
) -> Outcome<Vec<Case>> {
    let path = dir.join("disk");
    let cases = vec![
        case(&path, Some(layout), base, size, pattern)?,
        case(&path, None, base, size, pattern)?,
    ];
    std::fs::remove_file(&path)?;
    Ok(cases)
}

/// Makes the disk with this layout, or opens the one that is there, and writes.
fn case(
    path: &Path,
    layout: Option<Layout>,
    base: &Arc<Base>,
    size: u64,
    pattern: Pattern,
) -> Outcome<Case> {
    let open = OpenOptions::default();
    let disk = match layout {
        Some(layout) => {
            let file = FileOptions::new()
                .read(true)
                .write(true)
                .create_new(true)
                .open(path)?;
            let options = CreateOptions {
                layout,
                ..CreateOptions::disk(size)
            };
            let entry = BackingEntry {
                name: BackingName::FileName {
                    name: "base".into(),
                    identity: None,
                },
                size,
            };
            Disk::create(Arc::new(file), &options, Some((entry, base.clone())), &open)?
        }
        None => {
            let file = FileOptions::new().read(true).write(true).open(path)?;
            Disk::open(Arc::new(file), &open, &OneBacking(Some(base.clone())))?
        }
    };
    let writes = measure(size, pattern, |at, bytes| Ok(disk.write_at(at, bytes)?))?;
    let flush = timed(|| Ok(disk.flush()?))?;
    disk.close()?;
    Case::new(writes, flush, path)
}

fn measure(
    size: u64,
    pattern: Pattern,
    mut write: impl FnMut(u64, &[u8]) -> Outcome<()>,
) -> Outcome<Vec<u64>> {
    let bytes = vec![0x5A; pattern.bytes()];
    let mut taken = Vec::with_capacity(pattern.count(size) as usize);
    for number in 0..pattern.count(size) {
        let begin = Instant::now();
        write(pattern.offset(number, size), &bytes)?;
        taken.push(begin.elapsed().as_nanos() as u64);
    }
    Ok(taken)
}

fn timed(work: impl FnOnce() -> Outcome<()>) -> Outcome<Duration> {
    let begin = Instant::now();
    work()?;
    Ok(begin.elapsed())
}

/// A plain file as a backing.
struct Base {
    file: File,
    size: u64,
}

impl Base {
    fn make(path: &Path, size: u64) -> Outcome<Self> {
        let file = FileOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(path)?;
        let piece: Vec<u8> = (0..MIB).map(|n| ((n * 31) >> 3) as u8).collect();
        for number in 0..size / MIB {
            file.write_all_at(&piece, number * MIB)?;
        }
        file.sync_all()?;
        Ok(Base { file, size })
    }
}

impl BlockDevice for Base {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), bcow::Error> {
        self.file
            .read_exact_at(buf, offset)
            .map_err(|source| bcow::Error::Io {
                action: "read",
                offset,
                source,
            })
    }

    fn status(&self, _: u64, length: u64) -> Result<Status, bcow::Error> {
        Ok(Status::data(length))
    }
}

//! What the first write to a file of the image costs: as a partial file, and by copying the file
//! whole.
//!
//! `cargo run --release -p bcow-union --example first_write [DIRECTORY]` says from which size on a
//! partial file is worth it. The directory is on the file system that shall be measured. Each line
//! has medians in microseconds: of a write of one byte, then of the fsync after it, and of a read
//! of the whole file at the end.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bcow_union::testing::account::Account;
use bcow_union::testing::partial::{Durability, Lower, Partials};
use bcow_union::testing::upper::ImageName;
use bcow_union::{Instance, Seek, UnionOptions};
use rustix::io::Errno;

const ROUNDS: usize = 60;

/// A file of the host, as what a page cache has of an image's file.
struct HostLower {
    file: File,
    size: u64,
}

impl Lower for HostLower {
    fn size(&self) -> u64 {
        self.size
    }
    fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<(), Errno> {
        self.file.read_exact_at(buf, offset).map_err(|_| Errno::IO)
    }
    fn seek(&self, offset: u64, what: Seek) -> Result<Option<u64>, Errno> {
        Ok(match what {
            _ if offset >= self.size => None,
            Seek::Data => Some(offset),
            Seek::Hole => Some(self.size),
        })
    }
}

struct Bench {
    directory: PathBuf,
    partials: Partials,
}

#[derive(Default)]
struct Times {
    write: Vec<Duration>,
    sync: Vec<Duration>,
    read: Vec<Duration>,
}

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

impl Bench {
    /// A new file of the upper, with holes only.
    fn file(&self, name: &str, size: u64) -> Outcome<File> {
        let path = self.directory.join(name);
        let _ = std::fs::remove_file(&path);
        let file = File::options()
            .create_new(true)
            .read(true)
            .write(true)
            .open(path)?;
        file.set_len(size)?;
        Ok(file)
    }

    fn partial(&self, lower: &Arc<HostLower>, times: &mut Times) -> Outcome<()> {
        let file = self.file("sketch", lower.size)?;
        let start = Instant::now();
        let lower_file: Arc<dyn Lower> = lower.clone();
        let partial = self.partials.create(file, lower_file)?;
        partial.write_at(lower.size / 2, &[1])?;
        times.write.push(start.elapsed());
        let start = Instant::now();
        partial.flush(Durability::Durable)?;
        times.sync.push(start.elapsed());
        let start = Instant::now();
        let mut buf = vec![0; lower.size as usize];
        partial.read_at(0, &mut buf)?;
        times.read.push(start.elapsed());
        Ok(())
    }

    fn copy(&self, lower: &HostLower, times: &mut Times) -> Outcome<()> {
        let file = self.file("copy", lower.size)?;
        let start = Instant::now();
        let mut buf = vec![0; lower.size.min(128 << 10) as usize];
        let mut at = 0;
        while at < lower.size {
            let piece = (lower.size - at).min(buf.len() as u64) as usize;
            lower.read_at(at, &mut buf[..piece])?;
            file.write_all_at(&buf[..piece], at)?;
            at += piece as u64;
        }
        file.write_all_at(&[1], lower.size / 2)?;
        times.write.push(start.elapsed());
        let start = Instant::now();
        file.sync_data()?;
        times.sync.push(start.elapsed());
        let start = Instant::now();
        let mut buf = vec![0; lower.size as usize];
        file.read_exact_at(&mut buf, 0)?;
        times.read.push(start.elapsed());
        Ok(())
    }
}

fn median(times: &mut [Duration]) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e6
}

fn line(name: &str, size: u64, times: &mut Times) {
    println!(
        "{:>8} {name:<7} {:>9.1} {:>9.1} {:>9.1}",
        size >> 10,
        median(&mut times.write),
        median(&mut times.sync),
        median(&mut times.read),
    );
}

fn main() -> Outcome<()> {
    let parent = std::env::args_os()
        .nth(1)
        .map_or_else(std::env::temp_dir, PathBuf::from);
    let directory = parent.join(format!("first-write-{}", std::process::id()));
    let image = ImageName {
        identity: [0; 32],
        name: "benchmark",
    };
    let instance = Instance::open(&directory, image, "a benchmark")?;
    let account = Arc::new(Account::new(None));
    let partials = Partials::new(&instance, account, &UnionOptions::default())?;
    let bench = Bench {
        directory: directory.clone(),
        partials,
    };
    println!("     KiB what        write      sync      read   (microseconds, median)");
    for size in (12..=20).map(|shift| 1u64 << shift) {
        let file = bench.file("lower", size)?;
        file.write_all_at(&vec![7; size as usize], 0)?;
        let lower = Arc::new(HostLower { file, size });
        let (mut partial, mut copy) = (Times::default(), Times::default());
        for _ in 0..ROUNDS {
            bench.copy(&lower, &mut copy)?;
            bench.partial(&lower, &mut partial)?;
        }
        line("copy", size, &mut copy);
        line("sketch", size, &mut partial);
    }
    drop(bench);
    drop(instance);
    Ok(std::fs::remove_dir_all(directory)?)
}

//! What benches/union.py has done to files, and times: single opens, writes and reads, without an
//! interpreter between them.
//!
//! Built by `rustc -O`, needs nothing but std. The first argument says what to do, others are
//! `name=value`; the answer is a line of JSON, times in nanoseconds. With `wait=1` it begins when
//! its standard input ends, so that many can begin together.

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const BLOCK: u64 = 4096;

/// xorshift64*: the same order in each run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, (self.next() % (last as u64 + 1)) as usize);
        }
    }
}

struct Arguments(HashMap<String, String>);

impl Arguments {
    fn text(&self, name: &str) -> io::Result<&str> {
        self.0
            .get(name)
            .map(String::as_str)
            .ok_or_else(|| io::Error::other(format!("{name}= is missing")))
    }

    fn number(&self, name: &str, default: u64) -> io::Result<u64> {
        match self.0.get(name) {
            Some(text) => text
                .parse()
                .map_err(|_| io::Error::other(format!("{name}={text} is no number"))),
            None => Ok(default),
        }
    }
}

/// Latencies as one object.
fn figures(mut times: Vec<u64>, whole: Duration) -> String {
    let first = times.first().copied().unwrap_or(0);
    let count = times.len().max(1);
    let rest: u64 = times.iter().skip(1).sum();
    times.sort_unstable();
    let at = |share: f64| {
        times
            .get((((count - 1) as f64) * share) as usize)
            .copied()
            .unwrap_or(0)
    };
    format!(
        "{{\"count\":{},\"seconds\":{:.6},\"first\":{first},\"mean\":{},\"mean_of_rest\":{},\
         \"p50\":{},\"p99\":{},\"p999\":{},\"max\":{}}}",
        times.len(),
        whole.as_secs_f64(),
        times.iter().sum::<u64>() / count as u64,
        rest / (count as u64 - 1).max(1),
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0)
    )
}

fn timed(count: usize, mut each: impl FnMut(usize) -> io::Result<()>) -> io::Result<String> {
    let mut times = Vec::with_capacity(count);
    let begin = Instant::now();
    for number in 0..count {
        let start = Instant::now();
        each(number)?;
        times.push(start.elapsed().as_nanos() as u64);
    }
    Ok(figures(times, begin.elapsed()))
}

fn writable(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

/// A file that neither compresses to nothing nor has holes: noise and text in turn.
fn make(arguments: &Arguments) -> io::Result<String> {
    let (path, size) = (arguments.text("file")?, arguments.number("size", 0)?);
    let mut random = Random(arguments.number("seed", 1)? | 1 << 40);
    let mut out = File::create(path)?;
    let mut left = size;
    let mut chunk = vec![0; 1 << 20];
    while left > 0 {
        for (number, block) in chunk.chunks_mut(BLOCK as usize).enumerate() {
            if number % 4 == 3 {
                let line = format!(
                    "{:016x} a line of a table, as a database might keep it\n",
                    random.next()
                );
                for (to, from) in block.iter_mut().zip(line.bytes().cycle()) {
                    *to = from;
                }
            } else {
                for word in block.chunks_mut(8) {
                    word.copy_from_slice(&random.next().to_le_bytes()[..word.len()]);
                }
            }
        }
        let now = left.min(chunk.len() as u64);
        out.write_all(&chunk[..now as usize])?;
        left -= now;
    }
    Ok(format!("{{\"bytes\":{size}}}"))
}

/// Open, write one byte, close; of one file, at `at` and then `step` further each time.
fn touch(arguments: &Arguments) -> io::Result<String> {
    let path = PathBuf::from(arguments.text("file")?);
    let (at, step) = (arguments.number("at", 0)?, arguments.number("step", 0)?);
    let size = fs::metadata(&path)?.len();
    timed(arguments.number("rounds", 1)? as usize, |number| {
        let file = writable(&path)?;
        file.write_all_at(b"x", (at + number as u64 * step) % size)
    })
}

/// Writes a block in place and makes it durable, at another place each time, in one open file.
fn durable(arguments: &Arguments) -> io::Result<String> {
    let file = writable(Path::new(arguments.text("file")?))?;
    let blocks = file.metadata()?.len() / BLOCK;
    if blocks == 0 {
        return Err(io::Error::other("the file has no whole block"));
    }
    let data = vec![b'd'; BLOCK as usize];
    let mut random = Random(1 << 40 | 7);
    timed(arguments.number("count", 1)? as usize, |_| {
        file.write_all_at(&data, random.next() % blocks * BLOCK)?;
        file.sync_data()
    })
}

/// As the papers' write-many: for each block, open, seek, write some bytes, close.
fn strew(arguments: &Arguments) -> io::Result<String> {
    let path = PathBuf::from(arguments.text("file")?);
    let data = vec![b'w'; arguments.number("bytes", 410)? as usize];
    let stride = arguments.number("stride", BLOCK)?;
    let mut places: Vec<u64> = (0..fs::metadata(&path)?.len() / stride).collect();
    if arguments.number("random", 0)? != 0 {
        Random(arguments.number("seed", 7)? | 1 << 40).shuffle(&mut places);
    }
    places.truncate(arguments.number("count", u64::MAX)? as usize);
    timed(places.len(), |number| {
        let mut file = writable(&path)?;
        file.seek(SeekFrom::Start(places[number] * stride))?;
        file.write_all(&data)
    })
}

/// Reads a share of a file's blocks, each once, in random order.
fn probe(arguments: &Arguments) -> io::Result<String> {
    let file = File::open(arguments.text("file")?)?;
    let mut places: Vec<u64> = (0..file.metadata()?.len() / BLOCK).collect();
    Random(arguments.number("seed", 7)? | 1 << 40).shuffle(&mut places);
    places.truncate(places.len() * arguments.number("percent", 20)? as usize / 100);
    let mut block = vec![0; BLOCK as usize];
    timed(places.len(), |number| {
        file.read_exact_at(&mut block, places[number] * BLOCK)
    })
}

/// Opens for appending, writes, closes.
fn append(arguments: &Arguments) -> io::Result<String> {
    let path = PathBuf::from(arguments.text("file")?);
    let data = vec![b'a'; arguments.number("bytes", 1 << 20)? as usize];
    timed(1, |_| {
        OpenOptions::new()
            .append(true)
            .open(&path)?
            .write_all(&data)
    })
}

/// Does one thing to each of the files dNNN/PREFIXNNN below a directory, in random order.
fn each(arguments: &Arguments) -> io::Result<String> {
    let (root, operation) = (
        PathBuf::from(arguments.text("root")?),
        arguments.text("do")?.to_owned(),
    );
    let prefix = arguments.0.get("prefix").map_or("f", String::as_str);
    let (directories, files) = (
        arguments.number("directories", 1)?,
        arguments.number("files", 1)?,
    );
    let mut paths = Vec::new();
    for directory in 0..directories {
        for file in 0..files {
            paths.push(root.join(format!("d{directory:03}/{prefix}{file:03}")));
        }
    }
    Random(arguments.number("seed", 7)? | 1 << 40).shuffle(&mut paths);
    paths.truncate(arguments.number("count", u64::MAX)? as usize);
    let data = vec![b'c'; arguments.number("bytes", 1)? as usize];
    let mut into = Vec::with_capacity(1 << 20);
    timed(paths.len(), |number| {
        let path = &paths[number];
        match operation.as_str() {
            "stat" => fs::symlink_metadata(path).map(drop),
            "open" => File::open(path).map(drop),
            "read" => {
                into.clear();
                File::open(path)?.read_to_end(&mut into).map(drop)
            }
            "write" => writable(path)?.write_all(&data),
            "create" => OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o644)
                .open(path)?
                .write_all(&data),
            "truncate" => writable(path)?.set_len(0),
            "unlink" => fs::remove_file(path),
            "sync" => {
                let mut file = writable(path)?;
                file.write_all(&data)?;
                file.sync_all()
            }
            other => Err(io::Error::other(format!("do={other} is not known"))),
        }
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
    })
}

fn sync(arguments: &Arguments) -> io::Result<String> {
    let file = File::open(arguments.text("file")?)?;
    timed(1, |_| file.sync_all())
}

fn main() -> io::Result<()> {
    let mut words = std::env::args().skip(1);
    let what = words.next().unwrap_or_default();
    let arguments = Arguments(
        words
            .filter_map(|word| {
                word.split_once('=')
                    .map(|(name, value)| (name.into(), value.into()))
            })
            .collect(),
    );
    if arguments.number("wait", 0)? != 0 {
        io::stdin().read_to_end(&mut Vec::new())?;
    }
    let answer = match what.as_str() {
        "make" => make(&arguments),
        "touch" => touch(&arguments),
        "durable" => durable(&arguments),
        "strew" => strew(&arguments),
        "probe" => probe(&arguments),
        "append" => append(&arguments),
        "each" => each(&arguments),
        "sync" => sync(&arguments),
        other => Err(io::Error::other(format!("{other}: not known"))),
    }?;
    println!("{answer}");
    Ok(())
}

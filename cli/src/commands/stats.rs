//! `bcow stats`

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bcow_fuse::MountedImage;
use bcow_fuse::stats::document::{Document, OperationFigures, SCHEMA, Upper};
use bcow_fuse::stats::{MOST_XATTR_BYTES, STATS_XATTR};
use rustix::io::Errno;

use crate::commands::mount::failure;
use crate::error::{CommandError, Context};
use crate::names::printable;
use crate::size::{Count, Human, plural};
use crate::ui::{Output, Ui};

/// Show what a mount does
///
/// Sketches and what they save, the cache of decoded blocks, and how long requests take. For whoever may read the
/// mount's root directory.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The directory it is mounted on
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    directory: PathBuf,
    /// Print JSON (schema bcow.stats/1), with the histograms of all requests
    #[arg(long)]
    json: bool,
}

/// Prints the statistics of a mount.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    bcow_fuse::mounted_image(&args.directory).map_err(|error| failure(&error))?;
    let json = read(&args.directory)
        .context(|| format!("cannot read the statistics of {}", args.directory.display()))?;
    let damaged = || {
        format!(
            "what {} says of itself makes no sense",
            args.directory.display()
        )
    };
    if args.json {
        let value: serde_json::Value = serde_json::from_slice(&json).context(damaged)?;
        return ui.print_json(&value);
    }
    let document: Document = serde_json::from_slice(&json).context(damaged)?;
    if document.schema != SCHEMA {
        return Err(CommandError::new(damaged())
            .caused_by_text(format!("its schema is {:?}", document.schema)));
    }
    let mut out = ui.output();
    print(&document, &mut out)?;
    out.finish()
}

/// What a mount answers.
#[derive(Debug)]
pub enum Answer {
    /// This is what it says of itself.
    Says(Box<Document>),
    /// Nobody serves it any more.
    NotServed,
    /// It does not answer, or not to us.
    Nothing,
}

/// What a mount says of itself, without waiting for one that does not answer.
///
/// Another process asks: only its end takes back a question to a mount that hangs, and the question keeps the mount in use. For root
/// it asks as the user whom alone the mount lets in.
pub fn ask(mount: &MountedImage, patience: Duration) -> Answer {
    let mut command = Command::new("/proc/self/exe");
    command
        .args(["stats", "--json", "--"])
        .arg(&mount.path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    if let Some((user, group)) = mount.owner
        && rustix::process::geteuid().is_root()
    {
        command.uid(user).gid(group);
    }
    let Ok(mut child) = command.spawn() else {
        return Answer::Nothing;
    };
    let (sender, receiver) = std::sync::mpsc::channel();
    if let Some(mut stdout) = child.stdout.take() {
        // Without a thread there is no sender, and no answer.
        let _ = std::thread::Builder::new().spawn(move || {
            let mut json = Vec::new();
            let read = stdout.read_to_end(&mut json);
            let _ = sender.send(read.map(|_| json));
        });
    }
    let answer = receiver.recv_timeout(patience);
    let _ = child.kill();
    // It cannot be killed while the mount's process has its question in hand.
    let start = Instant::now();
    while matches!(child.try_wait(), Ok(None)) && start.elapsed() < patience {
        std::thread::sleep(Duration::from_millis(1));
    }
    let Ok(Ok(json)) = answer else {
        return Answer::Nothing;
    };
    match serde_json::from_slice(&json) {
        Ok(document) => Answer::Says(document),
        // It was refused at once, so that we can see for ourselves.
        Err(_) => match rustix::fs::getxattr(&mount.path, STATS_XATTR, &mut [0; 0]) {
            Err(Errno::NOTCONN) => Answer::NotServed,
            _ => Answer::Nothing,
        },
    }
}

fn read(directory: &Path) -> Result<Vec<u8>, std::io::Error> {
    let mut json = vec![0; MOST_XATTR_BYTES];
    match rustix::fs::getxattr(directory, STATS_XATTR, &mut json) {
        Ok(length) => {
            json.truncate(length);
            Ok(json)
        }
        Err(Errno::NODATA) => Err(std::io::Error::other(
            "the mount is served by a version that keeps none",
        )),
        Err(errno) => Err(errno.into()),
    }
}

fn print(document: &Document, out: &mut Output) -> Result<(), CommandError> {
    let Document {
        image,
        process,
        cache,
        upper,
        operations,
        ..
    } = document;
    let mut line = |name: &str, value: &str| writeln!(out, "{:<12} {value}", format!("{name}:"));
    line("image", &printable(&image.name))?;
    line("identity", &image.identity)?;
    line(
        "served by",
        &format!(
            "process {}, for {}",
            process.pid,
            Lasting(process.uptime_seconds)
        ),
    )?;
    line(
        "cache",
        &format!(
            "{} of {}; {} hits, {} misses{}",
            Human(cache.held_bytes),
            Human(cache.limit_bytes),
            Count(cache.hits),
            Count(cache.misses),
            share(cache.hits, cache.hits + cache.misses)
                .map_or_else(String::new, |share| format!(" ({share} hit)")),
        ),
    )?;
    if let Some(upper) = upper {
        print_upper(upper, out)?;
    }
    print_operations(operations, out)
}

fn print_upper(upper: &Upper, out: &mut Output) -> Result<(), CommandError> {
    let sketches = &upper.sketches;
    let mut line = |name: &str, value: &str| writeln!(out, "{:<12} {value}", format!("{name}:"));
    line("upper", &printable(&upper.path))?;
    line("sync", &printable(&upper.sync))?;
    line(
        "stored",
        &match (upper.stored_bytes, upper.limit_bytes) {
            (Some(stored), Some(limit)) => format!("{} of {}", Human(stored), Human(limit)),
            _ => "not counted without a limit".to_owned(),
        },
    )?;
    line(
        "copied up",
        &format!(
            "{} whole, {} by metadata only",
            plural(upper.copied_whole, "file"),
            Count(upper.copied_metadata)
        ),
    )?;
    line(
        "sketches",
        &format!(
            "{} in use, {} of {} blocks present; {} promoted",
            Count(sketches.open),
            Count(sketches.present_blocks),
            Count(sketches.blocks),
            Count(sketches.promoted),
        ),
    )?;
    line(
        "saved",
        &format!(
            "{} stored for them, {} not copied",
            Human(sketches.stored_bytes),
            Human(sketches.saved_bytes)
        ),
    )?;
    let fills = &sketches.fills;
    line(
        "in transit",
        &format!(
            "{}; {} completed: {} in the background, {} to be read, {} to be flushed, {} to make room",
            plural(sketches.in_transit_blocks, "block"),
            Count(fills.total()),
            Count(fills.background),
            Count(fills.readers),
            Count(fills.flushes),
            Count(fills.writers),
        ),
    )?;
    line(
        "inodes",
        &format!("{} known to the kernel", Count(upper.nodes)),
    )
}

fn print_operations(operations: &[OperationFigures], out: &mut Output) -> Result<(), CommandError> {
    if operations.is_empty() {
        return Ok(());
    }
    writeln!(out)?;
    writeln!(
        out,
        "{:<16} {:>12} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "requests", "count", "mean", "half", "90%", "99%", "99.9%"
    )?;
    for figures in operations {
        let mean = figures.total_ns.checked_div(figures.count).unwrap_or(0);
        writeln!(
            out,
            "{:<16} {:>12} {:>9} {:>9} {:>9} {:>9} {:>9}",
            printable(&figures.operation),
            Count(figures.count),
            Took(mean),
            Took(figures.p50_ns),
            Took(figures.p90_ns),
            Took(figures.p99_ns),
            Took(figures.p999_ns),
        )?;
    }
    Ok(())
}

/// A part of a whole, in percent.
fn share(part: u64, whole: u64) -> Option<String> {
    (whole > 0).then(|| format!("{:.1}%", 100.0 * part as f64 / whole as f64))
}

/// A short time for people, with three digits at most: `1.2 us`, `34 ms`.
struct Took(u64);

impl std::fmt::Display for Took {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ns = self.0 as f64;
        let (value, unit) = match self.0 {
            0..1_000 => return f.pad(&format!("{} ns", self.0)),
            1_000..1_000_000 => (ns / 1e3, "us"),
            1_000_000..1_000_000_000 => (ns / 1e6, "ms"),
            _ => (ns / 1e9, "s"),
        };
        let decimals = usize::from(value < 9.95);
        f.pad(&format!("{value:.decimals$} {unit}"))
    }
}

/// A long time for people: `42 s`, `3 h 5 min`, `12 d 3 h`.
struct Lasting(f64);

impl std::fmt::Display for Lasting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let seconds = self.0.max(0.0) as u64;
        let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
        match seconds {
            0..60 => write!(f, "{seconds} s"),
            60..3600 => write!(f, "{minutes} min {} s", seconds % 60),
            3600..86400 => write!(f, "{hours} h {} min", minutes % 60),
            _ => write!(f, "{days} d {} h", hours % 24),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_read_well() {
        for (ns, text) in [
            (0, "0 ns"),
            (999, "999 ns"),
            (1_234, "1.2 us"),
            (34_567, "35 us"),
            (5_000_000, "5.0 ms"),
            (12_300_000_000, "12 s"),
        ] {
            assert_eq!(Took(ns).to_string(), text);
        }
        for (seconds, text) in [
            (0.4, "0 s"),
            (125.0, "2 min 5 s"),
            (11_100.0, "3 h 5 min"),
            (1_047_600.0, "12 d 3 h"),
        ] {
            assert_eq!(Lasting(seconds).to_string(), text);
        }
    }
}

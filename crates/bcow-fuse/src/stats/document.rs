//! The schema `bcow.stats/1`: what `bcow stats --json` prints. Fields may be added; what is there keeps its meaning.

use std::os::fd::RawFd;
use std::time::Duration;

use bcow::CacheFigures;
use bcow_union::errors::{self, ErrorKind, ErrorLog, RecordedError};
use bcow_union::fs::Report;
use bcow_union::options::SyncPolicy;
use serde::{Deserialize, Serialize};

use crate::outcome::Ending;

use super::latency::{self, Counts, Operation};

/// The schema's name.
pub const SCHEMA: &str = "bcow.stats/1";

/// What a mount knows of itself.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Document {
    /// [`SCHEMA`].
    pub schema: String,
    /// What is mounted.
    pub image: Image,
    /// Where; empty if that is not known.
    #[serde(default)]
    pub mountpoint: String,
    /// Who serves it.
    pub process: Process,
    /// Decoded blocks of the image.
    pub cache: Cache,
    /// What was written; `None` of a read-only mount.
    pub upper: Option<Upper>,
    /// What went wrong since the mount.
    #[serde(default)]
    pub errors: Errors,
    /// Requests that there were, by kind.
    pub operations: Vec<OperationFigures>,
}

/// An image.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Image {
    /// Its name.
    pub name: String,
    /// What it is recognised by, in hexadecimal digits.
    pub identity: String,
    /// Its file, or its place in a layout.
    #[serde(default)]
    pub file: String,
}

/// What went wrong in a mount.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Errors {
    /// How many errors there were.
    pub total: u64,
    /// How many of each kind, those of which there were none too. The names of kinds are stable; there may be new ones.
    pub kinds: Vec<KindCount>,
    /// The different errors that happened last, the latest first.
    pub recent: Vec<LastError>,
}

/// How many errors of a kind there were.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KindCount {
    /// The kind.
    pub kind: String,
    /// How many.
    pub count: u64,
}

/// An error that happened, perhaps more than once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LastError {
    /// When it happened last, in seconds since 1970.
    pub unix_seconds: u64,
    /// The same, in UTC, as RFC 3339 writes it.
    pub time: String,
    /// How often it happened.
    pub count: u64,
    /// Its kind.
    pub kind: String,
    /// The inode, by its number in the mount; 0 if it is about none.
    pub inode: u64,
    /// Paths of the file; none if they are not known.
    pub paths: Vec<String>,
    /// What could not be done, behind "cannot"; empty if the cause says all.
    pub action: String,
    /// Where in the file, in bytes.
    pub offset: Option<u64>,
    /// Why.
    pub cause: String,
}

/// A process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Process {
    /// Its number, in its own PID namespace.
    pub pid: u32,
    /// When it started, in clock ticks since the system did: with the number, this tells it from all others.
    pub start_ticks: u64,
    /// For how long it has served the mount.
    pub uptime_seconds: f64,
}

/// A cache of decoded blocks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cache {
    /// Most bytes that it may hold.
    pub limit_bytes: u64,
    /// Bytes that it holds.
    pub held_bytes: u64,
    /// Blocks that were in it when they were wanted.
    pub hits: u64,
    /// Blocks that had to be read and decoded.
    pub misses: u64,
}

/// What was written to a mount, and how it is kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Upper {
    /// The directory.
    pub path: String,
    /// When copy-ups are made durable: `strict`, `batch=N` or `volatile`.
    pub sync: String,
    /// Most bytes that may be stored.
    pub limit_bytes: Option<u64>,
    /// Bytes that are stored; without a limit they are not counted.
    pub stored_bytes: Option<u64>,
    /// Most inodes that the upper may have. `None` also of a version that does not tell.
    #[serde(default)]
    pub limit_inodes: Option<u64>,
    /// Inodes that the upper has; without a limit they are not counted.
    #[serde(default)]
    pub stored_inodes: Option<u64>,
    /// Inodes that the kernel knows.
    pub nodes: u64,
    /// Files of the image whose metadata alone were copied, since the mount.
    pub copied_metadata: u64,
    /// Files of the image that were copied whole, since the mount.
    pub copied_whole: u64,
    /// Files of the image that were written in part.
    pub sketches: Sketches,
    /// The descriptor of the process that tells, in the end, whether all that was written is there. For `bcow umount`;
    /// `None` of a version that does not tell.
    #[serde(default)]
    pub outcome_descriptor: Option<i32>,
}

/// Sketches: files of the image that were written in part.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sketches {
    /// How many are in use.
    pub open: u64,
    /// Blocks of all these files.
    pub blocks: u64,
    /// Blocks of them that the image is no longer needed for.
    pub present_blocks: u64,
    /// Blocks of them that were written in part, and the rest is still to be copied.
    pub in_transit_blocks: u64,
    /// Bytes stored for them.
    pub stored_bytes: u64,
    /// Bytes of their lower files that were not copied.
    pub saved_bytes: u64,
    /// Those that became plain files, since the mount.
    pub promoted: u64,
    /// Blocks completed, since the mount.
    pub fills: Fills,
    /// Flushes of sketches, since the mount.
    pub flushes: u64,
    /// Maps of blocks that were written anew, since the mount.
    pub maps_written: u64,
}

/// Blocks that were completed from the image, by whom.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Fills {
    /// By the background, in its own time.
    pub background: u64,
    /// By who wanted to read them.
    pub readers: u64,
    /// By who wanted them durable.
    pub flushes: u64,
    /// By who wrote, as the background was behind.
    pub writers: u64,
}

impl Fills {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.background + self.readers + self.flushes + self.writers
    }
}

/// How long requests of a kind took, from being read to being answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OperationFigures {
    /// The kind.
    pub operation: String,
    /// How many there were.
    pub count: u64,
    /// All their times together.
    pub total_ns: u64,
    /// Half of them took less.
    pub p50_ns: u64,
    /// Nine of ten took less.
    pub p90_ns: u64,
    /// 99 of 100 took less.
    pub p99_ns: u64,
    /// 999 of 1000 took less.
    pub p999_ns: u64,
    /// How many took less than so many ns, and not less than half of that. Without those that count none.
    pub histogram: Vec<Bucket>,
}

/// A part of a histogram.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Bucket {
    /// Below this; `None` is above all others.
    pub below_ns: Option<u64>,
    /// So many.
    pub count: u64,
}

impl Document {
    /// What will tell how the use of the upper ended; `None` if this process cannot hear it, or the process that served
    /// the mount is gone.
    pub fn ending(&self) -> Option<Ending> {
        let descriptor = self.upper.as_ref()?.outcome_descriptor?;
        let ending = Ending::open(self.process.pid, descriptor).ok()?;
        self.process.is_running().then_some(ending)
    }
}

impl Process {
    pub(super) fn this(uptime: Duration) -> Self {
        let pid = std::process::id();
        Process {
            pid,
            start_ticks: start_ticks(pid).unwrap_or(0),
            uptime_seconds: uptime.as_secs_f64(),
        }
    }

    /// Whether it is still there, as far as this process can see.
    pub fn is_running(&self) -> bool {
        start_ticks(self.pid) == Some(self.start_ticks)
    }
}

/// When a process started (proc_pid_stat(5), field 22); `None` if there is none, or it has ended and only its parent has not
/// taken notice.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command's name stands in parentheses and may hold anything.
    let (_, behind) = stat.rsplit_once(')')?;
    let mut fields = behind.split_whitespace();
    match fields.next()? {
        "Z" | "X" => None,
        _ => fields.nth(18)?.parse().ok(),
    }
}

impl Errors {
    pub(super) fn none() -> Self {
        Errors::of(&ErrorLog::default())
    }

    pub(super) fn of(log: &ErrorLog) -> Self {
        let kinds: Vec<_> = ErrorKind::ALL
            .into_iter()
            .map(|kind| KindCount {
                kind: kind.name().to_owned(),
                count: log.count(kind),
            })
            .collect();
        Errors {
            total: kinds.iter().map(|kind| kind.count).sum(),
            kinds,
            recent: log.recent().into_iter().map(LastError::of).collect(),
        }
    }
}

impl LastError {
    fn of(error: RecordedError) -> Self {
        LastError {
            unix_seconds: error.unix_seconds,
            time: i64::try_from(error.unix_seconds)
                .ok()
                .and_then(bcow::rfc3339)
                .unwrap_or_default(),
            count: error.count,
            kind: error.kind.name().to_owned(),
            inode: error.inode,
            paths: error.paths,
            action: error.action.to_owned(),
            offset: error.offset,
            cause: error.cause,
        }
    }
}

impl std::fmt::Display for LastError {
    /// As the log has it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if !self.paths.is_empty() || self.inode != 0 {
            write!(f, "{}: ", errors::place(self.inode, &self.paths))?;
        }
        if !self.action.is_empty() {
            write!(f, "cannot {}", self.action)?;
            if let Some(offset) = self.offset {
                write!(f, " at byte {offset}")?;
            }
            f.write_str(": ")?;
        }
        f.write_str(&self.cause)
    }
}

impl Cache {
    pub(super) fn of(figures: &CacheFigures) -> Self {
        Cache {
            limit_bytes: figures.limit_bytes,
            held_bytes: figures.held_bytes,
            hits: figures.hits,
            misses: figures.misses,
        }
    }
}

impl Upper {
    pub(super) fn of(report: Report, outcome: RawFd) -> Self {
        let (blocks, counters) = (report.blocks, report.sketches);
        Upper {
            path: report.upper,
            sync: match report.sync {
                SyncPolicy::Strict => "strict".to_owned(),
                SyncPolicy::Batch(count) => format!("batch={count}"),
                SyncPolicy::Volatile => "volatile".to_owned(),
            },
            limit_bytes: report.limit_bytes,
            stored_bytes: report.limit_bytes.map(|_| report.counted_bytes),
            limit_inodes: report.limit_inodes,
            stored_inodes: report.limit_inodes.map(|_| report.counted_inodes),
            nodes: report.nodes,
            copied_metadata: report.copied_metadata,
            copied_whole: report.copied_whole,
            sketches: Sketches {
                open: report.open_sketches,
                blocks: blocks.blocks,
                present_blocks: blocks.present,
                in_transit_blocks: blocks.in_transit,
                stored_bytes: blocks.stored_bytes,
                saved_bytes: counters.bytes_not_copied,
                promoted: counters.promotions,
                fills: Fills {
                    background: counters.fills_by_background,
                    readers: counters.fills_by_readers,
                    flushes: counters.fills_by_flushes,
                    writers: counters.fills_by_writers,
                },
                flushes: counters.flushes,
                maps_written: counters.maps_written,
            },
            outcome_descriptor: Some(outcome),
        }
    }
}

impl OperationFigures {
    /// `None` if there were none.
    pub(super) fn of(operation: Operation, counts: &Counts) -> Option<Self> {
        let last = latency::BUCKETS - 1;
        let histogram: Vec<_> = (0..latency::BUCKETS)
            .filter(|&index| counts.buckets[index] > 0)
            .map(|index| Bucket {
                below_ns: (index < last).then(|| latency::upper_ns(index)),
                count: counts.buckets[index],
            })
            .collect();
        (!histogram.is_empty()).then(|| OperationFigures {
            operation: operation.name().to_owned(),
            count: counts.count(),
            total_ns: counts.total_ns,
            p50_ns: counts.quantile_ns(0.5),
            p90_ns: counts.quantile_ns(0.9),
            p99_ns: counts.quantile_ns(0.99),
            p999_ns: counts.quantile_ns(0.999),
            histogram,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_is_running_and_another_that_had_its_number_is_not() {
        let this = Process::this(Duration::ZERO);
        assert!(this.start_ticks > 0);
        assert!(this.is_running());
        let other = Process {
            start_ticks: this.start_ticks + 1,
            ..this
        };
        assert!(!other.is_running());
    }
}

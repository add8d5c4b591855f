//! The schema `bcow.stats/1`, which `bcow stats --json` prints. New versions may add fields;
//! existing fields keep their meaning.

use std::time::Duration;

use bcow::{BlockDevice, CacheFigures, Disk};
use bcow_union::errors::{ErrorKind, ErrorLog, RecordedError};
use serde::{Deserialize, Serialize};

use crate::disk::Barriers;
use crate::outcome::Ending;

use super::DiskUse;
use super::latency::{self, Counts, Operation};

/// The upper of a writable mount.
pub use bcow_union::fs::Report as Upper;

/// The schema's name.
pub const SCHEMA: &str = "bcow.stats/1";

/// The statistics of a mount.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Document {
    pub schema: String,
    /// The image that is mounted.
    pub image: Image,
    /// The mountpoint; empty if it is not known.
    #[serde(default)]
    pub mountpoint: String,
    /// The process that serves the mount.
    pub process: Process,
    /// The cache of decoded blocks of the image.
    pub cache: CacheFigures,
    /// The upper; `None` for a read-only mount.
    pub upper: Option<Upper>,
    /// The disk of a mount with the kernel driver.
    #[serde(default)]
    pub disk: Option<DiskFigures>,
    /// The files of the image that are on other machines; `None` without such files, and from
    /// versions that do not report them.
    #[serde(default)]
    pub remote: Option<Remote>,
    /// The driver, and the reason for it; `None` from versions that do not report it.
    #[serde(default)]
    #[serde(rename = "door")]
    pub driver: Option<ServedBy>,
    /// The pool whose process serves the mount, among others; `None` for a process of its own, and
    /// from versions without pools.
    #[serde(default)]
    pub pool: Option<String>,
    /// Whether the mount shares files with other mounts of the process; `None` with the kernel
    /// driver, and from versions without.
    #[serde(default)]
    pub share: Option<FileSharing>,
    /// Whether the kernel reads and writes the files of the upper that need no content of the image
    /// itself; `None` without an upper or with the kernel driver, and from versions without.
    #[serde(default)]
    pub passthrough: Option<FileSharing>,
    /// The parts of the sandbox of the process.
    #[serde(default)]
    pub sandbox: Vec<String>,
    /// The trace that the process writes when the mount has ended; `None` without one.
    #[serde(default)]
    pub trace: Option<String>,
    /// Errors since the mount.
    #[serde(default)]
    pub errors: Errors,
    /// Requests that are being answered, apart from the one for the statistics; `None` from
    /// versions that do not count them.
    #[serde(default)]
    pub in_flight: Option<u64>,
    /// Figures of the requests, for each kind that occurred.
    pub operations: Vec<OperationFigures>,
}

/// Whether the kernel uses files without requests to the process of the mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSharing {
    /// Whether it does.
    pub on: bool,
    /// Why not; `None` if it does.
    pub reason: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Image {
    /// The source of the mount in the kernel's list.
    pub name: String,
    /// The identity of the image, in hexadecimal digits.
    pub identity: String,
    /// The image file, or the path of the image in a layout.
    #[serde(default)]
    pub file: String,
    /// Whether that path still leads to the file that is mounted: `same`, `changed` (in place),
    /// `replaced` or `removed`. `None` if it is not the path of a file, for a writable disk, and
    /// from versions that do not examine it.
    #[serde(default)]
    pub file_state: Option<String>,
}

/// Errors of a mount.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Errors {
    /// Number of errors.
    pub total: u64,
    /// Number of errors of each kind, with zeros. Names of kinds are stable; new versions may add
    /// kinds.
    pub kinds: Vec<KindCount>,
    /// The latest distinct errors, newest first.
    pub recent: Vec<RecordedError>,
}

/// Number of errors of one kind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct KindCount {
    pub kind: String,
    /// The number.
    pub count: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Process {
    /// The process ID, in the PID namespace of the process itself.
    pub pid: u32,
    /// Start time in clock ticks since the system started. Process ID and start time together are
    /// unique.
    pub start_ticks: u64,
    /// Time since the mount, in seconds.
    pub uptime_seconds: f64,
}

/// The driver of a mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServedBy {
    /// `fuse` or `kernel`.
    pub name: String,
    /// Why this one.
    pub reason: String,
}

/// The disk of a mount with the kernel driver.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DiskFigures {
    /// The file of the disk.
    pub path: String,
    /// The upper that the disk belongs to; `None` for a disk on its own.
    #[serde(default)]
    pub upper: Option<String>,
    /// Size of the address space in bytes.
    pub size_bytes: u64,
    /// The largest size in bytes to which a writable disk can grow.
    #[serde(default)]
    pub largest_bytes: Option<u64>,
    /// The file system that the kernel has mounted.
    pub filesystem: String,
    /// The loop device below the file system.
    pub loop_device: String,
    /// `strict`, or `volatile` if flushes have no effect.
    pub sync: String,
    /// Whether the mount can change the disk.
    pub is_writable: bool,
    /// Flushes of the disk since the mount, or since its last snapshot.
    pub flushes: u64,
    /// Checkpoints of the disk since then.
    pub checkpoints: u64,
    /// Blocks that were written in part and completed from the backing, since then.
    pub filled_blocks: u64,
    /// Jobs that wait in the background.
    pub waiting_blocks: u64,
    /// Blocks changed since the last flush.
    pub unflushed_blocks: u64,
    /// Free bytes inside the file.
    pub free_bytes: u64,
    /// The descriptor of the process on which it finally reports whether the disk holds all written
    /// data.
    pub outcome_descriptor: i32,
}

/// Files on other machines.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Remote {
    /// Number of open files.
    pub files: u64,
    /// Length of all open files.
    pub file_bytes: u64,
    /// Bytes that their cache files take up on the disk.
    pub held_bytes: u64,
    /// Bytes that were fetched and checked, since the mount.
    pub fetched_bytes: u64,
    /// Bytes that were read from the cache and checked, since the mount.
    pub cached_bytes: u64,
    /// Bytes per second that arrived during the last ten seconds.
    pub bytes_per_second: u64,
    /// Requests whose answers have not arrived completely.
    pub running_requests: u64,
    /// Reads that wait for a server.
    pub waiting_reads: u64,
    /// The time that the longest of these reads has waited, in seconds.
    pub longest_wait_seconds: f64,
    /// Attempts after a failed one, since the mount.
    pub retries: u64,
    /// Tokens that token servers have issued, since the mount.
    pub tokens: u64,
    /// Failed attempts of each kind, with zeros. Names of kinds are stable; new versions may add
    /// kinds.
    pub errors: Vec<KindCount>,
    /// The servers, at most 17.
    pub servers: Vec<Server>,
}

/// The traffic of a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Server {
    /// `https://HOST[:PORT]`; or `other` for all servers after the first sixteen.
    pub server: String,
    /// Requests, since the mount.
    pub requests: u64,
    /// Bytes of the bodies of its answers, since the mount.
    pub received_bytes: u64,
}

/// Latency of one kind of request, from reading the request to sending the answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OperationFigures {
    /// The kind.
    pub operation: String,
    /// Number of requests.
    pub count: u64,
    /// Sum of all times in ns.
    pub total_ns: u64,
    /// Median in ns.
    pub p50_ns: u64,
    /// 90th percentile in ns.
    pub p90_ns: u64,
    /// 99th percentile in ns.
    pub p99_ns: u64,
    /// 99.9th percentile in ns.
    pub p999_ns: u64,
    /// The histogram. Each bucket counts requests from half of its limit up to its limit. Empty
    /// buckets are left out.
    pub histogram: Vec<Bucket>,
}

/// One bucket of a histogram.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Bucket {
    /// Upper limit in ns, exclusive; `None` for the last bucket.
    pub below_ns: Option<u64>,
    /// Number of requests.
    pub count: u64,
}

impl Document {
    /// The pipe on which the process reports how it closed the upper or the disk. `None` if this
    /// process cannot open the pipe, or if the process that served the mount is gone.
    pub fn ending(&self) -> Option<Ending> {
        let descriptor = match (&self.upper, &self.disk) {
            (Some(upper), _) => upper.outcome_descriptor?,
            (None, Some(disk)) => disk.outcome_descriptor,
            (None, None) => return None,
        };
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

    /// Whether the process still runs, as far as this process can see.
    pub fn is_running(&self) -> bool {
        start_ticks(self.pid) == Some(self.start_ticks)
    }
}

/// Start time of a process (proc_pid_stat(5), field 22). `None` if there is no such process, or if
/// it is a zombie.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name is in parentheses and may contain any character.
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
            recent: log.recent(),
        }
    }
}

impl DiskFigures {
    pub(super) fn of(disk: &DiskUse) -> Self {
        let open = disk.disk.upgrade();
        let figures = open.as_ref().map(|disk| disk.with(Disk::statistics));
        let figures = figures.unwrap_or_default();
        DiskFigures {
            path: disk.path.to_string_lossy().into_owned(),
            upper: disk
                .upper
                .as_ref()
                .map(|upper| upper.to_string_lossy().into_owned()),
            // A disk can grow while it is mounted.
            size_bytes: open.as_ref().map_or(disk.size, |disk| disk.size()),
            largest_bytes: open.as_ref().map(|disk| disk.with(Disk::largest_size)),
            filesystem: disk.filesystem.to_owned(),
            loop_device: disk.loop_device.to_string_lossy().into_owned(),
            sync: match disk.barriers {
                Barriers::On => "strict",
                Barriers::Off => "volatile",
            }
            .to_owned(),
            is_writable: open.is_some(),
            flushes: figures.flushes,
            checkpoints: figures.checkpoints,
            filled_blocks: figures.filled_blocks,
            waiting_blocks: figures.queued_jobs,
            unflushed_blocks: figures.unflushed_blocks,
            free_bytes: figures.free_bytes,
            outcome_descriptor: disk.outcome,
        }
    }
}

impl OperationFigures {
    /// `None` without requests.
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

//! `bcow top`, and the rates of `bcow stats --interval`.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::time::{Duration, Instant};

use bcow_fuse::stats::document::Document;
use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::termios::tcgetwinsize;
use serde::Serialize;
use serde_json::json;

use super::ps::{self, ANSWER_TIMEOUT, Row};
use crate::ask::{self, Answer};
use crate::error::CommandError;
use crate::names::printable;
use crate::size::{Count, Human, plural};
use crate::ui::Ui;

/// Show the activity of all mounts, live
///
/// The command lists the same mounts and served disks as `bcow ps`, again and again, with their
/// rates in the last interval. Ctrl-C ends it. It asks each mount for its statistics; a mount that
/// does not answer within a second has `-` in the columns with numbers, as have served disks, which
/// have no statistics. A row names the containers whose root directory is on the mount.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Seconds between two lists
    #[arg(long, value_name = "SECONDS", default_value = "2")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    interval: u32,
    /// Print one list, with the rates in one interval
    #[arg(long)]
    once: bool,
    /// Print JSON (schema bcow.top/1), one line for each list
    #[arg(long)]
    json: bool,
    /// The column to sort by, the largest value first
    #[arg(long, value_name = "COLUMN", default_value = "requests")]
    sort: Column,
    /// List only mounts and disks with TEXT in the name of their image, place, upper, pool or
    /// container
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Column {
    /// Requests per second
    Requests,
    /// Mean latency of requests
    Latency,
    /// Requests in flight
    InFlight,
    /// Blocks decoded per second
    Misses,
    /// Bytes fetched per second
    Fetched,
    /// Files copied up
    Copied,
    /// Bytes stored in the upper
    Stored,
    /// Errors
    Errors,
}

/// What a mount has done since it was made, and its state.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Totals {
    requests: u64,
    requests_ns: u64,
    in_flight: Option<u64>,
    cache_hits: u64,
    cache_misses: u64,
    cached_bytes: u64,
    fetched_bytes: u64,
    copied_files: u64,
    stored_bytes: Option<u64>,
    errors: u64,
}

/// What a mount did in an interval.
#[derive(Debug, Serialize)]
pub struct Activity {
    totals: Totals,
    requests_per_second: f64,
    /// `None` without requests in the interval.
    mean_ns: Option<u64>,
    decoded_blocks_per_second: f64,
    fetched_bytes_per_second: f64,
}

impl Totals {
    pub fn of(document: &Document) -> Self {
        let operations = || document.operations.iter();
        let upper = document.upper.as_ref();
        Totals {
            requests: operations().map(|figures| figures.count).sum(),
            requests_ns: operations().map(|figures| figures.total_ns).sum(),
            in_flight: document.in_flight,
            cache_hits: document.cache.hits,
            cache_misses: document.cache.misses,
            cached_bytes: document.cache.held_bytes,
            fetched_bytes: document
                .remote
                .as_ref()
                .map_or(0, |remote| remote.fetched_bytes),
            copied_files: upper.map_or(0, |upper| upper.copied_whole + upper.copied_metadata),
            stored_bytes: upper.and_then(|upper| upper.stored_bytes),
            errors: document.errors.total,
        }
    }
}

impl Activity {
    /// The counters of a process begin at zero if it has replaced another one.
    pub fn between(before: &Totals, now: &Totals, interval: Duration) -> Self {
        let seconds = interval.as_secs_f64().max(f64::EPSILON);
        let rate = |before: u64, now: u64| now.saturating_sub(before) as f64 / seconds;
        let requests = now.requests.saturating_sub(before.requests);
        let ns = now.requests_ns.saturating_sub(before.requests_ns);
        Activity {
            requests_per_second: rate(before.requests, now.requests),
            mean_ns: ns.checked_div(requests),
            decoded_blocks_per_second: rate(before.cache_misses, now.cache_misses),
            fetched_bytes_per_second: rate(before.fetched_bytes, now.fetched_bytes),
            totals: now.clone(),
        }
    }

    pub const TITLES: [&'static str; 8] = [
        "REQ/S",
        "LATENCY",
        "FLIGHT",
        "DECODED/S",
        "FETCHED/S",
        "COPIED",
        "STORED",
        "ERRORS",
    ];

    /// The cells, in the order of the titles.
    pub fn columns(&self) -> [String; 8] {
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let totals = &self.totals;
        [
            format!("{:.0}", self.requests_per_second),
            or_dash(self.mean_ns.map(|ns| Took(ns).to_string())),
            or_dash(totals.in_flight.map(|count| Count(count).to_string())),
            format!("{:.0}", self.decoded_blocks_per_second),
            Human(self.fetched_bytes_per_second as u64).to_string(),
            Count(totals.copied_files).to_string(),
            or_dash(totals.stored_bytes.map(|bytes| Human(bytes).to_string())),
            Count(totals.errors).to_string(),
        ]
    }

    fn value(&self, column: Column) -> f64 {
        let totals = &self.totals;
        match column {
            Column::Requests => self.requests_per_second,
            Column::Latency => self.mean_ns.unwrap_or(0) as f64,
            Column::InFlight => totals.in_flight.unwrap_or(0) as f64,
            Column::Misses => self.decoded_blocks_per_second,
            Column::Fetched => self.fetched_bytes_per_second,
            Column::Copied => totals.copied_files as f64,
            Column::Stored => totals.stored_bytes.unwrap_or(0) as f64,
            Column::Errors => totals.errors as f64,
        }
    }
}

/// A short time in ns, rounded: `1.2 us`, `34 ms`.
pub struct Took(pub u64);

impl std::fmt::Display for Took {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ns = self.0 as f64;
        let (value, unit) = match self.0 {
            0..1_000 => return f.pad(&format!("{} ns", self.0)),
            // From 999.5 on, the next unit: the number would be rounded to 1000.
            1_000..999_500 => (ns / 1e3, "us"),
            999_500..999_500_000 => (ns / 1e6, "ms"),
            _ => (ns / 1e9, "s"),
        };
        let decimals = usize::from(value < 9.95);
        f.pad(&format!("{value:.decimals$} {unit}"))
    }
}

/// One line of the list.
#[derive(Serialize)]
struct Line {
    #[serde(flatten)]
    row: Row,
    /// The containers whose root directory is on the mount.
    containers: BTreeSet<String>,
    activity: Option<Activity>,
}

/// Prints lists until it is interrupted, or one of them.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let interval = Duration::from_secs(args.interval.into());
    let (mut before, mut began) = (totals(&lines(&HashMap::new(), interval)?), Instant::now());
    loop {
        std::thread::sleep(interval);
        let mut lines = lines(&before, began.elapsed())?;
        (before, began) = (totals(&lines), Instant::now());
        if let Some(text) = &args.filter {
            lines.retain(|line| line.place().contains(text));
        }
        let value = |line: &Line| {
            line.activity
                .as_ref()
                .map_or(-1.0, |one| one.value(args.sort))
        };
        lines.sort_by(|a, b| value(b).total_cmp(&value(a)));
        if args.json {
            let list = json!({ "schema": "bcow.top/1", "services": lines });
            let mut out = ui.output();
            writeln!(out, "{list}")?;
            out.finish()?;
        } else {
            print(&lines, args.once, ui)?;
        }
        if args.once {
            return Ok(());
        }
    }
}

fn print(lines: &[Line], is_once: bool, ui: &Ui) -> Result<(), CommandError> {
    let mut rows = lines.len();
    let mut out = ui.output();
    if let (false, Ok(size)) = (is_once, tcgetwinsize(std::io::stdout())) {
        write!(out, "\x1b[H\x1b[2J")?; // Clears the terminal.
        // Some terminals have no size. The list is between two lines and the one of the cursor.
        if size.ws_row > 3 {
            rows = rows.min(usize::from(size.ws_row) - 3);
        }
    }
    let requests = lines.iter().filter_map(|line| line.activity.as_ref());
    let requests: f64 = requests.map(|activity| activity.requests_per_second).sum();
    let pools: BTreeSet<_> = lines
        .iter()
        .filter_map(|line| line.row.pool.as_ref())
        .collect();
    writeln!(
        out,
        "{} and served disks, {}: {requests:.0} requests per second",
        plural(lines.len() as u64, "mount"),
        plural(pools.len() as u64, "pool"),
    )?;
    let [a, b, c, d, e, f, g, h] = Activity::TITLES;
    let titles = [a, b, c, d, e, f, g, h, "STATE", "IMAGE AND PLACE"];
    out.table(titles, lines[..rows].iter().map(Line::columns))?;
    out.finish()
}

/// The mounts and disks at this moment, with their activity since their totals were `before`.
fn lines(before: &HashMap<Key, Totals>, interval: Duration) -> Result<Vec<Line>, CommandError> {
    let rows = ps::rows()?;
    let now = ps::at_once(&rows, |row| {
        match ask::ask(row.mount.as_ref()?, ANSWER_TIMEOUT) {
            Answer::Statistics(json) => Some(Totals::of(&serde_json::from_slice(&json).ok()?)),
            _ => None,
        }
    });
    let containers = containers_by_device();
    let lines = rows.into_iter().zip(now).map(|(row, now)| Line {
        activity: now.map(|now| {
            let before = before.get(&key(&row)).unwrap_or(&now);
            Activity::between(before, &now, interval)
        }),
        containers: row
            .mount
            .as_ref()
            .and_then(|mount| containers.get(&mount.device).cloned())
            .unwrap_or_default(),
        row,
    });
    Ok(lines.collect())
}

/// What identifies a mount in two lists: its mountpoints, and when it was made.
type Key = (Vec<String>, Option<u64>);

fn key(row: &Row) -> Key {
    (row.at.clone(), row.since_unix_seconds)
}

fn totals(lines: &[Line]) -> HashMap<Key, Totals> {
    let known = |line: &Line| Some((key(&line.row), line.activity.as_ref()?.totals.clone()));
    lines.iter().filter_map(known).collect()
}

impl Line {
    fn place(&self) -> String {
        let mut place = self.row.place();
        let names: Vec<&str> = self.containers.iter().map(String::as_str).collect();
        if !names.is_empty() {
            place += &format!(", container {}", printable(&names.join(", ")));
        }
        place
    }

    fn columns(&self) -> [String; 10] {
        let none = || ["-"; 8].map(str::to_owned);
        let [a, b, c, d, e, f, g, h] = self.activity.as_ref().map_or_else(none, Activity::columns);
        let state = self.row.state().to_owned();
        [a, b, c, d, e, f, g, h, state, self.place()]
    }
}

/// The names of the containers whose root directory is on a mount, by the device of the mount. A
/// container is the last part of a cgroup of processes that have another mount namespace and
/// another cgroup than this process. This sends no request to a mount.
fn containers_by_device() -> HashMap<String, BTreeSet<String>> {
    let mut found: HashMap<String, BTreeSet<String>> = HashMap::new();
    let namespace = |process: &Path| std::fs::read_link(process.join("ns/mnt")).ok();
    let groups = |process: &Path| std::fs::read_to_string(process.join("cgroup"));
    let this = Path::new("/proc/self");
    let (own_namespace, own_groups) = (namespace(this), groups(this).unwrap_or_default());
    let own_groups: Vec<&str> = own_groups.lines().collect();
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let process = process.path();
        if namespace(&process).is_none_or(|it| own_namespace.as_ref() == Some(&it)) {
            continue;
        }
        let groups = groups(&process).unwrap_or_default();
        let mut others = groups.lines().filter(|line| !own_groups.contains(line));
        let name = others.find_map(|line| line.rsplit('/').next().filter(|name| !name.is_empty()));
        let flags = AtFlags::STATX_DONT_SYNC;
        let root = rustix::fs::statx(CWD, process.join("root"), flags, StatxFlags::TYPE);
        if let (Some(name), Ok(root)) = (name, root) {
            let device = format!("{}:{}", root.stx_dev_major, root.stx_dev_minor);
            found.entry(device).or_default().insert(name.to_owned());
        }
    }
    found
}

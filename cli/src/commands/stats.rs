//! `bcow stats`

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bcow_fuse::stats::document::{
    DiskFigures, Document, Errors, KindCount, OperationFigures, Remote, SCHEMA, Upper,
};
use bcow_fuse::{Driver, MountedImage};
use serde_json::json;

use super::top::{Activity, Took, Totals};
use crate::ask::{self, ANSWER_TIMEOUT};
use crate::error::{CommandError, Context};
use crate::named_mount::mount_at;
use crate::names::printable;
use crate::size::{Count, Human, plural};
use crate::ui::{Output, Ui, cache_line};

/// Show the activity of a mount
///
/// The command shows the cache, the upper with its partial files (partly written files), the last
/// errors, and the latency of requests. It works for every user who may read the root directory of
/// the mount; for a mount with the kernel driver (see `bcow help mount`), only root can use it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The directory of the mount
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    directory: PathBuf,
    /// Print JSON (schema bcow.stats/1), with latency histograms of all requests
    #[arg(long)]
    json: bool,
    /// Seconds to wait for a mount that does not answer [default: 5]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    timeout: Option<u32>,
    /// Print a line every SECONDS with the requests since the line before, until the mount ends;
    /// with --json, all statistics in one line
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    interval: Option<u32>,
    /// Print the unchanged answer of the mount
    #[arg(long, hide = true)]
    direct: bool,
}

/// Prints the statistics of a mount.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    if args.direct {
        ask::print_statistics(&args.directory);
    }
    let mount = mount_at(&args.directory, "stats")?;
    if let Driver::Direct(file) = &mount.driver {
        return print_direct(&mount, file, args.json, ui);
    }
    let timeout = args.timeout.map_or(ANSWER_TIMEOUT, |seconds| {
        Duration::from_secs(seconds.into())
    });
    if let Some(seconds) = args.interval {
        return print_often(
            args,
            &mount,
            timeout,
            Duration::from_secs(seconds.into()),
            ui,
        );
    }
    let json = ask::statistics(&args.directory, &mount, timeout)?;
    if args.json {
        let value: serde_json::Value = serde_json::from_slice(&json)
            .context(|| format!("the statistics of {} are invalid", args.directory.display()))?;
        return ui.print_json(&value);
    }
    let document = ask::read(&args.directory, &json)?;
    let mut out = ui.output();
    print(&document, &mut out)?;
    out.finish()
}

/// Prints the activity in each interval, as vmstat(8) does.
fn print_often(
    args: &Args,
    mount: &MountedImage,
    timeout: Duration,
    interval: Duration,
    ui: &Ui,
) -> Result<(), CommandError> {
    let mut before: Option<(Totals, Instant)> = None;
    loop {
        let json = ask::statistics(&args.directory, mount, timeout)?;
        let now = Totals::of(&ask::read(&args.directory, &json)?);
        let mut out = ui.output();
        let line = |cells: [String; 8]| cells.map(|cell| format!("{cell:>11}")).concat();
        match &before {
            _ if args.json => {
                out.write_bytes(&json)?;
                writeln!(out)?;
            }
            None => writeln!(out, "{}", line(Activity::TITLES.map(str::to_owned)))?,
            Some((totals, at)) => {
                let activity = Activity::between(totals, &now, at.elapsed());
                writeln!(out, "{}", line(activity.columns()))?;
            }
        }
        out.finish()?;
        before = Some((now, Instant::now()));
        std::thread::sleep(interval);
    }
}

/// Prints what is known of a mount that has no process.
fn print_direct(
    mount: &MountedImage,
    file: &Path,
    as_json: bool,
    ui: &Ui,
) -> Result<(), CommandError> {
    const REASON: &str = "the image is plain";
    let file = file.to_string_lossy();
    if as_json {
        return ui.print_json(&json!({
            "schema": SCHEMA,
            "image": { "name": file, "identity": null, "file": file },
            "mountpoint": mount.path.to_string_lossy(),
            "trace": null,
            "process": null,
            "cache": null,
            "upper": null,
            "disk": null,
            "remote": null,
            "door": { "name": "kernel", "reason": REASON },
            "pool": null,
            "share": null,
            "passthrough": null,
            "sandbox": [],
            "errors": null,
            "in_flight": null,
            "operations": [],
        }));
    }
    let mut out = ui.output();
    writeln!(out, "image:       {}", printable(&file))?;
    writeln!(out, "served by:   the kernel, no process")?;
    writeln!(out, "driver:        kernel: {REASON}")?;
    writeln!(
        out,
        "checked:     metadata, before the mount; nothing on reads"
    )?;
    out.finish()
}

fn print(document: &Document, out: &mut Output) -> Result<(), CommandError> {
    let Document {
        image,
        process,
        cache,
        upper,
        disk,
        remote,
        driver,
        pool,
        share: sharing,
        passthrough,
        sandbox,
        trace,
        errors,
        in_flight,
        operations,
        ..
    } = document;
    writeln!(out, "image:       {}", printable(&image.name))?;
    if let Some(state) = image.file_state.as_deref().filter(|&state| state != "same") {
        let file = printable(&image.file);
        writeln!(
            out,
            "image file:  {file} was {} since the mount",
            printable(state)
        )?;
    }
    writeln!(out, "identity:    {}", image.identity)?;
    let (pid, uptime) = (process.pid, Lasting(process.uptime_seconds));
    writeln!(out, "served by:   process {pid}, for {uptime}")?;
    let parts = if sandbox.is_empty() { "off".to_owned() } else { sandbox.join(", ") };
    writeln!(out, "sandbox:     {}", printable(&parts))?;
    if let Some(driver) = driver {
        let (name, reason) = (printable(&driver.name), printable(&driver.reason));
        writeln!(out, "driver:        {name}: {reason}")?;
    }
    if let Some(pool) = pool {
        let pool = printable(pool);
        writeln!(out, "pool:        {pool}, whose mounts share the cache")?;
        if let Some(sharing) = sharing {
            let cache = match &sharing.reason {
                None => "one for all mounts, of unchanged files".to_owned(),
                Some(reason) => format!("of this mount only: {}", printable(reason)),
            };
            writeln!(out, "page cache:  {cache}")?;
        }
        if let Some(passthrough) = passthrough {
            let how = match &passthrough.reason {
                None => "the kernel reads and writes those of the upper".to_owned(),
                Some(reason) => format!("by requests to the process: {}", printable(reason)),
            };
            writeln!(out, "whole files: {how}")?;
        }
    }
    if let Some(trace) = trace {
        writeln!(out, "trace:       {}", printable(trace))?;
    }
    let hit = share(cache.hits, cache.hits + cache.misses);
    let hit = hit.map_or_else(String::new, |share| format!(" ({share} hit)"));
    writeln!(out, "{}{hit}", cache_line(cache))?;
    if let Some(remote) = remote {
        print_remote(remote, out)?;
    }
    if let Some(upper) = upper {
        print_upper(upper, out)?;
    }
    if let Some(disk) = disk {
        print_disk(disk, out)?;
    }
    print_errors(errors, out)?;
    if let Some(in_flight) = in_flight {
        writeln!(out, "in flight:   {}", plural(*in_flight, "request"))?;
    }
    print_operations(operations, out)
}

fn print_remote(remote: &Remote, out: &mut Output) -> Result<(), CommandError> {
    writeln!(
        out,
        "here:        {} of {}{}, in {}",
        Human(remote.held_bytes),
        Human(remote.file_bytes),
        share(remote.held_bytes, remote.file_bytes)
            .map_or_else(String::new, |share| format!(" ({share})")),
        plural(remote.files, "file"),
    )?;
    writeln!(
        out,
        "fetched:     {}; {} read from the cache; {} per second lately",
        Human(remote.fetched_bytes),
        Human(remote.cached_bytes),
        Human(remote.bytes_per_second),
    )?;
    for server in &remote.servers {
        writeln!(
            out,
            "server:      {}: {} in {}",
            printable(&server.server),
            Human(server.received_bytes),
            plural(server.requests, "request"),
        )?;
    }
    let longest = match remote.waiting_reads {
        0 => String::new(),
        _ => format!(", the longest for {}", Lasting(remote.longest_wait_seconds)),
    };
    writeln!(
        out,
        "waiting:     {}{longest}; {} under way",
        plural(remote.waiting_reads, "read"),
        plural(remote.running_requests, "request"),
    )?;
    writeln!(
        out,
        "failed:      {}; {} repeated, {} issued",
        counted(&remote.errors),
        plural(remote.retries, "attempt"),
        plural(remote.tokens, "token"),
    )
}

fn print_upper(upper: &Upper, out: &mut Output) -> Result<(), CommandError> {
    let partials = &upper.partials;
    writeln!(out, "upper:       {}", printable(&upper.path))?;
    writeln!(out, "sync:        {}", printable(&upper.sync))?;
    let mut stored = match (upper.stored_bytes, upper.limit_bytes) {
        (Some(stored), Some(limit)) => format!("{} of {}", Human(stored), Human(limit)),
        _ => "bytes not counted without --size-limit".to_owned(),
    };
    if let (Some(inodes), Some(limit)) = (upper.stored_inodes, upper.limit_inodes) {
        stored += &format!(", in {} of {} inodes", Count(inodes), Count(limit));
    }
    writeln!(out, "stored:      {stored}")?;
    writeln!(
        out,
        "copied up:   {} whole, {} by metadata only",
        plural(upper.copied_whole, "file"),
        Count(upper.copied_metadata)
    )?;
    writeln!(
        out,
        "partial files:    {} in use, {} of {} blocks present; {} promoted",
        Count(partials.open),
        Count(partials.present_blocks),
        Count(partials.blocks),
        Count(partials.promoted),
    )?;
    writeln!(
        out,
        "saved:       {} stored for them, {} not copied",
        Human(partials.stored_bytes),
        Human(partials.saved_bytes)
    )?;
    let fills = &partials.fills;
    writeln!(
        out,
        "incomplete:  {}; {} completed: {} in the background, {} for reads, {} for flushes, {} for \
         room",
        plural(partials.incomplete_blocks, "block"),
        Count(fills.total()),
        Count(fills.background),
        Count(fills.readers),
        Count(fills.flushes),
        Count(fills.writers),
    )?;
    let nodes = Count(upper.nodes);
    writeln!(out, "inodes:      {nodes} known to the kernel")
}

fn print_disk(disk: &DiskFigures, out: &mut Output) -> Result<(), CommandError> {
    if let Some(upper) = &disk.upper {
        writeln!(out, "upper:       {}", printable(upper))?;
    }
    writeln!(out, "disk:        {}", printable(&disk.path))?;
    writeln!(
        out,
        "holds:       {} of {}, on {}",
        printable(&disk.filesystem),
        Human(disk.size_bytes),
        printable(&disk.loop_device)
    )?;
    if !disk.is_writable {
        return Ok(());
    }
    writeln!(out, "sync:        {}", printable(&disk.sync))?;
    writeln!(
        out,
        "flushes:     {}, and {}; {} not flushed",
        Count(disk.flushes),
        plural(disk.checkpoints, "checkpoint"),
        plural(disk.unflushed_blocks, "block"),
    )?;
    writeln!(
        out,
        "background:  {} waiting; {} completed from the backing",
        plural(disk.waiting_blocks, "job"),
        plural(disk.filled_blocks, "block"),
    )
}

fn print_errors(errors: &Errors, out: &mut Output) -> Result<(), CommandError> {
    writeln!(out, "errors:      {}", counted(&errors.kinds))?;
    for (index, error) in errors.recent.iter().enumerate() {
        let name = match index {
            0 => "last error:",
            _ => "before that:",
        };
        let times = match error.count {
            1 => String::new(),
            count => format!(" ({} times)", Count(count)),
        };
        writeln!(
            out,
            "{name:<12} {}{times}: {}",
            printable(&error.time),
            printable(&error.to_string())
        )?;
    }
    Ok(())
}

/// The kinds that occurred, with their numbers.
fn counted(kinds: &[KindCount]) -> String {
    let kinds: Vec<String> = kinds
        .iter()
        .filter(|kind| kind.count > 0)
        .map(|kind| format!("{} {}", Count(kind.count), printable(&kind.kind)))
        .collect();
    if kinds.is_empty() {
        return "none".to_owned();
    }
    kinds.join(", ")
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

/// A long time in seconds: `42 s`, `3 h 5 min`, `12 d 3 h`.
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
            (999_499, "999 us"),
            (999_600, "1.0 ms"),
            (999_600_000, "1.0 s"),
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

//! `bcow pool stats`

use bcow::CacheFigures;
use bcow_mounts::PoolName;
use serde::{Deserialize, Serialize};

use crate::commands::stats::cache_line;
use crate::error::{CommandError, Context};
use crate::names::printable;
use crate::pool::client;
use crate::pool::protocol::Request;
use crate::size::{Count, Human, plural};
use crate::ui::Ui;

/// Show the memory, the cache and the mounts of a pool
///
/// `bcow stats DIR` shows more about one mount.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The name of the pool
    #[arg(value_name = "NAME")]
    name: PoolName,
    /// Print JSON (schema bcow.pool-stats/1)
    #[arg(long)]
    json: bool,
}

/// The statistics of a pool.
#[derive(Debug, Serialize, Deserialize)]
pub struct Document {
    pub schema: String,
    /// The name of the pool.
    pub pool: String,
    /// Its process.
    pub pid: u32,
    /// Start time in seconds since 1970.
    pub since_unix_seconds: u64,
    /// The processes that the pool had before.
    #[serde(default)]
    pub restarts: u64,
    pub memory: Memory,
    /// The cache of decoded blocks of all mounts.
    pub cache: CacheFigures,
    /// Threads of the process.
    pub threads: u64,
    /// Requests that were answered at these mounts.
    pub requests: u64,
    /// The mounts, the oldest first.
    pub mounts: Vec<Mount>,
}

/// The memory of a process in bytes, as the kernel counts it.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Memory {
    /// Memory in use, with what other processes use too.
    pub resident_bytes: u64,
    /// As above, but memory that several processes use counts in parts; 0 if it is unknown.
    pub proportional_bytes: u64,
}

/// A mount of a pool.
#[derive(Debug, Serialize, Deserialize)]
pub struct Mount {
    pub image: String,
    /// The mountpoint.
    pub at: String,
    pub upper: Option<String>,
    /// `ro` or `rw`.
    pub mode: String,
    /// The device number, in the form of the kernel.
    pub device: Option<String>,
    /// Start time in seconds since 1970.
    pub since_unix_seconds: u64,
    /// Requests that were answered.
    pub requests: u64,
    /// Errors since the mount.
    pub errors: u64,
}

/// The schema of [`Document`].
pub const SCHEMA: &str = "bcow.pool-stats/1";

/// Prints the statistics.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let answer = client::require(&args.name)?.ask(&Request::Stats, ui)?;
    if args.json {
        return ui.print_json(&answer);
    }
    let document: Document = serde_json::from_value(answer)
        .context(|| format!("the statistics of the pool {} are invalid", args.name))?;
    let mut out = ui.output();
    let restarts = match document.restarts {
        0 => String::new(),
        restarts => format!(", {}", plural(restarts, "restart")),
    };
    let (pool, pid) = (printable(&document.pool), document.pid);
    writeln!(out, "pool:        {pool}, process {pid}{restarts}")?;
    let resident = Human(document.memory.resident_bytes);
    let threads = plural(document.threads, "thread");
    writeln!(out, "memory:      {resident}; {threads}")?;
    writeln!(out, "{}", cache_line(&document.cache))?;
    writeln!(out, "requests:    {}", Count(document.requests))?;
    writeln!(out, "mounts:      {}", Count(document.mounts.len() as u64))?;
    if !document.mounts.is_empty() {
        writeln!(
            out,
            "\n{:>12} {:>8}  MODE  IMAGE AND PLACE",
            "REQUESTS", "ERRORS"
        )?;
    }
    for mount in &document.mounts {
        let upper = match &mount.upper {
            Some(upper) => format!(", upper {}", printable(upper)),
            None => String::new(),
        };
        writeln!(
            out,
            "{:>12} {:>8}  {:<4}  {} at {}{upper}",
            Count(mount.requests),
            Count(mount.errors),
            printable(&mount.mode),
            printable(&mount.image),
            printable(&mount.at)
        )?;
    }
    out.finish()
}

//! `bcow pool stats`

use bcow_pool::PoolName;
use bcow_pool::client;

use crate::error::CommandError;
use crate::names::printable;
use crate::size::{Count, Human, plural};
use crate::ui::{Ui, cache_line};

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

/// Prints the statistics.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let document = client::statistics(&args.name, ui)?;
    if args.json {
        return ui.print_json(&document);
    }
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
    let sandbox = &document.sandbox;
    let parts = if sandbox.is_empty() { "off".to_owned() } else { sandbox.join(", ") };
    writeln!(out, "sandbox:     {}", printable(&parts))?;
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

//! `bcow pool list`

use serde_json::{Value, json};

use crate::error::{CommandError, Context};
use crate::names::printable;
use crate::pool::client::{self, Found};
use crate::pool::{Directory, PoolName};
use crate::ui::Ui;

/// List the pools of this user
///
/// A pool has two processes: one that serves the mounts, and one that starts another in its place
/// if it crashes or is killed. If both were killed, the pool is listed as dead until `bcow pool
/// start` starts it again.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON (schema bcow.pools/1)
    #[arg(long)]
    json: bool,
}

/// Prints the pools.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let pools = find()?;
    if args.json {
        let pools: Vec<Value> = pools.iter().map(document).collect();
        return ui.print_json(&json!({ "schema": "bcow.pools/1", "pools": pools }));
    }
    let mut out = ui.output();
    if pools.is_empty() {
        ui.status("no pool runs");
        return out.finish();
    }
    let name_width = pools.iter().map(|(name, _)| name.to_string().len()).max();
    let width = name_width.unwrap_or(0).max(4);
    writeln!(out, "{:<width$}  PID      MOUNTS  STATE    SINCE", "NAME")?;
    for (name, found) in &pools {
        let unknown = || "-".to_owned();
        let (mut pid, mut mounts, mut since) = (unknown(), unknown(), unknown());
        if let Found::Running(connection) = found {
            let hello = &connection.hello;
            (pid, mounts) = (hello.pid.to_string(), hello.mounts.to_string());
            since = time(hello.since).unwrap_or(since);
        }
        let state = state(found);
        writeln!(
            out,
            "{:<width$}  {pid:<7}  {mounts:<6}  {state:<7}  {since}",
            printable(&name.to_string())
        )?;
    }
    out.finish()
}

fn find() -> Result<Vec<(PoolName, Found)>, CommandError> {
    let Some(directory) = Directory::find()? else {
        return Ok(Vec::new());
    };
    let cannot = || format!("cannot read {}", directory.path().display());
    let mut pools = Vec::new();
    for name in directory.names().context(cannot)? {
        match client::find(&directory.socket(&name))? {
            // It has ended meanwhile.
            Found::Missing => {}
            found => pools.push((name, found)),
        }
    }
    Ok(pools)
}

fn state(found: &Found) -> &'static str {
    match found {
        Found::Running(_) => "running",
        Found::Silent => "silent",
        Found::Dead | Found::Missing => "dead",
    }
}

fn time(since: u64) -> Option<String> {
    bcow::rfc3339(i64::try_from(since).ok()?)
}

fn document((name, found): &(PoolName, Found)) -> Value {
    let hello = match found {
        Found::Running(connection) => Some(&connection.hello),
        _ => None,
    };
    json!({
        "name": name.to_string(),
        "state": state(found),
        "pid": hello.map(|hello| hello.pid),
        "mounts": hello.map(|hello| hello.mounts),
        "version": hello.map(|hello| &hello.program),
        "protocol": hello.map(|hello| hello.version),
        "since": hello.and_then(|hello| time(hello.since)),
        "since_unix_seconds": hello.map(|hello| hello.since),
        "keeper": hello.and_then(|hello| hello.keeper),
        "restarts": hello.map(|hello| hello.restarts),
    })
}

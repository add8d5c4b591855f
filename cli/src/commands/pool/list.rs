//! `bcow pool list`

use bcow_pool::client::{self, PoolAtSocket};
use bcow_pool::protocol::Hello;
use serde_json::{Value, json};

use crate::error::CommandError;
use crate::names::printable;
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
    // Only a running pool tells more than its state.
    let pools = client::pools()?.into_iter().map(|(name, found)| {
        let (state, hello) = match found {
            PoolAtSocket::Running(connection) => ("running", Some(connection.hello)),
            PoolAtSocket::Silent => ("silent", None),
            PoolAtSocket::Dead | PoolAtSocket::Missing => ("dead", None),
        };
        (name.to_string(), state, hello)
    });
    let pools: Vec<_> = pools.collect();
    let since = |hello: &Hello| bcow::rfc3339(hello.since.try_into().ok()?);
    if args.json {
        let pools = pools.iter().map(|(name, state, hello)| {
            let hello = hello.as_ref();
            json!({
                "name": name,
                "state": state,
                "pid": hello.map(|hello| hello.pid),
                "mounts": hello.map(|hello| hello.mounts),
                "version": hello.map(|hello| &hello.program),
                "protocol": hello.map(|hello| hello.version),
                "since": hello.and_then(since),
                "since_unix_seconds": hello.map(|hello| hello.since),
                "keeper": hello.and_then(|hello| hello.supervisor),
                "restarts": hello.map(|hello| hello.restarts),
            })
        });
        let pools: Vec<Value> = pools.collect();
        return ui.print_json(&json!({ "schema": "bcow.pools/1", "pools": pools }));
    }
    let mut out = ui.output();
    if pools.is_empty() {
        ui.status("no pool runs");
        return out.finish();
    }
    let known = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let rows = pools.iter().map(|(name, state, hello)| {
        let hello = hello.as_ref();
        [
            printable(name).into_owned(),
            known(hello.map(|hello| hello.pid.to_string())),
            known(hello.map(|hello| hello.mounts.to_string())),
            (*state).to_owned(),
            known(hello.and_then(since)),
        ]
    });
    out.table(["NAME", "PID", "MOUNTS", "STATE", "SINCE"], rows)?;
    out.finish()
}

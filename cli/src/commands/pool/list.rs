//! `bcow pool list`

use bcow_pool::PoolName;
use bcow_pool::client::{self, PoolAtSocket};
use serde::Serialize;

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

#[derive(Serialize)]
struct List {
    schema: &'static str,
    pools: Vec<Pool>,
}

/// A pool. Only a running one tells more than its state.
#[derive(Serialize)]
struct Pool {
    name: String,
    state: &'static str,
    pid: Option<u32>,
    mounts: Option<usize>,
    version: Option<String>,
    protocol: Option<u64>,
    since: Option<String>,
    since_unix_seconds: Option<u64>,
    #[serde(rename = "keeper")]
    supervisor: Option<u32>,
    restarts: Option<u64>,
}

impl Pool {
    fn of((name, found): (PoolName, PoolAtSocket)) -> Self {
        let (state, hello) = match found {
            PoolAtSocket::Running(connection) => ("running", Some(connection.hello)),
            PoolAtSocket::Silent => ("silent", None),
            PoolAtSocket::Dead | PoolAtSocket::Missing => ("dead", None),
        };
        let hello = hello.as_ref();
        Pool {
            name: name.to_string(),
            state,
            pid: hello.map(|hello| hello.pid),
            mounts: hello.map(|hello| hello.mounts),
            version: hello.map(|hello| hello.program.clone()),
            protocol: hello.map(|hello| hello.version),
            since: hello.and_then(|hello| bcow::rfc3339(hello.since.try_into().ok()?)),
            since_unix_seconds: hello.map(|hello| hello.since),
            supervisor: hello.and_then(|hello| hello.supervisor),
            restarts: hello.map(|hello| hello.restarts),
        }
    }
}

/// Prints the pools.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let pools = client::pools()?;
    let pools: Vec<Pool> = pools.into_iter().map(Pool::of).collect();
    if args.json {
        return ui.print_json(&List {
            schema: "bcow.pools/1",
            pools,
        });
    }
    let mut out = ui.output();
    if pools.is_empty() {
        ui.status("no pool runs");
        return out.finish();
    }
    let known = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    let rows = pools.into_iter().map(|pool| {
        [
            printable(&pool.name).into_owned(),
            known(pool.pid.map(|pid| pid.to_string())),
            known(pool.mounts.map(|mounts| mounts.to_string())),
            pool.state.to_owned(),
            known(pool.since),
        ]
    });
    out.table(["NAME", "PID", "MOUNTS", "STATE", "SINCE"], rows)?;
    out.finish()
}

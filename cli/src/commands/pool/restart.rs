//! `bcow pool restart`

use std::time::{Duration, Instant};

use bcow_mounts::PoolName;

use crate::error::CommandError;
use crate::pool::Directory;
use crate::pool::client::{self, PoolAtSocket};
use crate::pool::protocol::Request;
use crate::size::plural;
use crate::ui::Ui;

/// How long the new process may take. It waits for half a minute for servers that do not answer.
const TAKES_OVER_WITHIN: Duration = Duration::from_secs(120);

/// Replace the process of a pool, and keep its mounts
///
/// A new process takes over the mounts. It runs the program file with which the pool was started,
/// so after an upgrade of that file it runs the new version of bcow. Meanwhile, programs that use
/// the mounts wait. The command returns when the new process serves the mounts.
///
/// The new process cannot take over a mount whose image or disk is gone, or any mount on a kernel
/// before Linux 6.9. The command fails if the pool has such a mount, unless --force unmounts it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The name of the pool
    #[arg(value_name = "NAME")]
    name: PoolName,
    /// First unmount the mounts that cannot be taken over, even if files are in use
    #[arg(short, long)]
    force: bool,
}

/// Replaces the process.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let mut connection = client::require(&args.name)?;
    let supervisor = connection.supervisor();
    let before = connection.hello.restarts;
    connection.ask(&Request::Restart { force: args.force }, ui)?;
    connection.wait_for_end();
    let cannot = || CommandError::new(format!("cannot restart the pool {}", args.name));
    let ended = || {
        cannot()
            .caused_by_text("no process has taken over")
            .hint("the system log, or the file of --log-file, has the reason")
    };
    let Some(directory) = Directory::find()? else {
        return Err(ended());
    };
    let begun = Instant::now();
    let hello = loop {
        match client::find(&directory.socket(&args.name))? {
            PoolAtSocket::Running(connection) if connection.hello.restarts > before => {
                break connection.hello;
            }
            // The supervisor gives up, or another pool has the name now.
            PoolAtSocket::Running(_) | PoolAtSocket::Dead | PoolAtSocket::Missing => {
                client::wait_for_supervisor(supervisor);
                return Err(ended());
            }
            // It opens the images again.
            PoolAtSocket::Silent if begun.elapsed() < TAKES_OVER_WITHIN => {}
            PoolAtSocket::Silent => {
                return Err(cannot().caused_by_text("the new process does not answer yet"));
            }
        }
    };
    ui.status(format_args!(
        "process {} serves the pool {}",
        hello.pid, args.name
    ));
    match hello.lost {
        0 => Ok(()),
        lost => Err(CommandError::new(format!(
            "{} of the pool {} could not be taken over",
            plural(lost, "mount"),
            args.name
        ))
        .hint("the system log, or the file of --log-file, has the reason")),
    }
}

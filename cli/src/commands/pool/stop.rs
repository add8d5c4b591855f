//! `bcow pool stop`

use bcow_pool::{PoolName, client};

use crate::error::CommandError;
use crate::size::plural;
use crate::ui::Ui;

/// End a pool
///
/// The command fails if the pool has mounts, unless --force unmounts them. It returns when the pool
/// has ended, and all data written to its mounts is durable. If files are in use, their mounts are
/// detached, the command says so, and the pool ends when the last open file is closed.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The name of the pool
    #[arg(value_name = "NAME")]
    name: PoolName,
    /// First unmount all mounts of the pool, even if files are in use
    #[arg(short, long)]
    force: bool,
}

/// Ends the pool.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let count = client::stop(&args.name, args.force, ui)?;
    if count > 0 {
        ui.status(format_args!(
            "{} of the pool {} {} in use; the pool ends when the last open file is closed",
            plural(count, "mount"),
            args.name,
            if count == 1 { "is" } else { "are" },
        ));
    }
    Ok(())
}

//! `bcow pool restart`

use bcow_pool::PoolName;

use crate::error::CommandError;
use crate::ui::Ui;

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
    bcow_pool::restart(&args.name, args.force, ui)
}

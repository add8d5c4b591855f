//! `bcow pool start`

use bcow_pool::start::{self, StartArgs};

use crate::error::CommandError;
use crate::ui::Ui;

/// Start a pool
///
/// The command returns when the pool takes requests. The pool listens at a socket in a directory
/// that only its user can enter: /run/bcow/pools for root, $XDG_RUNTIME_DIR/bcow/pools or
/// /tmp/bcow-UID for other users, or $BCOW_POOLS. Other users cannot use the pool. The pool opens
/// the files of its mounts with its own rights, in its own mount namespace.
///
/// SIGTERM and SIGINT unmount all mounts and end the pool. If files are in use, their mounts are
/// detached, and the pool ends when the last open file is closed, or at a second signal.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pool: StartArgs,
}

/// Starts the pool. Returns the exit status.
pub fn run(args: &Args, ui: &Ui) -> Result<u8, CommandError> {
    start::run(&args.pool, ui)
}

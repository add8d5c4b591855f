//! `bcow pool`

mod list;
mod restart;
mod start;
mod stats;
mod stop;

use crate::error::{CommandError, exit};
use crate::ui::Ui;

/// Serve many mounts with one process
///
/// A pool is a process that serves all mounts that `bcow mount --pool NAME` makes, with both
/// drivers (see `bcow help mount`). Its mounts share the connections to other machines and one
/// cache of decoded blocks, which holds one copy of content that several mounts have in common. A
/// pool belongs to the user who starts it. Pools share no memory and no connections with each
/// other.
///
/// If the process of a pool crashes, or `bcow pool restart` replaces it, programs that use its
/// mounts wait until the next process serves them. This needs Linux 6.9 or later.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Start(start::Args),
    List(list::Args),
    Stats(stats::Args),
    Restart(restart::Args),
    Stop(stop::Args),
}

/// Runs the subcommand. Returns the exit status.
pub fn run(args: &Args, ui: &Ui) -> Result<u8, CommandError> {
    match &args.command {
        Command::Start(args) => return start::run(args, ui),
        Command::List(args) => list::run(args, ui),
        Command::Stats(args) => stats::run(args, ui),
        Command::Restart(args) => restart::run(args, ui),
        Command::Stop(args) => stop::run(args, ui),
    }
    .map(|()| exit::DONE)
}

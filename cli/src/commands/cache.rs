//! `bcow cache`

mod list;
mod prune;
mod verify;
mod warm;

use std::path::PathBuf;

use bcow_remote::Cache;

use crate::cache;
use crate::error::CommandError;
use crate::ui::Ui;

/// Show, check, fill or clear the cache for images on other machines
///
/// The cache keeps what was read of images on other machines. It is a directory with one sparse
/// file per image file, and belongs to one user. These commands can be used at any time, also while
/// images are mounted: what a process finds missing or wrong in the cache, it fetches again.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    List(list::Args),
    Verify(verify::Args),
    Prune(prune::Args),
    Warm(Box<warm::Args>),
}

/// The cache of a command that needs no image.
#[derive(Debug, clap::Args)]
struct DirectoryArgs {
    /// The directory of the cache [default: $BCOW_CACHE, or /var/cache/bcow for root, or
    /// $XDG_CACHE_HOME/bcow, or ~/.cache/bcow]
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    cache_dir: Option<PathBuf>,
}

impl DirectoryArgs {
    /// The cache, or the path at which it does not exist.
    fn find(&self) -> Result<Result<Cache, PathBuf>, CommandError> {
        cache::find(self.cache_dir.as_deref())
    }
}

/// Runs the subcommand.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    match &args.command {
        Command::List(args) => list::run(args, ui),
        Command::Verify(args) => verify::run(args, ui),
        Command::Prune(args) => prune::run(args, ui),
        Command::Warm(args) => warm::run(args, ui),
    }
}

fn cannot_read(cache: &Cache) -> String {
    format!("cannot read {}", cache.path().display())
}

//! `bcow cache`

mod list;
mod prune;
mod verify;
mod warm;

use std::path::{Path, PathBuf};

use bcow_view::{ViewCache, ViewEntry};

use crate::cache::FoundCache;
use crate::error::{CommandError, Context};
use crate::names::printable;
use crate::ui::Ui;
use crate::{cache, views};

/// Show, check, fill or clear the caches: data of remote images, and ext4 metadata
///
/// The cache holds data of remote images. It is a directory with one sparse file per
/// image file, and belongs to one user. These commands can be used at any time, also while images
/// are mounted: a process that finds data missing or wrong in the cache fetches the data again.
///
/// bcow also caches the ext4 metadata that it generates for an image (see `bcow help create`). This
/// metadata is called a view of the image. The views are in the directory $BCOW_VIEWS. If this
/// variable is not set, they are in the directory `views` of the cache. The option --cache-dir of
/// these commands selects the cache in which they look for views; that of other commands has no
/// effect on views. bcow generates a removed view again when a command needs it.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

impl Args {
    /// Whether the command fetches what the next one with the same arguments need not fetch.
    pub fn keeps_what_it_fetched(&self) -> bool {
        matches!(self.command, Command::Warm(_))
    }
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    List(list::Args),
    Verify(verify::Args),
    Prune(prune::Args),
    Warm(Box<warm::Args>),
}

/// Selects the cache of a command that takes no image.
#[derive(Debug, clap::Args)]
struct DirectoryArgs {
    /// The directory of the cache [default: $BCOW_CACHE, or /var/cache/bcow for root, or
    /// $XDG_CACHE_HOME/bcow, or ~/.cache/bcow]
    #[arg(long, value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    cache_dir: Option<PathBuf>,
}

impl DirectoryArgs {
    fn find(&self) -> Result<FoundCache, CommandError> {
        cache::find(self.cache_dir.as_deref())
    }

    /// Lists the views that belong to this cache.
    fn views(&self) -> Result<Views, CommandError> {
        let Some(cache) = views::of_cache(self.cache_dir.as_deref()) else {
            return Ok(Views::default());
        };
        let entries = cache.entries().context(|| cannot_read(cache.directory()))?;
        Ok(Views {
            cache: Some(cache),
            entries,
        })
    }
}

/// The views of one directory.
#[derive(Default)]
struct Views {
    /// `None` if neither an option nor the environment names a directory for views.
    cache: Option<ViewCache>,
    /// The most recently used view first.
    entries: Vec<ViewEntry>,
}

impl Views {
    fn held_bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.held_bytes).sum()
    }
}

/// The name of the image of a view; without a name, the first 12 characters of its identity.
fn image_label(view: &ViewEntry) -> String {
    match &view.image_name {
        Some(name) => printable(name).into_owned(),
        None => view.image.chars().take(12).collect(),
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

fn cannot_read(directory: &Path) -> String {
    format!("cannot read {}", directory.display())
}

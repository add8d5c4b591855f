//! `bcow umount`

use std::path::PathBuf;

use bcow_fuse::WhenBusy;

use crate::commands::mount::failure;
use crate::error::CommandError;
use crate::ui::Ui;

/// Unmount an image
///
/// Works on mounts of `bcow mount` only, for root and for the user who mounted. The process that served
/// the mount ends by itself. umount(8) and `fusermount3 -u` do the same.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The directory it is mounted on
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    directory: PathBuf,
    /// If files are in use, detach the mount now and end it with its last user
    #[arg(short = 'z', long)]
    lazy: bool,
}

/// Unmounts.
pub fn run(args: &Args, _ui: &Ui) -> Result<(), CommandError> {
    let when_busy = match args.lazy {
        true => WhenBusy::Detach,
        false => WhenBusy::Fail,
    };
    bcow_fuse::unmount(&args.directory, when_busy).map_err(|error| failure(&error))
}

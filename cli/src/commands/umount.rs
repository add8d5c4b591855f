//! `bcow umount`

use std::path::PathBuf;

use bcow_mounts::umount;
use bcow_pool::client;

use crate::error::CommandError;
use crate::ui::Ui;

/// Unmount an image or a disk
///
/// The command works only on mounts of `bcow mount`, for root and for the user who mounted. It
/// returns when the process of the mount has ended, or, in a pool, when the mount has ended. All
/// data written to a writable mount is then durable (with --sync volatile, it is in the host's file
/// system). The command does not wait for a process that does not answer, or that continues because
/// the image is also mounted at another place. If the process of a writable mount was killed, did
/// not report that the host accepted all data, or does not answer, or if it did not write the trace
/// of `bcow mount --record`, the command fails, but the mount is unmounted anyway. umount(8),
/// `fusermount3 -u` and --lazy do not wait and do not report such a failure.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The directory of the mount
    #[arg(value_name = "DIR", value_hint = clap::ValueHint::DirPath)]
    directory: PathBuf,
    /// If files are in use, detach the mount now; the mount ends when the last open file is closed
    #[arg(short = 'z', short_alias = 'l', long)]
    lazy: bool,
}

/// Unmounts.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    umount::unmount(&args.directory, args.lazy, client::answers, ui)
}

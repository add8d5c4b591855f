//! `bcow rebase`

use std::path::PathBuf;

use bcow::OpenOptions;
use bcow::operation::{rebase, rebase_reference};

use super::create::backing;
use crate::disks::{Below, lock_disk};
use crate::error::CommandError;
use crate::image::{StoreArgs, cannot_open_file};
use crate::rewrite::{TerminalMonitor, operation_failure};
use crate::size::Human;
use crate::ui::Ui;

/// Change the backing of a disk
///
/// Without --unsafe, the content of the disk does not change. The command compares the old and the
/// new backing where the disk reads from its backing, and writes the differences into the disk
/// before it records the new backing. With --unsafe, the command only records the new backing. That
/// is for a backing that was moved, renamed or changed on purpose; the old one need not exist.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk
    #[arg(value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    disk: PathBuf,
    /// The new backing: a BCoW file, or an image as oci:DIR[:REF]
    #[arg(
        short,
        long,
        value_name = "NEW",
        required_unless_present = "no_backing",
        value_hint = clap::ValueHint::FilePath
    )]
    backing: Option<PathBuf>,
    /// Remove the backing, after copying its visible data into the disk
    #[arg(long, conflicts_with = "backing")]
    no_backing: bool,
    /// Record the new backing by the digest of its file instead of its name
    #[arg(long, requires = "backing")]
    by_digest: bool,
    /// Change only the recorded backing, without a comparison; the disk then shows the data of the
    /// new backing
    #[arg(long = "unsafe")]
    reference_only: bool,
    #[command(flatten)]
    stores: StoreArgs,
}

/// Rebases.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let name = &args.disk;
    let options = OpenOptions::default();
    // Locked first, so that a backing that needs this disk shows as one in use.
    let file = lock_disk(name, "rebase")?;
    let new = match &args.backing {
        Some(new) => Some(backing(
            new,
            args.by_digest,
            file.path(),
            &args.stores,
            &options,
        )?),
        None => None,
    };
    let over = new
        .as_ref()
        .map_or("no backing".to_owned(), |(entry, _)| entry.name.to_string());
    let written = match args.reference_only {
        true => {
            rebase_reference(file.storage(), new, &options)
                .map_err(|error| cannot_open_file(name, name, &error))?;
            0
        }
        false => {
            let disk = Below::new(&args.stores, &options)?.open_disk(name, &file)?;
            let cannot = || format!("cannot rebase {}", name.display());
            rebase(disk, new, &TerminalMonitor::new(ui))
                .map_err(|error| operation_failure(&error, cannot, cannot))?
        }
    };
    let kept = match written {
        0 => String::new(),
        bytes => format!(", {} written into the disk", Human(bytes)),
    };
    ui.status(format_args!("{}: over {over}{kept}", name.display()));
    Ok(())
}

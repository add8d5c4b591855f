//! `bcow snapshot`

mod list;
mod rm;

use bcow_convert::take_snapshot;
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};
use serde_json::json;

use crate::error::CommandError;
use crate::image::StoreArgs;
use crate::ui::Ui;

/// Take, list or remove snapshots of a disk
///
/// `bcow snapshot DISK NAME` makes the present content of a disk its snapshot NAME. No data is
/// copied: the file of the disk becomes the file DISK@NAME in the same directory, and a new empty
/// disk over it gets the name DISK. DISK@NAME is a file name, which every command takes that reads
/// an image or a disk. bcow never writes to it.
///
/// `bcow fork` makes a further disk over a snapshot, and `bcow rollback` goes back to one.
///
/// If `bcow serve` or `bcow attach` uses the disk, that process takes the snapshot: its clients
/// wait for a moment and see no error, and all that was answered before is in the snapshot. A disk
/// that another process uses is refused.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// The disk
    #[arg(value_name = "DISK", value_hint = clap::ValueHint::FilePath, required = true)]
    #[arg(value_parser = NameParser(IMAGE))]
    disk: Option<Name>,
    /// The name of the snapshot: letters, digits, `.`, `_` and `-`; the first one is a letter or a
    /// digit
    #[arg(value_name = "NAME", required = true)]
    name: Option<String>,
    /// Print JSON (schema bcow.snapshot/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    stores: StoreArgs,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    List(list::Args),
    Rm(Box<rm::Args>),
}

/// Runs the subcommand, or takes a snapshot.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    match (&args.command, &args.disk, &args.name) {
        (Some(Command::List(args)), ..) => list::run(args, ui),
        (Some(Command::Rm(args)), ..) => rm::run(args, ui),
        (None, Some(disk), Some(name)) => take(args, disk, name, ui),
        // The parser of the command line requires both.
        (None, ..) => Err(CommandError::usage("the snapshot needs a disk and a name")),
    }
}

fn take(args: &Args, disk: &Name, name: &str, ui: &Ui) -> Result<(), CommandError> {
    let path = take_snapshot(disk, name, &args.stores)?;
    if args.json {
        return ui.print_json(&json!({
            "schema": "bcow.snapshot/1",
            "disk": disk.to_string(),
            "snapshot": name,
            "file": path.to_string_lossy(),
        }));
    }
    ui.status(format_args!(
        "{disk}: its content is the snapshot {disk}@{name}"
    ));
    Ok(())
}

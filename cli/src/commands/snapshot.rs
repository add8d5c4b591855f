//! `bcow snapshot`

mod list;
mod rm;

use bcow_convert::{take_snapshot, take_upper_snapshot};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};
use bcow_images::readable_upper::refuse_temporary;
use bcow_images::target::Target;
use bcow_mounts::control::hold_frozen;
use serde_json::json;

use crate::error::{CommandError, Context};
use crate::image::StoreArgs;
use crate::ui::Ui;

/// Take, list or remove snapshots of a disk or of a writable mount
///
/// `bcow snapshot DISK NAME` makes the present content of a disk its snapshot NAME. No data is
/// copied: the file of the disk becomes the file DISK@NAME in the same directory, and a new empty
/// disk over it gets the name DISK. DISK@NAME is a file name, which every command takes that reads
/// an image or a disk. bcow never writes to it.
///
/// `bcow snapshot UPPER NAME` does the same with an upper of the kernel driver, which has a disk.
/// Its snapshot has the name UPPER@NAME for `bcow fork`. A snapshot of an upper of the FUSE driver
/// is a copy, UPPER/.bcow/snapshots/NAME, which shares its blocks where the host has reflinks. In
/// place of an upper or a disk, the command takes the directory where it is mounted.
///
/// `bcow fork` makes a further disk or upper over a snapshot, and `bcow rollback` goes back to one.
///
/// If `bcow serve`, `bcow attach` or `bcow mount` uses it, that process takes the snapshot:
/// programs wait for a moment and see no error, and all that they wrote before is in the snapshot.
/// The file system of a mount is frozen meanwhile. What another process uses is refused.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    #[command(subcommand)]
    command: Option<Command>,
    /// The disk, the upper, or the directory of a mount
    #[arg(value_name = "DISK|UPPER|DIR", value_hint = clap::ValueHint::AnyPath, required = true)]
    #[arg(value_parser = NameParser(IMAGE))]
    disk: Option<Name>,
    /// The name of the snapshot: letters, digits, `.`, `_` and `-`; the first one is a letter or a
    /// digit
    #[arg(value_name = "NAME", required = true)]
    name: Option<String>,
    /// In a process that `bcow mount` starts: freeze the file system at the directory, with the
    /// device number NAME
    #[arg(long, hide = true)]
    freeze: bool,
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
        (None, Some(mount), Some(device)) if args.freeze => {
            let path = mount.path().unwrap_or(mount.shown());
            let frozen = hold_frozen(path, device, std::io::stdin(), std::io::stdout());
            frozen.context(|| format!("cannot freeze {mount}"))
        }
        (None, Some(disk), Some(name)) => take(args, disk, name, ui),
        // The parser of the command line requires both.
        (None, ..) => Err(CommandError::usage("the snapshot needs a disk and a name")),
    }
}

fn take(args: &Args, disk: &Name, name: &str, ui: &Ui) -> Result<(), CommandError> {
    refuse_temporary(name)?;
    let (of, path) = match Target::of(disk)? {
        Target::Disk(disk) => ("disk", take_snapshot(&disk, name, &args.stores)?),
        Target::Upper(upper) => ("upper", take_upper_snapshot(&upper, name)?),
    };
    if args.json {
        return ui.print_json(&json!({
            "schema": "bcow.snapshot/1",
            of: disk.to_string(),
            "snapshot": name,
            "file": path.to_string_lossy(),
        }));
    }
    ui.status(format_args!(
        "{disk}: its content is the snapshot {disk}@{name}"
    ));
    Ok(())
}

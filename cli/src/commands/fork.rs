//! `bcow fork`

use bcow_convert::fork;
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser, new_file, new_path};
use serde_json::json;

use crate::error::CommandError;
use crate::image::StoreArgs;
use crate::size::{Human, plural};
use crate::ui::Ui;

/// Make a further disk that begins with the content of a disk or a snapshot
///
/// The new disk is over the snapshot and stores only its own changes. If DISK is a writable disk,
/// the command first takes a snapshot of it, with the name fork-N. Any number of disks can be over
/// a snapshot.
///
/// The new disk has the size and the layout of the snapshot. It must be in the same directory, or
/// the commands that use it need --backing-dir. The command never overwrites an existing file.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk, or its snapshot
    #[arg(value_name = "DISK[@NAME]", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    from: Name,
    /// The disk to create
    #[arg(value_name = "NEW", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(new_file("fork")))]
    new: Name,
    /// Print JSON (schema bcow.fork/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    stores: StoreArgs,
}

/// Forks.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let forked = fork(&args.from, new_path(&args.new)?, &args.stores)?;
    if args.json {
        return ui.print_json(&json!({
            "schema": "bcow.fork/1",
            "disk": args.new.to_string(),
            "bytes": forked.bytes,
            "backing": forked.backing,
        }));
    }
    ui.status(format_args!(
        "{}: writable disk of {} ({}) over {}",
        args.new.display(),
        Human(forked.bytes),
        plural(forked.bytes, "byte"),
        forked.backing
    ));
    Ok(())
}

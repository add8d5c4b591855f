//! `bcow fork`

use bcow_convert::{fork, fork_upper};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser, new_file, new_path};
use bcow_images::target::Target;
use serde_json::json;

use crate::error::CommandError;
use crate::image::StoreArgs;
use crate::size::{Human, plural};
use crate::ui::Ui;

/// Make a further disk or upper that begins with the content of another one or of a snapshot
///
/// The new disk is over the snapshot and stores only its own changes. If DISK is a writable disk,
/// the command first takes a snapshot of it, with the name fork-N. Any number of disks can be over
/// a snapshot.
///
/// The new disk has the size and the layout of the snapshot. It must be in the same directory, or
/// the commands that use it need --backing-dir. The command never overwrites an existing file.
///
/// `bcow fork UPPER@NAME NEW` makes a further upper of the kernel driver, which stores only its own
/// changes too; `bcow mount IMG DIR --upper NEW` mounts it. It must be in the same file system. Of
/// the FUSE driver, the new upper is a copy, which shares blocks where the host has reflinks. In
/// place of UPPER, the command takes the directory where it is mounted.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk, the upper or the directory of a mount, or a snapshot of it
    #[arg(value_name = "DISK|UPPER|DIR[@NAME]", value_hint = clap::ValueHint::AnyPath)]
    #[arg(value_parser = NameParser(IMAGE))]
    from: Name,
    /// The disk or the upper to create
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
    let new = new_path(&args.new)?;
    let (of, forked) = match Target::with_snapshot(&args.from)? {
        (Target::Disk(disk), _) => ("disk", Some(fork(&disk, new, &args.stores)?)),
        (Target::Upper(upper), name) => ("upper", fork_upper(&upper, name.as_deref(), new)?),
    };
    if args.json {
        return ui.print_json(&json!({
            "schema": "bcow.fork/1",
            of: args.new.to_string(),
            "bytes": forked.as_ref().map(|disk| disk.bytes),
            "backing": forked.as_ref().map(|disk| &disk.backing),
        }));
    }
    let (new, from) = (args.new.display(), args.from.display());
    match forked {
        Some(disk) => ui.status(format_args!(
            "{new}: writable {of} of {} ({}) over {}",
            Human(disk.bytes),
            plural(disk.bytes, "byte"),
            disk.backing
        )),
        None => ui.status(format_args!("{new}: upper with the content of {from}")),
    }
    Ok(())
}

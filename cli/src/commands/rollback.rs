//! `bcow rollback`

use bcow_convert::{roll_back, roll_back_upper};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};
use bcow_images::target::Target;
use serde_json::json;

use crate::error::CommandError;
use crate::image::StoreArgs;
use crate::ui::Ui;

/// Go back to a snapshot of a disk or of an upper
///
/// A new empty disk over the snapshot takes the place of the disk, in one step. What was written to
/// the disk since its last snapshot is lost, unless --keep makes it a snapshot first. All snapshots
/// stay, also later ones. An upper of the kernel driver has a disk. An upper of the FUSE
/// driver is replaced by a copy of its snapshot. The disk or the upper must not be in use.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk, or the upper
    #[arg(value_name = "DISK|UPPER", value_hint = clap::ValueHint::AnyPath)]
    #[arg(value_parser = NameParser(IMAGE))]
    disk: Name,
    /// The name of the snapshot to go back to
    #[arg(value_name = "NAME")]
    name: String,
    /// First make the present content of the disk its snapshot NAME2
    #[arg(long, value_name = "NAME2")]
    keep: Option<String>,
    /// Print JSON (schema bcow.rollback/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    stores: StoreArgs,
}

/// Rolls back.
pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let (disk, name, keep) = (&args.disk, &args.name, args.keep.as_deref());
    let (of, rolled_back) = match Target::of(disk)? {
        Target::Disk(disk) => ("disk", Some(roll_back(&disk, name, keep, &args.stores)?)),
        Target::Upper(upper) => ("upper", roll_back_upper(&upper, name, keep)?),
    };
    if args.json {
        return ui.print_json(&json!({
            "schema": "bcow.rollback/1",
            of: disk.to_string(),
            "snapshot": name,
            "kept": keep,
            "backing": rolled_back.map(|disk| disk.backing),
        }));
    }
    let kept = keep.map_or(String::new(), |keep| {
        format!("; its earlier content is the snapshot {disk}@{keep}")
    });
    ui.status(format_args!("{disk}: as its snapshot {name}{kept}"));
    Ok(())
}

//! `bcow rollback`

use bcow_convert::roll_back;
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};
use serde_json::json;

use crate::error::CommandError;
use crate::image::StoreArgs;
use crate::ui::Ui;

/// Go back to a snapshot of a disk
///
/// A new empty disk over the snapshot takes the place of the disk, in one step. What was written to
/// the disk since its last snapshot is lost, unless --keep makes it a snapshot first. All snapshots
/// stay, also later ones.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk
    #[arg(value_name = "DISK", value_hint = clap::ValueHint::FilePath)]
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
    let rolled_back = roll_back(disk, name, keep, &args.stores)?;
    if args.json {
        return ui.print_json(&json!({
            "schema": "bcow.rollback/1",
            "disk": disk.to_string(),
            "snapshot": name,
            "kept": keep,
            "backing": rolled_back.backing,
        }));
    }
    let kept = keep.map_or(String::new(), |keep| {
        format!("; its earlier content is the snapshot {disk}@{keep}")
    });
    ui.status(format_args!("{disk}: as its snapshot {name}{kept}"));
    Ok(())
}

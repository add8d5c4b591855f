//! `bcow snapshot rm`

use bcow_convert::remove_snapshot;
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};
use serde_json::json;

use crate::error::CommandError;
use crate::image::StoreArgs;
use crate::size::Human;
use crate::ui::Ui;

/// Remove a snapshot of a disk
///
/// If one disk or snapshot is over it, that one first takes its data, and shows the same content as
/// before. If several are over it, the command fails. Disks in other directories, which find the
/// snapshot by --backing-dir, are not noticed, and do not open afterwards.
///
/// The disk, and the disks over the snapshot, must not be in use. If the command is interrupted,
/// all content is unchanged, and you can run the command again.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk
    #[arg(value_name = "DISK", value_hint = clap::ValueHint::FilePath)]
    #[arg(value_parser = NameParser(IMAGE))]
    disk: Name,
    /// The name of the snapshot
    #[arg(value_name = "NAME")]
    name: String,
    /// Print JSON (schema bcow.snapshot-rm/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    stores: StoreArgs,
}

pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let (disk, name) = (&args.disk, &args.name);
    let removed = ui.work(|work| remove_snapshot(disk, name, &args.stores, work))?;
    if args.json {
        return ui.print_json(&json!({
            "schema": "bcow.snapshot-rm/1",
            "disk": disk.to_string(),
            "snapshot": name,
            "into": removed.into.map(|path| path.to_string_lossy().into_owned()),
            "written_bytes": removed.bytes,
        }));
    }
    let into = removed.into.map_or(String::new(), |path| {
        format!(", {} written into {}", Human(removed.bytes), path.display())
    });
    ui.status(format_args!("{disk}: snapshot {name} removed{into}"));
    Ok(())
}

//! `bcow snapshot rm`

use bcow_convert::{remove_snapshot, remove_upper_snapshot};
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};
use bcow_images::target::Target;
use serde_json::json;

use crate::error::CommandError;
use crate::image::StoreArgs;
use crate::size::Human;
use crate::ui::Ui;

/// Remove a snapshot of a disk or of an upper
///
/// If one disk or snapshot is over it, that one first takes its data, and shows the same content as
/// before. If several are over it, the command fails. The forks of an upper keep their snapshots,
/// and their content. Disks in other directories, which find the
/// snapshot by --backing-dir, are not noticed, and do not open afterwards.
///
/// If the disk is served or mounted, the process that does so removes the snapshot. Programs
/// continue while it copies data. Other disks over the snapshot must not be in use. If the command
/// is interrupted, all content is unchanged, and you can run the command again.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk, or the upper
    #[arg(value_name = "DISK|UPPER", value_hint = clap::ValueHint::AnyPath)]
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
    let (of, removed) = match Target::of(disk)? {
        Target::Disk(disk) => {
            let removed = ui.work(|work| remove_snapshot(&disk, name, &args.stores, work));
            ("disk", removed?)
        }
        Target::Upper(upper) => {
            let removed = ui.work(|work| remove_upper_snapshot(&upper, name, work));
            ("upper", removed?)
        }
    };
    if args.json {
        return ui.print_json(&json!({
            "schema": "bcow.snapshot-rm/1",
            of: disk.to_string(),
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

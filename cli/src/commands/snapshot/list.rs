//! `bcow snapshot list`

use bcow_convert::upper_snapshots;
use bcow_images::Name;
use bcow_images::args::{IMAGE, NameParser};
use bcow_images::snapshots::{Snapshot, disk_path, snapshots};
use bcow_images::target::Target;
use serde_json::{Value, json};

use crate::error::CommandError;
use crate::names::printable;
use crate::size::Human;
use crate::ui::Ui;

/// List the snapshots of a disk or of an upper, the oldest first
///
/// The list shows when each snapshot was taken, the size of its disk, the space that its file takes
/// up, the file below it, and the disks and snapshots in its directory that are over it. The forks
/// of an upper have its snapshots too, and are counted. The disk may be in use.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The disk, the upper, or the directory of a mount
    #[arg(value_name = "DISK|UPPER|DIR", value_hint = clap::ValueHint::AnyPath)]
    #[arg(value_parser = NameParser(IMAGE))]
    disk: Name,
    /// Print JSON (schema bcow.snapshots/1)
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let (of, snapshots) = match Target::of(&args.disk)? {
        Target::Disk(disk) => ("disk", snapshots(&disk_path(&disk)?)?),
        Target::Upper(upper) => ("upper", upper_snapshots(&upper)?),
    };
    if args.json {
        return ui.print_json(&json!({
            "schema": "bcow.snapshots/1",
            of: args.disk.to_string(),
            "snapshots": snapshots.iter().map(document).collect::<Vec<_>>(),
        }));
    }
    let mut out = ui.output();
    let titles = ["NAME", "TAKEN", "SIZE", "STORED", "OVER", "USED BY"];
    out.table(titles, snapshots.iter().map(row))?;
    out.finish()
}

fn document(snapshot: &Snapshot) -> Value {
    json!({
        "name": snapshot.name,
        "file": snapshot.path.to_string_lossy(),
        "taken": bcow::rfc3339(snapshot.taken),
        "taken_unix_seconds": snapshot.taken,
        "bytes": snapshot.bytes,
        "stored_bytes": snapshot.stored_bytes,
        "backing": snapshot.backing,
        "used_by": snapshot.used_by,
        "other_directories": snapshot.other_links,
    })
}

fn row(snapshot: &Snapshot) -> [String; 6] {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let mut used_by = snapshot.used_by.clone();
    if snapshot.other_links > 0 {
        used_by.push(format!("{} elsewhere", snapshot.other_links));
    }
    let used_by = used_by.join(", ");
    [
        snapshot.name.clone(),
        or_dash(bcow::rfc3339(snapshot.taken)),
        Human(snapshot.bytes).to_string(),
        Human(snapshot.stored_bytes).to_string(),
        or_dash(
            snapshot
                .backing
                .as_deref()
                .map(|name| printable(name).into()),
        ),
        printable(&used_by).into(),
    ]
}

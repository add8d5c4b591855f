//! `bcow cache list`

use bcow::format::hex;
use bcow_remote::{CacheEntry, EntryKind};
use bcow_view::ViewEntry;
use serde_json::{Value, json};

use super::{DirectoryArgs, cannot_read, image_label};
use crate::cache::FoundCache;
use crate::error::{CommandError, Context};
use crate::names::printable;
use crate::size::{Human, plural};
use crate::ui::Ui;

/// List the files of the cache, and the views, the most recently used first
///
/// The list shows the size of each file, how much of it is present, the time of its last use,
/// whether a process uses it, its root hash, and the URL from which it was last fetched, if that is
/// known. The command does not verify the bytes; `bcow cache verify` does.
///
/// For each view, the list shows the size of its ext4 file system, the space that the view takes up
/// on the disk, the time of its last use, whether a process uses it, and the image as the last
/// command named it. If no name is known, the list shows the first 12 characters of the image's
/// identity.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON (schema bcow.cache-list/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    directory: DirectoryArgs,
}

pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let (path, entries) = match args.directory.find()? {
        FoundCache::Present(cache) => {
            let entries = cache.entries().context(|| cannot_read(cache.path()))?;
            (cache.path().to_owned(), entries)
        }
        FoundCache::Missing(path) => (path, Vec::new()),
    };
    let directory = path.to_string_lossy();
    let held_bytes: u64 = entries.iter().map(|entry| entry.held_bytes).sum();
    let views = args.directory.views()?;
    // `None` if neither an option nor the environment names a directory for views.
    let directory_of_views = views.cache.as_ref().map(|cache| cache.directory());
    let directory_of_views = directory_of_views.map(|path| path.to_string_lossy());
    if args.json {
        let of_kind = |is: fn(&EntryKind) -> bool| -> Vec<Value> {
            let entries = entries.iter().filter(|entry| is(&entry.kind));
            entries.map(entry_json).collect()
        };
        return ui.print_json(&json!({
            "schema": "bcow.cache-list/1",
            "directory": directory,
            "held_bytes": held_bytes,
            "files": of_kind(|kind| matches!(kind, EntryKind::File(_))),
            "manifests": of_kind(|kind| matches!(kind, EntryKind::Manifest(_))),
            "names": of_kind(|kind| matches!(kind, EntryKind::Name(_))),
            "unknown": of_kind(|kind| matches!(kind, EntryKind::Unknown)),
            "views_directory": directory_of_views,
            "views_bytes": views.held_bytes(),
            "views": views.entries.iter().map(view_json).collect::<Vec<_>>(),
        }));
    }
    let mut out = ui.output();
    let titles = ["SIZE", "PRESENT", "LAST USE", "IN USE", "ROOT", "FROM"];
    let files: Vec<_> = entries.iter().filter_map(file_row).collect();
    let count = files.len() as u64;
    out.table(titles, files)?;
    let titles = ["VIEW", "SIZE", "LAST USE", "IN USE", "IMAGE"];
    out.table(titles, views.entries.iter().map(view_row))?;
    out.finish()?;
    let (files, held) = (plural(count, "file"), Human(held_bytes));
    ui.status(format_args!("{files} with {held} in {directory}"));
    if let Some(directory) = directory_of_views.filter(|_| !views.entries.is_empty()) {
        let held = Human(views.held_bytes());
        let views = plural(views.entries.len() as u64, "view");
        ui.status(format_args!("{views} with {held} in {directory}"));
    }
    Ok(())
}

fn entry_json(entry: &CacheEntry) -> Value {
    let mut document = json!({ "name": entry.name });
    match &entry.kind {
        EntryKind::File(root) => {
            document["root"] = json!(root.to_string());
            document["origin"] = json!(entry.origin);
            document["file_bytes"] = json!(entry.file_bytes);
            document["present_bytes"] = json!(present_bytes(entry));
            document["in_use"] = json!(entry.is_in_use);
        }
        EntryKind::Manifest(digest) => {
            document["digest"] = json!(format!("sha256:{}", hex(digest)));
        }
        EntryKind::Name(_) | EntryKind::Unknown => {}
    }
    document["held_bytes"] = json!(entry.held_bytes);
    document["last_use"] = json!(bcow::rfc3339(entry.last_use));
    document["last_use_unix_seconds"] = json!(entry.last_use);
    document
}

/// Blocks of the host are larger than the last bytes of a file.
fn present_bytes(entry: &CacheEntry) -> u64 {
    entry.held_bytes.min(entry.file_bytes.unwrap_or(u64::MAX))
}

fn file_row(entry: &CacheEntry) -> Option<[String; 6]> {
    let EntryKind::File(root) = &entry.kind else {
        return None;
    };
    let origin = entry.origin.as_deref();
    Some([
        known(entry.file_bytes.map(|bytes| Human(bytes).to_string())),
        Human(present_bytes(entry)).to_string(),
        known(bcow::rfc3339(entry.last_use)),
        yes_or_no(entry.is_in_use),
        root.to_string().chars().take(12).collect(),
        known(origin.map(|origin| printable(origin).into())),
    ])
}

fn view_json(view: &ViewEntry) -> Value {
    json!({
        "name": view.name,
        "image_identity": view.image,
        "image": view.image_name,
        "bytes": view.bytes,
        "layout": view.layout,
        "held_bytes": view.held_bytes,
        "in_use": view.is_in_use,
        "last_use": bcow::rfc3339(view.last_use),
        "last_use_unix_seconds": view.last_use,
    })
}

fn view_row(view: &ViewEntry) -> [String; 5] {
    [
        Human(view.bytes).to_string(),
        Human(view.held_bytes).to_string(),
        known(bcow::rfc3339(view.last_use)),
        yes_or_no(view.is_in_use),
        image_label(view),
    ]
}

fn known(text: Option<String>) -> String {
    text.unwrap_or_else(|| "-".to_owned())
}

fn yes_or_no(is_so: bool) -> String {
    if is_so { "yes" } else { "no" }.to_owned()
}

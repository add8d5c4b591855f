//! `bcow cache list`

use bcow_remote::{CacheEntry, EntryKind};
use bcow_view::ViewEntry;
use serde_json::{Value, json};

use super::{DirectoryArgs, cannot_read, image_label};
use crate::cache::FoundCache;
use crate::error::{CommandError, Context};
use crate::names::{hex, printable};
use crate::size::{Human, plural};
use crate::ui::{Output, Ui};

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
    let views = args.directory.views()?;
    let views_directory = views.cache.as_ref();
    let views_directory = views_directory.map(|cache| cache.directory().to_string_lossy());
    let shown = path.display();
    let held: u64 = entries.iter().map(|entry| entry.held_bytes).sum();
    if args.json {
        let of = |kind: fn(&EntryKind) -> bool| -> Vec<Value> {
            let entries = entries.iter().filter(|entry| kind(&entry.kind));
            entries.map(document).collect()
        };
        return ui.print_json(&json!({
            "schema": "bcow.cache-list/1",
            "directory": path.to_string_lossy(),
            "held_bytes": held,
            "files": of(|kind| matches!(kind, EntryKind::File(_))),
            "manifests": of(|kind| matches!(kind, EntryKind::Manifest(_))),
            "names": of(|kind| matches!(kind, EntryKind::Name(_))),
            "unknown": of(|kind| *kind == EntryKind::Unknown),
            "views_directory": views_directory,
            "views_bytes": views.held_bytes(),
            "views": views.entries.iter().map(view_document).collect::<Vec<_>>(),
        }));
    }
    let mut out = ui.output();
    let mut rows = Vec::new();
    for entry in &entries {
        if let EntryKind::File(root) = entry.kind {
            rows.push([
                entry
                    .file_bytes
                    .map_or_else(|| "-".to_owned(), |bytes| Human(bytes).to_string()),
                Human(present(entry)).to_string(),
                bcow::rfc3339(entry.last_use).unwrap_or_else(|| "-".to_owned()),
                yes_or_no(entry.is_in_use),
                root.to_string().chars().take(12).collect(),
                entry
                    .origin
                    .as_deref()
                    .map_or_else(|| "-".to_owned(), |origin| printable(origin).into_owned()),
            ]);
        }
    }
    let files = rows.len() as u64;
    let titles = ["SIZE", "PRESENT", "LAST USE", "IN USE", "ROOT", "FROM"];
    print(titles, rows, &mut out)?;
    let rows = views.entries.iter().map(|view| {
        [
            Human(view.bytes).to_string(),
            Human(view.held_bytes).to_string(),
            bcow::rfc3339(view.last_use).unwrap_or_else(|| "-".to_owned()),
            yes_or_no(view.is_in_use),
            image_label(view),
        ]
    });
    let titles = ["VIEW", "SIZE", "LAST USE", "IN USE", "IMAGE"];
    print(titles, rows.collect(), &mut out)?;
    out.finish()?;
    ui.status(format_args!(
        "{} with {} in {shown}",
        plural(files, "file"),
        Human(held)
    ));
    if let Some(cache) = &views.cache
        && !views.entries.is_empty()
    {
        ui.status(format_args!(
            "{} with {} in {}",
            plural(views.entries.len() as u64, "view"),
            Human(views.held_bytes()),
            cache.directory().display()
        ));
    }
    Ok(())
}

fn yes_or_no(is_so: bool) -> String {
    if is_so { "yes" } else { "no" }.to_owned()
}

/// Prints a table; nothing without rows.
fn print<const COLUMNS: usize>(
    titles: [&str; COLUMNS],
    mut rows: Vec<[String; COLUMNS]>,
    out: &mut Output,
) -> Result<(), CommandError> {
    if rows.is_empty() {
        return Ok(());
    }
    rows.insert(0, titles.map(str::to_owned));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..COLUMNS)
        .map(|column| width(column).unwrap_or(0))
        .collect();
    for row in &rows {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .map(|(cell, &width)| format!("{cell:<width$}"))
            .collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    Ok(())
}

fn view_document(view: &ViewEntry) -> Value {
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

/// Blocks of the host are larger than the last bytes of a file.
fn present(entry: &CacheEntry) -> u64 {
    entry.held_bytes.min(entry.file_bytes.unwrap_or(u64::MAX))
}

fn document(entry: &CacheEntry) -> Value {
    let mut document = json!({ "name": entry.name });
    match entry.kind {
        EntryKind::File(root) => {
            document["root"] = root.to_string().into();
            document["origin"] = entry.origin.clone().into();
            document["file_bytes"] = entry.file_bytes.into();
            document["present_bytes"] = present(entry).into();
            document["in_use"] = entry.is_in_use.into();
        }
        EntryKind::Manifest(digest) => {
            document["digest"] = format!("sha256:{}", hex(&digest)).into();
        }
        EntryKind::Name(_) | EntryKind::Unknown => {}
    }
    document["held_bytes"] = entry.held_bytes.into();
    document["last_use"] = bcow::rfc3339(entry.last_use).into();
    document["last_use_unix_seconds"] = entry.last_use.into();
    document
}

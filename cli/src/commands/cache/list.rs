//! `bcow cache list`

use bcow_remote::{CacheEntry, EntryKind};
use serde_json::{Value, json};

use super::{DirectoryArgs, cannot_read};
use crate::error::{CommandError, Context};
use crate::names::{hex, printable};
use crate::size::{Human, plural};
use crate::ui::Ui;

/// List the files of the cache, the most recently used first
///
/// The list shows the size of each file, how much of it is present, the time of its last use,
/// whether a process uses it, its root hash, and the URL from which it was last fetched, if that is
/// known. Bytes are counted, not checked: `bcow cache verify` does that.
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
        Ok(cache) => {
            let entries = cache.entries().context(|| cannot_read(&cache))?;
            (cache.path().to_owned(), entries)
        }
        Err(missing) => (missing, Vec::new()),
    };
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
                if entry.is_in_use { "yes" } else { "no" }.to_owned(),
                root.to_string().chars().take(12).collect(),
                entry
                    .origin
                    .as_deref()
                    .map_or_else(|| "-".to_owned(), |origin| printable(origin).into_owned()),
            ]);
        }
    }
    if !rows.is_empty() {
        let titles = ["SIZE", "PRESENT", "LAST USE", "IN USE", "ROOT", "FROM"].map(str::to_owned);
        rows.insert(0, titles);
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
        let widths: Vec<usize> = (0..6).map(|column| width(column).unwrap_or(0)).collect();
        for row in &rows {
            let cells: Vec<String> = row
                .iter()
                .zip(&widths)
                .map(|(cell, &width)| format!("{cell:<width$}"))
                .collect();
            writeln!(out, "{}", cells.join("  ").trim_end())?;
        }
    }
    out.finish()?;
    let files = rows.len().saturating_sub(1) as u64;
    ui.status(format_args!(
        "{} with {} in {shown}",
        plural(files, "file"),
        Human(held)
    ));
    Ok(())
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

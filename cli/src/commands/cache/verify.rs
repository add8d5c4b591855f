//! `bcow cache verify`

use bcow_remote::{CacheEntry, EntryKind};
use bcow_view::{Remove, ViewEntry};
use serde_json::{Value, json};

use super::{DirectoryArgs, cannot_read, image_label};
use crate::cache::FoundCache;
use crate::error::{CommandError, Context};
use crate::interrupt::Interrupt;
use crate::names::{printable, quoted};
use crate::size::{Human, plural};
use crate::ui::Ui;

/// Verify the cached data against the Merkle trees, and remove damaged data
///
/// The command reads every cached byte. It removes damaged chunks from their files; bcow fetches
/// them again when they are needed. It removes views whose bytes do not match their checksums; bcow
/// generates them again when they are needed. It reports files that do not belong to the cache, and
/// keeps them. The exit status is 0 also if the command removed damaged data.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON (schema bcow.cache-verify/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    directory: DirectoryArgs,
}

pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let interrupt = Interrupt::catch();
    let mut files = Vec::new();
    let mut unknown = Vec::new();
    let mut directory = None;
    let (mut right, mut damaged, mut manifests, mut wrong_manifests) = (0, 0, 0, 0);
    match args.directory.find()? {
        FoundCache::Missing(path) => directory = Some(path),
        FoundCache::Present(cache) => {
            directory.replace(cache.path().to_owned());
            let entries = cache.entries().context(|| cannot_read(cache.path()))?;
            let progress = ui.progress();
            progress.phase("verifying");
            let is_file = |entry: &&CacheEntry| matches!(entry.kind, EntryKind::File(_));
            let held = entries.iter().filter(is_file);
            progress.total(Some(held.map(|entry| entry.held_bytes).sum()));
            for entry in entries {
                let cannot =
                    || format!("cannot verify {}", cache.path().join(&entry.name).display());
                let root = match entry.kind {
                    EntryKind::File(root) => root,
                    EntryKind::Manifest(digest) => {
                        manifests += 1;
                        if !cache.verify_manifest(&digest).context(cannot)? {
                            wrong_manifests += 1;
                        }
                        continue;
                    }
                    EntryKind::Name(_) => continue,
                    EntryKind::Unknown => {
                        unknown.push(entry.name);
                        continue;
                    }
                };
                let mut advance = |bytes| {
                    progress.advance(bytes);
                    interrupt.check().is_ok()
                };
                let found = cache.verify(root, &mut advance).context(cannot)?;
                interrupt.check()?;
                // Removed meanwhile.
                let Some(found) = found else { continue };
                right += found.right_bytes;
                damaged += found.damaged_bytes;
                files.push((root, entry.origin, found));
            }
        }
    }
    let (views, damaged_views) = verify_views(&args.directory, &interrupt)?;
    let directory = directory.unwrap_or_default();
    if args.json {
        let list: Vec<Value> = files
            .iter()
            .map(|(root, origin, found)| {
                json!({
                    "root": root.to_string(),
                    "origin": origin,
                    "file_bytes": (found.file_bytes > 0).then_some(found.file_bytes),
                    "right_bytes": found.right_bytes,
                    "damaged_bytes": found.damaged_bytes,
                    "unknown_bytes": found.unknown_bytes,
                    "complete": found.is_complete(),
                })
            })
            .collect();
        return ui.print_json(&json!({
            "schema": "bcow.cache-verify/1",
            "directory": directory.to_string_lossy(),
            "right_bytes": right,
            "damaged_bytes": damaged,
            "manifests": manifests,
            "damaged_manifests": wrong_manifests,
            "files": list,
            "unknown": unknown,
            "views": views,
            "damaged_views": damaged_views.iter().map(|view| &view.name).collect::<Vec<_>>(),
        }));
    }
    let mut out = ui.output();
    for (root, origin, found) in &files {
        if found.damaged_bytes > 0 {
            writeln!(
                out,
                "{root}: removed {} that did not match the Merkle tree{}",
                plural(found.damaged_bytes, "byte"),
                origin
                    .as_deref()
                    .map_or_else(String::new, |from| format!(" ({})", printable(from))),
            )?;
        }
    }
    if wrong_manifests > 0 {
        writeln!(
            out,
            "{} removed",
            plural(wrong_manifests, "damaged manifest")
        )?;
    }
    for view in &damaged_views {
        writeln!(
            out,
            "{}: removed the damaged view of {}",
            view.name,
            image_label(view)
        )?;
    }
    for name in &unknown {
        writeln!(out, "{}: not a file of the cache", quoted(name.as_bytes()))?;
    }
    out.finish()?;
    ui.status(format_args!(
        "{} in {} {} verified, {} removed",
        Human(right),
        plural(files.len() as u64, "file"),
        if files.len() == 1 { "is" } else { "are" },
        Human(damaged),
    ));
    Ok(())
}

/// Checks the views, and removes those that are damaged. Returns how many were checked, and the
/// damaged ones.
fn verify_views(
    directory: &DirectoryArgs,
    interrupt: &Interrupt,
) -> Result<(u64, Vec<ViewEntry>), CommandError> {
    let (mut checked, mut damaged) = (0, Vec::new());
    let views = directory.views()?;
    let Some(cache) = views.cache else {
        return Ok((checked, damaged));
    };
    for view in views.entries {
        interrupt.check()?;
        let cannot = || {
            format!(
                "cannot verify {}",
                cache.directory().join(&view.name).display()
            )
        };
        let Some(is_sound) = cache.verify(&view.name).context(cannot)? else {
            continue;
        };
        checked += 1;
        if !is_sound {
            cache.remove(&view.name, Remove::Any).context(cannot)?;
            damaged.push(view);
        }
    }
    Ok((checked, damaged))
}

//! `bcow cache prune`

use std::time::Duration;

use bcow_remote::{Prune, Pruned};
use bcow_view::{Removal, Remove};
use serde_json::json;

use super::{DirectoryArgs, Views};
use crate::cache::FoundCache;
use crate::error::{CommandError, Context};
use crate::size::{self, Human, plural};
use crate::ui::Ui;

/// Remove files from the cache, and views
///
/// The command keeps files and views that a process uses, so existing mounts keep their cached
/// data. The option --cache-limit of other commands, in contrast, also evicts parts of files in
/// use.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("which").required(true))]
pub struct Args {
    /// Remove all files and views that no process uses
    #[arg(long, group = "which")]
    all: bool,
    /// Remove files and views that were not used for this time: 90s, 30m, 12h, 7d or 4w
    #[arg(long, group = "which", value_name = "TIME", value_parser = parse_time)]
    older_than: Option<Duration>,
    /// Remove the least recently used files until the cache is not larger than SIZE. Views count
    /// towards SIZE, and are removed only when no other file is left to remove
    #[arg(long, group = "which", value_name = "SIZE", value_parser = size::parse)]
    limit: Option<u64>,
    /// Print JSON (schema bcow.cache-prune/1)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    directory: DirectoryArgs,
}

pub fn run(args: &Args, ui: &Ui) -> Result<(), CommandError> {
    let which = match (args.older_than, args.limit) {
        (Some(time), _) => Prune::OlderThan(time),
        (None, Some(limit)) => Prune::Limit(limit),
        (None, None) => Prune::All,
    };
    let views = args.directory.views()?;
    let of_files = match which {
        Prune::Limit(limit) => Prune::Limit(limit.saturating_sub(views.held_bytes())),
        other => other,
    };
    let pruned = match args.directory.find()? {
        FoundCache::Present(cache) => cache
            .prune(of_files)
            .context(|| format!("cannot remove files from {}", cache.path().display()))?,
        FoundCache::Missing(_) => Pruned::default(),
    };
    let of_views = match which {
        Prune::Limit(limit) => Prune::Limit(limit.saturating_sub(pruned.held_bytes)),
        other => other,
    };
    let has_views = !views.entries.is_empty();
    let pruned_views = prune_views(views, of_views)?;
    if args.json {
        return ui.print_json(&json!({
            "schema": "bcow.cache-prune/1",
            "removed_files": pruned.removed_files,
            "removed_bytes": pruned.removed_bytes,
            "in_use_files": pruned.in_use_files,
            "held_bytes": pruned.held_bytes,
            "removed_views": pruned_views.removed_files,
            "removed_views_bytes": pruned_views.removed_bytes,
            "in_use_views": pruned_views.in_use_files,
            "views_bytes": pruned_views.held_bytes,
        }));
    }
    report(&pruned, "file", ui);
    if has_views {
        report(&pruned_views, "view", ui);
    }
    Ok(())
}

fn report(pruned: &Pruned, what: &str, ui: &Ui) {
    ui.status(format_args!(
        "{} with {} removed; {} left",
        plural(pruned.removed_files, what),
        Human(pruned.removed_bytes),
        Human(pruned.held_bytes),
    ));
    if pruned.in_use_files > 0 {
        ui.status(format_args!(
            "{} in use {} kept",
            plural(pruned.in_use_files, what),
            if pruned.in_use_files == 1 { "is" } else { "are" },
        ));
    }
}

/// Removes views that no process has open, the one with the oldest use first.
fn prune_views(views: Views, which: Prune) -> Result<Pruned, CommandError> {
    let mut pruned = Pruned {
        held_bytes: views.held_bytes(),
        ..Pruned::default()
    };
    let Some(cache) = views.cache else {
        return Ok(pruned);
    };
    for view in views.entries.iter().rev() {
        if !which.selects(view.last_use, pruned.held_bytes) {
            continue;
        }
        let removed = cache.remove(&view.name, Remove::Unused);
        match removed.context(|| format!("cannot remove {}", view.name))? {
            Removal::Removed => {
                pruned.removed_files += 1;
                pruned.removed_bytes += view.held_bytes;
                pruned.held_bytes -= view.held_bytes;
            }
            Removal::Missing => pruned.held_bytes -= view.held_bytes,
            Removal::InUse => pruned.in_use_files += 1,
        }
    }
    Ok(pruned)
}

/// Parses a number with a unit of time.
fn parse_time(text: &str) -> Result<Duration, String> {
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    let (number, unit) = text.split_at(digits);
    let bad = || "a time is a number with a unit: 90s, 30m, 12h, 7d or 4w".to_owned();
    let number: u64 = number.parse().map_err(|_| bad())?;
    let seconds = match unit {
        "s" => 1,
        "m" => 60,
        "h" => 3600,
        "d" => 86400,
        "w" => 7 * 86400,
        _ => return Err(bad()),
    };
    let total = number.checked_mul(seconds);
    total
        .map(Duration::from_secs)
        .ok_or_else(|| "the time is too long".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit() {
        for (text, seconds) in [
            ("90s", 90),
            ("30m", 1800),
            ("12h", 43200),
            ("0d", 0),
            ("2w", 1209600),
        ] {
            assert_eq!(parse_time(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in [
            "",
            "7",
            "d",
            "7 d",
            "-1d",
            "1y",
            "99999999999999999999s",
            "18446744073709551615w",
        ] {
            assert!(parse_time(text).is_err(), "{text}");
        }
    }
}

//! The check of a disk over a backing: whether an opening of the disk finds the files below it.

use std::path::Path;

use bcow::chain::{ChainCause, NoViews, Opener, Policy};
use bcow::check::{Finding, Severity};
use bcow::format::Use;
use bcow::{Image, OpenOptions};

use bcow_images::disks::Below;
use bcow_images::error::CommandError;
use bcow_images::image::StoreArgs;

/// The place of findings about files below that are missing or wrong: the table of the file above
/// names these files.
pub const BACKING_TABLE: &str = "backing table";

/// Opens the files below the disk at `path`, and returns the problems. Their content is not
/// checked. A file that is not a disk over a backing has no problems.
pub fn check(disk: &Image, path: &Path, stores: &StoreArgs) -> Result<Vec<Finding>, CommandError> {
    let Some(backing) = disk
        .disk_backing()
        .filter(|_| disk.header().purpose == Use::Disk)
    else {
        return Ok(Vec::new());
    };
    let below = Below::new(stores, &OpenOptions::default())?;
    let policy = Policy {
        // The check of a disk over a view makes no view: it looks for the image only.
        views: &NoViews,
        ..below.policy()
    };
    let opener = Opener::new(path, policy);
    // The opener records the problems.
    let _ = opener.open(backing);
    let problems = opener.problems();
    Ok(problems
        .iter()
        .filter(|problem| !matches!(problem.cause, ChainCause::View(_)))
        .map(|problem| {
            // A file with another user, or on another machine, may be there the next time.
            let severity = match problem.cause {
                ChainCause::InUse(..) | ChainCause::Url(_) => Severity::Warning,
                _ => Severity::Error,
            };
            let message = below.first_problem(problem).text;
            Finding::error(problem.code(), BACKING_TABLE, message).of(severity)
        })
        .collect())
}

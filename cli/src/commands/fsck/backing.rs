//! `bcow fsck` of a disk over a backing: whether an opening of the disk finds the files below it.

use std::path::Path;

use bcow::chain::{ChainProblem, NoViews, Opener, Policy};
use bcow::format::Use;
use bcow::{Image, OpenOptions};

use super::{BACKING_TABLE, Finding};
use crate::disks::Below;
use crate::error::CommandError;
use crate::image::StoreArgs;

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
        .filter(|problem| !matches!(***problem, ChainProblem::View { .. }))
        .map(|problem| Finding {
            // A file with another user, or on another machine, may be there the next time.
            error: !matches!(
                **problem,
                ChainProblem::InUse { .. } | ChainProblem::Url { .. }
            ),
            code: problem.code(),
            place: BACKING_TABLE.into(),
            message: below.first_problem(problem).text,
        })
        .collect())
}

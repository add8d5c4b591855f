//! `bcow fsck` of the upper of a mount with the FUSE driver.

use std::path::Path;
use std::sync::Arc;

use bcow_union::offline::check::{self, CheckedImage, Finding, Place, Report};
use bcow_union::{Instance, META, UpperError, UpperReader};

use super::report::{Checked, Outcome, Repairs, Upper};
use super::{Args, upper_image};
use crate::error::CommandError;
use crate::image::OpenImage;
use crate::ui::Ui;
use crate::upper::{cannot_use, require_same_image, when_free};
use bcow_images::Name;

/// Whether `path` is the upper of a writable mount, with either driver.
pub fn is_upper(path: &Path) -> bool {
    path.join(META).is_dir()
}

/// Checks an upper, and repairs it with --repair.
pub fn check(args: &Args, ui: &Ui) -> Result<Outcome, CommandError> {
    if args.jobs.is_some() {
        return Err(
            CommandError::usage("-j does not apply to an upper of the FUSE driver")
                .hint("leave out -j"),
        );
    }
    let progress = ui.progress();
    progress.phase("checking");
    let mut image = None;
    let mut found = examine(args, ui, &mut image)?;
    let mut repaired = Vec::new();
    if args.repair && found.report.is_repairable() {
        progress.phase("repairing");
        let note = format!("bcow fsck --repair, process {}", std::process::id());
        let instance = when_free(ui, || Instance::open_existing(args.image.shown(), &note))
            .map_err(|error| cannot_use(&error))?;
        let upper = UpperReader::of(&instance).map_err(|error| cannot_use(&error))?;
        // The open has emptied the directory of temporary files. Removing links there changes link
        // counts. Also, the upper may have been mounted since the check. So the repairs come from a
        // second check.
        let work_was_emptied = found.report.has_leftover_work();
        let again = examine_open(args, ui, &upper, &mut image)?;
        repaired = check::repair(&instance, &again.report).map_err(|error| cannot_use(&error))?;
        if work_was_emptied {
            repaired.push(format!("emptied {META}/work"));
        }
        drop(upper);
        drop(instance);
        progress.phase("checking");
        found = examine(args, ui, &mut image)?;
    }
    let report = found.report;
    let checked = Checked {
        name: args.image.to_string(),
        findings: report.findings,
        upper: Some(Upper::Fuse {
            image: found.image,
            directories: report.directories,
            files: report.files,
            whiteouts: report.whiteouts,
            metadata_copies: report.metadata_copies,
            partials: report.partials,
            // Counted records of packed partial files, which this version does not read.
            dropped_records: 0,
        }),
        ..Checked::default()
    };
    let repairs = Repairs {
        of_damage: !repaired.is_empty(),
        lines: repaired,
        ..Repairs::default()
    };
    Ok(Outcome::of_upper(args, checked, repairs))
}

/// The result of a check.
struct CheckedUpper {
    report: Report,
    /// The image against which the upper was checked. `None` without an image.
    image: Option<String>,
}

/// The image of the upper, after the first check has opened it or has found it not usable.
type UsedImage = Option<Option<OpenImage>>;

/// Opens the upper for reading and checks it.
fn examine(args: &Args, ui: &Ui, image: &mut UsedImage) -> Result<CheckedUpper, CommandError> {
    let upper = match when_free(ui, || UpperReader::open(args.image.shown())) {
        Ok(upper) => upper,
        // Without the record, the marks cannot be interpreted, so nothing else is checked.
        Err(error @ UpperError::Record { .. }) => {
            let place = Place::Path(format!("{META}/instance.json").into_bytes());
            let mut report = Report::default();
            report
                .findings
                .add(Finding::error("upper-record", place, error.to_string()));
            return Ok(CheckedUpper {
                report,
                image: None,
            });
        }
        Err(error) => return Err(cannot_use(&error)),
    };
    examine_open(args, ui, &upper, image)
}

/// Checks an open upper.
fn examine_open(
    args: &Args,
    ui: &Ui,
    upper: &UpperReader,
    image: &mut UsedImage,
) -> Result<CheckedUpper, CommandError> {
    let image = match image {
        // Another mount may have begun the upper anew since the last check.
        Some(Some(image)) => {
            require_same_image(upper, image)?;
            Some(&*image)
        }
        Some(None) => None,
        None => image.insert(open_image(args, upper, ui)?).as_ref(),
    };
    let checked = match image {
        Some(image) => Some(CheckedImage {
            filesystem: Arc::new(image.tree()?.into_filesystem()),
            device: image.image().clone(),
        }),
        None => None,
    };
    let check = if args.data { check::check_data } else { check::check };
    let report = check(upper, checked.as_ref()).map_err(|error| cannot_use(&error))?;
    Ok(CheckedUpper {
        report,
        image: image.map(|image| image.path().to_string_lossy().into_owned()),
    })
}

/// Opens the image of the upper. `None` if the upper has no record, or if the recorded image is not
/// usable.
fn open_image(
    args: &Args,
    upper: &UpperReader,
    ui: &Ui,
) -> Result<Option<OpenImage>, CommandError> {
    let recorded = upper.record().map(|record| record.image_name.as_str());
    let Some(name) = args
        .lower
        .as_ref()
        .map(Name::shown)
        .or(recorded.map(Path::new))
    else {
        if args.layers.layers.is_empty() {
            return Ok(None);
        }
        let usage = "--layer needs the image of the upper: LOWER";
        return Err(CommandError::usage(usage));
    };
    let require_same = |image: &OpenImage| require_same_image(upper, image);
    upper_image::open(args, name, require_same, "references to it are", ui)
}

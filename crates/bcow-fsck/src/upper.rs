//! The check of the upper of a mount with the FUSE driver.

use std::sync::Arc;

use bcow_images::error::CommandError;
use bcow_images::image::OpenImage;
use bcow_images::upper::{cannot_use, require_same_image, when_free};
use bcow_union::offline::check::{self, CheckedImage, Finding, Place, Report};
use bcow_union::{Instance, META, UpperError, UpperReader};

use crate::report::{CheckedFile, FsckReport, Repairs, UpperFacts};
use crate::{Fsck, upper_image};

/// Checks an upper, and repairs it with --repair.
pub fn check(asked: &Fsck<'_>) -> Result<FsckReport, CommandError> {
    if asked.jobs.is_some() {
        return Err(
            CommandError::usage("-j does not apply to an upper of the FUSE driver")
                .hint("leave out -j"),
        );
    }
    let progress = asked.progress;
    progress.phase("checking");
    let mut image = None;
    let mut found = examine(asked, &mut image)?;
    let mut repaired = Vec::new();
    if asked.repair.is_some() && found.report.is_repairable() {
        progress.phase("repairing");
        let note = format!("bcow fsck --repair, process {}", std::process::id());
        let instance = when_free(asked.messages, || {
            Instance::open_existing(asked.image.shown(), &note)
        })
        .map_err(|error| cannot_use(&error))?;
        let upper = UpperReader::of(&instance).map_err(|error| cannot_use(&error))?;
        // The open has emptied the directory of temporary files. Removing links there changes link
        // counts. Also, the upper may have been mounted since the check. So the repairs come from a
        // second check.
        let work_was_emptied = found.report.has_leftover_work();
        let again = examine_open(asked, &upper, &mut image)?;
        repaired = check::repair(&instance, &again.report).map_err(|error| cannot_use(&error))?;
        if work_was_emptied {
            repaired.push(format!("emptied {META}/work"));
        }
        drop(upper);
        drop(instance);
        progress.phase("checking");
        found = examine(asked, &mut image)?;
    }
    let report = found.report;
    let checked = CheckedFile {
        name: asked.image.to_string(),
        findings: report.findings,
        upper: Some(UpperFacts::Fuse {
            image: found.image,
            directories: report.directories,
            files: report.files,
            whiteouts: report.whiteouts,
            metadata_copies: report.metadata_copies,
            partials: report.partials,
            // Counted records of packed partial files, which this version does not read.
            dropped_records: 0,
        }),
        ..CheckedFile::default()
    };
    let repairs = Repairs {
        of_damage: !repaired.is_empty(),
        lines: repaired,
        ..Repairs::default()
    };
    Ok(FsckReport::of_upper(asked, checked, repairs))
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
fn examine(asked: &Fsck<'_>, image: &mut UsedImage) -> Result<CheckedUpper, CommandError> {
    let upper = match when_free(asked.messages, || UpperReader::open(asked.image.shown())) {
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
    examine_open(asked, &upper, image)
}

/// Checks an open upper.
fn examine_open(
    asked: &Fsck<'_>,
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
        None => {
            let recorded = upper.record().map(|record| &*record.image_name);
            let require_same = |image: &OpenImage| require_same_image(upper, image);
            let opened = upper_image::open(asked, recorded, require_same, "references to it are")?;
            image.insert(opened).as_ref()
        }
    };
    let checked = match image {
        Some(image) => Some(CheckedImage {
            filesystem: Arc::new(image.tree()?.into_filesystem()),
            device: image.image().clone(),
        }),
        None => None,
    };
    let report = check::check(upper, checked.as_ref(), asked.data);
    let report = report.map_err(|error| cannot_use(&error))?;
    Ok(CheckedUpper {
        report,
        image: image.map(|image| image.path().to_string_lossy().into_owned()),
    })
}

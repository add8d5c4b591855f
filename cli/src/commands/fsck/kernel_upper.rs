//! `bcow fsck` of an upper of the kernel door: its record, its disk, and whether the disk opens
//! over the view of the image.
//!
//! The ext4 on the disk is not checked here: e2fsck(8) checks it, and e2fsck and the kernel replay
//! its journal.

use std::path::{Path, PathBuf};

use bcow::check::{self, CheckOptions, Repair};
use bcow::{BlockDevice, Image, OpenOptions};
use bcow_fuse::kernel::{self, Kind};
use bcow_union::{DiskInstance, DiskReader, META, UpperError};
use serde_json::json;

use super::report::{outcome, verdict};
use super::{Args, Finding, upper_image};
use crate::error::{CommandError, Context, exit};
use crate::image::OpenImage;
use crate::kernel_upper::{read_disk, require_same_image};
use crate::names::printable;
use crate::size::{Count, Human, plural};
use crate::ui::Ui;
use crate::upper::{cannot_use, when_free};

/// The name of the disk's file in META.
const DISK: &str = "disk.bcow";

/// The result of a check.
#[derive(Default)]
struct Found {
    findings: Vec<Finding>,
    omitted: u64,
    tables: u64,
    blocks: u64,
    bytes_read: u64,
    /// Size of the file system in bytes, if the upper is complete.
    size: Option<u64>,
    /// The image of the upper, if it was opened.
    image: Option<PathBuf>,
}

impl Found {
    fn add(&mut self, error: bool, code: &'static str, place: &str, message: String) {
        self.findings.push(Finding {
            error,
            code,
            place: format!("{META}/{place}"),
            message,
        });
    }

    /// Omitted findings count as errors: their severity is not recorded.
    fn errors(&self) -> u64 {
        self.findings.iter().filter(|found| found.error).count() as u64 + self.omitted
    }

    fn warnings(&self) -> u64 {
        self.findings.iter().filter(|found| !found.error).count() as u64
    }
}

/// Repairs the disk if asked, checks the upper, prints the result, and returns the exit status.
pub fn run(args: &Args, ui: &Ui) -> Result<u8, CommandError> {
    let progress = ui.progress();
    let mut repaired = Vec::new();
    if args.repair {
        progress.phase("repairing");
        repaired = repair(args.image.shown(), ui)?;
    }
    progress.phase("checking");
    let found = examine(args, ui)?;
    drop(progress);
    let lines: Vec<String> = repaired.iter().map(Repair::to_string).collect();
    match args.json {
        true => ui.print_json(&as_json(args, &found, &lines))?,
        false => print_text(args, ui, &found, &lines)?,
    }
    // A repair often follows an accident, which may have damaged data too.
    if found.errors() == 0 && found.size.is_some() && args.repair && !args.data {
        ui.hint(format_args!(
            "the content of blocks was not checked: `bcow fsck --data {}` reads it too",
            args.image.display()
        ));
    }
    Ok(match found.errors() {
        0 if repaired.iter().any(Repair::is_of_damage) => exit::FSCK_REPAIRED,
        0 => exit::DONE,
        _ => exit::FSCK_ERRORS_LEFT,
    })
}

/// Repairs the file of the disk. An upper without a disk has nothing to repair.
fn repair(upper: &Path, ui: &Ui) -> Result<Vec<Repair>, CommandError> {
    let note = format!("bcow fsck --repair, process {}", std::process::id());
    let instance = match when_free(ui, || DiskInstance::open_existing(upper, &note)) {
        Ok(instance) => instance,
        // The check reports it.
        Err(UpperError::Record { .. }) => return Ok(Vec::new()),
        Err(error) => return Err(cannot_use(&error)),
    };
    match instance.disk() {
        None => Ok(Vec::new()),
        Some(disk) => check::repair(disk).context(|| format!("cannot repair {}", upper.display())),
    }
}

fn examine(args: &Args, ui: &Ui) -> Result<Found, CommandError> {
    let mut found = Found::default();
    let upper = args.image.shown();
    let reader = match when_free(ui, || DiskReader::open(upper)) {
        Ok(reader) => reader,
        Err(error @ UpperError::Incomplete { .. }) => {
            // A disk without a record was never mounted.
            let message = format!("{error}; it has no changes, and the next mount begins it again");
            found.add(false, "upper-incomplete", "instance.json", message);
            return Ok(found);
        }
        Err(error @ UpperError::Record { .. }) => {
            found.add(true, "upper-record", "instance.json", error.to_string());
            return Ok(found);
        }
        Err(error) => return Err(cannot_use(&error)),
    };
    found.size = Some(reader.record().size);
    if reader.is_lost().map_err(|error| cannot_use(&error))? {
        let message = "the machine stopped while it was mounted with --sync volatile";
        found.add(true, "upper-volatile", "volatile", message.to_owned());
    }
    let options = CheckOptions {
        data: args.data,
        threads: args.threads(),
    };
    let report = check::check(reader.disk(), &options)
        .context(|| format!("cannot check {}", reader.disk_path().display()))?;
    (found.tables, found.blocks) = (report.tables, report.blocks);
    (found.bytes_read, found.omitted) = (report.bytes_read, report.omitted);
    let of_disk = report.findings.into_iter().map(|finding| Finding {
        place: format!("{META}/{DISK}: {}", finding.place),
        ..Finding::from(finding)
    });
    found.findings.extend(of_disk);
    // A damaged file may not open at all.
    if found.errors() == 0
        && let Some(image) = open_image(args, &reader, ui)?
    {
        found.image = Some(image.path().to_owned());
        match read_disk(&reader, &image, &OpenOptions::default()) {
            Ok(disk) => check_disk(&disk, &reader, &mut found),
            Err(error) => {
                let causes = error.causes().join(": ");
                found.add(true, "backing-unreadable", DISK, causes);
            }
        }
    }
    Ok(found)
}

/// Checks the size of the disk against the record, and that the content is an ext4.
fn check_disk(disk: &Image, reader: &DiskReader, found: &mut Found) {
    let size = reader.record().size;
    // A disk that has grown while it was mounted gets its record at the next mount.
    found.size = Some(disk.size().max(size));
    if disk.size() < size {
        let message = format!("it has {} bytes, and the record says {size}", disk.size());
        found.add(true, "upper-disk", DISK, message);
    }
    match kernel::detect(disk) {
        Ok(Kind::Ext4) => {}
        Ok(kind) => {
            let message = format!("it holds {}, not ext4", kind.name());
            found.add(true, "upper-disk", DISK, message);
        }
        Err(error) => found.add(true, "upper-disk", DISK, error.to_string()),
    }
}

/// Opens the image of the upper. `None` if the recorded image is not usable.
fn open_image(
    args: &Args,
    reader: &DiskReader,
    ui: &Ui,
) -> Result<Option<OpenImage>, CommandError> {
    let recorded = Path::new(&reader.record().image_name);
    let require_same = |image: &OpenImage| require_same_image(reader, image);
    let unchecked = "what the disk shows of it is";
    upper_image::open(args, recorded, require_same, unchecked, ui)
}

fn severity(finding: &Finding) -> &'static str {
    match finding.error {
        true => "error",
        false => "warning",
    }
}

fn as_json(args: &Args, found: &Found, repaired: &[String]) -> serde_json::Value {
    let name = args.image.to_string();
    let findings: Vec<_> = found
        .findings
        .iter()
        .map(|finding| {
            json!({
                "code": finding.code,
                "severity": severity(finding),
                "file": name,
                "place": finding.place,
                "message": finding.message,
            })
        })
        .collect();
    json!({
        "schema": "bcow.fsck/1",
        "verdict": verdict(found.errors()),
        "errors": found.errors(),
        "warnings": found.warnings(),
        "findings": findings,
        "findings_omitted": found.omitted,
        "repaired": repaired,
        "data": args.data,
        "tables": found.tables,
        "blocks": found.blocks,
        "bytes_read": found.bytes_read,
        "upper": {
            "door": "kernel",
            "image": found.image.as_ref().map(|image| image.to_string_lossy()),
            "fs": found.size.map(|_| "ext4"),
            "size": found.size,
        },
    })
}

fn print_text(
    args: &Args,
    ui: &Ui,
    found: &Found,
    repaired: &[String],
) -> Result<(), CommandError> {
    let mut out = ui.output();
    for line in repaired {
        writeln!(out, "repaired: {}", printable(line))?;
    }
    for finding in &found.findings {
        writeln!(
            out,
            "{} {}: {}: {}",
            severity(finding),
            finding.code,
            printable(&finding.place),
            printable(&finding.message)
        )?;
    }
    if found.omitted > 0 {
        writeln!(out, "... and {} more", Count(found.omitted))?;
    }
    let (errors, warnings) = (found.errors(), found.warnings());
    if errors + warnings > 0 || !ui.quiet() {
        let kind = match found.size {
            Some(size) => format!("kernel door, disk of {}", Human(size)),
            None => "kernel door".to_owned(),
        };
        let read = match args.data {
            true => format!("{} read", Human(found.bytes_read)),
            false => "data not checked".to_owned(),
        };
        writeln!(
            out,
            "{}: {} ({kind}, {}, {}, {read})",
            args.image.display(),
            outcome(errors, warnings),
            plural(found.tables, "table"),
            plural(found.blocks, "block"),
        )?;
    }
    out.finish()
}

//! The check of an upper of the kernel driver: its record, its disk, and whether the disk opens
//! over the view of the image.
//!
//! The ext4 on the disk is not checked here: e2fsck(8) checks it, and e2fsck and the kernel replay
//! its journal.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use bcow::check::{self, CheckOptions, Finding, Findings, Place, Repair};
use bcow::{BlockDevice, Image, OpenOptions};
use bcow_fuse::kernel::{self, Kind};
use bcow_images::error::{CommandError, Context};
use bcow_images::image::{Messages, OpenImage};
use bcow_images::kernel_upper::{read_disk, require_same_image};
use bcow_images::snapshots::snapshots;
use bcow_images::upper::{cannot_use, when_free};
use bcow_union::{DiskInstance, DiskReader, META, UpperError};

use crate::report::{CheckedFile, FsckReport, ReadCounts, Repairs, UpperFacts};
use crate::{Fsck, unread_content, upper_image};

/// The name of the disk's file in META.
const DISK: &str = "disk.bcow";

/// The result of a check.
#[derive(Default)]
struct CheckedDisk {
    findings: Findings,
    counts: ReadCounts,
    /// Size of the file system in bytes, if the upper is complete.
    size: Option<u64>,
    /// The image of the upper, if it was opened.
    image: Option<String>,
}

/// A place in the upper.
fn place(name: &str) -> Place {
    format!("{META}/{name}").into()
}

/// Repairs the disk if asked, and checks the upper.
pub fn check(asked: &Fsck<'_>) -> Result<FsckReport, CommandError> {
    let progress = asked.progress;
    let mut repairs = Repairs::default();
    if asked.repair.is_some() {
        progress.phase("repairing");
        repairs.add(&repair(asked.image.shown(), asked.messages)?);
    }
    progress.phase("checking");
    let found = examine(asked)?;
    // A repair often follows an accident, which may have damaged data too.
    let is_unread =
        asked.repair.is_some() && !asked.data && found.size.is_some() && found.findings.is_sound();
    let checked = CheckedFile {
        name: asked.image.to_string(),
        findings: found.findings,
        counts: Some(found.counts),
        upper: Some(UpperFacts::Kernel {
            image: found.image,
            fs: found.size.map(|_| "ext4"),
            size: found.size,
        }),
        ..CheckedFile::default()
    };
    let mut outcome = FsckReport::of_upper(asked, checked, repairs);
    if is_unread {
        outcome.hints.push(unread_content(&asked.image.display()));
    }
    Ok(outcome)
}

/// Repairs the file of the disk. An upper without a disk has nothing to repair.
fn repair(upper: &Path, messages: &dyn Messages) -> Result<Vec<Repair>, CommandError> {
    let note = format!("bcow fsck --repair, process {}", std::process::id());
    let instance = match when_free(messages, || DiskInstance::open_existing(upper, &note)) {
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

fn examine(asked: &Fsck<'_>) -> Result<CheckedDisk, CommandError> {
    let mut found = CheckedDisk::default();
    let upper = asked.image.shown();
    let reader = match when_free(asked.messages, || DiskReader::open(upper)) {
        Ok(reader) => reader,
        Err(error @ UpperError::Incomplete { .. }) => {
            // A disk without a record was never mounted.
            let message = format!("{error}; it has no changes, and the next mount begins it again");
            let finding = Finding::warning("upper-incomplete", place("instance.json"), message);
            found.findings.add(finding);
            return Ok(found);
        }
        Err(error @ UpperError::Record { .. }) => {
            let finding = Finding::error("upper-record", place("instance.json"), error.to_string());
            found.findings.add(finding);
            return Ok(found);
        }
        Err(error) => return Err(cannot_use(&error)),
    };
    found.size = Some(reader.record().size);
    if reader.is_lost().map_err(|error| cannot_use(&error))? {
        let message = "the machine stopped while it was mounted with --sync volatile";
        let finding = Finding::error("upper-volatile", place("volatile"), message);
        found.findings.add(finding);
    }
    let options = CheckOptions {
        data: asked.data,
        threads: asked.threads(),
    };
    let report = check::check(reader.disk(), &options)
        .context(|| format!("cannot check {}", reader.disk_path().display()))?;
    found.counts = ReadCounts::of(&report);
    let of_disk = report.findings.of_file(&format!("{META}/{DISK}"));
    found.findings.append(of_disk);
    for snapshot in snapshots(&reader.disk_path())? {
        let cannot = || format!("cannot check {}", snapshot.path.display());
        let file = Arc::new(File::open(&snapshot.path).context(cannot)?);
        let report = check::check(file, &options).context(cannot)?;
        found.counts = found.counts.plus(ReadCounts::of(&report));
        let name = snapshot.path.file_name().unwrap_or_default();
        let of_file = format!("{META}/{}", name.to_string_lossy());
        found.findings.append(report.findings.of_file(&of_file));
    }
    // A damaged file may not open at all.
    let recorded = Some(&*reader.record().image_name);
    let require_same = |image: &OpenImage| require_same_image(&reader, image);
    let unchecked = "what the disk shows of it is";
    if found.findings.is_sound()
        && let Some(image) = upper_image::open(asked, recorded, require_same, unchecked)?
    {
        found.image = Some(image.path().to_string_lossy().into_owned());
        match read_disk(&reader, &image, &OpenOptions::default()) {
            Ok((disk, _)) => check_disk(&disk, &reader, &mut found),
            Err(error) => {
                let causes = error.causes().join(": ");
                let finding = Finding::error("backing-unreadable", place(DISK), causes);
                found.findings.add(finding);
            }
        }
    }
    Ok(found)
}

/// Checks the size of the disk against the record, and that the content is an ext4.
fn check_disk(disk: &Image, reader: &DiskReader, found: &mut CheckedDisk) {
    let size = reader.record().size;
    // A disk that has grown while it was mounted gets its record at the next mount.
    found.size = Some(disk.size().max(size));
    let mut wrong = |message| {
        let finding = Finding::error("upper-disk", place(DISK), message);
        found.findings.add(finding);
    };
    if disk.size() < size {
        wrong(format!(
            "it has {} bytes, and the record says {size}",
            disk.size()
        ));
    }
    match kernel::detect(disk) {
        Ok(Kind::Ext4) => {}
        Ok(kind) => wrong(format!("it holds {}, not ext4", kind.name())),
        Err(error) => wrong(error.to_string()),
    }
}

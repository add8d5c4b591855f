//! The result of the check as text, as JSON, and the hints that follow it.

use bcow::format::Use;
use bcow::{Image, OpenOptions, header_of};
use bcow_images::NameParts;
use serde_json::{Value, json};

use super::{Args, BACKING_TABLE, Checked, Finding};
use crate::error::CommandError;
use crate::names::printable;
use crate::size::{Count, Human, plural};
use crate::ui::{Output, Ui};

/// Most lines about what follows from the damage of one place.
const MAX_EFFECTS: usize = 3;
/// Codes of the findings that `--repair` repairs.
const REPAIRABLE: [&str; 3] = ["header-slot", "free-list", "leak"];

/// The result as JSON (schema `bcow.fsck/1`).
pub(super) fn as_json(args: &Args, files: &[Checked], repaired: &[String]) -> Value {
    let sum = |of: fn(&Checked) -> u64| files.iter().map(of).sum::<u64>();
    let findings: Vec<_> = files
        .iter()
        .flat_map(|file| file.findings.iter().map(move |finding| (file, finding)))
        .map(|(file, finding)| {
            json!({
                "code": finding.code,
                "severity": if finding.error { "error" } else { "warning" },
                "file": file.target.name,
                "place": finding.place,
                "message": finding.message,
            })
        })
        .collect();
    let each: Vec<_> = files
        .iter()
        .map(|file| {
            json!({
                "name": file.target.name,
                "path": file.target.path.to_string_lossy(),
                "digest": file.target.digest,
                "verdict": verdict(file.errors()),
                "errors": file.errors(),
                "warnings": file.warnings(),
                "tables": file.tables,
                "blocks": file.blocks,
                "bytes_read": file.bytes_read,
                "inodes": file.inodes,
                "writable": file.writable.map(|writable| json!({
                    "records": writable.records,
                    "dropped_record": writable.dropped_record,
                    "open_blocks": writable.open_blocks,
                    "free_bytes": writable.free_bytes,
                    "leaked_bytes": writable.leaked_bytes,
                })),
            })
        })
        .collect();
    json!({
        "schema": "bcow.fsck/1",
        "verdict": verdict(sum(Checked::errors)),
        "errors": sum(Checked::errors),
        "warnings": sum(Checked::warnings),
        "findings": findings,
        "findings_omitted": sum(|file| file.omitted),
        "repaired": repaired,
        "data": args.data(),
        "checked": scope(args),
        "tables": sum(|file| file.tables),
        "blocks": sum(|file| file.blocks),
        "bytes_read": sum(|file| file.bytes_read),
        "inodes": files.first().and_then(|file| file.inodes),
        "files": each,
    })
}

/// Prints the repairs, the findings, and a line with the verdict on each file.
pub(super) fn print_report(
    args: &Args,
    ui: &Ui,
    files: &[Checked],
    repaired: &[String],
) -> Result<(), CommandError> {
    let mut out = ui.output();
    for line in repaired {
        writeln!(out, "repaired: {line}")?;
    }
    for (index, file) in files.iter().enumerate() {
        let label = (index > 0).then(|| printable(&file.target.label));
        print_findings(&file.findings, label.as_deref(), &mut out)?;
        if file.omitted > 0 {
            writeln!(out, "... and {} more", Count(file.omitted))?;
        }
        if file.errors() + file.warnings() > 0 || !ui.quiet() {
            print_file(args, file, &mut out)?;
        }
    }
    let errors: u64 = files.iter().map(Checked::errors).sum();
    let shown = args.image.shown();
    if files.len() > 1 && (errors > 0 || !ui.quiet()) {
        let bad = files.iter().filter(|file| file.errors() > 0).count() as u64;
        let count = plural(files.len() as u64, "file");
        match bad {
            0 => writeln!(out, "{}: {count}, {}", shown.display(), clean(args))?,
            bad => writeln!(
                out,
                "{}: {count}, {} of them damaged",
                shown.display(),
                Count(bad)
            )?,
        }
    }
    out.finish()
}

/// Prints the findings, one line each. Of the findings that follow from the damage of one place, as
/// each file in a damaged block does, only the first ones have a line.
fn print_findings(
    findings: &[Finding],
    label: Option<&str>,
    out: &mut Output,
) -> Result<(), CommandError> {
    let mut effects = vec![0; findings.len()];
    for (index, finding) in findings.iter().enumerate() {
        if let Some(cause) = cause_of(finding, &findings[..index]) {
            effects[cause] += 1;
            if effects[cause] > MAX_EFFECTS {
                continue;
            }
        }
        write!(
            out,
            "{} {}: ",
            if finding.error { "error" } else { "warning" },
            finding.code,
        )?;
        if let Some(label) = label {
            write!(out, "{label}: ")?;
        }
        writeln!(
            out,
            "{}: {}",
            printable(&finding.place),
            printable(&finding.message)
        )?;
    }
    for (finding, effects) in findings.iter().zip(effects) {
        if effects > MAX_EFFECTS {
            writeln!(
                out,
                "... and {} more findings because of {}, which --json lists",
                Count((effects - MAX_EFFECTS) as u64),
                printable(&finding.place)
            )?;
        }
    }
    Ok(())
}

/// The earlier finding with the damage that `finding` names as its cause.
fn cause_of(finding: &Finding, earlier: &[Finding]) -> Option<usize> {
    earlier.iter().position(|cause| {
        let before = finding.message.strip_suffix(&cause.message);
        before.is_some_and(|before| before.ends_with(": "))
    })
}

fn print_file(args: &Args, file: &Checked, out: &mut Output) -> Result<(), CommandError> {
    let (errors, warnings) = (file.errors(), file.warnings());
    let counts = match (errors, warnings) {
        (0, 0) => String::new(),
        (0, n) => format!(", {}", plural(n, "warning")),
        (n, 0) => format!(" {} found", plural(n, "error")),
        (n, m) => format!(" {} and {} found", plural(n, "error"), plural(m, "warning")),
    };
    let read = match args.data() {
        true => match file.writable.map_or(0, |writable| writable.open_blocks) {
            0 => format!(", {} read", Human(file.bytes_read)),
            // Open blocks have no checksums until the disk is sealed.
            open => format!(
                ", {} read, {} without checksum",
                Human(file.bytes_read),
                plural(open, "block")
            ),
        },
        false => ", data not checked".to_owned(),
    };
    let writable = file.writable.map_or(String::new(), |writable| {
        let lost = match writable.dropped_record {
            true => " and one that a crash cut short",
            false => "",
        };
        format!(
            ", {}{lost}, {} free",
            plural(writable.records, "record"),
            Human(writable.free_bytes)
        )
    });
    writeln!(
        out,
        "{}: {}{counts} ({}, {}{}{writable}{read})",
        printable(&file.target.name),
        if errors > 0 { "damaged:" } else { clean(args) },
        plural(file.tables, "table"),
        plural(file.blocks, "block"),
        file.inodes
            .map_or(String::new(), |n| format!(", {}", plural(n, "inode"))),
    )
}

/// Prints recovery commands as hints on standard error. A test runs each of these commands.
pub(super) fn print_hints(args: &Args, files: &[Checked], ui: &Ui) {
    let image = &args.image;
    let damaged: Vec<&Checked> = files.iter().filter(|file| file.errors() > 0).collect();
    if damaged.is_empty() {
        // A repair often follows an accident, which may have damaged data too.
        if args.repair && !args.data() {
            ui.hint(format_args!(
                "the content of blocks was not checked: `bcow fsck --data {image}` reads it too"
            ));
        }
        return;
    }
    let mut findings = damaged.iter().flat_map(|file| &file.findings);
    if !args.repair && findings.all(|finding| REPAIRABLE.contains(&finding.code)) {
        ui.hint(format_args!("`bcow fsck --repair {image}` repairs this"));
        return;
    }
    let top = &files[0];
    let header = header_of(&*top.target.file);
    if header.is_some_and(|header| header.purpose != Use::Image) {
        let mut errors = top.findings.iter().filter(|finding| finding.error);
        if errors.all(|finding| finding.place == BACKING_TABLE) {
            ui.hint(
                "name the directory of the backing with --backing-dir, or accept another file as \
                 the backing with `bcow rebase --unsafe`",
            );
            return;
        }
        // If the disk does not open, none of its data can be read.
        if Image::open_storage(top.target.file.clone(), &OpenOptions::default()).is_ok() {
            ui.hint(format_args!(
                "these commands save the readable data of the disk: \
                 `bcow serve --read-only {image} --socket SOCKET` and \
                 `qemu-img convert --salvage -O raw 'nbd+unix:///?socket=SOCKET' SAVED.raw`"
            ));
        }
        return;
    }
    match args.image.parts() {
        NameParts::Url(_) => ui.hint(
            "replace the damaged file on the server: `bcow fsck --repair --from COPY FILE` \
             restores a copy on this machine, and `bcow convert` creates the image again from its \
             source",
        ),
        NameParts::File(_) | NameParts::Bcow(_) => {
            ui.hint("`bcow convert` creates the image again from its source");
            if args.from.is_none() && header_of(&*top.target.file).is_some() {
                ui.hint(format_args!(
                    "`bcow fsck --repair --from COPY {image}` restores it from another copy"
                ));
            }
        }
        _ => {
            // A stack is not damaged itself if its layers are missing or do not match.
            let bad = damaged.iter().filter(|file| {
                let mut findings = file.findings.iter();
                findings.any(|finding| finding.error && finding.place != BACKING_TABLE)
            });
            let bad: Vec<_> = bad.collect();
            for file in &bad {
                ui.hint(format_args!(
                    "the damaged file is {}: remove it before you copy the image here again with \
                     skopeo or a similar tool, which keeps existing files",
                    printable(&file.target.path.to_string_lossy())
                ));
            }
            ui.hint(format_args!(
                "`bcow convert SOURCE {image}` replaces damaged and missing files"
            ));
            // A repair does not restore a missing file.
            if args.from.is_none() && !bad.is_empty() {
                ui.hint(format_args!(
                    "`bcow fsck --repair --from COPY {image}` restores damaged files from another \
                     copy of the image"
                ));
            }
        }
    }
    if top.inodes.is_some() {
        ui.hint(format_args!(
            "`bcow extract --keep-going {image} DIR` extracts the readable files"
        ));
    }
}

pub(super) fn verdict(errors: u64) -> &'static str {
    match errors {
        0 => "clean",
        _ => "errors",
    }
}

/// The verdict on an upper, with the number of findings.
pub(super) fn outcome(errors: u64, warnings: u64) -> String {
    match (errors, warnings) {
        (0, 0) => "clean".to_owned(),
        (0, n) => format!("clean, {}", plural(n, "warning")),
        (n, 0) => format!("damaged: {} found", plural(n, "error")),
        (n, m) => format!(
            "damaged: {} and {} found",
            plural(n, "error"),
            plural(m, "warning")
        ),
    }
}

/// The scope of the check: all bytes, or all except the content of blocks.
fn scope(args: &Args) -> &'static str {
    match args.data() {
        true => "all",
        false => "structure",
    }
}

/// The verdict on files without errors.
fn clean(args: &Args) -> &'static str {
    match args.data() {
        true => "clean",
        false => "structure clean",
    }
}

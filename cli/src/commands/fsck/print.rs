//! The text of `bcow fsck`.

use std::borrow::Cow;

use bcow::check::{Finding, Findings, Place};
use bcow_fsck::{CheckedFile, FsckReport, UpperFacts};

use crate::error::CommandError;
use crate::names::{printable, quoted};
use crate::size::{Count, Human, plural};
use crate::ui::{Output, Ui};

/// Most lines about what follows from the damage of one place.
const MAX_EFFECTS: usize = 3;

/// Prints the repairs, the findings, and a line with the verdict on each file; and then the hints.
pub fn print(report: &FsckReport, ui: &Ui) -> Result<(), CommandError> {
    let mut out = ui.output();
    for line in &report.repairs.lines {
        writeln!(out, "repaired: {}", printable(line))?;
    }
    for one in &report.checked {
        print_findings(&one.findings, one.label.as_deref(), &mut out)?;
        if !one.findings.is_empty() || !ui.quiet() {
            print_verdict(one, report.data, &mut out)?;
        }
    }
    let bad = report.checked.iter().filter(|one| !one.findings.is_sound());
    let bad = bad.count() as u64;
    if report.checked.len() > 1 && (bad > 0 || !ui.quiet()) {
        let shown = report.shown.display();
        let count = plural(report.checked.len() as u64, "file");
        match bad {
            0 => writeln!(
                out,
                "{shown}: {count}, {}",
                clean(&report.checked[0], report.data)
            )?,
            bad => writeln!(out, "{shown}: {count}, {} of them damaged", Count(bad))?,
        }
    }
    out.finish()?;
    for hint in &report.hints {
        ui.hint(hint);
    }
    Ok(())
}

/// The verdict if there are no errors.
fn clean(one: &CheckedFile, data: bool) -> &'static str {
    match one.upper {
        None if !data => "structure clean",
        _ => "clean",
    }
}

fn print_verdict(one: &CheckedFile, data: bool, out: &mut Output) -> Result<(), CommandError> {
    let (errors, warnings) = (one.findings.errors(), one.findings.warnings());
    let clean = clean(one, data);
    let verdict = match (errors, warnings) {
        (0, 0) => clean.to_owned(),
        (0, n) => format!("{clean}, {}", plural(n, "warning")),
        (n, 0) => format!("damaged: {} found", plural(n, "error")),
        (n, m) => format!(
            "damaged: {} and {} found",
            plural(n, "error"),
            plural(m, "warning")
        ),
    };
    let parts = parts(one, data).join(", ");
    writeln!(out, "{}: {verdict} ({parts})", printable(&one.name))
}

/// The counts in the line with the verdict.
fn parts(one: &CheckedFile, data: bool) -> Vec<String> {
    let mut parts = Vec::new();
    if let Some(UpperFacts::Kernel { size, .. }) = one.upper {
        parts.push(match size {
            Some(size) => format!("kernel driver, disk of {}", Human(size)),
            None => "kernel driver".to_owned(),
        });
    }
    if let Some(counts) = one.counts {
        parts.push(plural(counts.tables, "table"));
        parts.push(plural(counts.blocks, "block"));
    }
    parts.extend(one.inodes.map(|inodes| plural(inodes, "inode")));
    if let Some(writable) = one.writable {
        let mut records = plural(writable.records, "record");
        if writable.dropped_record {
            records += " and one that a crash cut short";
        }
        parts.push(records);
        parts.push(format!("{} free", Human(writable.free_bytes)));
    }
    if let Some(UpperFacts::Fuse {
        directories,
        files,
        whiteouts,
        partials,
        ..
    }) = one.upper
    {
        parts.push(plural(directories, "directory"));
        parts.push(plural(files, "file"));
        parts.push(plural(whiteouts, "whiteout"));
        parts.push(plural(partials, "partial file"));
    }
    if let Some(counts) = one.counts.filter(|_| data) {
        parts.push(format!("{} read", Human(counts.bytes_read)));
        // Open blocks have no checksums until the disk is sealed.
        let open_blocks = one.writable.map_or(0, |writable| writable.open_blocks);
        if open_blocks > 0 {
            parts.push(format!("{} without checksum", plural(open_blocks, "block")));
        }
    } else if one.counts.is_some() {
        parts.push("data not checked".to_owned());
    }
    parts
}

/// Prints the findings, one line each. Of the findings that follow from the damage of one place, as
/// each file in a damaged block does, only the first ones have a line.
fn print_findings(
    findings: &Findings,
    label: Option<&str>,
    out: &mut Output,
) -> Result<(), CommandError> {
    let mut effects = vec![0; findings.len()];
    let label = label.map_or_else(String::new, |label| format!("{}: ", printable(label)));
    for (index, finding) in findings.iter().enumerate() {
        if let Some(cause) = cause_of(finding, &findings[..index]) {
            effects[cause] += 1;
            if effects[cause] > MAX_EFFECTS {
                continue;
            }
        }
        writeln!(
            out,
            "{} {}: {label}{}: {}",
            finding.severity,
            finding.code,
            shown(&finding.place),
            printable(&finding.message)
        )?;
    }
    for (finding, effects) in findings.iter().zip(effects) {
        if effects > MAX_EFFECTS {
            writeln!(
                out,
                "... and {} more findings because of {}, which --json lists",
                Count((effects - MAX_EFFECTS) as u64),
                shown(&finding.place)
            )?;
        }
    }
    if findings.omitted() > 0 {
        writeln!(out, "... and {} more", Count(findings.omitted()))?;
    }
    Ok(())
}

fn shown(place: &Place) -> Cow<'_, str> {
    match place {
        Place::Text(text) => printable(text),
        Place::Path(path) => quoted(path).into(),
    }
}

/// The earlier finding with the damage that `finding` names as its cause.
fn cause_of(finding: &Finding, earlier: &[Finding]) -> Option<usize> {
    earlier.iter().position(|cause| {
        let before = finding.message.strip_suffix(&cause.message);
        before.is_some_and(|before| before.ends_with(": "))
    })
}

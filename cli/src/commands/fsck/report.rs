//! The result of a check, of an image or of an upper: as text, as JSON, and as an exit status.

use std::borrow::Cow;
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;

use bcow::Storage;
use bcow::check::{Finding, Findings, Place, Repair, Severity, Writable};
use bcow_oci::Digest;
use serde::{Serialize, Serializer};

use super::Args;
use crate::error::{CommandError, exit};
use crate::names::{printable, quoted};
use crate::size::{Count, Human, plural};
use crate::ui::{Output, Ui};

/// Most lines about what follows from the damage of one place.
const MAX_EFFECTS: usize = 3;

/// The result of the command.
pub struct Outcome {
    /// The name of the image or upper in the line about several files.
    pub shown: PathBuf,
    /// The image and the files below it, or one upper.
    pub checked: Vec<Checked>,
    pub repairs: Repairs,
    /// Whether the content of blocks was read.
    pub data: bool,
    /// Commands that the user can run next.
    pub hints: Vec<String>,
}

/// What the command has changed, before the check.
#[derive(Default)]
pub struct Repairs {
    /// A description of each change.
    pub lines: Vec<String>,
    /// Whether a change repaired damage. A log that was applied is not damage.
    pub of_damage: bool,
    /// Whether a change gave the file another identity.
    pub new_identity: bool,
}

impl Repairs {
    /// Adds changes of a BCoW file.
    pub fn add(&mut self, done: &[Repair]) {
        self.of_damage |= done.iter().any(Repair::is_of_damage);
        self.new_identity |= done.iter().any(Repair::changes_identity);
        self.lines.extend(done.iter().map(Repair::to_string));
    }
}

/// The result for one file, or for one upper, which has no path and no storage.
#[derive(Default, Serialize)]
pub struct Checked {
    /// The name in JSON, and in the line with the verdict.
    pub name: String,
    /// The short name in lines with findings. `None` for the file that the user named.
    #[serde(skip)]
    pub label: Option<String>,
    pub path: String,
    #[serde(skip)]
    pub storage: Option<Arc<dyn Storage>>,
    pub digest: Option<Digest>,
    #[serde(flatten, serialize_with = "verdict")]
    pub findings: Findings,
    /// `None` for an upper of the FUSE driver.
    #[serde(flatten)]
    pub counts: Option<Counts>,
    /// The number of inodes in the superblock. `None` if the file has no file system, or if the
    /// image or the superblock is damaged.
    pub inodes: Option<u64>,
    pub writable: Option<Writable>,
    #[serde(skip)]
    pub upper: Option<Upper>,
}

fn verdict<S: Serializer>(findings: &Findings, to: S) -> Result<S::Ok, S::Error> {
    Verdict::of([findings]).serialize(to)
}

/// What was read of BCoW files.
#[derive(Clone, Copy, Default, Serialize)]
pub struct Counts {
    pub tables: u64,
    pub blocks: u64,
    pub bytes_read: u64,
}

/// An upper, by its driver. `image` is the image against which it was checked, if there was one.
#[derive(Serialize)]
#[serde(tag = "door", rename_all = "lowercase")]
pub enum Upper {
    Fuse {
        image: Option<String>,
        directories: u64,
        files: u64,
        whiteouts: u64,
        metadata_copies: u64,
        #[serde(rename = "sketches")]
        partials: u64,
        dropped_records: u64,
    },
    Kernel {
        image: Option<String>,
        /// `None` if the upper is not complete.
        fs: Option<&'static str>,
        /// Size of the file system in bytes, as `fs`.
        size: Option<u64>,
    },
}

/// The result as JSON (schema `bcow.fsck/1`).
#[derive(Serialize)]
pub struct Document<'o> {
    schema: &'static str,
    #[serde(flatten)]
    verdict: Verdict,
    findings: Vec<ListedFinding<'o>>,
    findings_omitted: u64,
    repaired: &'o [String],
    data: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    checked: Option<&'static str>,
    #[serde(flatten)]
    counts: Option<Counts>,
    /// Of the first file.
    #[serde(skip_serializing_if = "Option::is_none")]
    inodes: Option<Option<u64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    files: Option<&'o [Checked]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    upper: Option<&'o Upper>,
}

#[derive(Serialize)]
struct Verdict {
    verdict: &'static str,
    errors: u64,
    warnings: u64,
}

#[derive(Serialize)]
struct ListedFinding<'o> {
    code: &'static str,
    severity: Severity,
    file: &'o str,
    place: String,
    message: &'o str,
    #[serde(skip_serializing_if = "Option::is_none")]
    repair: Option<&'static str>,
}

impl Verdict {
    fn of<'f>(all: impl IntoIterator<Item = &'f Findings>) -> Self {
        let (mut errors, mut warnings) = (0, 0);
        for findings in all {
            errors += findings.errors();
            warnings += findings.warnings();
        }
        Verdict {
            verdict: if errors == 0 { "clean" } else { "errors" },
            errors,
            warnings,
        }
    }
}

impl Outcome {
    pub fn of_upper(args: &Args, checked: Checked, repairs: Repairs) -> Self {
        Outcome {
            shown: args.image.shown().to_owned(),
            checked: vec![checked],
            repairs,
            data: args.data,
            hints: Vec::new(),
        }
    }

    fn verdict(&self) -> Verdict {
        Verdict::of(self.checked.iter().map(|one| &one.findings))
    }

    pub fn exit(&self) -> u8 {
        match self.verdict().errors {
            0 if self.repairs.of_damage => exit::FSCK_REPAIRED,
            0 => exit::DONE,
            _ => exit::FSCK_ERRORS_LEFT,
        }
    }

    pub fn document(&self) -> Document<'_> {
        let all = || self.checked.iter();
        let upper = all().find_map(|one| one.upper.as_ref());
        let of_files = upper.is_none().then_some(&self.checked[..]);
        Document {
            schema: "bcow.fsck/1",
            verdict: self.verdict(),
            findings: all().flat_map(Checked::listed).collect(),
            findings_omitted: all().map(|one| one.findings.omitted()).sum(),
            repaired: &self.repairs.lines,
            data: self.data,
            checked: of_files.map(|_| if self.data { "all" } else { "structure" }),
            counts: all().filter_map(|one| one.counts).reduce(Counts::plus),
            inodes: of_files.map(|files| files.first().and_then(|file| file.inodes)),
            files: of_files,
            upper,
        }
    }

    /// Prints the repairs, the findings, and a line with the verdict on each file; and then the
    /// hints.
    pub fn print(&self, ui: &Ui) -> Result<(), CommandError> {
        let mut out = ui.output();
        for line in &self.repairs.lines {
            writeln!(out, "repaired: {}", printable(line))?;
        }
        for one in &self.checked {
            print_findings(&one.findings, one.label.as_deref(), &mut out)?;
            if !one.findings.is_empty() || !ui.quiet() {
                one.print_verdict(self.data, &mut out)?;
            }
        }
        let bad = self.checked.iter().filter(|one| !one.findings.is_sound());
        let bad = bad.count() as u64;
        if self.checked.len() > 1 && (bad > 0 || !ui.quiet()) {
            let shown = self.shown.display();
            let count = plural(self.checked.len() as u64, "file");
            match bad {
                0 => writeln!(
                    out,
                    "{shown}: {count}, {}",
                    self.checked[0].clean(self.data)
                )?,
                bad => writeln!(out, "{shown}: {count}, {} of them damaged", Count(bad))?,
            }
        }
        out.finish()?;
        for hint in &self.hints {
            ui.hint(hint);
        }
        Ok(())
    }
}

impl Counts {
    fn plus(self, other: Counts) -> Counts {
        Counts {
            tables: self.tables + other.tables,
            blocks: self.blocks + other.blocks,
            bytes_read: self.bytes_read + other.bytes_read,
        }
    }
}

impl Checked {
    fn listed(&self) -> impl Iterator<Item = ListedFinding<'_>> {
        self.findings.iter().map(|finding| ListedFinding {
            code: finding.code,
            severity: finding.severity,
            file: &self.name,
            place: finding.place.to_string(),
            message: &finding.message,
            repair: finding.repair,
        })
    }

    /// The verdict if there are no errors.
    fn clean(&self, data: bool) -> &'static str {
        match self.upper {
            None if !data => "structure clean",
            _ => "clean",
        }
    }

    fn print_verdict(&self, data: bool, out: &mut Output) -> Result<(), CommandError> {
        let (errors, warnings) = (self.findings.errors(), self.findings.warnings());
        let clean = self.clean(data);
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
        let parts = self.parts(data).join(", ");
        writeln!(out, "{}: {verdict} ({parts})", printable(&self.name))
    }

    /// The counts in the line with the verdict.
    fn parts(&self, data: bool) -> Vec<String> {
        let mut parts = Vec::new();
        if let Some(Upper::Kernel { size, .. }) = self.upper {
            parts.push(match size {
                Some(size) => format!("kernel driver, disk of {}", Human(size)),
                None => "kernel driver".to_owned(),
            });
        }
        if let Some(counts) = self.counts {
            parts.push(plural(counts.tables, "table"));
            parts.push(plural(counts.blocks, "block"));
        }
        parts.extend(self.inodes.map(|inodes| plural(inodes, "inode")));
        if let Some(writable) = self.writable {
            let mut records = plural(writable.records, "record");
            if writable.dropped_record {
                records += " and one that a crash cut short";
            }
            parts.push(records);
            parts.push(format!("{} free", Human(writable.free_bytes)));
        }
        if let Some(Upper::Fuse {
            directories,
            files,
            whiteouts,
            partials,
            ..
        }) = self.upper
        {
            parts.push(plural(directories, "directory"));
            parts.push(plural(files, "file"));
            parts.push(plural(whiteouts, "whiteout"));
            parts.push(plural(partials, "partial file"));
        }
        if let Some(counts) = self.counts.filter(|_| data) {
            parts.push(format!("{} read", Human(counts.bytes_read)));
            // Open blocks have no checksums until the disk is sealed.
            let open_blocks = self.writable.map_or(0, |writable| writable.open_blocks);
            if open_blocks > 0 {
                parts.push(format!("{} without checksum", plural(open_blocks, "block")));
            }
        } else if self.counts.is_some() {
            parts.push("data not checked".to_owned());
        }
        parts
    }
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

/// The hint after a repair that was not followed by a check of the content.
pub fn unread_content(name: &impl Display) -> String {
    format!("the content of blocks was not checked: `bcow fsck --data {name}` reads it too")
}

//! The result of a check, of an image or of an upper, and the JSON document of it.

use std::path::PathBuf;
use std::sync::Arc;

use bcow::Storage;
use bcow::check::{Findings, Repair, Severity, Writable};
use bcow_oci::Digest;
use serde::{Serialize, Serializer};

use crate::Fsck;

/// The result of a check.
pub struct FsckReport {
    /// The name of the image or upper in the line about several files.
    pub shown: PathBuf,
    /// The image and the files below it, or one upper.
    pub checked: Vec<CheckedFile>,
    /// What was repaired before the check.
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
    pub(crate) fn add(&mut self, done: &[Repair]) {
        self.of_damage |= done.iter().any(Repair::is_of_damage);
        self.new_identity |= done.iter().any(Repair::changes_identity);
        self.lines.extend(done.iter().map(Repair::to_string));
    }
}

/// The result for one file, or for one upper, which has no path and no storage.
#[derive(Default, Serialize)]
pub struct CheckedFile {
    /// The name in JSON, and in the line with the verdict.
    pub name: String,
    /// The short name in lines with findings. `None` for the file that the user named.
    #[serde(skip)]
    pub label: Option<String>,
    /// The path, or the URL.
    pub path: String,
    #[serde(skip)]
    pub(crate) storage: Option<Arc<dyn Storage>>,
    /// The expected digest, from the name of the file or from the file above it.
    pub digest: Option<Digest>,
    /// The problems.
    #[serde(flatten, serialize_with = "verdict")]
    pub findings: Findings,
    /// `None` for an upper of the FUSE driver.
    #[serde(flatten)]
    pub counts: Option<ReadCounts>,
    /// The number of inodes in the superblock. `None` if the file has no file system, or if the
    /// image or the superblock is damaged.
    pub inodes: Option<u64>,
    /// Of a writable disk.
    pub writable: Option<Writable>,
    /// Of an upper.
    #[serde(skip)]
    pub upper: Option<UpperFacts>,
}

fn verdict<S: Serializer>(findings: &Findings, to: S) -> Result<S::Ok, S::Error> {
    Verdict::of([findings]).serialize(to)
}

/// What was read of BCoW files.
#[derive(Clone, Copy, Default, Serialize)]
pub struct ReadCounts {
    /// Tables of the format.
    pub tables: u64,
    /// Stored blocks.
    pub blocks: u64,
    /// Bytes of blocks that were read and verified.
    pub bytes_read: u64,
}

/// An upper, by its driver. `image` is the image against which it was checked, if there was one.
#[derive(Serialize)]
#[serde(tag = "door", rename_all = "lowercase")]
pub enum UpperFacts {
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
pub struct FsckDocument<'o> {
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
    counts: Option<ReadCounts>,
    /// Of the first file.
    #[serde(skip_serializing_if = "Option::is_none")]
    inodes: Option<Option<u64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    files: Option<&'o [CheckedFile]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    upper: Option<&'o UpperFacts>,
}

/// What the findings mean.
#[derive(Serialize)]
pub struct Verdict {
    verdict: &'static str,
    /// The number of errors, also of those that are not listed.
    pub errors: u64,
    /// The number of warnings, also of those that are not listed.
    pub warnings: u64,
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

impl FsckReport {
    pub(crate) fn of_upper(asked: &Fsck<'_>, checked: CheckedFile, repairs: Repairs) -> Self {
        FsckReport {
            shown: asked.image.shown().to_owned(),
            checked: vec![checked],
            repairs,
            data: asked.data,
            hints: Vec::new(),
        }
    }

    /// The verdict on all files.
    pub fn verdict(&self) -> Verdict {
        Verdict::of(self.checked.iter().map(|one| &one.findings))
    }

    /// The JSON document.
    pub fn document(&self) -> FsckDocument<'_> {
        let all = || self.checked.iter();
        let upper = all().find_map(|one| one.upper.as_ref());
        let of_files = upper.is_none().then_some(&self.checked[..]);
        FsckDocument {
            schema: "bcow.fsck/1",
            verdict: self.verdict(),
            findings: all().flat_map(CheckedFile::listed).collect(),
            findings_omitted: all().map(|one| one.findings.omitted()).sum(),
            repaired: &self.repairs.lines,
            data: self.data,
            checked: of_files.map(|_| if self.data { "all" } else { "structure" }),
            counts: all().filter_map(|one| one.counts).reduce(ReadCounts::plus),
            inodes: of_files.map(|files| files.first().and_then(|file| file.inodes)),
            files: of_files,
            upper,
        }
    }
}

impl ReadCounts {
    pub(crate) fn of(report: &bcow::check::Report) -> Self {
        ReadCounts {
            tables: report.tables,
            blocks: report.blocks,
            bytes_read: report.bytes_read,
        }
    }

    pub(crate) fn plus(self, other: ReadCounts) -> ReadCounts {
        ReadCounts {
            tables: self.tables + other.tables,
            blocks: self.blocks + other.blocks,
            bytes_read: self.bytes_read + other.bytes_read,
        }
    }
}

impl CheckedFile {
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
}

//! The problems that checks find. All checks of bcow use these types.

use std::fmt;
use std::ops::Deref;

use serde::Serialize;

/// The largest number of errors that are kept, and the largest number of warnings; a file of random
/// bytes would have millions.
const MAX_FINDINGS: u64 = 1000;

/// Severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Content is lost or cannot be trusted.
    Error,
    /// No content is lost, but a writer should not leave the file in this state.
    Warning,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Severity::Error => "error",
            Severity::Warning => "warning",
        })
    }
}

/// The place of a problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// Text: "header", "root table", "region 17", "byte 4096 of the address space".
    Text(String),
    /// The path of a file of the host, below the directory that was checked.
    Path(Vec<u8>),
}

impl<T: Into<String>> From<T> for Place {
    fn from(text: T) -> Self {
        Place::Text(text.into())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Text(text) => f.write_str(text),
            Place::Path(path) => f.write_str(&String::from_utf8_lossy(path)),
        }
    }
}

/// A problem and its place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{code}: {place}: {message}")]
pub struct Finding {
    /// Stable code: of a BCoW file, one of spec section 12.
    pub code: &'static str,
    /// Severity.
    pub severity: Severity,
    /// Place.
    pub place: Place,
    /// Description. It ends with the message of another finding if that is the cause.
    pub message: String,
    /// What a repair does, if it can repair this.
    pub repair: Option<&'static str>,
}

impl Finding {
    /// An error that no repair changes.
    pub fn error(code: &'static str, place: impl Into<Place>, message: impl Into<String>) -> Self {
        Finding {
            code,
            severity: Severity::Error,
            place: place.into(),
            message: message.into(),
            repair: None,
        }
    }

    /// A warning that no repair changes.
    pub fn warning(
        code: &'static str,
        place: impl Into<Place>,
        message: impl Into<String>,
    ) -> Self {
        Finding::error(code, place, message).of(Severity::Warning)
    }

    /// The finding with another severity.
    pub fn of(self, severity: Severity) -> Self {
        Finding { severity, ..self }
    }

    /// The finding with the description of its repair.
    pub fn repaired_by(self, repair: &'static str) -> Self {
        Finding {
            repair: Some(repair),
            ..self
        }
    }

    /// Whether the severity is [`Severity::Error`].
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}

/// The findings of a check, in its order. The first thousand errors and the first thousand warnings
/// are kept, and all are counted.
#[derive(Debug, Clone, Default)]
pub struct Findings {
    kept: Vec<Finding>,
    errors: u64,
    warnings: u64,
}

impl Findings {
    /// Adds a finding of a check that can have any number of them.
    pub fn add(&mut self, finding: Finding) {
        let count = self.count(finding.severity);
        *count += 1;
        if *count <= MAX_FINDINGS {
            self.kept.push(finding);
        }
    }

    fn count(&mut self, severity: Severity) -> &mut u64 {
        match severity {
            Severity::Error => &mut self.errors,
            Severity::Warning => &mut self.warnings,
        }
    }

    /// The findings of a file with this name in front of their places.
    pub fn of_file(mut self, name: &str) -> Self {
        for finding in &mut self.kept {
            finding.place = format!("{name}: {}", finding.place).into();
        }
        self
    }

    /// Adds all findings of another check, which has limited their number.
    pub fn append(&mut self, other: Findings) {
        self.kept.extend(other.kept);
        self.errors += other.errors;
        self.warnings += other.warnings;
    }

    /// Adds to the number of errors that are not kept.
    pub fn omit_errors(&mut self, count: u64) {
        self.errors += count;
    }

    /// The number of errors, including those not kept.
    pub fn errors(&self) -> u64 {
        self.errors
    }

    /// The number of warnings, including those not kept.
    pub fn warnings(&self) -> u64 {
        self.warnings
    }

    /// The number of findings that are not kept.
    pub fn omitted(&self) -> u64 {
        self.errors + self.warnings - self.kept.len() as u64
    }

    /// Whether there is no error.
    pub fn is_sound(&self) -> bool {
        self.errors == 0
    }
}

/// Keeps all findings of another check, which has limited their number.
impl Extend<Finding> for Findings {
    fn extend<I: IntoIterator<Item = Finding>>(&mut self, findings: I) {
        for finding in findings {
            *self.count(finding.severity) += 1;
            self.kept.push(finding);
        }
    }
}

impl Deref for Findings {
    type Target = [Finding];

    fn deref(&self) -> &[Finding] {
        &self.kept
    }
}

impl IntoIterator for Findings {
    type Item = Finding;
    type IntoIter = std::vec::IntoIter<Finding>;

    fn into_iter(self) -> Self::IntoIter {
        self.kept.into_iter()
    }
}

impl<const N: usize> PartialEq<[Finding; N]> for Findings {
    fn eq(&self, other: &[Finding; N]) -> bool {
        self.kept == other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_beyond_the_limit_are_counted_by_their_severity() {
        let mut findings = Findings::default();
        for _ in 0..MAX_FINDINGS + 3 {
            findings.add(Finding::warning("leak", "free list", ""));
        }
        assert!(findings.is_sound());
        findings.add(Finding::error("overlap", "bytes 0..1", ""));
        assert_eq!((findings.errors(), findings.warnings()), (1, 1003));
        assert_eq!((findings.len(), findings.omitted()), (1001, 3));
        assert_eq!(findings.last().map(|finding| finding.code), Some("overlap"));
        let mut all = Findings::default();
        all.append(findings);
        all.extend([Finding::error("merkle", "Merkle tree", "")]);
        all.omit_errors(2);
        assert_eq!((all.errors(), all.warnings(), all.omitted()), (4, 1003, 5));
    }
}

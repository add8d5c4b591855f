//! Names that are refused.

use std::fmt;

/// A part of a name that is not as it must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Syntax {
    pub problem: String,
    /// The correct spelling.
    pub hint: String,
}

impl Syntax {
    pub(crate) fn new(problem: impl Into<String>, hint: impl Into<String>) -> Self {
        Syntax {
            problem: problem.into(),
            hint: hint.into(),
        }
    }
}

/// A name that a command does not take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NameError {
    pub(crate) message: String,
    pub(crate) hint: String,
}

impl NameError {
    /// What the user can do.
    pub fn hint(&self) -> &str {
        &self.hint
    }
}

impl fmt::Display for NameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for NameError {}
